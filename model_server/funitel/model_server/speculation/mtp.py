"""Multi-token prediction: the layer that a checkpoint has behind its last, to predict the token after the next.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2; `MtpModel` of transformers. Where a checkpoint has several such
layers the first makes every draft.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from funitel.model_server.attention.backend import AttentionBackend
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.layers.linear import Matmul, NormLayer
from funitel.model_server.layers.rotary import Rotary, rotations_of
from funitel.model_server.models.decoder import layer_of
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.spec.state_layers import STATE_KINDS
from funitel.model_server.speculation.tables import VocabTables, likeliest


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Names of the tensors of such a layer, without `.weight`; `{p}` is the model's prefix, `{n}` its layers.

    `unread` are patterns of others, which repeat what the model has or are of further such layers.
    """

    layer: str  # in place of `layers.{i}.`
    fuse: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    unread: tuple[str, ...]


LAYOUTS: Mapping[str, MtpNames] = {
    "a layer behind the last": MtpNames(
        layer="{p}layers.{n}.",
        fuse="{p}layers.{n}.eh_proj",
        embedding_norm="{p}layers.{n}.enorm",
        hidden_norm="{p}layers.{n}.hnorm",
        norm="{p}layers.{n}.shared_head.norm",
        unread=(r"layers\.\d+\.(shared_head\.head|embed_tokens)\.weight$",),
    ),
    "mtp": MtpNames(
        layer="mtp.layers.0.",
        fuse="mtp.fc",
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        norm="mtp.norm",
        unread=(r"^mtp\.layers\.[1-9]", r"^mtp\.(embed_tokens|lm_head)\.weight$"),
    ),
}
"""How checkpoints name them: DeepSeek's and GLM's, and Qwen's."""


_STEMS = ("layer", "fuse", "embedding_norm", "hidden_norm", "norm")


def find_names(spec: ModelSpec, weights: Weights) -> MtpNames | None:
    """The names in this checkpoint; None where it has no such layer."""
    for layout in LAYOUTS.values():
        places = {"p": weights.prefix, "n": str(spec.num_layers)}
        stems: dict[str, Any] = {name: _filled(getattr(layout, name), places) for name in _STEMS}
        names = replace(layout, **stems)
        if weights.has_linear(names.fuse):
            return names
    return None


def layer_spec(spec: ModelSpec, names: MtpNames, weights: Weights) -> ModelSpec:
    """The spec of a model of that layer alone: as the target's, but that it attends to everything."""
    own = spec.names.of_layer(names.layer)
    experts = None
    if spec.experts is not None and any(weights.has_linear(each) for each in own.router.split("|")):
        experts = replace(spec.experts, dense_layers=())
    no_states: dict[str, Any] = dict.fromkeys(STATE_KINDS)
    return replace(
        spec,
        num_layers=1,
        experts=experts,
        indexer=None if spec.indexer is None else replace(spec.indexer, sharing_layers=()),
        sliding_windows=(),
        chunk_sizes=(),
        unrotated_layers=(),
        state_layers=(),
        mlp_layers=(),
        layers=(),
        is_state_beside=False,
        names=own,
        **no_states,
    )


def _filled(template: str, places: Mapping[str, str]) -> str:
    for key, value in places.items():
        template = template.replace(f"{{{key}}}", value)
    return template


class MtpHead:
    """See DraftHead. States are normalised hidden states: those of the target behind its final norm, and its own.

    Args:
        spec: of the layer.
        names: of the tensors around it.
        weights: the model's checkpoint; of it are taken the layer's tensors, and no other of these may be left.
        tables: of the model.
        parallel: the ranks.
        attention: of the layer.
    """

    hidden_layers: tuple[int, ...] = (-1,)

    def __init__(
        self,
        spec: ModelSpec,
        names: MtpNames,
        weights: Weights,
        tables: VocabTables,
        parallel: TensorParallel,
        attention: AttentionBackend,
    ) -> None:
        size = spec.hidden_size
        self._tables = tables
        self._parallel = parallel
        self._attention = attention
        self._dtype = weights.dtype
        weights.prefix = ""  # names of the layer are whole
        self._embedding_norm = NormLayer(spec, weights, names.embedding_norm, size)
        self._hidden_norm = NormLayer(spec, weights, names.hidden_norm, size)
        self._fuse = Matmul(weights.read_linear(names.fuse, size, 2 * size))
        self._layer = layer_of(spec, weights, parallel, attention, 0)
        self._norm = NormLayer(spec, weights, names.norm, size)
        rotary = spec.rotary_of(0)
        self._rotaries = [] if rotary is None else [Rotary(rotary, spec.head_dim, weights.device)]
        block = re.escape(names.layer.partition("layers.0.")[0] or names.layer)
        weights.finish((rf"^(?!{block})", *names.unread))

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """See DraftHead."""
        return self._tables.normed(hidden[:, 0].to(self._dtype))

    def step(self, states: torch.Tensor, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """See DraftHead."""
        embedded = self._embedding_norm(self._tables.embed(batch.input_ids).to(self._dtype))
        x = self._fuse(torch.cat((embedded, self._hidden_norm(states)), dim=-1))
        rotations = rotations_of(self._rotaries, batch, x.dtype)
        x, _ = self._layer(x, None, None, batch, cache, self._attention.plan(batch), rotations)
        return self._norm(x)

    def choose(self, states: torch.Tensor) -> torch.Tensor:
        """See DraftHead."""
        return likeliest(self._tables.head(states), len(states), self._parallel, states.device)
