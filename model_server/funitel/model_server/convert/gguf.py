"""Convert a GGUF file into a Hugging Face folder that holds the same model in float32, and its blocks as they are.

A row of `gguf_architectures` gives the configuration, that gives the ModelSpec, and the spec says what its checkpoint
calls each tensor of the file and how it lies there. Every tensor of the file must be known, every expected one present.
`hub` owns the folder and makes this atomic.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from funitel.model_server.checkpoint.gguf_block_types import BLOCKS, BlockType, record_weights
from funitel.model_server.convert.gguf_architectures import ROLES, Architecture, find_architecture
from funitel.model_server.convert.gguf_reader import GgufFile, read_gguf
from funitel.model_server.convert.gguf_tokenizer import build_tokenizer, special_token_id
from funitel.model_server.convert.hf_folder import Planned, write_json, write_safetensors
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.spec.model_spec import ModelSpec, NormPlacement, Position, QkNorm, QkvLayout
from funitel.proto.errors import UnsupportedModel, WeightsError

Scalar = TypeVar("Scalar", bound=np.generic)

_NORMS = frozenset(role for role in ROLES.values() if role.endswith("norm"))
_BIASED = {  # role -> field of a ModelSpec: whether it has a bias
    **dict.fromkeys(("q", "k", "v", "qkv"), "has_qkv_bias"),
    **dict.fromkeys(("gate", "up", "gate_up", "down"), "has_mlp_bias"),
    **dict.fromkeys(_NORMS, "has_norm_bias"),
    **dict.fromkeys(("q_norm", "k_norm"), "has_qk_norm_bias"),
    "out": "has_out_bias",
    "head": "has_head_bias",
}
_MLP = frozenset(("gate", "up", "gate_up", "down"))
_SHARED = frozenset(("shared_gate", "shared_up", "shared_down", "shared_share"))
_EXPERTS = _SHARED | {"router", "expert_gate", "expert_up", "expert_down"}
_UNTURNED = _NORMS | {"embedding", "positions", "head"}  # never stored [inputs, outputs]
_CHUNK_ELEMENTS = 1 << 24  # of a matrix on its way to the new file


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A tensor of the file, or one expert's matrix of a stack there; the name and role it has in the checkpoint."""

    gguf_name: str
    hf_name: str
    role: str
    expert: int | None = None

    @property
    def is_weight(self) -> bool:
        """No bias."""
        return self.gguf_name.endswith(".weight")


def convert_gguf(path: Path, folder: Path) -> None:
    """Write `path` as config, generation config, float32 safetensors, blocks and tokenizer files into `folder`.

    Raises: `UnsupportedModel` naming what is not supported, `WeightsError` for a damaged or incomplete file.
    """
    gguf = read_gguf(path)
    architecture = find_architecture(gguf)
    if "token_embd.weight" not in gguf.tensors:
        raise WeightsError(f"{path}: tensor token_embd.weight is missing")
    vocab_size = gguf.shape("token_embd.weight")[0]
    token_ids = {f"{name}_token_id": special_token_id(gguf, name) for name in ("bos", "eos", "pad")}
    config = {
        "architectures": [architecture.hf_class],
        **architecture.config(gguf),
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "dtype": "float32",
        **token_ids,
    }
    try:
        spec = spec_of(config)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error.message}") from error
    layout = Layout(gguf, spec, architecture)
    built = build_tokenizer(gguf)
    if built.tokenizer.get_vocab_size() > vocab_size:
        message = f"{path}: {built.tokenizer.get_vocab_size()} tokens but only {vocab_size} embeddings"
        raise WeightsError(message)
    generation = {**token_ids, "eos_token_id": _end_token_ids(gguf)}
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {k: v for k, v in generation.items() if v is not None})
    write_json(folder / "tokenizer_config.json", built.settings)
    built.tokenizer.save(str(folder / "tokenizer.json"))
    layout.write(folder)


def _end_token_ids(gguf: GgufFile) -> int | list[int] | None:
    """Every token that ends a completion (of a text, a turn, a message); a bare id when there is one."""
    named = (special_token_id(gguf, name) for name in ("eos", "eot", "eom"))
    token_ids = list(dict.fromkeys(token_id for token_id in named if token_id is not None))
    if len(token_ids) > 1:
        return token_ids
    return token_ids[0] if token_ids else None


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[str, str]]:
    """Every tensor a GGUF of such a model has: its name there -> its name in the checkpoint, and its role.

    Those of experts have one name there for all, and `{j}` in the checkpoint's, which has each by itself.
    """
    names, absent = spec.names, _absent(spec)
    found = {}
    for stem, role in ROLES.items():
        if role == "up" and names.gate_up and spec.is_gated:
            role = "gate_up"
        template = getattr(names, role)
        if role in absent or not template:
            continue
        prefix = "" if role == "head" else names.prefix
        suffixes = ["weight", "bias"] if role in _BIASED and getattr(spec, _BIASED[role]) else ["weight"]
        template = template.partition("|")[0]  # of alternatives the one by one
        for i in _layers_with(role, spec) if "#" in stem else (0,):
            for suffix in suffixes:
                hf_name = f"{prefix}{template.format(i=i, j='{j}')}.{suffix}"
                found[f"{stem.replace('#', str(i))}.{suffix}"] = hf_name, role
    return found


def _layers_with(role: str, spec: ModelSpec) -> Sequence[int]:
    """Layers that have tensors of a role: of a mixture of experts some have the plain MLP."""
    every = range(spec.num_layers)
    if spec.experts is None or role not in _MLP | _EXPERTS:
        return every
    return [i for i in every if (i in spec.experts.dense_layers) is (role in _MLP)]


def _absent(spec: ModelSpec) -> set[str]:
    """Roles for which the spec has a name but no use."""
    placement = spec.norm_placement
    absent = {"q", "k", "v"} if spec.names.qkv else {"qkv"}
    absent |= set() if spec.is_gated and not spec.names.gate_up else {"gate"}
    absent |= {"q_norm", "k_norm"} if spec.qk_norm is QkNorm.NONE else set()
    absent |= _EXPERTS if spec.experts is None else set() if spec.experts.shared_size else _SHARED
    absent |= {"positions"} if spec.position is not Position.LEARNED else set()
    absent |= {"attention_norm", "mlp_norm"} if placement is NormPlacement.POST else set()
    absent |= {"attention_post_norm", "mlp_post_norm"} if placement is NormPlacement.PRE else set()
    return absent if spec.has_norm_weight else absent | _NORMS


class Layout:
    """The tensors of one file, each with what must be done for it to lie as the family's checkpoints have it.

    Raises: `WeightsError` where a tensor is missing, `UnsupportedModel` where one is not known.
    """

    def __init__(self, gguf: GgufFile, spec: ModelSpec, architecture: Architecture) -> None:
        self._gguf = gguf
        self._spec = spec
        self._is_permuted = architecture.is_permuted
        expected = expected_tensors(spec)
        optional = {name for name, (_, role) in expected.items() if role == "head" and spec.is_tied}
        missing = expected.keys() - gguf.tensors.keys() - optional
        if missing:
            raise WeightsError(f"{gguf.path}: tensor {min(missing)} is missing ({len(missing)} missing in all)")
        unknown = gguf.tensors.keys() - expected.keys() - set(architecture.factors)
        if unknown:
            message = f"{gguf.path}: tensor {min(unknown)} is not part of {gguf.architecture} as supported"
            raise UnsupportedModel(message)
        self._sources = [
            source for name in gguf.tensors if name in expected for source in self._of(name, *expected[name])
        ]

    def _of(self, gguf_name: str, hf_name: str, role: str) -> Iterator[GgufSource]:
        """What becomes of a tensor of the file."""
        experts = self._spec.experts
        if experts is None or not role.startswith("expert_"):
            yield GgufSource(gguf_name, hf_name, role)
            return
        shape = self._gguf.shape(gguf_name)
        if len(shape) != 3 or shape[0] != experts.num_experts:
            found = f"{self._gguf.path}: tensor {gguf_name} has shape {list(shape)}"
            raise WeightsError(f"{found}, expected {experts.num_experts} matrices")
        for j in range(experts.num_experts):
            yield GgufSource(gguf_name, hf_name.format(j=j), role, j)

    def write(self, folder: Path) -> None:
        """Write float32 safetensors, and the blocks of matrices that are computed on as they are, if there are any."""
        gguf, tensors = self._gguf, []
        for source in self._sources:
            shape = self._shape(source)[:: -1 if self._is_turned(source) else 1]
            tensors.append(Planned(source.hf_name, "F32", shape, 4 * math.prod(shape), partial(self._numbers, source)))
        path = folder / "model.safetensors"
        write_safetensors(path, tensors, {"format": "pt"}, f"converting {gguf.path.name}")
        blocks, types = [], {}
        for source in self._sources:
            tensor = gguf.tensors[source.gguf_name]
            if self._spec.experts is not None:
                break  # the step that computes on blocks has no experts
            found = BlockType.__members__.get(tensor.kind.name)
            if found is not None and found.num_inputs > 1 and tensor.data.ndim == 2:
                read = partial(self._block_rows, source)
                blocks.append(Planned(source.hf_name, "U8", tensor.data.shape, tensor.data.nbytes, read))
                types[source.hf_name] = tensor.kind.name
        if blocks:
            (folder / BLOCKS).parent.mkdir()
            write_safetensors(folder / BLOCKS, blocks, types, f"copying blocks of {gguf.path.name}")
            record_weights(folder, path)

    def _shape(self, source: GgufSource) -> tuple[int, ...]:
        shape = self._gguf.shape(source.gguf_name)
        if source.role == "shared_share" and len(shape) == 1:  # one output
            return (1, *shape)
        return shape if source.expert is None else shape[1:]

    def _is_turned(self, source: GgufSource) -> bool:
        return self._spec.names.is_transposed and source.is_weight and source.role not in _UNTURNED

    def _numbers(self, source: GgufSource) -> Iterator[npt.NDArray[np.float32]]:
        """See `_values`. Raises: `WeightsError` where some of them are not numbers."""
        for part in self._values(source):
            if np.isnan(part).any():
                message = f"{self._gguf.path} is damaged: tensor {source.gguf_name} holds values that are not numbers"
                raise WeightsError(message)
            yield part

    def _values(self, source: GgufSource) -> Iterator[npt.NDArray[np.float32]]:
        """A tensor's values as the checkpoint lays them out, in parts where nothing has to be put in another order."""
        name = source.gguf_name
        if source.expert is not None:
            yield self._gguf.dequantise(name, slice(source.expert, source.expert + 1))[0]
            return
        shape = self._gguf.shape(name)
        if len(shape) == 1 or self._is_turned(source) or self._reorders(source):
            values = self._reordered(source, self._gguf.dequantise(name))
            values = values - np.float32(self._spec.norm_offset) if source.role in _NORMS else values
            yield values.T if self._is_turned(source) else values
            return
        step = max(1, _CHUNK_ELEMENTS // math.prod(shape[1:]))
        for start in range(0, shape[0], step):
            yield self._gguf.dequantise(name, slice(start, start + step))

    def _block_rows(self, source: GgufSource) -> Iterator[npt.NDArray[np.uint8]]:
        yield self._reordered(source, self._gguf.tensors[source.gguf_name].data)

    def _reorders(self, source: GgufSource) -> bool:
        is_grouped = source.role == "qkv" and self._spec.qkv_layout is QkvLayout.GROUPED
        return is_grouped or (self._is_permuted and source.role in ("q", "k"))

    def _reordered(self, source: GgufSource, rows: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
        """A tensor's rows, of values or of blocks, in the checkpoint's order."""
        spec = self._spec
        if not self._reorders(source):
            return rows
        count = spec.num_heads if source.role == "q" else spec.num_kv_heads
        num_rows = {"q": spec.num_heads, "k": spec.num_kv_heads}.get(source.role, spec.num_heads + 2 * count)
        if len(rows) != num_rows * spec.head_dim:
            name = f"{self._gguf.path}: tensor {source.gguf_name}"
            raise WeightsError(f"{name} has {len(rows)} rows, expected {num_rows} heads of {spec.head_dim}")
        if source.role == "qkv":
            return _grouped(rows, count, spec.head_dim)
        halves = rows.reshape(count, -1, 2, *rows.shape[1:])  # [heads, head_dim / 2, 2, hidden_size or bytes]
        return halves.swapaxes(1, 2).reshape(rows.shape)


def _grouped(rows: npt.NDArray[Scalar], num_kv_heads: int, head_dim: int) -> npt.NDArray[Scalar]:
    """All queries, all keys, all values -> for each head of keys its queries, its key, its value."""
    size = num_kv_heads * head_dim
    parts = np.split(rows, [len(rows) - 2 * size, len(rows) - size])
    together = [part.reshape(num_kv_heads, -1, *rows.shape[1:]) for part in parts]
    return np.concatenate(together, axis=1).reshape(rows.shape)
