"""Measure a mixture of experts: decoding steps and a prompt in kernels, against the loop over experts in torch.

The roof of a step is the reading of the experts that its rows hit, which are counted, of all other weights and of the
KV. Tokens are compared with those of the loop. A rounding may move a token to another expert, and random weights make
near ties of experts likely, so one layer is compared alone too, where both compute the same experts.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.layers.expert_ops import ExpertOps, HeldExperts, TorchExpertOps
from funitel.model_server.models.decoder import Decoder
from gpu_sections import decode, roofs, timing
from gpu_sections.figures import Facts, Line
from gpu_sections.model import decoding_step, graphed, make_decoder, make_pool
from gpu_sections.plan import BLOCK_SIZE, Plan

SAME_TOKENS = 0.95  # share of rows
LAYER_ERROR = 1e-2  # relative, of the experts of one layer
ROWS = 0.6  # share of the roof of weights and KV


class CountingOps(TorchExpertOps):
    """The loop, which counts the experts that are hit."""

    def __init__(self) -> None:
        self.num_hit: list[int] = []

    def add(
        self,
        experts: HeldExperts,
        x: torch.Tensor,
        chosen: torch.Tensor,
        shares: torch.Tensor,
        shared: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ExpertOps."""
        self.num_hit.append(len(chosen.unique()))
        return super().add(experts, x, chosen, shares, shared)


def measure(plan: Plan, facts: Facts) -> Iterator[Line]:
    """Whether kernels are used, the error of one layer, then steps and a prompt."""
    plan = replace(plan, config=plan.mixture, dtype=plan.dtype if plan.is_gpu else torch.float16)
    copy = timing.copy_rate(plan)
    decoder = make_decoder(plan)
    ops = decoder.mixtures()[0].ops
    yield Line("experts_used", f"experts in {ops.name}", None, "")
    with torch.inference_mode():
        for num_rows in plan.mixture_rows:
            yield _layer_error(plan, decoder, num_rows)
        for num_rows in plan.mixture_rows:
            yield from _decoding(plan, decoder, ops, num_rows, copy)
        yield from _prompt(plan, decoder, ops)


def _compute_with(decoder: Decoder, ops: ExpertOps) -> None:
    for mixture in decoder.mixtures():
        mixture.ops = ops


def _layer_error(plan: Plan, decoder: Decoder, num_rows: int) -> Line:
    mixture, generator = decoder.mixtures()[0], torch.Generator(plan.device).manual_seed(num_rows)
    x = torch.randn(num_rows, plan.spec.hidden_size, generator=generator, device=plan.device).to(plan.dtype)
    chosen, shares = mixture.router(x)
    found = mixture.ops.add(mixture.held_experts, x, chosen, shares, None).float()
    expected = TorchExpertOps().add(mixture.held_experts, x, chosen, shares, None).float()
    error = float((found - expected).norm() / expected.norm())
    name = f"experts of one layer, {num_rows} rows, error against the loop"
    return Line(f"experts_error_{num_rows}", name, error, "relative", error, LAYER_ERROR, is_most=True)


def _decoding(plan: Plan, decoder: Decoder, ops: ExpertOps, num_rows: int, copy_rate: float) -> Iterator[Line]:
    cache, tables = make_pool(plan, num_rows, plan.context)
    batch, forward = decoding_step(plan, tables, plan.context), graphed(plan, decoder, num_rows)
    name = f"mixture, decoding, {num_rows} rows of {plan.context} tokens"
    seconds = timing.seconds_of(plan, lambda: forward(batch, cache), at_once=decode.QUEUED)
    launched = timing.seconds_of(plan, lambda: decoder(batch, cache))
    found = forward(batch, cache)
    counting = CountingOps()
    _compute_with(decoder, counting)
    expected = decoder(batch, cache)
    _compute_with(decoder, TorchExpertOps())
    looped = timing.seconds_of(plan, lambda: decoder(batch, cache))
    _compute_with(decoder, ops)
    num_hit = sum(counting.num_hit) / len(counting.num_hit)
    read = roofs.mixture_bytes(plan.spec, num_hit, plan.dtype.itemsize)
    read += num_rows * roofs.kv_bytes(plan.spec, plan.context, plan.dtype.itemsize)
    share, same = roofs.share_of_roof(read, seconds, copy_rate), decode.share_alike(found, expected)
    yield Line(f"experts_decode_{num_rows}", name, seconds * 1e3, "ms, share of its roof", share, ROWS)
    yield Line(f"experts_hit_{num_rows}", f"{name}, experts hit", num_hit, "of a layer")
    yield Line(f"experts_launched_{num_rows}", f"{name}, without graphs", launched * 1e3, "ms")
    yield Line(f"experts_loop_{num_rows}", f"{name}, the loop", looped * 1e3, "ms, times kernels", looped / seconds)
    title = f"{name}, tokens as by the loop or near ties"
    yield Line(f"experts_same_{num_rows}", title, same * 100, "%", same, SAME_TOKENS)


def _prompt(plan: Plan, decoder: Decoder, ops: ExpertOps) -> Iterator[Line]:
    cache, tables = make_pool(plan, 1, plan.mixture_prompt)
    tokens = np.random.default_rng(1).integers(5, 250, plan.mixture_prompt).tolist()
    batch = ForwardBatch.build([RowSpan(tokens, 0, tables[0])], BLOCK_SIZE, plan.device)
    seconds = timing.seconds_of(plan, lambda: decoder(batch, cache))
    _compute_with(decoder, TorchExpertOps())
    looped = timing.seconds_of(plan, lambda: decoder(batch, cache))
    _compute_with(decoder, ops)
    name = f"mixture, prompt of {plan.mixture_prompt} tokens"
    rates = plan.mixture_prompt / seconds, plan.mixture_prompt / looped
    yield Line("experts_prompt", name, rates[0], "tokens/s, times the loop", rates[0] / rates[1])
    yield Line("experts_prompt_loop", f"{name}, the loop", rates[1], "tokens/s")
