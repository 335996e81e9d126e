"""Make of a GGUF file a Hugging Face folder that points to it: configuration, tokenizer, and where each tensor lies.

A row of `gguf_architectures` gives the configuration, that gives the ModelSpec, and the spec says what its checkpoint
calls each tensor of the file and how it lies there. Every tensor of the file must be known, every expected one present.
`hub` owns the folder and makes this atomic.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from funitel.model_server.convert.gguf_architectures import find_architecture
from funitel.model_server.convert.gguf_reader import GgufFile, read_gguf
from funitel.model_server.convert.gguf_row import ROLES, Architecture
from funitel.model_server.convert.gguf_tokenizer import build_tokenizer, special_token_id
from funitel.model_server.convert.hf_folder import write_json
from funitel.model_server.files.gguf_pointer import GROUPED, HALVES, GgufEntry, GgufPointer, part_of, write_pointer
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.spec.model_spec import ModelSpec, NormPlacement, Position, QkNorm, QkvLayout
from funitel.proto.errors import UnsupportedModel, WeightsError

_MAX_FURTHER = 64  # layers that predict tokens beyond the next, and are not read
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
_LATENT_QUERIES = frozenset(("q_down", "q_latent_norm", "q_up"))
_LATENT = _LATENT_QUERIES | {"kv_down", "kv_latent_norm", "kv_up"}
_EXPERTS = _SHARED | {"router", "router_correction", "expert_gate", "expert_up", "expert_down"}
_UNTURNED = _NORMS | {"embedding", "positions", "head"}  # never stored [inputs, outputs]


def point_to_gguf(path: Path, folder: Path) -> None:
    """Write config, generation config, tokenizer files and the pointer to `path` into `folder`; no weights.

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
    write_pointer(folder, layout.pointer(folder))


def _end_token_ids(gguf: GgufFile) -> int | list[int] | None:
    """Every token that ends a completion (of a text, a turn, a message); a bare id when there is one."""
    named = (special_token_id(gguf, name) for name in ("eos", "eot", "eom"))
    token_ids = list(dict.fromkeys(token_id for token_id in named if token_id is not None))
    if len(token_ids) > 1:
        return token_ids
    return token_ids[0] if token_ids else None


def expected_tensors(spec: ModelSpec, roles: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Every tensor a GGUF of such a model has: its name there -> its name in the checkpoint, and its role.

    `roles` are those of the architecture that differ from `ROLES`. Experts have one name there for all, and `{j}` in
    the checkpoint's, which has each by itself.
    """
    names, absent = spec.names, _absent(spec)
    found = {}
    for stem, role in {**ROLES, **roles}.items():
        if role == "up" and names.gate_up and spec.is_gated:
            role = "gate_up"
        template = getattr(names, role) if role else ""
        if role in absent or not template:
            continue
        prefix = "" if role == "head" else names.prefix
        suffixes = ["weight", "bias"] if role in _BIASED and getattr(spec, _BIASED[role]) else ["weight"]
        template = template.partition("|")[0]  # of alternatives the one by one
        for i in _layers_with(role, spec) if "#" in stem else (0,):
            if role == "router_correction":
                found[f"{stem.replace('#', str(i))}.bias"] = prefix + template.format(i=i), role
                continue
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
    if spec.latent is None:
        absent |= _LATENT
    else:
        absent |= {"k", "v"} | (_LATENT_QUERIES if spec.latent.query_rank is None else {"q"})
    absent |= {"q_norm", "k_norm"} if spec.qk_norm is QkNorm.NONE else set()
    absent |= _EXPERTS if spec.experts is None else set() if spec.experts.shared_size else _SHARED
    absent |= {"positions"} if spec.position is not Position.LEARNED else set()
    absent |= {"attention_norm", "mlp_norm"} if placement is NormPlacement.POST else set()
    absent |= {"attention_post_norm", "mlp_post_norm"} if placement is NormPlacement.PRE else set()
    return absent if spec.has_norm_weight else absent | _NORMS


class Layout:
    """The tensors of one file, each with how it lies there against the family's checkpoints.

    Raises: `WeightsError` where a tensor is missing or has another shape, `UnsupportedModel` where one is not known.
    """

    def __init__(self, gguf: GgufFile, spec: ModelSpec, architecture: Architecture) -> None:
        self._gguf = gguf
        self._spec = spec
        self._is_permuted = architecture.is_permuted
        self._expected = expected = expected_tensors(spec, architecture.roles)
        optional = {name for name, (_, role) in expected.items() if role == "head" and spec.is_tied}
        missing = expected.keys() - gguf.tensors.keys() - optional
        if missing:
            raise WeightsError(f"{gguf.path}: tensor {min(missing)} is missing ({len(missing)} missing in all)")
        num_further = gguf.integer(gguf.key("nextn_predict_layers"), 0)
        further = tuple(f"blk.{spec.num_layers + i}." for i in range(min(num_further, _MAX_FURTHER)))
        known = expected.keys() | set(architecture.factors)
        unknown = {name for name in gguf.tensors.keys() - known if not name.startswith(further)}
        if unknown:
            message = f"{gguf.path}: tensor {min(unknown)} is not part of {gguf.architecture} as supported"
            raise UnsupportedModel(message)

    def pointer(self, folder: Path) -> GgufPointer:
        """Where each tensor of the checkpoint lies, for the pointer of a folder."""
        tensors = {}
        for name in self._gguf.tensors:
            if name in self._expected:
                hf_name, role = self._expected[name]
                tensors[hf_name] = self._entry(name, role)
        return GgufPointer(tuple(part_of(folder, *each) for each in self._gguf.parts), tensors)

    def _entry(self, name: str, role: str) -> GgufEntry:
        tensor, spec = self._gguf.tensors[name], self._spec
        self._gguf.check_kind(name)
        is_weight = name.endswith(".weight")
        shape, num_heads = tensor.shape, 0
        if role.startswith("expert_"):
            self._check_stack(name)
        elif role == "shared_share" and len(shape) == 1:  # one output
            shape = (1, *shape)
        order = self._order(role)
        if order:
            num_heads = spec.num_heads if role == "q" else spec.num_kv_heads
            self._check_heads(name, role)
        return GgufEntry(
            name=name,
            kind=tensor.kind.name,
            shape=shape,
            offset=tensor.offset,
            part=tensor.part,
            order=order,
            num_heads=num_heads,
            head_dim=spec.head_dim if order else 0,
            is_turned=spec.names.is_transposed and is_weight and role not in _UNTURNED,
            minus=float(spec.norm_offset) if role in _NORMS and is_weight else 0.0,
        )

    def _check_stack(self, name: str) -> None:
        shape, experts = self._gguf.shape(name), self._spec.experts
        assert experts is not None
        if len(shape) != 3 or shape[0] != experts.num_experts:
            found = f"{self._gguf.path}: tensor {name} has shape {list(shape)}"
            raise WeightsError(f"{found}, expected {experts.num_experts} matrices")

    def _order(self, role: str) -> str:
        if role == "qkv" and self._spec.qkv_layout is QkvLayout.GROUPED:
            return GROUPED
        return HALVES if self._is_permuted and role in ("q", "k") else ""

    def _check_heads(self, name: str, role: str) -> None:
        spec, num_rows = self._spec, self._gguf.shape(name)[0]
        heads = {"q": spec.num_heads, "k": spec.num_kv_heads}.get(role, spec.num_heads + 2 * spec.num_kv_heads)
        if num_rows != heads * spec.head_dim:
            place = f"{self._gguf.path}: tensor {name}"
            raise WeightsError(f"{place} has {num_rows} rows, expected {heads} heads of {spec.head_dim}")
