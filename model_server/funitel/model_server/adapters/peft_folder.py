"""Read the tensors of a PEFT folder: for each module its two matrices, or its whole weight where that was saved."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from funitel.model_server.adapters.peft_config import LoraConfig, read_config
from funitel.model_server.checkpoint.storage import open_safetensors
from funitel.model_server.files.integrity import check_safetensors
from funitel.proto.errors import InvalidRequest

TENSORS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_ROOT = "base_model.model."  # of PEFT's wrapper, before every name
_HALF = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(\.[^.]+)?\.weight")
_EMBEDDING_HALF = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<half>[AB])(\.[^.]+)?")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_OF_EXPERTS = re.compile(r"\.(experts|router|block_sparse_moe)\b|\.mlp\.gate$")
_SAVED = re.compile(r"(?P<module>.+?)(\.modules_to_save(\.[^.]+)?|\.base_layer)?\.weight")


@dataclass(frozen=True, slots=True)
class LowRank:
    """The matrices of a module: its weight grows by `scale * b @ a`. They have the precision of the file.

    Of an embedding `a` is [rank, vocab_size] and `b` [hidden_size, rank].
    """

    a: torch.Tensor  # [rank, inputs]
    b: torch.Tensor  # [outputs, rank]
    scale: float

    @property
    def rank(self) -> int:
        """Rows of `a`."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """An adapter by the names of the base's matrices; `saved` has weights that take the place of the base's."""

    low_ranks: Mapping[str, LowRank]
    saved: Mapping[str, torch.Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """The precision that all tensors have; float32 where they differ."""
        tensors = [each for pair in self.low_ranks.values() for each in (pair.a, pair.b)]
        found = {tensor.dtype for tensor in (*tensors, *self.saved.values())}
        only = found.pop() if len(found) == 1 else torch.float32
        return only if only in (torch.float16, torch.bfloat16) else torch.float32

    @property
    def num_elements(self) -> int:
        """Numbers of all tensors."""
        pairs = sum(each.a.numel() + each.b.numel() for each in self.low_ranks.values())
        return pairs + sum(tensor.numel() for tensor in self.saved.values())

    @property
    def max_rank(self) -> int:
        """The largest rank of a module; 0 where there is none."""
        return max((each.rank for each in self.low_ranks.values()), default=0)


@dataclass(frozen=True, slots=True)
class BaseModules:
    """The matrices of a base that take adapters.

    Attributes:
        shapes: [outputs, inputs] by name; an embedding has the vocabulary as inputs.
        tables: names of embeddings.
        heads: names of matrices that may be saved whole, embeddings included.
        prefix: what the names begin with in the checkpoint.
    """

    shapes: Mapping[str, tuple[int, int]]
    tables: frozenset[str]
    heads: frozenset[str]
    prefix: str

    def find(self, module: str) -> str | None:
        """The name of the matrix that PEFT calls `module`; a wrapper around the text model changes nothing."""
        if module in self.shapes:
            return module
        for outer in _OUTER:
            if module.startswith(outer) and self.prefix + module.removeprefix(outer) in self.shapes:
                return self.prefix + module.removeprefix(outer)
        tail = module.rpartition(".")[2]
        return tail if tail in self.heads and tail in self.shapes and module == f"language_model.{tail}" else None


_OUTER = ("model.language_model.", "language_model.model.", "language_model.", "transformer.", "model.", "")


_Found = dict[str, tuple[str, torch.Tensor]]
"""Tensors of a module by their part, "A", "B" or "saved", with their names in the file."""


def read_adapter(folder: Path, base: BaseModules, max_rank: int) -> AdapterTensors:
    """Read the adapter in `folder` for a base.

    Raises:
        InvalidRequest: it is no LoRA adapter of this base; the message names field or tensor.
        WeightsError: a file is missing or not whole.
    """
    if not folder.is_dir():
        raise InvalidRequest(f"path {folder} is not a folder")
    config = read_config(folder, max_rank)
    if not (folder / TENSORS).is_file() and (folder / _PICKLE).exists():
        raise InvalidRequest(f"{_PICKLE} is a pickle, which can run code: save the adapter as {TENSORS}")
    if not (folder / TENSORS).is_file():
        raise InvalidRequest(f"{folder} holds no {TENSORS}")
    check_safetensors(folder / TENSORS)
    file, names = open_safetensors(folder / TENSORS)
    modules: dict[str, _Found] = {}
    for name in sorted(names):
        _sort(name, config, base, file.get_slice(name).get_shape(), partial(file.get_tensor, name), modules)
    if not modules:
        raise InvalidRequest(f"{folder / TENSORS} holds no tensor")
    low_ranks, saved = {}, {}
    owners: dict[str, str] = {}
    for module, parts in modules.items():
        own = base.find(module)
        assert own is not None
        if owners.setdefault(own, module) != module:
            raise InvalidRequest(f"modules {owners[own]} and {module} are the same matrix of the base")
        if "saved" in parts:
            saved[own] = parts["saved"][1]
        if {"A", "B"} & parts.keys():
            low_ranks[own] = _low_rank(module, parts, config)
    unsaved = [name for name in config.saved if not any(f".{own}".endswith(f".{name}") for own in saved)]
    if unsaved:
        raise InvalidRequest(f"modules_to_save names {unsaved[0]}, of which {folder / TENSORS} holds no weight")
    return AdapterTensors(low_ranks, saved)


def _sort(
    name: str,
    config: LoraConfig,
    base: BaseModules,
    shape: list[int],
    read: Callable[[], torch.Tensor],
    modules: dict[str, _Found],
) -> None:
    """Put a tensor to its module, checked as far as it can be by itself."""
    if "lora_magnitude_vector" in name:
        raise InvalidRequest(f"tensor {name} is of DoRA (use_dora), which is not supported")
    inner = name.removeprefix(_ROOT)
    half, table_half, saved = (each.fullmatch(inner) for each in (_HALF, _EMBEDDING_HALF, _SAVED))
    found = half or table_half or saved
    if found is None or inner == name:
        raise InvalidRequest(f"tensor {name} is surplus: it is none of a LoRA adapter")
    module = found["module"]
    own = base.find(module)
    if own is None:
        raise InvalidRequest(
            f"tensor {name}: {_missing(module)}; adapters go to projections of attention and plain MLPs, the "
            f"embedding and the head"
        )
    is_half = half is not None or table_half is not None
    if is_half and not config.has_target(module):
        raise InvalidRequest(f"tensor {name} is surplus: target_modules of adapter_config.json do not name {module}")
    if not is_half and own not in base.heads:
        raise InvalidRequest(f"tensor {name}: of modules_to_save this model takes the embedding and the head only")
    if (table_half is not None) != (is_half and own in base.tables):
        raise InvalidRequest(f"tensor {name}: {module} is {'an' if own in base.tables else 'no'} embedding")
    part = found["half"] if is_half else "saved"
    expected = _expected(part, config.rank_of(module), base.shapes[own], is_table=own in base.tables)
    if list(shape) != expected:
        raise InvalidRequest(
            f"tensor {name} has shape {list(shape)}, expected {expected}: it is for another base or rank"
        )
    kept = modules.setdefault(module, {})
    if part in kept:
        raise InvalidRequest(f"tensors {kept[part][0]} and {name} are the same part of {module}")
    tensor = read()
    if tensor.dtype not in _DTYPES:
        raise InvalidRequest(f"tensor {name} has numbers of {tensor.dtype}, expected one of {_DTYPES}")
    if not torch.isfinite(tensor.float()).all():
        raise InvalidRequest(f"tensor {name} holds values that are not finite numbers")
    kept[part] = name, tensor


def _missing(module: str) -> str:
    if _OF_EXPERTS.search(module):
        return f"{module} is of a mixture of experts, of which no matrix takes adapters"
    return f"the base has no {module} that takes adapters"


def _expected(part: str, rank: int, shape: tuple[int, int], *, is_table: bool) -> list[int]:
    outputs, inputs = shape
    if part == "saved":
        return [inputs, outputs] if is_table else [outputs, inputs]
    return [rank, inputs] if part == "A" else [outputs, rank]


def _low_rank(module: str, parts: _Found, config: LoraConfig) -> LowRank:
    for half, other in ("AB", "BA"):
        if half not in parts:
            raise InvalidRequest(f"tensor {parts[other][0]} has no lora_{half} beside it")
    name, b = parts["B"]
    scale = config.scale_of(module)
    if not torch.isfinite(b.float() * scale).all():
        raise InvalidRequest(f"tensor {name} times its scale {scale:g} (lora_alpha by rank) is not finite")
    return LowRank(parts["A"][1], b, scale)
