"""EAGLE-3: a layer that reads the target's outputs behind three of its layers, and predicts the token after the next.

Source: arXiv 2503.01840; checkpoints of the class LlamaForCausalLMEagle3, and those of the library speculators.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from funitel.model_server.attention.backend import AttentionBackend
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.layers.attention import Attention
from funitel.model_server.layers.linear import ColumnLinear, Matmul, NormLayer, VocabEmbedding
from funitel.model_server.layers.mlp import Mlp
from funitel.model_server.layers.rotary import Rotary, rotations_of
from funitel.model_server.models.decoder import ResidualBlock
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.registry.rules.row import reading_config
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.speculation.tables import VocabTables, likeliest
from funitel.proto.errors import WeightsError

ARCHITECTURES = frozenset(("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"))
_LAYERS = ("midlayer.", "layers.0.")


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """What an EAGLE-3 head is. `layer` is the spec of a model of its layer alone, with the tokens of the target."""

    layer: ModelSpec
    draft_vocab_size: int  # tokens that it can propose
    hidden_layers: tuple[int, ...]  # of the target
    is_residual_normed: bool  # the residual of its layer is behind the norm of hidden states


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is one of such a head."""
    named = config.get("architectures")
    return isinstance(named, list) and any(name in ARCHITECTURES for name in named if isinstance(name, str))


def eagle3_spec(config: Mapping[str, Any], target: ModelSpec) -> Eagle3Spec:
    """The spec of a head as its `config.json` describes it. Raises: `UnsupportedModel`, `WeightsError`."""
    with reading_config("an EAGLE-3 head"):
        layer = {**config, **_object(config, "transformer_layer_config")}
        own = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": target.vocab_size}
        spec = spec_of({**layer, **own, "tie_word_embeddings": False})
        key = next((name for name in ("draft_vocab_size", "vocab_size") if layer.get(name)), None)
        size = target.vocab_size if key is None else _whole(key, layer[key])
        if size < 1:
            raise ValueError(f"{key} must be > 0, given {size}")
        layers = _hidden_layers(config, target)
        return Eagle3Spec(spec, size, layers, bool(config.get("norm_before_residual", False)))


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of a config that may be left out."""
    found = config.get(name) or {}
    if not isinstance(found, dict):
        raise TypeError(f"{name} must be an object, given {str(found)[:100]!r}")
    return found


def _whole(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, given {str(value)[:100]!r}")
    return value


def _integers(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, list | tuple):
        raise TypeError(f"{name} must be a list of integers, given {str(values)[:100]!r}")
    return tuple(_whole(name, value) for value in values)


def _hidden_layers(config: Mapping[str, Any], target: ModelSpec) -> tuple[int, ...]:
    """Layers of the target of which the head reads the outputs.

    Of `eagle_aux_hidden_state_layer_ids` the config's own are layers that read them, those of its `eagle_config` layers
    that give them.
    """
    count = target.num_layers
    name = "eagle_aux_hidden_state_layer_ids"
    told = _integers(name, _object(config, "eagle_config").get(name) or ())
    readers = _integers(name, config.get(name) or (2, count // 2, count - 3))
    layers = told or tuple(layer - 1 for layer in readers)
    wrong = next((layer for layer in layers if not 0 <= layer < count), None)
    if wrong is not None:
        raise WeightsError(f"the EAGLE-3 head reads layer {wrong}, and {target.architecture} has {count} layers")
    return layers


class Eagle3Head:
    """See DraftHead. States are hidden states of its layer, before the norm.

    Args:
        folder: of the head, for messages.
        spec: of the head.
        weights: its checkpoint, all of which is taken.
        target: the target's spec.
        tables: the target's embeddings, for heads without their own.
        parallel: the ranks.
        attention: of the layer.

    Raises:
        WeightsError: the head is for another model, or its checkpoint is not whole.
    """

    def __init__(
        self,
        folder: Path,
        spec: Eagle3Spec,
        weights: Weights,
        target: ModelSpec,
        tables: VocabTables,
        parallel: TensorParallel,
        attention: AttentionBackend,
    ) -> None:
        layer, size = spec.layer, spec.layer.hidden_size
        self.hidden_layers = spec.hidden_layers
        self._spec = spec
        self._parallel = parallel
        self._attention = attention
        self._dtype = weights.dtype
        num_read = len(spec.hidden_layers) * target.hidden_size
        weights.prefix = ""
        self._check_sizes(folder, spec, weights, target)
        self._fuse = Matmul(weights.read_linear("fc", size, num_read))
        names = layer.names.of_layer(next((s for s in _LAYERS if weights.has(f"{s}hidden_norm.weight")), _LAYERS[0]))
        layer = replace(layer, names=names)
        stem = names.attention_norm.removesuffix("input_layernorm")
        self._embedding_norm = NormLayer(layer, weights, names.attention_norm, size)
        self._hidden_norm = NormLayer(layer, weights, f"{stem}hidden_norm", size)
        self._attend = Attention(layer, weights, parallel, attention, 0, num_inputs=2 * size)
        self._residual = ResidualBlock(layer, weights, names.mlp_norm, "", 0)
        self._mlp = Mlp(layer, weights, parallel, 0)
        self._norm = NormLayer(layer, weights, "norm", size)
        rotary = layer.rotary_of(0)
        self._rotaries = [] if rotary is None else [Rotary(rotary, layer.head_dim, weights.device)]
        rows = parallel.split(spec.draft_vocab_size)
        part = ("lm_head", spec.draft_vocab_size, rows)
        self._head = ColumnLinear(weights, [part], size, has_bias=False, is_transposed=False)
        self._tables = tables
        if weights.has("embed_tokens.weight"):
            self._tables = replace(
                tables, embedding=VocabEmbedding(layer, weights, "embed_tokens", parallel), scale=1.0
            )
        self._offsets = self._read_offsets(folder, weights, target)
        weights.finish((r"^t2d$", r"rotary_emb\.inv_freq$"))

    def _check_sizes(self, folder: Path, spec: Eagle3Spec, weights: Weights, target: ModelSpec) -> None:
        """Refuse a head for another model by what it reads."""
        own = spec.layer.hidden_size
        shape = [own, len(spec.hidden_layers) * target.hidden_size]
        try:
            weights.check("fc.weight", shape)
        except WeightsError as error:
            raise WeightsError(
                f"{folder} is no EAGLE-3 head for {target.architecture} with a hidden size of {target.hidden_size}: "
                f"{error.message}"
            ) from None
        if own != target.hidden_size and not weights.has("embed_tokens.weight"):
            raise WeightsError(
                f"{folder} is no EAGLE-3 head for {target.architecture} with a hidden size of {target.hidden_size}: "
                f"its own is {own}, and it has no embed_tokens"
            )

    def _read_offsets(self, folder: Path, weights: Weights, target: ModelSpec) -> torch.Tensor | None:
        """What is added to a token it proposes to get the target's; None: nothing."""
        count = self._spec.draft_vocab_size
        if not weights.has("d2t"):
            if count != target.vocab_size:
                raise WeightsError(
                    f"{folder} proposes {count} of {target.vocab_size} tokens, and has no d2t to say which"
                )
            return None
        offsets = weights.read("d2t", [count], dtype=torch.int64)
        if offsets.is_meta:
            return offsets
        tokens = offsets + torch.arange(count, device=offsets.device)
        if not bool(((tokens >= 0) & (tokens < target.vocab_size)).all()):
            raise WeightsError(f"tensor d2t of {folder} names tokens beyond the {target.vocab_size} of the target")
        return offsets

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """See DraftHead."""
        return self._fuse(hidden.flatten(1).to(self._dtype))

    def step(self, states: torch.Tensor, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """See DraftHead."""
        embedded = self._embedding_norm(self._tables.embed(batch.input_ids).to(self._dtype))
        normed = self._hidden_norm(states)
        rotations = rotations_of(self._rotaries, batch, states.dtype)
        plan = self._attention.plan(batch)
        attended = self._attend(torch.cat((embedded, normed), dim=-1), batch, cache, plan, rotations)
        x = (normed if self._spec.is_residual_normed else states) + attended
        return self._residual.leave(x, self._mlp(self._residual.enter(x)))

    def choose(self, states: torch.Tensor) -> torch.Tensor:
        """See DraftHead."""
        logits = self._parallel.gather_columns(self._head(self._norm(states)).float(), self._spec.draft_vocab_size)
        chosen = likeliest(logits, len(states), self._parallel, states.device)
        return chosen if self._offsets is None else chosen + self._offsets[chosen]
