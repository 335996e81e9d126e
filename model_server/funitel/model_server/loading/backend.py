"""A decoder loaded with its weights: the fused step where this CPU and the model have it, else torch."""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from funitel.model_server.attention.select import choose_attention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu import decoder as fused
from funitel.model_server.cpu.build import CannotBuild, build
from funitel.model_server.cpu.coverage import missing
from funitel.model_server.cpu.footprint import step_bytes, weight_bytes
from funitel.model_server.cpu.logits_processors import FusedScores
from funitel.model_server.cpu.native import load_library
from funitel.model_server.cpu.precision import MADE, Tier
from funitel.model_server.cpu.shared_memory_ranks import SharedMemoryRanks
from funitel.model_server.cpu.thread_tuning import settle_threads
from funitel.model_server.device.memory import bytes_in_use
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.forward.interface import Forward
from funitel.model_server.hub.resolve import DEFAULT_CACHE_DIR
from funitel.model_server.kv_cache.pool import KVCache, is_float8
from funitel.model_server.loading.torch_footprint import torch_weight_bytes
from funitel.model_server.models.cuda_graphs import recorded
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.models.fuse_elementwise import fuse_glue
from funitel.model_server.models.weight_offload import offload_of
from funitel.model_server.quantized.select import choose_products
from funitel.model_server.sampling.logits_processors import ScoreMath, TorchScores
from funitel.model_server.settings import ModelServerSettings
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.proto.errors import SettingsError

logger = logging.getLogger(__name__)

_MOST_LOGITS = 128  # in a step: requests that the router lets in at once where it is not told otherwise
FLOAT8_KV = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_EXACT = "--dtype float32 keeps them exact"


class Footprint(Protocol):
    """What weights take, as `Weights` counts it."""

    held_bytes: int
    sharded_bytes: int
    total_sharded_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A decoder, and what the rest of the shard must know of it.

    `precision` is that of the weights, `parallel` the ranks as the decoder reduces over them, `step_bytes` the memory
    of a step of so many tokens, where it is known before. `takes_held_tokens`: all it reads of a batch's tokens is the
    tensor, so that some may be known to the device only.
    """

    name: str
    decoder: Forward
    scores: ScoreMath
    precision: str
    kv_dtype: torch.dtype
    num_threads: int
    parallel: TensorParallel
    footprint: Footprint
    step_bytes: Callable[[int], int] | None = None
    takes_held_tokens: bool = False


def load_torch(settings: ModelServerSettings, spec: ModelSpec, weights: Weights, parallel: TensorParallel) -> Loaded:
    """The readable decoder: every device, every spec, in the precision of `weights`."""
    weights.products = choose_products(settings.quantize, weights.quantization, weights.device, weights.dtype)
    kept = weights if weights.products is not None else None
    predicted = torch_weight_bytes(spec, parallel.rank, parallel.size, weights.dtype, weights.device, checkpoint=kept)
    before = bytes_in_use(weights.device)
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
    kv_dtype = FLOAT8_KV.get(settings.kv_cache_dtype or "", weights.dtype)
    attention = choose_attention(
        spec, heads, settings.block_size, weights.device, weights.dtype, kv_dtype, settings.attention
    )
    weights.scales_kv = is_float8(kv_dtype)
    offload = offload_of(settings.cpu_offload_gb, spec.num_layers, weights.device)
    decoder = Decoder(spec, weights, parallel, attention, offload)
    fuse_glue(decoder, heads, weights.device, weights.dtype, kv_dtype=kv_dtype)
    _log_memory(settings, spec, parallel, predicted, bytes_in_use(weights.device) - before, kv_dtype)
    loaded = in_torch(recorded(decoder, settings.cuda_graphs), weights, parallel, kv_dtype)
    return replace(loaded, takes_held_tokens=True)


def in_torch(
    decoder: Forward, weights: Weights, parallel: TensorParallel, kv_dtype: torch.dtype | None = None
) -> Loaded:
    """What the rest of the shard must know of a model that torch computes; the pool is in its precision or another."""
    return Loaded(
        name="torch",
        decoder=decoder,
        scores=TorchScores(),
        precision=str(weights.dtype),
        kv_dtype=kv_dtype or weights.dtype,
        num_threads=torch.get_num_threads(),
        parallel=parallel,
        footprint=weights,
    )


def load_fused(
    settings: ModelServerSettings, spec: ModelSpec, weights: Weights, parallel: TensorParallel, tier: Tier
) -> Loaded | None:
    """The fused step on this CPU; None, with the reason logged, where some rank does not have it.

    Raises:
        SettingsError: --quantize asks for a tier that only the fused step has.
    """
    library, reason = None, missing(spec)
    if reason is None:
        try:
            cache_dir = Path(settings.cache_dir) if settings.cache_dir else DEFAULT_CACHE_DIR
            library = load_library(build(cache_dir.expanduser().absolute()))
        except (CannotBuild, OSError) as error:
            reason = str(error)
    if not parallel.smallest(library is not None):
        reason = reason or "another rank does not have it"
    if library is None or reason is not None:
        if settings.quantize in MADE and weights.quantization is None:
            raise SettingsError(f"--quantize {settings.quantize} needs the fused CPU step: {reason}")
        logger.warning("the model runs in torch, without the fused CPU step: %s", reason)
        return None
    parallel = _in_shared_memory(parallel, library)
    predicted, before = weight_bytes(spec, parallel, tier, weights.block_type), bytes_in_use(weights.device)
    weights.dtype = torch.float32  # what the engine takes; the tier says what becomes of it
    decoder = fused.FusedDecoder(
        spec,
        weights,
        parallel,
        library,
        tier=tier,
        block_size=settings.block_size,
        num_threads=torch.get_num_threads(),
    )
    _log_memory(settings, spec, parallel, predicted, bytes_in_use(weights.device) - before, decoder.kv_dtype)
    settle_threads(
        decoder,
        spec,
        parallel,
        most_threads=torch.get_num_threads(),
        num_threads=settings.num_threads,
        spin_us=settings.thread_spin_us,
    )
    _log_tier(decoder, is_default=settings.dtype is None and settings.quantize is None)
    kept = Tier.INT8 if tier is Tier.GGUF and not decoder.has_blocks else tier
    precision = kept.label if kept in MADE.values() else f"torch.{kept.label}"
    return Loaded(
        name="fused",
        decoder=decoder,
        scores=FusedScores(decoder.program.engine),
        precision=precision,
        kv_dtype=decoder.kv_dtype,
        num_threads=decoder.num_threads,
        parallel=parallel,
        footprint=decoder.program,
        step_bytes=partial(_step_bytes, spec, parallel, tier),
    )


def _step_bytes(spec: ModelSpec, parallel: TensorParallel, tier: Tier, num_tokens: int) -> int:
    return step_bytes(spec, parallel, tier, num_tokens=num_tokens, num_logits=min(num_tokens, _MOST_LOGITS))


def _log_memory(
    settings: ModelServerSettings,
    spec: ModelSpec,
    parallel: TensorParallel,
    predicted: int,
    measured: int,
    kv_dtype: torch.dtype,
) -> None:
    """Say what weights were to take and took, and what a token takes in the pool."""
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
    block_bytes = KVCache.bytes_per_block(spec, heads.num_kv_heads, settings.block_size, kv_dtype)
    logger.info(
        "memory predicted_weight_bytes=%d measured_bytes=%d kv_bytes_per_token=%d",
        predicted,
        measured,
        block_bytes // settings.block_size,
    )


def _in_shared_memory(parallel: TensorParallel, library: ctypes.CDLL) -> TensorParallel:
    """The ranks in shared memory where they can; else as they are, with the reason logged."""
    if parallel.size == 1:
        return parallel
    ranks = SharedMemoryRanks.meet(parallel, library)
    if isinstance(ranks, SharedMemoryRanks):
        return ranks
    logger.info("ranks reduce through %s, without shared memory: %s", parallel.name, ranks)
    return parallel


def _log_tier(decoder: fused.FusedDecoder, *, is_default: bool) -> None:
    """Say how weights are kept where nobody asked, and which of a GGUF's are not as they were."""
    kinds = decoder.program.kinds
    others = [layers for layers, kind in kinds.items() if not kind.has_blocks]
    if decoder.tier is Tier.GGUF and not decoder.has_blocks:
        logger.warning("no block of the GGUF can be used as it is; weights are kept as int8; %s", _EXACT)
        return
    if is_default and decoder.tier is Tier.GGUF:
        types = ", ".join(sorted({kind.name for kind in kinds.values() if kind.has_blocks}))
        logger.info("weights are kept as the blocks of the GGUF (%s), the default on a CPU; %s", types, _EXACT)
    elif is_default:
        logger.info("weights are kept as %s, the default on a CPU; %s", decoder.tier.label, _EXACT)
    if decoder.tier is Tier.GGUF and others:
        message = "of %d matrices %d are kept as int8, as they are not blocks of one type that can be used: %s%s"
        some = ", ".join("+".join(layers) for layers in others[:2])
        logger.info(message, len(kinds), len(others), some, ", ..." if len(others) > 2 else "")
        logger.debug("kept as int8: %s", others)
