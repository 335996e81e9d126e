"""What makes the drafts of a model, chosen by its settings and files: a row of `KINDS` for each that has weights."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from funitel.model_server.attention.backend import AttentionBackend
from funitel.model_server.attention.select import choose_attention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.precision import choose_tier
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.forward.batch import KeepingForward
from funitel.model_server.hub.resolve import resolve
from funitel.model_server.kv_cache.pool import KVCache, Pools, SpecPools
from funitel.model_server.loading.common import Loaded, choose_dtype
from funitel.model_server.loading.fused_backend import load_fused
from funitel.model_server.loading.torch_backend import load_torch
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.settings import ModelServerSettings
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.speculation import mtp
from funitel.model_server.speculation.draft_model import DraftModel
from funitel.model_server.speculation.eagle3 import Eagle3Head, eagle3_spec, is_eagle3
from funitel.model_server.speculation.heads import DraftHead, HeadDrafter
from funitel.model_server.speculation.interface import Drafter
from funitel.model_server.speculation.medusa import MedusaDrafter, MedusaHeads, is_medusa
from funitel.model_server.speculation.pools import DraftPools
from funitel.model_server.speculation.tables import VocabTables
from funitel.proto.errors import NoRow, SettingsError, UnsupportedModel

logger = logging.getLogger(__name__)


class PoolDrafter(Drafter, Protocol):
    """A drafter that may have a pool of its own, and is told when there is a new one."""

    def take_pool(self, pool: KVCache | None) -> None:
        """Keep keys and values there from now on; what it knew of sequences is gone."""


@dataclass(slots=True)
class Bytes:
    """See Footprint."""

    held_bytes: int
    sharded_bytes: int
    total_sharded_bytes: int


@dataclass(frozen=True, slots=True)
class Target:
    """A model that is to have drafts."""

    settings: ModelServerSettings
    folder: Path
    spec: ModelSpec
    device: torch.device


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter, how its pool is made if it has one, and what it takes beside the target."""

    drafter: PoolDrafter
    pools: Pools | None
    footprint: Bytes
    step_bytes: Callable[[int], int] | None = None


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """A drafter that is still to be loaded, which the target's loaders must know of.

    `hidden_layers` are those of `Drafter`; `load` takes the target once that is loaded.
    """

    name: str
    hidden_layers: tuple[int, ...]
    load: Callable[[Loaded], LoadedDrafter]

    @property
    def reads_middle(self) -> bool:
        """Whether it reads outputs of other layers than the last."""
        return any(layer != -1 for layer in self.hidden_layers)


def plan_drafter(target: Target) -> DrafterPlan | None:
    """Choose the drafter of a model; None where none with weights is wanted or there.

    Raises:
        StartupError: the draft model is not there, or not for this target.
    """
    settings = target.settings
    if not settings.speculate or target.device.type != "cpu":
        return None
    if settings.draft_model is None:
        return _plan_mtp(target)
    folder = resolve(settings.draft_model, cache_dir=settings.cache_dir).folder
    config = read_json(folder / "config.json")
    for is_kind, plan in KINDS:
        if is_kind(config):
            return plan(target, folder, config)
    return _plan_model(target, folder, config)


def add_drafter(plan: DrafterPlan, loaded: Loaded, pools: Pools) -> tuple[Drafter, Loaded, Pools]:
    """Load a drafter beside its target; the target and its pools with the drafter's bytes counted."""
    if plan.hidden_layers:
        assert isinstance(loaded.decoder, KeepingForward)
        loaded.decoder.keep_hidden(plan.hidden_layers)
    draft = plan.load(loaded)
    names = ("held_bytes", "sharded_bytes", "total_sharded_bytes")
    kept = Bytes(*[getattr(loaded.footprint, name) + getattr(draft.footprint, name) for name in names])
    logger.info("drafter=%s weight_bytes=%d", plan.name, draft.footprint.held_bytes)
    step_bytes, own = loaded.step_bytes, draft.step_bytes
    if step_bytes is not None and own is not None:  # one computes after the other
        step_bytes = partial(_larger, step_bytes, own)
    loaded = replace(loaded, footprint=kept, step_bytes=step_bytes)
    return draft.drafter, loaded, DraftPools(pools, draft.pools, draft.drafter.take_pool)


def _larger(first: Callable[[int], int], second: Callable[[int], int], num_tokens: int) -> int:
    return max(first(num_tokens), second(num_tokens))


def _plan_mtp(target: Target) -> DrafterPlan | None:
    spec = target.spec
    weights = Weights(target.folder, torch.float32, target.device, spec.names.prefix, is_shown=False)
    names = mtp.find_names(spec, weights)
    if names is None:
        return None
    layer = mtp.layer_spec(spec, names, weights)

    def load(loaded: Loaded) -> LoadedDrafter:
        weights.dtype = _dtype_of(loaded)
        attention = _attention(target, layer, loaded.parallel, weights.dtype)
        tables = VocabTables.of(spec, loaded.decoder, weights, loaded.parallel)
        head = mtp.MtpHead(layer, names, weights, tables, loaded.parallel, attention)
        return _loaded_head("mtp", head, layer, weights, loaded, target)

    return DrafterPlan("mtp", mtp.MtpHead.hidden_layers, load)


def _plan_eagle3(target: Target, folder: Path, config: Mapping[str, Any]) -> DrafterPlan:
    spec = eagle3_spec(config, target.spec)

    def load(loaded: Loaded) -> LoadedDrafter:
        weights = Weights(folder, _dtype_of(loaded), target.device, is_shown=False)
        attention = _attention(target, spec.layer, loaded.parallel, weights.dtype)
        tables = VocabTables.of(target.spec, loaded.decoder, weights, loaded.parallel)
        head = Eagle3Head(folder, spec, weights, target.spec, tables, loaded.parallel, attention)
        return _loaded_head("eagle3", head, spec.layer, weights, loaded, target)

    return DrafterPlan("eagle3", spec.hidden_layers, load)


def _plan_medusa(target: Target, folder: Path, config: Mapping[str, Any]) -> DrafterPlan:
    def load(loaded: Loaded) -> LoadedDrafter:
        dtype, parallel, spec = _dtype_of(loaded), loaded.parallel, target.spec
        whole = Weights(target.folder, dtype, target.device, spec.names.prefix, is_shown=False)
        weights = Weights(folder, dtype, target.device, is_shown=False)
        heads = MedusaHeads(
            folder, config, weights, spec, VocabTables.of(spec, loaded.decoder, whole, parallel), parallel
        )
        read = (whole, weights)
        kept = Bytes(
            sum(each.held_bytes for each in read),
            sum(each.sharded_bytes for each in read),
            sum(each.total_sharded_bytes for each in read),
        )
        return LoadedDrafter(MedusaDrafter(heads, target.settings.block_size), None, kept)

    return DrafterPlan("medusa", MedusaDrafter.hidden_layers, load)


def is_mlp_speculator(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is one of the speculators that TGI knows besides Medusa."""
    return config.get("model_type") == "mlp_speculator"


def _refuse_mlp_speculator(target: Target, folder: Path, config: Mapping[str, Any]) -> DrafterPlan:
    raise UnsupportedModel(
        f"--draft-model {target.settings.draft_model} is an MLP speculator, which is not supported: give a smaller "
        f"model, an EAGLE-3 head or Medusa heads, or none to look drafts up"
    )


def _plan_model(target: Target, folder: Path, config: Mapping[str, Any]) -> DrafterPlan:
    settings = target.settings
    try:
        spec = spec_of(config)
    except NoRow as error:
        raise UnsupportedModel(f"--draft-model {settings.draft_model} cannot make drafts: {error.message}") from None
    if spec.state_layers:
        raise UnsupportedModel(
            f"--draft-model {settings.draft_model} cannot make drafts: {spec.architecture} keeps states, "
            f"which drafts that are rejected would spoil"
        )
    _check_tokens(target, folder)

    def load(loaded: Loaded) -> LoadedDrafter:
        own = _own_settings(settings, folder, loaded)
        parallel = loaded.parallel if _can_split(spec, loaded.parallel) else TensorParallel()
        weights = Weights(folder, choose_dtype(own.dtype, target.device), target.device, spec.names.prefix)
        tier = choose_tier(own.dtype, own.quantize, weights.quantization, has_blocks=weights.has_blocks)
        draft = load_fused(own, spec, weights, parallel, tier) if tier is not None else None
        draft = draft or load_torch(own, spec, weights, parallel)
        context = spec.max_position_embeddings
        vocabularies = spec.vocab_size, target.spec.vocab_size
        drafter = DraftModel(draft.decoder, loaded.parallel, settings.block_size, target.device, *vocabularies, context)
        heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
        pools = SpecPools(spec, heads, settings.block_size, draft.kv_dtype, target.device)
        kept = draft.footprint
        footprint = Bytes(kept.held_bytes, kept.sharded_bytes, kept.total_sharded_bytes)
        return LoadedDrafter(drafter, pools, footprint, draft.step_bytes)

    return DrafterPlan("draft_model", (), load)


Config = Mapping[str, Any]
KINDS: tuple[tuple[Callable[[Config], bool], Callable[[Target, Path, Config], DrafterPlan]], ...] = (
    (is_eagle3, _plan_eagle3),
    (is_medusa, _plan_medusa),
    (is_mlp_speculator, _refuse_mlp_speculator),
)
"""What a `--draft-model` may be beside a model, by its `config.json`."""


def refuse_drafter(settings: ModelServerSettings, config: Config) -> None:
    """Refuse a `--model-id` that is what makes drafts for another model. Raises: `UnsupportedModel`."""
    if any(is_kind(config) for is_kind, _ in KINDS):
        base = config.get("base_model_name_or_path") or "the model that it is for"
        raise UnsupportedModel(
            f"{settings.model_id} makes draft tokens for another model: serve {base} with --speculate 3 "
            f"--draft-model {settings.model_id}"
        )


def _own_settings(settings: ModelServerSettings, folder: Path, loaded: Loaded) -> ModelServerSettings:
    """The target's settings for the draft model: computed as the target, but as its checkpoint is."""
    return replace(
        settings,
        model_id=str(folder),
        model_spec=None,
        quantize=None if settings.quantize not in ("int8", "q4") else settings.quantize,
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


def _check_tokens(target: Target, folder: Path) -> None:
    """Refuse a draft model of which tokens are not the target's."""
    name, other = target.settings.model_id, target.settings.draft_model
    own, drafts = TextCodec(target.folder).vocabulary(), TextCodec(folder).vocabulary()
    if own == drafts:
        return
    token = min(
        (each for each in own.keys() | drafts.keys() if own.get(each) != drafts.get(each)), key=lambda t: (len(t), t)
    )
    raise SettingsError(
        f"--draft-model {other} has another vocabulary than {name}: token {token!r} is "
        f"{drafts.get(token, 'not there')}, in {name} {own.get(token, 'not there')}"
    )


def _dtype_of(loaded: Loaded) -> torch.dtype:
    """What a layer in torch is computed in beside a target."""
    if loaded.name == "fused":
        return torch.float32
    found: torch.dtype = getattr(torch, loaded.precision.removeprefix("torch."))
    return found


def _attention(target: Target, layer: ModelSpec, parallel: TensorParallel, dtype: torch.dtype) -> AttentionBackend:
    heads = HeadSplit.of(layer.num_heads, layer.num_kv_heads, parallel.size, parallel.rank)
    settings = target.settings
    return choose_attention(layer, heads, settings.block_size, target.device, dtype, dtype, settings.attention)


def _loaded_head(
    name: str, head: DraftHead, layer: ModelSpec, weights: Weights, loaded: Loaded, target: Target
) -> LoadedDrafter:
    parallel, block_size = loaded.parallel, target.settings.block_size
    heads = HeadSplit.of(layer.num_heads, layer.num_kv_heads, parallel.size, parallel.rank)
    pools = SpecPools(layer, heads, block_size, weights.dtype, target.device)
    kept = Bytes(weights.held_bytes, weights.sharded_bytes, weights.total_sharded_bytes)
    return LoadedDrafter(HeadDrafter(name, head, block_size, target.device), pools, kept)
