"""Checkpoint folder -> loaded executor: spec, ranks, weights, tokenizer, in that order."""

import logging
from dataclasses import replace
from pathlib import Path

from funitel.model_server.loading.common import (
    Bytes,
    Loaded,
    check_ranks,
    choose_dtype,
    find_eos,
    join_ranks,
    set_threads,
)
from funitel.model_server.loading.drafter_plans import (
    DrafterPlan,
    DraftTarget,
    plan_beside_parts,
    plan_drafter,
    refuse_drafter,
)
from funitel.model_server.loading.drafters import add_drafter
from funitel.model_server.loading.executor import LoadedShard, make_executor
from funitel.model_server.loading.fallback import asked_for_transformers, load_with_transformers
from funitel.model_server.loading.fused_backend import load_fused
from funitel.model_server.loading.parts import HOST, device_of, load_parts, open_weights, parts_of
from funitel.model_server.loading.stages import in_stage, join_stages, part_of
from funitel.model_server.loading.torch_backend import load_torch
from funitel.model_server.media.families.load import open_media
from funitel.model_server.models.key_frames import frame_keys
from funitel.model_server.registry.lookup import choose_spec
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.settings import NATIVE, TRANSFORMERS, ModelServerSettings
from funitel.model_server.spec.model_spec import ModelSpec, Position
from funitel.proto.errors import NoRow, UnsupportedModel

logger = logging.getLogger(__name__)


def load(settings: ModelServerSettings, folder: Path) -> LoadedShard:
    """Load this rank's share of the model in `folder`; blocks until every rank has joined.

    Raises:
        StartupError: the checkpoint, the settings and the machine do not fit together.
    """
    device = device_of(settings)
    set_threads(settings.num_threads or settings.most_threads)
    if device.type == "cpu":
        _tell_of_gpu_settings(settings)
    if settings.model_spec is None:
        refuse_drafter(settings, folder)
    if settings.engine == TRANSFORMERS:
        return load_with_transformers(settings, folder, asked_for_transformers(settings, folder), device)
    try:
        spec = _stretched(choose_spec(settings.model_spec, folder), settings)
    except NoRow as no_row:
        if settings.engine == NATIVE:
            raise UnsupportedModel(f"--engine native: {no_row.message}") from no_row
        return load_with_transformers(settings, folder, no_row, device)
    check_ranks(settings, spec)
    parts = parts_of(settings, spec, device)
    if parts is not None:
        codec = TextCodec(folder)
        target, eos_token_ids = DraftTarget(settings, folder, spec, HOST), find_eos(folder, codec)
        plan = plan_beside_parts(target)
        return _served(target, plan, load_parts(folder, spec, parts), codec, eos_token_ids)
    spec = part_of(settings, spec)
    weights, tier = open_weights(settings, folder, spec, device)
    codec = TextCodec(folder)
    target, eos_token_ids = DraftTarget(settings, folder, spec, device), find_eos(folder, codec)
    plan = plan_drafter(target) if settings.stages is None else None
    stage = None if settings.stages is None else join_stages(settings, settings.stages, device)
    parallel = join_ranks(settings, device) if stage is None else stage.tensor
    parallel.spreads_experts = settings.expert_parallel
    is_fused = tier is not None and not (plan is not None and plan.reads_middle)
    if tier is not None and not is_fused:
        logger.info("the model runs in torch: the drafter reads hidden states that the fused CPU step does not keep")
    link = None if stage is None else stage.link
    loaded: Loaded | None = None
    if tier is not None and is_fused:
        loaded = load_fused(settings, spec, weights, parallel, tier, stage)
    loaded = loaded or load_torch(settings, spec, weights, parallel, link)
    loaded = loaded if stage is None else in_stage(loaded, stage)
    return _served(target, plan, loaded, codec, eos_token_ids)


def _served(
    target: DraftTarget, plan: DrafterPlan | None, loaded: Loaded, codec: TextCodec, eos_token_ids: frozenset[int]
) -> LoadedShard:
    """The executor of a loaded model, with its drafter and its vision tower if there is one."""
    drafter, loaded, pools = add_drafter(target, plan, loaded)
    settings, folder, spec, device = target.settings, target.folder, target.spec, target.device
    digests = frame_keys(loaded.decoder, pools, codec, spec.max_position_embeddings)
    loaded = replace(loaded, key_frames=digests)
    opened = None
    if settings.model_spec is None:
        opened = open_media(settings, folder, spec.architecture, choose_dtype(settings.dtype, device), device)
    media = None
    if opened is not None:
        media, tower = opened
        loaded = replace(loaded, footprint=Bytes.of(loaded.footprint, tower))
    return make_executor(
        *(settings, folder, spec, loaded, pools, codec, device, eos_token_ids), drafter=drafter, media=media
    )


def _tell_of_gpu_settings(settings: ModelServerSettings) -> None:
    """Say of settings that are for GPUs that they change nothing on a CPU."""
    given = {
        "--cuda-graphs": settings.cuda_graphs,
        "--attention": settings.attention,
        "--cpu-offload-gb": settings.cpu_offload_gb or None,
        "--kv-host-gb": settings.kv_host_gb or None,
    }
    for flag, value in given.items():
        if value is not None:
            logger.warning("%s %s changes nothing: the model runs on a CPU", flag, value)


def _stretched(spec: ModelSpec, settings: ModelServerSettings) -> ModelSpec:
    """The spec with the rotary positions that the settings ask for."""
    if settings.rope_scaling is None and settings.rope_factor is None:
        return spec
    if spec.position is not Position.ROTARY:
        logger.warning("--rope-scaling and --rope-factor change nothing: %s has no rotary positions", spec.architecture)
        return spec
    return spec.stretched(settings.rope_factor or 1.0)
