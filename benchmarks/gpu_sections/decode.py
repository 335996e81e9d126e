"""Measure decoding steps and a long prompt against the limits of the card, with a profile of a step."""

from collections.abc import Iterator

import numpy as np
import torch

from funitel.model_server.attention.backend import AttentionBackend
from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.forward.batch import Forward, ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.layers.elementwise import ElementwiseOps, TorchElementwiseOps
from funitel.model_server.models.decoder import Decoder
from gpu_sections import layouts, profile, roofs, timing
from gpu_sections.figures import Facts, Line
from gpu_sections.model import decoding_step, graphed, make_decoder, make_pool
from gpu_sections.plan import BLOCK_SIZE, Plan

SAME_TOKENS = 0.98  # share of rows
NEAR_TIE = 0.1  # of the deviation of a row's logits: as far as bfloat16 may move them over the layers of a model
ONE_ROW = 1 / 0.85  # times the reading of its weights
ROWS = 0.75  # share of the roof of weights and KV
PROMPT = 0.6  # share of the rate of a product of matrices
QUEUED = 4  # steps, as a shard queues one while the one before runs


def measure(plan: Plan, facts: Facts) -> Iterator[Line]:
    """The ceilings, then every figure that is held against them."""
    copy, matmul = timing.copy_rate(plan), timing.matmul_rate(plan)
    yield Line("copy", "copy within memory", copy / 1e9, "GB/s")
    yield Line("matmul", "product of matrices", matmul / 1e12, "TFLOP/s")
    decoder = make_decoder(plan)
    used = f"attention in {decoder.attention.name}, what lies between products in {decoder.elementwise.name}"
    yield Line("used", used, None, "")
    with torch.inference_mode():
        for num_rows in plan.batches:
            yield from _decoding(plan, decoder, num_rows, copy)
        yield _prompt(plan, decoder, matmul)
        for num_rows in plan.batches[1:]:
            yield from layouts.measure(plan, num_rows, copy)
        for num_rows in plan.profiled:
            cache, tables = make_pool(plan, num_rows, plan.context)
            batch, forward = decoding_step(plan, tables, plan.context), graphed(plan, decoder, num_rows)
            yield from profile.measure(plan, num_rows, lambda: forward(batch, cache))  # noqa: B023 - called at once


def _decoding(plan: Plan, decoder: Decoder, num_rows: int, copy_rate: float) -> Iterator[Line]:
    cache, tables = make_pool(plan, num_rows, plan.context)
    batch, forward = decoding_step(plan, tables, plan.context), graphed(plan, decoder, num_rows)
    seconds = timing.seconds_of(plan, lambda: forward(batch, cache), at_once=QUEUED)
    launched = timing.seconds_of(plan, lambda: decoder(batch, cache))
    same = _agreement(plan, decoder, forward, batch, cache)
    name = f"decoding, {num_rows} rows of {plan.context} tokens"
    yield Line(f"launched_{num_rows}", f"{name}, without graphs", launched * 1e3, "ms")
    yield Line(f"same_{num_rows}", f"{name}, tokens as in torch or near ties", same * 100, "%", same, SAME_TOKENS)
    read = roofs.weight_bytes(plan.spec, plan.dtype.itemsize)
    key = f"decode_{num_rows}"
    if num_rows == 1:
        times = 1 / roofs.share_of_roof(read, seconds, copy_rate)
        yield Line(key, name, seconds * 1e3, "ms, times its weights' reading", times, ONE_ROW, is_most=True)
    else:
        read += num_rows * roofs.kv_bytes(plan.spec, plan.context, plan.dtype.itemsize)
        share = roofs.share_of_roof(read, seconds, copy_rate)
        yield Line(key, name, seconds * 1e3, "ms, share of its roof", share, ROWS)


def _agreement(plan: Plan, decoder: Decoder, forward: Forward, batch: ForwardBatch, cache: KVCache) -> float:
    """Share of rows with the same likeliest token as torch without our kernels, or one that nearly is."""
    found = forward(batch, cache)
    elementwise, reference = decoder.elementwise, TorchAttention(BLOCK_SIZE, plan.device)
    _compute_with(decoder, reference, TorchElementwiseOps())
    expected = decoder.run(batch, cache, reference.plan(batch))
    _compute_with(decoder, decoder.attention, elementwise)
    return share_alike(found, expected)


def share_alike(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Share of rows of logits with the same likeliest token, or one that nearly is."""
    assert found is not None
    assert expected is not None
    chosen = expected.gather(1, found.argmax(-1)[:, None])[:, 0]
    return float((expected.amax(-1) - chosen <= NEAR_TIE * expected.std(-1)).float().mean())


def _compute_with(decoder: Decoder, attention: AttentionBackend, elementwise: ElementwiseOps) -> None:
    decoder.adopt(elementwise)
    for layer in decoder.layers:
        layer.attention.backend = attention


def _prompt(plan: Plan, decoder: Decoder, matmul_rate: float) -> Line:
    cache, tables = make_pool(plan, 1, plan.prompt)
    tokens = np.random.default_rng(1).integers(5, 250, plan.prompt).tolist()
    batch = ForwardBatch.build([RowSpan(tokens, 0, tables[0])], BLOCK_SIZE, plan.device)
    seconds = timing.seconds_of(plan, lambda: decoder(batch, cache))
    share = roofs.prompt_operations(plan.spec, plan.prompt) / seconds / matmul_rate
    name = f"prompt of {plan.prompt} tokens"
    return Line("prompt", name, plan.prompt / seconds, "tokens/s, share of the product's rate", share, PROMPT)
