"""A drafter loaded beside its target, and the pools of both."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from funitel.model_server.attention.select import choose_attention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.precision import MADE, choose_tier
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.forward.batch import KeepingForward
from funitel.model_server.kv_cache.pool import Pools, SpecPools
from funitel.model_server.kv_cache.state_pool import StateLayout
from funitel.model_server.loading.common import Bytes, Loaded, choose_dtype
from funitel.model_server.loading.drafter_plans import DrafterPlan, DraftTarget, HeadPlan, ModelPlan, PoolDrafter
from funitel.model_server.loading.fused_backend import load_fused
from funitel.model_server.loading.torch_backend import load_torch
from funitel.model_server.settings import ModelServerSettings
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.speculation.draft_model import DraftModel
from funitel.model_server.speculation.interface import Drafter
from funitel.model_server.speculation.pools import DraftPools
from funitel.model_server.speculation.tables import VocabTables
from funitel.proto.errors import SettingsError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter, how its pool is made if it has one, and what it takes beside the target."""

    drafter: PoolDrafter
    pools: Pools | None
    footprint: Bytes
    step_bytes: Callable[[int], int] | None = None


def add_drafter(target: DraftTarget, plan: DrafterPlan | None, loaded: Loaded) -> tuple[Drafter | None, Loaded, Pools]:
    """Load a drafter, if there is one, beside its target; the target and its pools with the drafter's bytes counted."""
    spec, parallel, settings = target.spec, loaded.parallel, target.settings
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
    layout = StateLayout.of(spec, parallel.size, parallel.rank)
    pools: Pools = loaded.pools or SpecPools(spec, heads, settings.block_size, loaded.kv_dtype, target.device, layout)
    if plan is None:
        return None, loaded, pools
    if plan.hidden_layers:
        assert isinstance(loaded.decoder, KeepingForward)
        loaded.decoder.keep_hidden(plan.hidden_layers)
    if isinstance(plan.parts, HeadPlan):
        draft = _load_head(target, plan.parts, loaded)
    else:
        draft = _load_model(target, plan.parts, loaded)
    kept = Bytes.of(loaded.footprint, draft.footprint)
    logger.info("drafter=%s weight_bytes=%d", plan.name, draft.footprint.held_bytes)
    step_bytes, own = loaded.step_bytes, draft.step_bytes
    if step_bytes is not None and own is not None:  # one computes after the other
        step_bytes = partial(_larger, step_bytes, own, partial(plan.hidden_bytes, spec))
    loaded = replace(loaded, footprint=kept, step_bytes=step_bytes)
    return draft.drafter, loaded, DraftPools(pools, draft.pools, draft.drafter.take_pool)


def _larger(
    first: Callable[[int], int], second: Callable[[int], int], kept: Callable[[int], int], num_tokens: int
) -> int:
    return max(first(num_tokens), second(num_tokens)) + kept(num_tokens)


def _load_head(target: DraftTarget, plan: HeadPlan, loaded: Loaded) -> LoadedDrafter:
    parallel, dtype, device = loaded.parallel, _dtype_of(loaded), target.device
    whole = Weights(target.folder, dtype, device, target.spec.names.prefix, is_shown=False)
    weights = Weights(plan.folder, dtype, device, plan.prefix, is_shown=False)
    tables = VocabTables.of(target.spec, loaded.decoder, whole, parallel)
    layer, settings = plan.layer or target.spec, target.settings
    heads = HeadSplit.of(layer.num_heads, layer.num_kv_heads, parallel.size, parallel.rank)
    attention = choose_attention(layer, heads, settings.block_size, device, dtype, dtype, settings.attention)
    drafter = plan.build(weights, tables, parallel, attention)
    pools = None if plan.layer is None else SpecPools(layer, heads, settings.block_size, dtype, device)
    step_bytes = partial(plan.step_bytes, target.spec, parallel, dtype)
    return LoadedDrafter(drafter, pools, Bytes.of(whole, weights), step_bytes)


def _load_model(target: DraftTarget, plan: ModelPlan, loaded: Loaded) -> LoadedDrafter:
    spec, settings, device = plan.spec, target.settings, target.device
    own = _own_settings(settings, plan.folder, loaded)
    parallel = loaded.parallel if _can_split(spec, loaded.parallel) else TensorParallel()
    weights = Weights(plan.folder, choose_dtype(own.dtype, device), device, spec.names.prefix)
    weights.round_as(own.quantize, None, spec.names)
    tier = choose_tier(own.dtype, own.quantize, weights.quantization, has_blocks=weights.has_blocks)
    draft = load_fused(own, spec, weights, parallel, tier) if tier is not None else None
    draft = draft or load_torch(own, spec, weights, parallel)
    vocabularies = spec.vocab_size, target.spec.vocab_size
    context = spec.max_position_embeddings
    drafter = DraftModel(draft.decoder, loaded.parallel, settings.block_size, device, *vocabularies, context)
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
    pools = SpecPools(spec, heads, settings.block_size, draft.kv_dtype, device)
    return LoadedDrafter(drafter, pools, Bytes.of(draft.footprint), draft.step_bytes)


def _own_settings(settings: ModelServerSettings, folder: Path, loaded: Loaded) -> ModelServerSettings:
    """The target's settings for the draft model: computed as the target, but as its checkpoint is."""
    return replace(
        settings,
        model_id=str(folder),
        model_spec=None,
        quantize=settings.quantize if settings.quantize in MADE and settings.quantize != "gguf" else None,
        num_threads=loaded.num_threads,
        most_threads=None,
        cpu_offload_gb=0.0,
        kv_cache_dtype=None,
    )


def _can_split(spec: ModelSpec, parallel: TensorParallel) -> bool:
    """Whether the ranks can share the heads of a model; else each computes it whole."""
    try:
        HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
    except SettingsError:
        return False
    return True


def _dtype_of(loaded: Loaded) -> torch.dtype:
    """What a layer in torch is computed in beside a target."""
    if loaded.name == "fused":
        return torch.float32
    found: torch.dtype = getattr(torch, loaded.precision.removeprefix("torch."))
    return found
