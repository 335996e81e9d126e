"""Select the attention of a shard: of what device and model allow and a probe finds right, what is fastest."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from funitel.model_server.attention.backend import AttentionBackend, AttentionRule, RecordableAttention
from funitel.model_server.attention.flash import flash_2, flash_3
from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.device.probe_or_fall_back import check_probe, probe_or_fall_back, reason_of
from funitel.model_server.device.tensor_parallel import HeadSplit
from funitel.model_server.device.torch_import import seeded_generator
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.spec.model_spec import ModelSpec, Position, WholeSpans
from funitel.proto.errors import SettingsError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The first `num_decode` tokens of a step are rows that decode; a part without tokens has no plan."""

    num_decode: int
    decode: Any
    prompts: Any


class SplitAttention:
    """Rows that decode, which come first, through `decode`; those with more tokens through `prompts`.

    Where `is_for_fresh` the latter is for prompts from their beginning: a step with any other takes `decode` alone.
    """

    def __init__(self, decode: RecordableAttention, prompts: AttentionBackend, *, is_for_fresh: bool) -> None:
        self.name = f"{decode.name} and {prompts.name}"
        self.block_size, self.device = decode.block_size, decode.device
        self._decode = decode
        self._prompts = prompts
        self._is_for_fresh = is_for_fresh

    def plan(self, batch: ForwardBatch) -> SplitPlan:
        """See AttentionBackend."""
        num_decode, chunks = batch.num_decode, batch.rows[batch.num_decode :]
        if not chunks or (self._is_for_fresh and any(row.start for row in chunks)):
            return SplitPlan(batch.num_tokens, self._decode.plan(batch), None)
        return SplitPlan(
            num_decode,
            self._decode.plan(batch.of_rows(0, num_decode)) if num_decode else None,
            self._prompts.plan(batch.of_rows(num_decode, len(batch.rows))),
        )

    def plan_rows(self, contexts: torch.Tensor, tables: torch.Tensor) -> SplitPlan:
        """See RecordableAttention."""
        return SplitPlan(len(contexts), self._decode.plan_rows(contexts, tables), None)

    def attend(
        self, query: torch.Tensor, cache: KVCache, layer: int, plan: SplitPlan, rule: AttentionRule
    ) -> torch.Tensor:
        """See AttentionBackend."""
        if plan.prompts is None:
            return self._decode.attend(query, cache, layer, plan.decode, rule)
        prompts = self._prompts.attend(query[plan.num_decode :], cache, layer, plan.prompts, rule)
        if plan.decode is None:
            return prompts
        return torch.cat((self._decode.attend(query[: plan.num_decode], cache, layer, plan.decode, rule), prompts))


Rows = Sequence[tuple[int, int]]  # (computed before, computed now), in tokens
Stopwatch = Callable[[Callable[[], object]], float]  # work -> seconds

PROBE: Rows = ((0, 5), (40, 1), (300, 1), (0, 17), (30, 6))  # every way in which a row can lie in a step
FRESH: Rows = ((0, 5), (0, 17))
PROMPT: Rows = ((0, 2048),)
_DECODE_CONTEXT = 4096
_MAX_TIMED_BYTES = 512 << 20  # of keys and values: long enough for what a launch costs the host not to count


class KernelCheck:
    """Steps of random rows over one layer of a model."""

    def __init__(
        self,
        spec: ModelSpec,
        heads: HeadSplit,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self._spec = spec.of_one_layer()
        self._heads = heads
        self._block_size = block_size
        self._device = device
        self._dtype = dtype
        self._kv_dtype = kv_dtype or dtype
        sinks = torch.linspace(-1, 1, heads.num_heads, device=device) if spec.has_sinks else None
        self._sees_spans = spec.whole_spans is not WholeSpans.NONE
        window, softcap = spec.window(0), spec.attention_softcap
        self._rule = AttentionRule(spec.score_scale, window, softcap, sinks=sinks, sees_spans=self._sees_spans)

    @property
    def decode(self) -> Rows:
        """Rows that decode behind long contexts, as many as fill what may be timed."""
        bytes_each = KVCache.bytes_per_block(self._spec, self._heads, _DECODE_CONTEXT, self._kv_dtype)
        return [(_DECODE_CONTEXT - 1, 1)] * max(1, min(64, _MAX_TIMED_BYTES // bytes_each))

    def check(self, backend: AttentionBackend, reference: AttentionBackend, rows: Rows = PROBE) -> None:
        """Raise ValueError unless both give the same.

        The kernels of the model's widths are compiled on the way, so that no request waits for them.
        """
        for has_spans in (False, True) if self._sees_spans else (False,):
            attend = self._step(rows, has_spans=has_spans)
            check_probe(attend(backend), attend(reference))

    def seconds(self, backends: Sequence[AttentionBackend], rows: Rows, stopwatch: Stopwatch) -> list[float]:
        """How long each takes for a step of these rows."""
        attend = self._step(rows)
        return [stopwatch(lambda backend=backend: attend(backend)) for backend in backends]  # type: ignore[misc]

    def _step(self, rows: Rows, *, has_spans: bool = False) -> Callable[[AttentionBackend], torch.Tensor]:
        needed = [-(-sum(row) // self._block_size) for row in rows]
        tables = np.split(np.arange(1, sum(needed) + 1, dtype=np.int32), np.cumsum(needed)[:-1])
        spans = [
            RowSpan([0] * n, start, table, whole_spans=((start + n // 2, start + n),) if has_spans else ())
            for (start, n), table in zip(rows, tables, strict=True)
        ]
        batch = ForwardBatch.build(spans, self._block_size, self._device)
        cache = KVCache(self._spec, self._heads, sum(needed) + 1, self._block_size, self._kv_dtype, self._device)
        generator = seeded_generator(0, self._device)
        cache.pool.copy_(torch.empty_like(cache.pool, dtype=self._dtype).normal_(generator=generator))
        shape = (batch.num_tokens, self._heads.num_heads, self._spec.cached_dim)
        query = torch.randn(shape, device=self._device, generator=generator).to(self._dtype)
        return lambda backend: backend.attend(query, cache, 0, backend.plan(batch), self._rule)


def on_device(work: Callable[[], object]) -> float:
    """Seconds that work takes a GPU, of several times in a row after one that does not count."""
    times = 5
    work()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / times


Makers = Mapping[str, Callable[[], RecordableAttention]]  # by names that begin as --attention calls them
# What TGI's ATTENTION names, as near as there is; a deployment that is moved here goes on with it or without.
_OF_TGI = {"paged": "triton", "flashdecoding": "flash"}


def choose_attention(
    spec: ModelSpec,
    heads: HeadSplit,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    wanted: str | None = None,
) -> AttentionBackend:
    """The backend for this rank's heads; what was tried, and how fast it was, is logged.

    `dtype` is the precision of queries, `kv_dtype` that of the pool; `wanted` is what --attention says.

    Raises:
        SettingsError: what is wanted cannot be had.
    """
    reference = TorchAttention(block_size, device)
    if device.type != "cuda":
        return reference
    reason = needs_torch(spec)
    if reason is not None:
        logger.info("attention runs in torch: %s", reason)
        return reference
    makers: Makers = {
        "flash-attn 3": lambda: flash_3(spec, block_size, device, kv_dtype),
        "flash-attn 2": lambda: flash_2(spec, block_size, device, kv_dtype),
        "triton": lambda: _triton(spec, heads, block_size, device, dtype),
    }
    with torch.inference_mode():
        check = KernelCheck(spec, heads, block_size, device, dtype, kv_dtype)
        return choose(makers, reference, check, on_device, wanted, is_plain=_is_plain(spec))


def needs_torch(spec: ModelSpec) -> str | None:
    """Why no kernel computes the attention of a model, if none does."""
    if not spec.attention_layers:
        return "no layer attends"
    if spec.indexer is not None:
        return "tokens attend to those that an indexer chooses"
    if any(own.head_dim or own.num_kv_heads for own in spec.layers):
        return "heads of layers differ"
    return None


def choose(
    makers: Makers,
    reference: AttentionBackend,
    check: KernelCheck,
    stopwatch: Stopwatch,
    wanted: str | None = None,
    *,
    is_plain: bool,
) -> AttentionBackend:
    """The fastest backend for rows that decode, and with it the fastest for prompts.

    Args:
        makers: make the backends that read block tables, or say why not.
        reference: right by definition; for prompts from their beginning it is a candidate, where `is_plain`.
        check: checks them and has them timed.
        stopwatch: times work.
        wanted: what --attention says.
        is_plain: whether nothing but the causal order hides or changes scores.
    """
    if wanted == "torch":
        logger.info("attention runs in torch, as --attention says")
        return reference
    right = _right(makers, reference, check)
    kind = _OF_TGI.get(wanted or "", wanted or "")
    of_kind = [each for name, each in right.items() if kind and name.startswith(kind)]
    if wanted in ("triton", "flash") and not of_kind:
        raise SettingsError(f"--attention {wanted} cannot be had here; the log says why")
    paged = of_kind or list(right.values())
    if not paged:
        logger.warning("attention runs in torch, without kernels that read block tables")
        return reference
    decode = paged[_fastest("decoding", paged, check.seconds(paged, check.decode, stopwatch))]
    if of_kind:
        return decode
    for_prompts: list[AttentionBackend] = [*paged, *([reference] if is_plain else [])]
    prompts = for_prompts[_fastest("prompts", for_prompts, check.seconds(for_prompts, PROMPT, stopwatch))]
    if prompts is decode:
        return decode
    return SplitAttention(decode, prompts, is_for_fresh=prompts is reference)


def _right(makers: Makers, reference: AttentionBackend, check: KernelCheck) -> dict[str, RecordableAttention]:
    """The backends that can be made and give what the reference gives."""

    def probe(make: Callable[[], RecordableAttention]) -> RecordableAttention:
        backend = make()
        check.check(backend, reference)
        check.check(SplitAttention(backend, reference, is_for_fresh=True), reference, FRESH)
        return backend

    right = {name: probe_or_fall_back(partial(probe, make), partial(_unused, name)) for name, make in makers.items()}
    return {name: backend for name, backend in right.items() if backend is not None}


def _unused(name: str, error: Exception) -> None:
    """Say why a backend is not used: one that is not installed is no reason for a warning."""
    if isinstance(error, ImportError):
        logger.info("attention: %s is not used: %s", name, error)
    else:
        logger.warning("attention: %s is not used: %s", name, reason_of(error))


def _fastest(what: str, backends: Sequence[AttentionBackend], seconds: Sequence[float]) -> int:
    """Which of them it is; all are told."""
    best = min(range(len(backends)), key=seconds.__getitem__)
    timed = ", ".join(f"{each.name} {1e6 * took:.0f} us" for each, took in zip(backends, seconds, strict=True))
    logger.info("attention of %s: %s (of %s)", what, backends[best].name, timed)
    return best


def _is_plain(spec: ModelSpec) -> bool:
    is_local = any(spec.window(i) or spec.chunk(i) for i in range(spec.num_layers))
    is_changed = spec.attention_softcap is not None or spec.has_sinks or spec.position is Position.ALIBI
    return not is_local and not is_changed


def _triton(
    spec: ModelSpec, heads: HeadSplit, block_size: int, device: torch.device, dtype: torch.dtype
) -> RecordableAttention:
    if any(spec.chunk_sizes):
        raise ValueError("it does not attend within chunks")
    # Triton: seconds to import, and there with torch's builds for GPUs only
    from funitel.model_server.attention.triton_kernels import TritonAttention

    return TritonAttention(
        block_size,
        device,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=spec.cached_dim,
        dtype=dtype,
        num_processors=torch.cuda.get_device_properties(device).multi_processor_count,
    )
