"""What a folder of sentence-transformers says of pooling: modules.json and a folder for each module after the first."""

import json
from pathlib import Path
from typing import Any

import torch

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.files.integrity import read_json
from funitel.model_server.models.encoder.heads import POOLS, EmbeddingHead
from funitel.model_server.models.encoder.layers import Dense, read_dense
from funitel.proto.errors import UnsupportedModel, WeightsError

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
