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
from funitel.model_server.loading.common import Footprint, Loaded, choose_dtype
from funitel.model_server.loading.fused_backend import load_fused
from funitel.model_server.loading.torch_backend import load_torch
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.settings import ModelServerSettings
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.speculation import mtp
from funitel.model_server.speculation.draft_model import DraftModel
from funitel.model_server.speculation.eagle3 import Eagle3Head, eagle3_spec, is_eagle3
from funitel.model_server.speculation.heads import HeadDrafter
from funitel.model_server.speculation.interface import Drafter
from funitel.model_server.speculation.medusa import MedusaDrafter, MedusaHeads, is_medusa
from funitel.model_server.speculation.pools import DraftPools
from funitel.model_server.speculation.tables import VocabTables
from funitel.proto.errors import NoRow, SettingsError, UnsupportedModel

logger = logging.getLogger(__name__)

Config = Mapping[str, Any]


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

    @classmethod
    def of(cls, *parts: Footprint) -> "Bytes":
        """Those of several together."""
        return cls(
            sum(part.held_bytes for part in parts),
            sum(part.sharded_bytes for part in parts),
            sum(part.total_sharded_bytes for part in parts),
        )


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


Build = Callable[[Weights, VocabTables, TensorParallel, AttentionBackend], PoolDrafter]


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """A drafter that is built on the hidden states of its target.

    `folder` has its weights, below `prefix`; `layer` is the spec of a model of its layer alone, if it has KV. `build`
    takes its weights, what is around the target's layers, the ranks, and the attention of its layer.
    """

    folder: Path
    prefix: str
    layer: ModelSpec | None
    build: Build


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A drafter that is a model of its own: its folder and its spec."""

    folder: Path
    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """A drafter that is still to be loaded, which the target's loaders must know of.

    `hidden_layers` are those of `Drafter`.
    """

    name: str
    hidden_layers: tuple[int, ...]
    parts: HeadPlan | ModelPlan

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


def add_drafter(target: Target, plan: DrafterPlan, loaded: Loaded, pools: Pools) -> tuple[Drafter, Loaded, Pools]:
    """Load a drafter beside its target; the target and its pools with the drafter's bytes counted."""
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
        step_bytes = partial(_larger, step_bytes, own)
    loaded = replace(loaded, footprint=kept, step_bytes=step_bytes)
    return draft.drafter, loaded, DraftPools(pools, draft.pools, draft.drafter.take_pool)


def _larger(first: Callable[[int], int], second: Callable[[int], int], num_tokens: int) -> int:
    return max(first(num_tokens), second(num_tokens))


def _load_head(target: Target, plan: HeadPlan, loaded: Loaded) -> LoadedDrafter:
    parallel, dtype, device = loaded.parallel, _dtype_of(loaded), target.device
    whole = Weights(target.folder, dtype, device, target.spec.names.prefix, is_shown=False)
    weights = Weights(plan.folder, dtype, device, plan.prefix, is_shown=False)
    tables = VocabTables.of(target.spec, loaded.decoder, whole, parallel)
    layer, settings = plan.layer or target.spec, target.settings
    heads = HeadSplit.of(layer.num_heads, layer.num_kv_heads, parallel.size, parallel.rank)
    attention = choose_attention(layer, heads, settings.block_size, device, dtype, dtype, settings.attention)
    drafter = plan.build(weights, tables, parallel, attention)
    pools = None if plan.layer is None else SpecPools(layer, heads, settings.block_size, dtype, device)
    return LoadedDrafter(drafter, pools, Bytes.of(whole, weights))


def _plan_mtp(target: Target) -> DrafterPlan | None:
    prefix = target.spec.names.prefix
    checkpoint = Weights(target.folder, torch.float32, target.device, prefix, is_shown=False)
    names = mtp.find_names(target.spec, checkpoint)
    if names is None:
        return None
    layer = mtp.layer_spec(target.spec, names, checkpoint)

    def build(
        weights: Weights, tables: VocabTables, parallel: TensorParallel, attention: AttentionBackend
    ) -> PoolDrafter:
        head = mtp.MtpHead(layer, names, weights, tables, parallel, attention)
        return HeadDrafter("mtp", head, target.settings.block_size, target.device)

    return DrafterPlan("mtp", mtp.MtpHead.hidden_layers, HeadPlan(target.folder, prefix, layer, build))


def _plan_eagle3(target: Target, folder: Path, config: Config) -> DrafterPlan:
    spec = eagle3_spec(config, target.spec)

    def build(
        weights: Weights, tables: VocabTables, parallel: TensorParallel, attention: AttentionBackend
    ) -> PoolDrafter:
        head = Eagle3Head(folder, spec, weights, target.spec, tables, parallel, attention)
        return HeadDrafter("eagle3", head, target.settings.block_size, target.device)

    return DrafterPlan("eagle3", spec.hidden_layers, HeadPlan(folder, "", spec.layer, build))


def _plan_medusa(target: Target, folder: Path, config: Config) -> DrafterPlan:
    def build(
        weights: Weights, tables: VocabTables, parallel: TensorParallel, attention: AttentionBackend
    ) -> PoolDrafter:
        heads = MedusaHeads(folder, config, weights, target.spec, tables, parallel)
        return MedusaDrafter(heads, target.settings.block_size)

    return DrafterPlan("medusa", MedusaDrafter.hidden_layers, HeadPlan(folder, "", None, build))


def is_mlp_speculator(config: Config) -> bool:
    """Whether a `config.json` is one of the speculators that TGI knows besides Medusa."""
    return config.get("model_type") == "mlp_speculator"


def _refuse_mlp_speculator(target: Target, folder: Path, config: Config) -> DrafterPlan:
    raise UnsupportedModel(
        f"--draft-model {target.settings.draft_model} is an MLP speculator, which is not supported: give a smaller "
        f"model, an EAGLE-3 head or Medusa heads, or none to look drafts up"
    )


def _plan_model(target: Target, folder: Path, config: Config) -> DrafterPlan:
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

    return DrafterPlan("draft_model", (), ModelPlan(folder, spec))


def _load_model(target: Target, plan: ModelPlan, loaded: Loaded) -> LoadedDrafter:
    spec, settings, device = plan.spec, target.settings, target.device
    own = _own_settings(settings, plan.folder, loaded)
    parallel = loaded.parallel if _can_split(spec, loaded.parallel) else TensorParallel()
    weights = Weights(plan.folder, choose_dtype(own.dtype, device), device, spec.names.prefix)
    tier = choose_tier(own.dtype, own.quantize, weights.quantization, has_blocks=weights.has_blocks)
    draft = load_fused(own, spec, weights, parallel, tier) if tier is not None else None
    draft = draft or load_torch(own, spec, weights, parallel)
    vocabularies = spec.vocab_size, target.spec.vocab_size
    context = spec.max_position_embeddings
    drafter = DraftModel(draft.decoder, loaded.parallel, settings.block_size, device, *vocabularies, context)
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
    pools = SpecPools(spec, heads, settings.block_size, draft.kv_dtype, device)
    return LoadedDrafter(drafter, pools, Bytes.of(draft.footprint), draft.step_bytes)


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
