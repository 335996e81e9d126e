"""The executor of a loaded model, and the facts that its rank tells the router."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from funitel.model_server.adapters.registry import LoadedAdapters
from funitel.model_server.executor.async_sampling import AsyncSampling
from funitel.model_server.executor.executor import Executor, MakeSampling
from funitel.model_server.executor.row_rules import RowRules
from funitel.model_server.executor.staged_sampling import StagedSampling
from funitel.model_server.executor.sync_sampling import SyncSampling
from funitel.model_server.gpu_sampling.ops import choose_maths
from funitel.model_server.kv_cache.disk_tier import disk_tier_of
from funitel.model_server.kv_cache.pool import Pools
from funitel.model_server.loading.common import Loaded, info_of, log_loaded, options_of
from funitel.model_server.media.service import MediaService
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.settings import ModelServerSettings
from funitel.model_server.spec.model_spec import ModelFacts
from funitel.model_server.speculation.interface import Drafter
from funitel.model_server.speculation.ngram import NgramDrafter
from funitel.model_server.speculation.speculator import SharedDrafter, Speculator
from funitel.proto.step import Capability, ShardInfo

logger = logging.getLogger(__name__)

LoadedShard = tuple[Executor, ShardInfo]


def make_executor(
    settings: ModelServerSettings,
    folder: Path,
    spec: ModelFacts,
    loaded: Loaded,
    pools: Pools,
    codec: TextCodec,
    device: torch.device,
    eos_token_ids: frozenset[int],
    rules: RowRules | None = None,
    drafter: Drafter | None = None,
    media: MediaService | None = None,
) -> LoadedShard:
    """The executor of a loaded model, by default with the rules of a decoder; on a GPU it samples on the device.

    `drafter` makes drafts with weights of its own; without one they are looked up. `media` encodes images and sounds.
    """
    log_loaded(settings, folder, spec, device, loaded)
    speculator = speculator_of(
        settings, device, rules, None if drafter is None else SharedDrafter(drafter, loaded.parallel)
    )
    options = options_of(settings, device, loaded, eos_token_ids)
    precision = f"{loaded.precision} {loaded.key_frames}"
    if media is not None:
        options = replace(options, reserved_bytes=options.reserved_bytes + media.cache.max_bytes, media=media)
    elif settings.media_cache_gb:
        logger.warning("--media-cache-gb %g changes nothing: the model takes text alone", settings.media_cache_gb)
    options = replace(options, disk=disk_tier_of(settings, folder, device, loaded.name, precision))
    sampling: MakeSampling = partial(SyncSampling, scores=loaded.scores)
    if device.type == "cuda" and loaded.takes_device_tokens:
        sampling = partial(AsyncSampling, maths=choose_maths(device))
    reason = "not with --cpu-offload-gb" if settings.cpu_offload_gb else f"{spec.architecture} takes none on this shard"
    adapters = LoadedAdapters(loaded.adapters, settings.max_lora_rank, reason)
    stage, parallel = loaded.stage, loaded.parallel
    if stage is not None:
        parallel = stage.whole
        sampling = partial(StagedSampling, link=stage.link, num_stages=stage.num_stages, scores=loaded.scores)
    executor = Executor(
        *(spec, loaded.decoder, pools, codec, parallel, options, sampling, rules),
        adapters=adapters,
        speculator=speculator,
    )
    info = info_of(
        settings,
        options,
        loaded,
        spec.vocab_size,
        keeps_states=pools.state_layout is not None,
        has_parted_blocks=pools.has_parted_blocks and rules is None,
    )
    if media is not None:
        info = replace(info, capabilities=info.capabilities | {Capability.MEDIA}, media=media.facts)
    if speculator is None:
        return executor, replace(info, capabilities=info.capabilities - {Capability.SPECULATION})
    return executor, replace(info, speculate=speculator.max_drafts, drafter=speculator.drafter.name)


def speculator_of(
    settings: ModelServerSettings, device: torch.device, rules: RowRules | None, drafter: Drafter | None = None
) -> Speculator | None:
    """What chooses drafts; None where `--speculate` asks for none, or they cannot be verified, which is logged."""
    if not settings.speculate:
        return None
    if settings.stages is not None:
        logger.warning("--speculate %d changes nothing: pipeline stages do not speculate", settings.speculate)
        return None
    if rules is not None:
        logger.warning("--speculate %d changes nothing: an encoder-decoder does not speculate", settings.speculate)
        return None
    if device.type != "cpu":
        message = "--speculate %d changes nothing: drafts are verified on a CPU only, the model runs on %s"
        logger.warning(message, settings.speculate, device.type)
        return None
    if drafter is not None:
        return Speculator(drafter, settings.speculate, observes=True)
    return Speculator(NgramDrafter(), settings.speculate)
