"""Which attention a shard computes with: of what device and model allow and a probe finds right, what is fastest."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from funitel.model_server.attention.backend import AttentionBackend, RecordableAttention
from funitel.model_server.attention.flash import flash_2, flash_3
from funitel.model_server.attention.probe import FRESH, PROMPT, KernelCheck, Stopwatch, on_device
from funitel.model_server.attention.split_by_phase import SplitAttention
from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.device.probe_or_fall_back import probe_or_fall_back, reason_of
from funitel.model_server.device.tensor_parallel import HeadSplit
from funitel.model_server.spec.model_spec import ModelSpec, Position
from funitel.proto.errors import SettingsError

logger = logging.getLogger(__name__)

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
    makers: Makers = {
        "flash-attn 3": lambda: flash_3(spec, block_size, device, kv_dtype),
        "flash-attn 2": lambda: flash_2(spec, block_size, device, kv_dtype),
        "triton": lambda: _triton(spec, heads, block_size, device, dtype),
    }
    with torch.inference_mode():
        check = KernelCheck(spec, heads, block_size, device, dtype, kv_dtype)
        return choose(makers, reference, check, on_device, wanted, is_plain=_is_plain(spec))


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
    has_window = any(spec.window(i) is not None for i in range(spec.num_layers))
    return not has_window and spec.attention_softcap is None and spec.position is not Position.ALIBI


def _triton(
    spec: ModelSpec, heads: HeadSplit, block_size: int, device: torch.device, dtype: torch.dtype
) -> RecordableAttention:
    # Triton: seconds to import, and there with torch's builds for GPUs only
    from funitel.model_server.attention.triton import TritonAttention

    return TritonAttention(
        block_size,
        device,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=spec.cached_dim,
        dtype=dtype,
        num_processors=torch.cuda.get_device_properties(device).multi_processor_count,
    )
