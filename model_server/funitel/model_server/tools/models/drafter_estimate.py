"""Estimate what serving a decoder takes, with what makes its draft tokens."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.precision import MADE
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.kv_cache.pool import Pools, SpecPools
from funitel.model_server.loading.common import choose_device, choose_dtype
from funitel.model_server.loading.drafter_plans import (
    DraftTarget,
    HeadPlan,
    ModelPlan,
    plan_beside_parts,
    plan_drafter,
)
from funitel.model_server.media.families.load import tower_bytes
from funitel.model_server.models.footprint import torch_weight_bytes
from funitel.model_server.settings import ModelServerSettings, ModelsSettings
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.speculation.pools import DraftPools
from funitel.model_server.speculation.tables import VocabTables
from funitel.model_server.tools.models.decoder_estimate import estimate_alone
from funitel.model_server.tools.models.needs import Needs, with_memory
from funitel.model_server.tools.models.parts_estimate import estimate_parts, parts_for

_META, _CPU = torch.device("meta"), torch.device("cpu")


def estimate(settings: ModelsSettings, folder: Path, spec: ModelSpec) -> Needs:
    """What each rank of the decoder takes, with its vision tower, and what makes draft tokens if that has weights.

    Raises:
        StartupError: it cannot be served, or not with these settings.
    """
    parts = parts_for(settings, spec)
    if parts is None:
        device = choose_device(settings.device, 0)
        plan = plan_drafter(DraftTarget(_drafting_of(settings), folder, spec, device))
        facts, pools = estimate_alone(settings, folder, spec, reads_middle=plan is not None and plan.reads_middle)
        if settings.model_spec is None:
            tower = tower_bytes(folder, spec.architecture, choose_dtype(settings.dtype, device), device)
            facts = replace(facts, weights=tuple([held + tower for held in facts.weights]))
    else:
        plan = plan_beside_parts(DraftTarget(_drafting_of(settings), folder, spec, _CPU))
        facts, pools = estimate_parts(settings, folder, spec, parts)
    if plan is not None and isinstance(plan.parts, ModelPlan):
        num_shard = settings.num_shard if settings.num_shard <= plan.parts.spec.num_heads else 1
        quantize = settings.quantize if settings.quantize in MADE else None
        own = replace(settings, num_shard=num_shard, quantize=quantize, gpu_layers=None, layer_parts=None)
        own = own if parts is None else replace(own, device="cpu")
        drafts, more = estimate_alone(own, plan.parts.folder, plan.parts.spec)
        each = settings.num_shard // num_shard  # ranks that have it whole
        facts, pools = _with(facts, pools, drafts.weights * each, [*more] * each)
    elif plan is not None and isinstance(plan.parts, HeadPlan):
        is_shared = facts.served_by == "torch"
        facts, pools = _with(facts, pools, *_head_needs(settings, spec, plan.parts, is_shared=is_shared))
    return with_memory(facts, settings, pools)


def _with(
    facts: Needs, pools: Sequence[Pools], weights: Sequence[int], drafts: Sequence[Pools | None]
) -> tuple[Needs, Sequence[Pools]]:
    """The needs and pools of ranks with those of their drafters."""
    held = tuple(own + more for own, more in zip(facts.weights, weights, strict=True))
    joined = [DraftPools(own, more, lambda pool: None) for own, more in zip(pools, drafts, strict=True)]
    return replace(facts, weights=held), joined


def _drafting_of(settings: ModelsSettings) -> ModelServerSettings:
    """What a shard would be told of drafts."""
    return ModelServerSettings(
        model_id=settings.model_id,
        cache_dir=settings.cache_dir,
        block_size=settings.block_size,
        gpu_layers=settings.gpu_layers,
        layer_parts=settings.layer_parts,
        speculate=settings.speculate,
        draft_model=settings.draft_model,
    )


def _head_needs(
    settings: ModelsSettings, spec: ModelSpec, plan: HeadPlan, *, is_shared: bool
) -> tuple[list[int], list[Pools | None]]:
    """Bytes of the weights and the pools of such a drafter on each rank.

    `is_shared`: it uses the embedding table, final norm and head that the target has in torch.
    """
    dtype = choose_dtype(settings.dtype, _CPU) if is_shared else torch.float32
    checkpoint = Weights(plan.folder, dtype, _META, plan.prefix, is_shown=False)

    def build(weights: Weights, parallel: TensorParallel) -> ModelSpec:
        tables = VocabTables.of(spec, None, weights, parallel)
        if is_shared:
            weights.held_bytes = 0
        plan.build(weights, tables, parallel, TorchAttention(1, _META))
        return replace(spec, is_tied=spec.is_tied and not is_shared)

    size, layer = settings.num_shard, plan.layer
    held = [torch_weight_bytes(spec, rank, size, dtype, _CPU, build, checkpoint) for rank in range(size)]
    if layer is None:
        return held, [None] * size
    heads = [HeadSplit.of(layer.num_heads, layer.num_kv_heads, size, rank) for rank in range(size)]
    return held, [SpecPools(layer, each, settings.block_size, dtype, _CPU) for each in heads]
