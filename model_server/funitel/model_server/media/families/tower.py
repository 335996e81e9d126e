"""A tower with its projector: transformers' modules of a checkpoint's model, without the text model."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.torch_import import register_shapes
from funitel.proto.errors import UnsupportedModel, WeightsError, translating

_META = torch.device("meta")


def transformers_class(name: str) -> Any:
    """A class of transformers; its module takes seconds to import, which models of text alone do without."""
    return getattr(importlib.import_module("transformers"), name)


def load_tower(name: str, left_out: Sequence[str], folder: Path, weights: Weights) -> Any:
    """The tower of the model in `folder`, in the precision and on the device of `weights`, which counts it.

    Args:
        name: of its class in transformers.
        left_out: parts of that which are dropped.
        folder: of the model.
        weights: of the checkpoint.

    Raises:
        UnsupportedModel: transformers refuses its config.json.
        WeightsError: tensors are missing or have other shapes.
    """
    register_shapes()
    with translating(lambda error: UnsupportedModel(f"transformers refuses {folder / 'config.json'}: {error}")):
        config = transformers_class("AutoConfig").from_pretrained(folder, local_files_only=True)
        with _META:
            model = transformers_class(name)(config)
    for part in left_out:
        setattr(model, part, None)
    kept = model.state_dict()  # without buffers that are computed
    for own, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found = _name_here(weights, own) if own in kept else None
        if found is None and isinstance(tensor, torch.nn.Parameter):
            raise WeightsError(f"the checkpoint lacks tensor {own} of the tower; --media-cache-gb 0 serves text alone")
        if found is None:
            value = torch.empty(tensor.shape, dtype=tensor.dtype)  # filled below
        else:
            value = weights.read(found, tensor.shape)
            value._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' mark of what it leaves alone
        _put(model, own, value)
    model.initialize_weights()
    return model.to(weights.device).eval().requires_grad_(False)


def _put(model: Any, name: str, value: torch.Tensor) -> None:
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    if own in module._parameters:
        is_marked = getattr(value, "_is_hf_initialized", False)
        value = torch.nn.Parameter(value, requires_grad=False)
        value._is_hf_initialized = is_marked  # type: ignore[attr-defined]
        module._parameters[own] = value
    else:
        module._buffers[own] = value


def _name_here(weights: Weights, name: str) -> str | None:
    """What a tensor of the model is called in the checkpoint; None where it is not there.

    Names begin with `model.` or not, and some checkpoints have the layers of a CLIP or a SigLIP one level further down.
    """
    deeper = name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    names = [f"model.{name}", name, f"model.{deeper}", deeper]
    return next((each for each in names if weights.has(each)), None)
