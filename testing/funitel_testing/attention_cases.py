"""Steps of random rows for attention kernels: shapes, contexts, block tables and rules, each drawn from a seed."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from funitel.model_server.attention.backend import AttentionRule
from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.attention.triton_kernels import TritonAttention
from funitel.model_server.device.tensor_parallel import HeadSplit
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.spec.model_spec import ModelSpec

CPU = torch.device("cpu")
# Relative errors that the kernels are held to; float32 sums whatever the inputs.
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    """One step of random rows."""

    seed: int
    head_dim: int
    num_kv_heads: int
    group: int
    block_size: int
    dtype: torch.dtype
    cached: torch.dtype  # of keys and values
    num_decode: int
    num_chunks: int
    longest: int  # context before the step, in tokens
    most_new: int  # tokens of a chunk
    rule: AttentionRule
    num_processors: int

    def __str__(self) -> str:
        rule = self.rule
        marks = [f"window{rule.window}"] * (rule.window is not None) + ["softcap"] * (rule.softcap is not None)
        marks += ["spans"] * rule.sees_spans
        marks += ["slopes"] * (rule.slopes is not None) + ["sinks"] * (rule.sinks is not None)
        marks += [str(self.cached).removeprefix("torch.")] * (self.cached is not self.dtype)
        shape = f"{self.seed}-d{self.head_dim}-h{self.num_kv_heads}x{self.group}-b{self.block_size}"
        return "-".join([shape, str(self.dtype).removeprefix("torch."), *marks])


def draw(seed: int, *, is_short: bool = False) -> Case:
    """A case of its own for each seed; short ones take the interpreter a fraction of a second."""
    random = np.random.default_rng(seed)
    num_kv_heads, group = int(random.integers(1, 5)), int(random.choice([1, 2, 3, 4, 7, 8]))
    slopes = torch.from_numpy(random.uniform(0.01, 0.5, num_kv_heads * group).astype(np.float32))
    sinks = torch.from_numpy(random.standard_normal(num_kv_heads * group).astype(np.float32))
    head_dim = int(random.choice([16, 64, 80] if is_short and seed % 4 else [64, 80, 96, 128, 192, 256]))
    has_slopes = random.random() < 0.2
    num_decode = int(random.integers(0, 5))
    return Case(
        seed=seed,
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        group=group,
        block_size=int(random.choice([1, 4, 16, 32])),
        dtype=list(BOUNDS)[seed % 3],
        cached={4: torch.float8_e4m3fn, 7: torch.float8_e5m2}.get(seed % 8, list(BOUNDS)[seed % 3]),
        num_decode=num_decode,
        num_chunks=int(random.integers(num_decode == 0, 3)),
        longest=60 if is_short else int(random.choice([20, 300, 700])),
        most_new=12 if is_short else 150,
        rule=AttentionRule(
            scale=head_dim**-0.5,
            window=int(random.integers(1, 200)) if random.random() < 0.3 else None,
            softcap=float(random.uniform(5, 50)) if random.random() < 0.3 else None,
            slopes=slopes if has_slopes else None,
            sinks=sinks if not has_slopes and random.random() < 0.2 else None,
            sees_spans=seed % 5 < 2,
        ),
        num_processors=int(random.choice([1, 16, 132])),
    )


def run(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels give on a device, and the reference on the same numbers in float32."""
    random = np.random.default_rng(case.seed + 1)
    num_heads = case.num_kv_heads * case.group
    counts = [1] * case.num_decode + [int(n) for n in random.integers(2, case.most_new, case.num_chunks)]
    starts = [int(random.integers(0, case.longest)) for _ in counts]
    needed = [-(-(start + count) // case.block_size) for start, count in zip(starts, counts, strict=True)]
    blocks = random.permutation(np.arange(1, sum(needed) + 1)).astype(np.int32)
    tables = np.split(blocks, np.cumsum(needed)[:-1])
    spans = [
        RowSpan([0] * n, start, table, "all", whole_spans=_whole_spans(random, start, n))
        for n, start, table in zip(counts, starts, tables, strict=True)
    ]
    spec = ModelSpec(
        architecture="test",
        vocab_size=1,
        hidden_size=1,
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        intermediate_size=1,
        max_position_embeddings=10_000,
    )
    split = HeadSplit(0, num_heads, 0, case.num_kv_heads)
    cache = KVCache(spec, split, len(blocks) + 1, case.block_size, case.cached, device)
    generator = torch.Generator().manual_seed(case.seed)
    cache.pool.copy_(torch.randn(cache.pool.shape, generator=generator))
    batch = ForwardBatch.build(spans, case.block_size, device)
    query = torch.randn(batch.num_tokens, num_heads, case.head_dim, generator=generator).to(case.dtype)
    backend = TritonAttention(
        case.block_size,
        device,
        num_heads=num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        num_processors=case.num_processors,
    )
    rule = case.rule
    on_device = replace(
        rule,
        slopes=None if rule.slopes is None else rule.slopes.to(device),
        sinks=None if rule.sinks is None else rule.sinks.to(device),
    )
    found = backend.attend(query.to(device), cache, 1, backend.plan(batch), on_device)

    exact = KVCache(spec, split, len(blocks) + 1, case.block_size, torch.float32, CPU)
    exact.pool.copy_(cache.pool)
    reference = TorchAttention(case.block_size, CPU)
    plan = reference.plan(ForwardBatch.build(spans, case.block_size, CPU))
    return found.float().cpu(), reference.attend(query.float(), exact, 1, plan, rule)


def _whole_spans(random: np.random.Generator, start: int, count: int) -> tuple[tuple[int, int], ...]:
    """Up to two spans of which a row has all tokens in the step, or the last ones."""
    begin = int(random.integers(max(0, start - 5), start + count))
    end = int(random.integers(max(begin, start) + 1, start + count + 1))
    further = ((end, start + count),) if end < start + count and random.random() < 0.5 else ()
    return ((begin, end), *further)


def error_of(case: Case, device: torch.device) -> float:
    """Relative error of the kernels, infinite where any number is none."""
    found, expected = run(case, device)
    return float((found - expected).norm() / expected.norm()) if found.isfinite().all() else float("inf")
