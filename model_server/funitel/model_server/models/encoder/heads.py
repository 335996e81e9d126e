"""Heads of an encoder: a vector, as sentence-transformers pools it, scores of classes, tokens behind a mask."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.files.integrity import read_json
from funitel.model_server.models.encoder.layers import Dense, LayerNorm, read_dense
from funitel.model_server.models.encoder.packed import Packed
from funitel.model_server.spec.encoder import EncoderSpec
from funitel.proto.errors import UnsupportedModel, WeightsError

Pool = Callable[[torch.Tensor, Packed], torch.Tensor]  # [num_tokens, size] -> [texts, size], by place in the batch


def _first(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    return x[packed.starts]


def _last(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    return x[packed.starts + packed.lengths - 1]


def _by_group(x: torch.Tensor, packed: Packed, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Reduce the tokens of each text; `reduce` takes [texts, length, size]."""
    parts = [
        reduce(x[group.start : group.start + group.num_tokens].view(group.count, group.length, -1))
        for group in packed.groups
    ]
    return torch.cat(parts)


def _sum(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    return _by_group(x, packed, lambda tokens: tokens.sum(1))


def _mean(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    return _sum(x, packed) / packed.lengths[:, None]


def _mean_by_root(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    return _sum(x, packed) / packed.lengths[:, None].sqrt()


def _max(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    return _by_group(x, packed, lambda tokens: tokens.amax(1))


def _weighted_mean(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    weights = (packed.positions + 1).to(x.dtype)
    totals = packed.lengths * (packed.lengths + 1) / 2
    return _sum(x * weights[:, None], packed) / totals[:, None]


POOLS: dict[str, Pool] = {
    "cls": _first,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_by_root,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}
"""By sentence-transformers' names; where several are asked for, the vectors are laid end to end."""


class EmbeddingHead:
    """Pool the tokens of each text, in float32, and pass the result through dense layers."""

    def __init__(self, pools: tuple[str, ...], layers: list[Dense], width: int) -> None:
        self.pools = pools
        self.layers = layers
        self.width = width

    def __call__(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        pooled = torch.cat([POOLS[name](x.float(), packed) for name in self.pools], dim=1)
        for layer in self.layers:
            pooled = layer(pooled)
        return pooled


class ClassifierHead:
    """Scores of every class from the first token: [texts, labels]."""

    def __init__(self, spec: EncoderSpec, weights: Weights) -> None:
        names, size = spec.classifier, spec.hidden_size
        dense = (weights.prefix if names.has_base_dense else "") + names.dense
        self.dense = read_dense(weights, dense, size, size, spec.classifier_activation)
        self.output = read_dense(weights, names.output, len(spec.labels), size)

    def __call__(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        return self.output(self.dense(_first(x, packed))).float()


class FillHead:
    """The likeliest tokens in place of a token."""

    def __init__(self, spec: EncoderSpec, weights: Weights, embedding: torch.Tensor) -> None:
        names, size = spec.filler, spec.hidden_size
        assert names.norm is not None
        self.dense = read_dense(weights, names.dense, size, size, spec.filler_activation)
        self.norm = LayerNorm(weights, names.norm, size, spec.norm_eps)
        shape = [spec.vocab_size, size]
        own = f"{names.output}.weight"
        matrix = weights.read(own, shape) if weights.has(own) else embedding
        biases = [name for name in (f"{names.output}.bias", names.output_bias) if name and weights.has(name)]
        bias = weights.read(biases[0], [spec.vocab_size]) if biases else None
        self.output = Dense(matrix, bias)

    @staticmethod
    def is_in(spec: EncoderSpec, weights: Weights) -> bool:
        """Whether the checkpoint holds the head: one saved from a bare encoder does not."""
        return spec.is_filler and weights.has(f"{spec.filler.dense}.weight")

    def __call__(self, x: torch.Tensor, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities and ids of the `count` likeliest tokens at rows of x: [rows, count] each, likeliest first."""
        scores = self.output(self.norm(self.dense(x[rows]))).float().softmax(-1)
        best = scores.topk(count, dim=-1)
        return best.values, best.indices


_ACTIVATIONS = {"Tanh": "tanh", "Identity": "none", "GELU": "gelu", "ReLU": "relu"}
_OLD_POOLS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_NEEDS_NOTHING = ("Transformer", "Normalize", "Dropout")  # the encoder itself; what requests choose; training only


def read_embedding_head(folder: Path, hidden_size: int, device: torch.device) -> EmbeddingHead:
    """The head a folder describes; the mean of the tokens where it describes none.

    Raises:
        StartupError: it describes something that is not known here.
    """
    pools: tuple[str, ...] = ("mean",)
    layers: list[Dense] = []
    width = hidden_size
    for module in _modules(folder / "modules.json"):
        kind, place = str(module.get("type", "")).rpartition(".")[2], folder / str(module.get("path", ""))
        if kind == "Pooling":
            pools = _pools(place, read_json(place / "config.json"))
            width = hidden_size * len(pools)
        elif kind == "Dense":
            layer, width = _dense(place, width, device)
            layers.append(layer)
        elif kind not in _NEEDS_NOTHING:
            raise UnsupportedModel(f"{folder / 'modules.json'}: module {kind!r} is not supported")
    return EmbeddingHead(pools, layers, width)


def read_usual_tokens(folder: Path) -> int | None:
    """The most tokens of a text that a folder names."""
    path = folder / "sentence_bert_config.json"
    longest = read_json(path).get("max_seq_length") if path.is_file() else None
    return longest if isinstance(longest, int) and longest > 0 else None


def _modules(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise WeightsError(f"{path} is not a JSON array of objects")
    return modules


def _pools(place: Path, config: dict[str, Any]) -> tuple[str, ...]:
    named = config.get("pooling_mode") or [pool for field, pool in _OLD_POOLS.items() if config.get(field)] or "mean"
    pools = (named,) if isinstance(named, str) else tuple(named)
    unknown = [pool for pool in pools if pool not in POOLS]
    if unknown:
        raise UnsupportedModel(f"{place}: pooling {unknown[0]!r} is not supported; known: {', '.join(sorted(POOLS))}")
    if not config.get("include_prompt", True):
        raise UnsupportedModel(f"{place}: pooling without the prompt (include_prompt false) is not supported")
    return pools


def _dense(place: Path, num_inputs: int, device: torch.device) -> tuple[Dense, int]:
    config = read_json(place / "config.json")
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS or config.get("use_residual") or config.get("in_features") != num_inputs:
        raise UnsupportedModel(f"{place}: a dense module with these settings is not supported: {config}")
    num_outputs = int(config["out_features"])
    weights = Weights(place, torch.float32, device, is_shown=False)
    if config.get("bias", True):
        layer = read_dense(weights, "linear", num_outputs, num_inputs, _ACTIVATIONS[activation])
    else:
        layer = Dense(weights.read("linear.weight", [num_outputs, num_inputs]), None, _ACTIVATIONS[activation])
    weights.finish(())
    return layer, num_outputs
