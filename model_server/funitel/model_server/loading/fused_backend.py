"""A decoder loaded for the fused CPU step, where this processor and the model have it."""

import ctypes
import logging
from functools import partial

import torch

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu import decoder as fused
from funitel.model_server.cpu.compiler import CannotBuild
from funitel.model_server.cpu.coverage import missing
from funitel.model_server.cpu.decoder import FusedLogitsProcessors
from funitel.model_server.cpu.footprint import step_bytes, weight_bytes
from funitel.model_server.cpu.low_rank import adapter_base
from funitel.model_server.cpu.native import load_library
from funitel.model_server.cpu.precision import MADE, ActivationDtype, Tier, asked_kv_kind
from funitel.model_server.cpu.shared_memory_ranks import SharedMemoryRanks
from funitel.model_server.cpu.thread_tuning import settle_threads
from funitel.model_server.device.memory import bytes_in_use
from funitel.model_server.device.stages import Stage, StageLink
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.hub.resolve import cache_folder
from funitel.model_server.loading.common import Loaded, log_memory
from funitel.model_server.settings import ModelServerSettings
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.proto.errors import SettingsError

logger = logging.getLogger(__name__)

_MAX_LOGITS = 128  # in a step: requests that the router lets in at once where it is not told otherwise
_EXACT = "--dtype float32 keeps them exact"


def load_fused(
    settings: ModelServerSettings,
    spec: ModelSpec,
    weights: Weights,
    parallel: TensorParallel,
    tier: Tier,
    stage: Stage | None = None,
    link: StageLink | None = None,
) -> Loaded | None:
    """The fused step on this CPU; None, with the reason logged, where some rank does not have it.

    `stage` is this rank's place among pipeline stages, if there are several; without one `link` joins a part of a model
    to the others.
    to the others.

    Raises:
        SettingsError: --quantize asks for a tier that only the fused step has.
    """
    library, reason = None, missing(spec)
    if reason is None:
        try:
            library = load_library(cache_folder(settings.cache_dir))
        except (CannotBuild, OSError) as error:
            reason = str(error)
    every = parallel if stage is None else stage.whole
    if not every.smallest(library is not None and reason is None):
        reason = reason or "another rank does not have it"
    if library is None or reason is not None:
        if settings.quantize in MADE and weights.quantization is None:
            raise SettingsError(f"--quantize {settings.quantize} needs the fused CPU step: {reason}")
        logger.warning("the model runs in torch, without the fused CPU step: %s", reason)
        return None
    asked, kv_kind = settings.kv_cache_dtype, None
    if asked is not None:
        kv_kind = asked_kv_kind(spec, settings.block_size, asked)
    parallel = _in_shared_memory(parallel, library)
    predicted = weight_bytes(spec, parallel, tier, weights.block_type, weights.num_outliers)
    before, has_outliers = bytes_in_use(weights.device), weights.has_outliers
    weights.dtype = torch.float32  # what the engine takes; the tier says what becomes of it
    decoder = fused.FusedDecoder(
        spec,
        weights,
        parallel,
        library,
        tier=tier,
        block_size=settings.block_size,
        num_threads=torch.get_num_threads(),
        activations=_activations(settings, weights),
        kv_kind=kv_kind,
        link=link if stage is None else stage.link,
    )
    log_memory(settings, spec, parallel, predicted, bytes_in_use(weights.device) - before, decoder.kv_dtype)
    settle_threads(
        decoder,
        spec,
        parallel,
        max_threads=torch.get_num_threads(),
        num_threads=settings.num_threads,
        spin_us=settings.thread_spin_us,
    )
    _log_tier(decoder, is_default=settings.dtype is None and settings.quantize is None)
    kept = Tier.INT8 if tier is Tier.GGUF and not decoder.has_blocks else tier
    precision = weights.block_format or (kept.label if kept in MADE.values() else f"torch.{kept.label}")
    return Loaded(
        name="fused",
        decoder=decoder,
        scores=FusedLogitsProcessors(decoder.program.engine),
        precision=precision,
        kv_dtype=decoder.kv_dtype,
        num_threads=decoder.num_threads,
        parallel=parallel,
        footprint=decoder.program,
        step_bytes=partial(_step_bytes, spec, parallel, tier, has_outliers),
        adapters=adapter_base(spec, decoder.program, parallel, weights.prefix) if settings.max_lora_rank else None,
    )


def _activations(settings: ModelServerSettings, weights: Weights) -> ActivationDtype:
    """Levels of activations: of 16 bits for formats that have them in their name."""
    if (weights.block_format or "").startswith("a16"):
        return ActivationDtype.INT16
    return ActivationDtype[settings.activation_dtype.upper()]


def _step_bytes(spec: ModelSpec, parallel: TensorParallel, tier: Tier, has_outliers: bool, num_tokens: int) -> int:
    num_logits = min(num_tokens, _MAX_LOGITS)
    return step_bytes(spec, parallel, tier, num_tokens=num_tokens, num_logits=num_logits, has_outliers=has_outliers)


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
    """Log how weights are kept where no flag says it, and which of a GGUF's are not as they were."""
    kinds = decoder.program.kinds
    others = [layers for layers, kind in kinds.items() if kind is decoder.tier.kind]
    if decoder.tier is Tier.GGUF and not decoder.has_blocks:
        logger.warning("no matrix of the GGUF can be used as it is; weights are kept as int8; %s", _EXACT)
        return
    if is_default and decoder.tier is Tier.GGUF:
        types = ", ".join(sorted({kind.name for kind in kinds.values() if kind is not decoder.tier.kind}))
        logger.info("weights are kept as stored (%s), the default on a CPU; %s", types, _EXACT)
    elif is_default:
        logger.info("weights are kept as %s, the default on a CPU; %s", decoder.tier.label, _EXACT)
    if decoder.tier is Tier.GGUF and others:
        message = "of %d matrices %d are kept as int8, as they are not blocks of one type that can be used: %s%s"
        some = ", ".join("+".join(layers) for layers in others[:2])
        logger.info(message, len(kinds), len(others), some, ", ..." if len(others) > 2 else "")
        logger.debug("kept as int8: %s", others)
