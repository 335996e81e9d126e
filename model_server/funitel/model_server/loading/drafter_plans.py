"""What makes the drafts of a model, chosen by its settings and files: a row of `KINDS` for each that has weights."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from funitel.model_server.attention.backend import AttentionBackend
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.hub.resolve import resolve
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.settings import ModelServerSettings
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.speculation import mtp
from funitel.model_server.speculation.eagle3 import Eagle3Head, eagle3_spec, is_eagle3
from funitel.model_server.speculation.footprint import head_step_bytes, hidden_bytes
from funitel.model_server.speculation.heads import HeadDrafter
from funitel.model_server.speculation.interface import Drafter
from funitel.model_server.speculation.medusa import MedusaDrafter, MedusaHeads, is_medusa
from funitel.model_server.speculation.tables import VocabTables
from funitel.proto.errors import NoRow, SettingsError, UnsupportedModel

logger = logging.getLogger(__name__)

Config = Mapping[str, Any]


class PoolDrafter(Drafter, Protocol):
    """A drafter that may have a pool of its own, and is told when there is a new one."""

    def take_pool(self, pool: KVCache | None) -> None:
        """Keep keys and values there from now on; what it knew of sequences is gone."""


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """A model that is to have drafts."""

    settings: ModelServerSettings
    folder: Path
    spec: ModelSpec
    device: torch.device


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

    def step_bytes(self, target: ModelSpec, parallel: TensorParallel, dtype: torch.dtype, num_tokens: int) -> int:
        """See head_step_bytes."""
        return head_step_bytes(target, self.layer, parallel, dtype, num_tokens)


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

    def hidden_bytes(self, target: ModelSpec, num_tokens: int) -> int:
        """See hidden_bytes of the footprint."""
        return hidden_bytes(target, len(self.hidden_layers), num_tokens)


def plan_drafter(target: DraftTarget) -> DrafterPlan | None:
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


def plan_beside_parts(target: DraftTarget) -> DrafterPlan | None:
    """Choose the drafter of a model in parts, which keeps no hidden states for it.

    Raises: as plan_drafter, and SettingsError for a draft model that reads them.
    """
    plan, settings = plan_drafter(target), target.settings
    if plan is None or not plan.hidden_layers:
        return plan
    if settings.draft_model is not None:
        raise SettingsError(
            f"--draft-model {settings.draft_model} cannot be used with {settings.placing}: it reads hidden states"
        )
    logger.info("drafts are looked up: the MTP layer reads hidden states, which are not kept with %s", settings.placing)
    return None


def _plan_mtp(target: DraftTarget) -> DrafterPlan | None:
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


def _plan_eagle3(target: DraftTarget, folder: Path, config: Config) -> DrafterPlan:
    spec = eagle3_spec(config, target.spec)

    def build(
        weights: Weights, tables: VocabTables, parallel: TensorParallel, attention: AttentionBackend
    ) -> PoolDrafter:
        head = Eagle3Head(folder, spec, weights, target.spec, tables, parallel, attention)
        return HeadDrafter("eagle3", head, target.settings.block_size, target.device)

    return DrafterPlan("eagle3", spec.hidden_layers, HeadPlan(folder, "", spec.layer, build))


def _plan_medusa(target: DraftTarget, folder: Path, config: Config) -> DrafterPlan:
    def build(
        weights: Weights, tables: VocabTables, parallel: TensorParallel, attention: AttentionBackend
    ) -> PoolDrafter:
        heads = MedusaHeads(folder, config, weights, target.spec, tables, parallel)
        return MedusaDrafter(heads, target.settings.block_size)

    return DrafterPlan("medusa", MedusaDrafter.hidden_layers, HeadPlan(folder, "", None, build))


def is_mlp_speculator(config: Config) -> bool:
    """Whether a `config.json` is one of the speculators that TGI knows besides Medusa."""
    return config.get("model_type") == "mlp_speculator"


def _refuse_mlp_speculator(target: DraftTarget, folder: Path, config: Config) -> DrafterPlan:
    raise UnsupportedModel(
        f"--draft-model {target.settings.draft_model} is an MLP speculator, which is not supported: give a smaller "
        f"model, an EAGLE-3 head or Medusa heads, or none to look drafts up"
    )


def _plan_model(target: DraftTarget, folder: Path, config: Config) -> DrafterPlan:
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


KINDS: tuple[tuple[Callable[[Config], bool], Callable[[DraftTarget, Path, Config], DrafterPlan]], ...] = (
    (is_eagle3, _plan_eagle3),
    (is_medusa, _plan_medusa),
    (is_mlp_speculator, _refuse_mlp_speculator),
)
"""What a `--draft-model` may be beside a model, by its `config.json`."""


def refuse_drafter(settings: ModelServerSettings, folder: Path) -> None:
    """Refuse a `--model-id` that is what makes drafts for another model. Raises: `UnsupportedModel`."""
    config = read_json(folder / "config.json")
    if any(is_kind(config) for is_kind, _ in KINDS):
        base = config.get("base_model_name_or_path") or "the model that it is for"
        raise UnsupportedModel(
            f"{settings.model_id} makes draft tokens for another model: serve {base} with --speculate 3 "
            f"--draft-model {settings.model_id}"
        )


def _check_tokens(target: DraftTarget, folder: Path) -> None:
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
