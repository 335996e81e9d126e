"""One rank of a forward test: logits of every position, computed in chunks beside other rows, then token by token.

`serve_rank` is the main function of a rank. Rank 0 saves logits.pt: a list for each tier of the job, and the last of
them again in shared memory.
"""

import ctypes
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from funitel.model_server.adapters.registry import PlacedAdapter
from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.build import cpu_flags
from funitel.model_server.cpu.compiler import INSTRUCTION_SETS
from funitel.model_server.cpu.decoder import FusedDecoder
from funitel.model_server.cpu.native import load_library
from funitel.model_server.cpu.precision import ActivationDtype, KvKind, Tier
from funitel.model_server.cpu.shared_memory_ranks import SharedMemoryRanks
from funitel.model_server.device.stages import StageLink
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.forward.batch import Forward, ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.kv_cache.state_pool import StateLayout, StatePool
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.models.stage_boundary import StageBoundary
from funitel.model_server.registry.lookup import choose_spec, spec_of
from funitel.model_server.spec.model_spec import ModelSpec
from funitel_testing.cache import usual_cache

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def sets_that_add_alike(tier: Tier) -> list[list[str]]:
    """Instruction sets of this CPU, best first, in groups whose results have the same bits.

    In bfloat16 the best one uses tile registers where there are some, which add in another order.
    """
    names = [name for name, needs, _ in INSTRUCTION_SETS if needs <= cpu_flags()]
    return [names[:1], names[1:]] if tier is Tier.BFLOAT16 and "amx_bf16" in cpu_flags() else [names]


def serve_rank(work: Path, rank: int) -> None:
    """Do the job of `work`."""
    job = json.loads((work / "job.json").read_text())
    torch.set_num_threads(1)
    parallel = TensorParallel.join(rank, job["size"], "127.0.0.1", job["port"], CPU)
    tiers = [Tier[name] if name else None for name in job["tiers"]]
    folder, prompts, num_decode = Path(job["folder"]), job["prompts"], job["num_decode"]
    logits = [run(folder, parallel, prompts, num_decode, tier) for tier in tiers]
    ranks = SharedMemoryRanks.meet(parallel, fused_library())
    assert isinstance(ranks, SharedMemoryRanks), ranks
    logits.append(run(folder, ranks, prompts, num_decode, tiers[-1]))
    if rank == 0:
        torch.save(logits, work / "logits.pt")
    parallel.leave()


def serve_forked(work: Path, rank: int) -> None:
    """Fail unless a child, forked once there are threads for `model`, gives the same logits as this process."""
    torch.set_num_threads(1)
    folder = work / "model"
    decoder = fused_decoder(folder, Tier.INT8, TensorParallel(), num_threads=3)
    spec = spec_of(read_json(folder / "config.json"))
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)

    def logits() -> torch.Tensor:
        cache = KVCache(spec, heads, 400, decoder.block_size, decoder.kv_dtype, CPU)
        return step_through(decoder, cache, [list(range(30))], 6)[0]

    expected = logits()
    child = os.fork()
    if child == 0:
        is_equal = torch.equal(logits(), expected)
        del decoder  # its threads are not those of the child
        os._exit(0 if is_equal else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(logits(), expected)


def run(
    folder: Path,
    parallel: TensorParallel,
    prompts: list[list[int]],
    num_decode: int,
    tier: Tier | None = None,
    model_spec: str | None = None,
    activations: ActivationDtype = ActivationDtype.INT8,
    seed: int | None = None,
    part: Callable[[ModelSpec], ModelSpec] = lambda spec: spec,
    link: StageLink | None = None,
) -> list[torch.Tensor]:
    """Logits of every position of every prompt on rank 0; empty tensors elsewhere. Torch computes where no tier is.

    `model_spec` is the file of a spec to use instead of the family's, in torch. `seed` is that of `step_at_random`, in
    place of `step_through`. `part` makes the spec of a pipeline stage, which `link` joins to the others.
    """
    spec = part(choose_spec(model_spec, folder))
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
    decoder: Forward
    dtype = torch.float32
    if tier is None:
        weights = Weights(folder, torch.float32, CPU, spec.names.prefix)
        boundary = None if link is None else StageBoundary(link, torch.float32, CPU)
        decoder = Decoder(spec, weights, parallel, TorchAttention(BLOCK_SIZE, CPU), boundary=boundary)
    else:
        decoder = fused_decoder(folder, tier, parallel, activations=activations, part=part, link=link)
        dtype = decoder.kv_dtype
    cache = KVCache(spec, heads, 200, BLOCK_SIZE, dtype, CPU)
    layout = StateLayout.of(spec, parallel.size, parallel.rank)
    if layout is not None:
        cache.state_pool = StatePool(layout, 2 * len(prompts) + 1, CPU)
    if seed is not None:
        return step_at_random(decoder, cache, prompts, num_decode, seed)
    return step_through(decoder, cache, prompts, num_decode)


def fused_decoder(
    folder: Path,
    tier: Tier,
    parallel: TensorParallel,
    *,
    num_threads: int = 2,
    block_size: int = BLOCK_SIZE,
    instruction_set: str | None = None,
    activations: ActivationDtype = ActivationDtype.INT8,
    kv_kind: KvKind | None = None,
    part: Callable[[ModelSpec], ModelSpec] = lambda spec: spec,
    link: StageLink | None = None,
) -> FusedDecoder:
    """The model of `folder` in the fused step, or the stage of it that `part` makes."""
    library = fused_library(instruction_set)
    spec = part(spec_of(read_json(folder / "config.json")))
    weights = Weights(folder, torch.float32, CPU, spec.names.prefix)
    return FusedDecoder(
        spec,
        weights,
        parallel,
        library,
        tier=tier,
        block_size=block_size,
        num_threads=num_threads,
        activations=activations,
        kv_kind=kv_kind,
        link=link,
    )


def fused_library(instruction_set: str | None = None) -> ctypes.CDLL:
    """The library of the fused step, from the cache that FUNITEL_CACHE names."""
    return load_library(usual_cache(), instruction_set)


@torch.inference_mode()
def step_through(
    decoder: Forward,
    cache: KVCache,
    prompts: list[list[int]],
    num_decode: int,
    chunk: int = 11,
    adapters: Sequence[PlacedAdapter | None] = (),
) -> list[torch.Tensor]:
    """Step all sequences together: chunks of tokens first, single tokens for the last `num_decode`.

    `adapters` are those of the sequences, if any.
    """
    blocks = np.random.default_rng(3).permutation(np.arange(1, cache.num_blocks)).astype(np.int32)
    each = len(blocks) // len(prompts)
    tables = np.split(blocks[: each * len(prompts)], len(prompts))
    done = [0] * len(prompts)
    collected: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        spans, owners = [], []
        for i, prompt in enumerate(prompts):
            left = len(prompt) - done[i]
            if left:
                count = min(chunk, left - num_decode) if left > num_decode else 1
                tokens = prompt[done[i] : done[i] + count]
                span = RowSpan(tokens, done[i], tables[i], "all", len(prompt) - num_decode, state_slot=i + 1)
                spans.append(replace(span, adapter=adapters[i] if adapters else None))
                owners.append(i)
        out = decoder(ForwardBatch.build(spans, cache.block_size, CPU), cache)
        at = 0
        for i, span in zip(owners, spans, strict=True):
            done[i] += len(span.tokens)
            if out is not None:
                collected[i].append(out[at : at + len(span.tokens)])
                at += len(span.tokens)
    return [torch.cat(parts) if parts else torch.empty(0) for parts in collected]


@torch.inference_mode()
def step_at_random(
    decoder: Forward,
    cache: KVCache,
    prompts: list[list[int]],
    num_decode: int,
    seed: int,
    adapters: Sequence[PlacedAdapter | None] = (),
) -> list[torch.Tensor]:
    """As `step_through`, in chunks of random sizes; sequences join late and are preempted, once each, to begin again.

    A sequence that begins again has other blocks and another slot for its state; all that it had computed is prompt.
    """
    chosen = random.Random(seed)
    blocks = np.random.default_rng(seed).permutation(np.arange(1, cache.num_blocks)).astype(np.int32)
    tables = np.split(blocks[: len(blocks) // (2 * len(prompts)) * 2 * len(prompts)], 2 * len(prompts))
    begins = [0, *(chosen.randint(1, 5) for _ in prompts[1:])]  # step in which each joins
    ends = [chosen.randint(1, len(prompt) - 1) for prompt in prompts]  # tokens after which each is preempted
    lengths = [len(prompt) - num_decode for prompt in prompts]  # of what is computed in chunks
    done = [0] * len(prompts)
    collected: list[dict[int, torch.Tensor]] = [{} for _ in prompts]
    was_preempted = [False] * len(prompts)
    step = 0
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        spans, owners = [], []
        for i, prompt in enumerate(prompts):
            if done[i] >= ends[i] and not was_preempted[i]:
                lengths[i], done[i], was_preempted[i] = max(lengths[i], done[i]), 0, True
            if step < begins[i] or done[i] == len(prompt):
                continue
            left = lengths[i] - done[i]
            tokens = prompt[done[i] : done[i] + (min(chosen.randint(1, 17), left) if left > 0 else 1)]
            place = 2 * i + was_preempted[i]
            whole = len(prompt) - num_decode
            span = RowSpan(tokens, done[i], tables[place], "all", whole, state_slot=place + 1)
            spans.append(replace(span, adapter=adapters[i] if adapters else None))
            owners.append(i)
        step += 1
        if not spans:
            continue
        out = decoder(ForwardBatch.build(spans, cache.block_size, CPU), cache)
        at = 0
        for i, span in zip(owners, spans, strict=True):
            for place in range(len(span.tokens) if out is not None else 0):
                collected[i][span.start + place] = out[at + place]  # type: ignore[index]
            done[i] += len(span.tokens)
            at += len(span.tokens)
    return [torch.stack([found[i] for i in sorted(found)]) if found else torch.empty(0) for found in collected]
