"""Turn a GGUF file into a Hugging Face folder that holds the same model in float32, and its blocks as they are.

A row of `ARCHITECTURES` says how one architecture's settings and tensors are named on both sides. Every
tensor of the file must be known, every expected one present. `hub` owns the folder and makes this atomic.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from funitel.model_server.gguf_blocks import BLOCKS, BlockType
from funitel.model_server.gguf_reader import GgufFile, read_gguf
from funitel.model_server.gguf_tokenizer import build_tokenizer, special_token_id
from funitel.model_server.progress import Progress
from funitel.proto.errors import UnsupportedModel, WeightsError

_BLOCK = re.compile(r"^blk\.(\d+)\.")
Scalar = TypeVar("Scalar", bound=np.generic)
_OPTIONAL = frozenset({"output.weight", "rope_freqs.weight"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How one GGUF architecture maps to a Hugging Face one. In every name `#` stands for the block's number.

    `transposed` tensors lie the other way round in the GGUF. `interleaved` tensors have the rows of each head
    reordered for a rotary embedding of neighbours, where Hugging Face rotates halves; the value is the
    setting with the number of heads.
    """

    hf_class: str
    hf_settings: Callable[[GgufFile], dict[str, object]]
    tensors: Mapping[str, str]
    transposed: frozenset[str] = frozenset()
    interleaved: Mapping[str, str] = field(default_factory=dict)


def convert_gguf(path: Path, folder: Path) -> None:
    """Write `path` as config, generation config, float32 safetensors, blocks and tokenizer files into `folder`.

    Raises: `UnsupportedModel` naming what is not supported, `WeightsError` for a damaged or incomplete file.
    """
    gguf = read_gguf(path)
    architecture = ARCHITECTURES.get(gguf.architecture)
    if architecture is None:
        supported = ", ".join(ARCHITECTURES)
        message = f"{path}: architecture {gguf.architecture} is not supported; supported: {supported}"
        raise UnsupportedModel(message)
    names = _hf_names(gguf, architecture)
    built = build_tokenizer(gguf)
    vocab_size = gguf.shape("token_embd.weight")[0]
    if built.tokenizer.get_vocab_size() > vocab_size:
        message = f"{path}: {built.tokenizer.get_vocab_size()} tokens but only {vocab_size} embeddings"
        raise WeightsError(message)
    token_ids = {f"{name}_token_id": special_token_id(gguf, name) for name in ("bos", "eos", "pad")}
    config = {
        "architectures": [architecture.hf_class],
        **architecture.hf_settings(gguf),
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "dtype": "float32",
        **token_ids,
    }
    generation = {**token_ids, "eos_token_id": _end_token_ids(gguf)}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {k: v for k, v in generation.items() if v is not None})
    _write_json(folder / "tokenizer_config.json", built.settings)
    built.tokenizer.save(str(folder / "tokenizer.json"))
    _write_weights(gguf, architecture, names, folder / "model.safetensors")
    _write_blocks(gguf, architecture, names, folder / BLOCKS)


def _end_token_ids(gguf: GgufFile) -> int | list[int] | None:
    """Every token that ends a completion (of a text, a turn, a message); a bare id when there is one."""
    named = (special_token_id(gguf, name) for name in ("eos", "eot", "eom"))
    token_ids = list(dict.fromkeys(token_id for token_id in named if token_id is not None))
    if len(token_ids) > 1:
        return token_ids
    return token_ids[0] if token_ids else None


def _hf_names(gguf: GgufFile, architecture: Architecture) -> dict[str, str]:
    """Map each of the file's tensors to its Hugging Face name, in the file's order."""
    num_blocks = gguf.integer(gguf.key("block_count"))
    expected = {
        gguf_name.replace("#", str(block)): hf_name.replace("#", str(block))
        for gguf_name, hf_name in architecture.tensors.items()
        for block in range(num_blocks if "#" in gguf_name else 1)
    }
    missing = expected.keys() - gguf.tensors.keys() - _OPTIONAL
    if missing:
        raise WeightsError(f"{gguf.path}: tensor {min(missing)} is missing ({len(missing)} missing in all)")
    unknown = gguf.tensors.keys() - expected.keys() - _OPTIONAL
    if unknown:
        message = f"{gguf.path}: tensor {min(unknown)} is not part of {gguf.architecture} as supported"
        raise UnsupportedModel(message)
    return {name: expected[name] for name in gguf.tensors if name in expected}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor to be written; `read` gives its values when their turn has come."""

    name: str
    dtype: str
    shape: Sequence[int]
    num_bytes: int
    read: Callable[[], npt.NDArray[Any]]


def _write_weights(gguf: GgufFile, architecture: Architecture, names: Mapping[str, str], path: Path) -> None:
    tensors = []
    for name, hf_name in names.items():
        shape = gguf.shape(name)
        if _numberless(name) in architecture.transposed:
            shape = shape[::-1]
        read = partial(_restored, gguf, architecture, name)
        tensors.append(_Tensor(hf_name, "F32", shape, 4 * math.prod(shape), read))
    _write_safetensors(path, tensors, {"format": "pt"}, f"converting {gguf.path.name}")


def _write_blocks(gguf: GgufFile, architecture: Architecture, names: Mapping[str, str], path: Path) -> None:
    """Write the blocks of matrices that are computed on as they are; no file where there are none."""
    tensors, types = [], {}
    for name, hf_name in names.items():
        blocks = gguf.tensors[name]
        if blocks.tensor_type.name in BlockType.__members__ and blocks.data.ndim == 2:
            read = partial(_with_halves, gguf, architecture, name, blocks.data)
            tensors.append(_Tensor(hf_name, "U8", blocks.data.shape, blocks.data.nbytes, read))
            types[hf_name] = blocks.tensor_type.name
    if tensors:
        path.parent.mkdir()
        _write_safetensors(path, tensors, types, f"copying blocks of {gguf.path.name}")


def _write_safetensors(path: Path, tensors: Sequence[_Tensor], metadata: Mapping[str, str], label: str) -> None:
    """Stream the tensors out, so that no more than one is in memory at a time."""
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    progress = Progress(label, end)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors:
            file.write(np.ascontiguousarray(tensor.read()).data)
            progress.advance(tensor.num_bytes)
    progress.finish()


def _restored(gguf: GgufFile, architecture: Architecture, name: str) -> npt.NDArray[np.float32]:
    """Return a tensor's values as Hugging Face lays them out."""
    values = gguf.dequantise(name)
    if _numberless(name) in architecture.transposed:
        values = values.T
    return _with_halves(gguf, architecture, name, values)


def _with_halves(
    gguf: GgufFile, architecture: Architecture, name: str, rows: npt.NDArray[Scalar]
) -> npt.NDArray[Scalar]:
    """Return a tensor's rows, of values or of blocks, in Hugging Face's order."""
    heads = architecture.interleaved.get(_numberless(name))
    if heads is None:
        return rows
    num_heads = _num_heads(gguf, heads)
    if len(rows) % (2 * num_heads):
        raise WeightsError(f"{gguf.path}: tensor {name} has {len(rows)} rows for {num_heads} heads")
    halves = rows.reshape(num_heads, -1, 2, rows.shape[-1])  # [num_heads, head_dim / 2, 2, hidden_size or bytes]
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _numberless(name: str) -> str:
    return _BLOCK.sub("blk.#.", name)


def _num_heads(gguf: GgufFile, name: str = "attention.head_count") -> int:
    """Query heads, or as many as `name` says; a file that does not say has one of each per query head."""
    num_query_heads = gguf.integer(gguf.key("attention.head_count"))
    num_heads = gguf.integer(gguf.key(name), num_query_heads)
    if num_heads < 1 or num_query_heads % num_heads:
        raise WeightsError(f"{gguf.path}: {name} {num_heads} does not divide {num_query_heads} query heads")
    return num_heads


def _head_dim(gguf: GgufFile) -> int:
    even = gguf.integer(gguf.key("embedding_length")) // _num_heads(gguf)
    head_dim = gguf.integer(gguf.key("attention.key_length"), even)
    for name in ("attention.value_length", "rope.dimension_count"):
        other = gguf.integer(gguf.key(name), head_dim)
        if other != head_dim:
            raise UnsupportedModel(f"{gguf.path}: {name} {other} differs from the head size {head_dim}")
    return head_dim


def _decoder_settings(gguf: GgufFile, model_type: str) -> dict[str, object]:
    """The settings Llama and its relatives share."""
    num_experts = gguf.integer(gguf.key("expert_count"), 0)
    if num_experts:
        raise UnsupportedModel(f"{gguf.path}: {gguf.architecture} with {num_experts} experts is not supported")
    return {
        "model_type": model_type,
        "hidden_size": gguf.integer(gguf.key("embedding_length")),
        "intermediate_size": gguf.integer(gguf.key("feed_forward_length")),
        "num_hidden_layers": gguf.integer(gguf.key("block_count")),
        "num_attention_heads": _num_heads(gguf),
        "num_key_value_heads": _num_heads(gguf, "attention.head_count_kv"),
        "head_dim": _head_dim(gguf),
        "hidden_act": "silu",
        "max_position_embeddings": gguf.integer(gguf.key("context_length")),
        "rms_norm_eps": gguf.number(gguf.key("attention.layer_norm_rms_epsilon")),
        "rope_theta": _rope_theta(gguf),
        "rope_scaling": _rope_scaling(gguf),
    }


def _rope_theta(gguf: GgufFile) -> float:
    return gguf.number(gguf.key("rope.freq_base"), 10000.0)


def _rope_scaling(gguf: GgufFile) -> dict[str, object] | None:
    if "rope_freqs.weight" in gguf.tensors:
        return _llama3_scaling(gguf)
    kind = gguf.text(gguf.key("rope.scaling.type"), "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{gguf.path}: rope scaling {kind} is not supported; supported: linear, yarn")
    scaling: dict[str, object] = {"rope_type": kind, "factor": gguf.number(gguf.key("rope.scaling.factor"))}
    if kind == "yarn":
        original = gguf.integer(gguf.key("rope.scaling.original_context_length"))
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(gguf: GgufFile) -> dict[str, object]:
    """Find Llama 3's scaling again: the file holds only its outcome, a divisor for each rotary frequency.

    Every published Llama 3 has these bounds; a file whose divisors they do not explain is refused.
    Source: `_compute_llama3_parameters` of transformers.
    """
    low, high, original = 1.0, 4.0, 8192
    divisors = gguf.dequantise("rope_freqs.weight")  # [head_dim / 2]
    factor = float(divisors.max())
    exponents = np.arange(len(divisors)) / len(divisors)
    turns = original / (2 * math.pi * _rope_theta(gguf) ** exponents)  # in the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise UnsupportedModel(f"{gguf.path}: the factors in rope_freqs.weight are not those of Llama 3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _llama_settings(gguf: GgufFile) -> dict[str, object]:
    return {**_decoder_settings(gguf, "llama"), "attention_bias": False, "mlp_bias": False}


def _qwen2_settings(gguf: GgufFile) -> dict[str, object]:
    return {**_decoder_settings(gguf, "qwen2"), "use_sliding_window": False}


def _qwen3_settings(gguf: GgufFile) -> dict[str, object]:
    return {**_decoder_settings(gguf, "qwen3"), "attention_bias": False, "use_sliding_window": False}


def _gpt2_settings(gguf: GgufFile) -> dict[str, object]:
    return {
        "model_type": "gpt2",
        "n_embd": gguf.integer(gguf.key("embedding_length")),
        "n_inner": gguf.integer(gguf.key("feed_forward_length")),
        "n_layer": gguf.integer(gguf.key("block_count")),
        "n_head": _num_heads(gguf),
        "n_positions": gguf.integer(gguf.key("context_length")),
        "layer_norm_epsilon": gguf.number(gguf.key("attention.layer_norm_epsilon")),
        "activation_function": "gelu_new",
    }


def _suffixed(suffix: str, stems: Mapping[str, str]) -> dict[str, str]:
    return {f"{stem}.{suffix}": f"{hf_stem}.{suffix}" for stem, hf_stem in stems.items()}


_QKV = {
    "blk.#.attn_q": "model.layers.#.self_attn.q_proj",
    "blk.#.attn_k": "model.layers.#.self_attn.k_proj",
    "blk.#.attn_v": "model.layers.#.self_attn.v_proj",
}
_QK_NORM = {
    "blk.#.attn_q_norm": "model.layers.#.self_attn.q_norm",
    "blk.#.attn_k_norm": "model.layers.#.self_attn.k_norm",
}
_DECODER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    **_QKV,
    "blk.#.attn_output": "model.layers.#.self_attn.o_proj",
    "blk.#.attn_norm": "model.layers.#.input_layernorm",
    "blk.#.ffn_norm": "model.layers.#.post_attention_layernorm",
    "blk.#.ffn_gate": "model.layers.#.mlp.gate_proj",
    "blk.#.ffn_up": "model.layers.#.mlp.up_proj",
    "blk.#.ffn_down": "model.layers.#.mlp.down_proj",
}
_GPT2_EMBEDDINGS = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output": "lm_head",
}
_GPT2_PROJECTIONS = {
    "blk.#.attn_qkv": "transformer.h.#.attn.c_attn",
    "blk.#.attn_output": "transformer.h.#.attn.c_proj",
    "blk.#.ffn_up": "transformer.h.#.mlp.c_fc",
    "blk.#.ffn_down": "transformer.h.#.mlp.c_proj",
}
_GPT2_BIASED = {
    "output_norm": "transformer.ln_f",
    "blk.#.attn_norm": "transformer.h.#.ln_1",
    "blk.#.ffn_norm": "transformer.h.#.ln_2",
    **_GPT2_PROJECTIONS,
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        hf_class="LlamaForCausalLM",
        hf_settings=_llama_settings,
        tensors=_suffixed("weight", _DECODER),
        interleaved={
            "blk.#.attn_q.weight": "attention.head_count",
            "blk.#.attn_k.weight": "attention.head_count_kv",
        },
    ),
    "qwen2": Architecture(
        hf_class="Qwen2ForCausalLM",
        hf_settings=_qwen2_settings,
        tensors=_suffixed("weight", _DECODER) | _suffixed("bias", _QKV),
    ),
    "qwen3": Architecture(
        hf_class="Qwen3ForCausalLM",
        hf_settings=_qwen3_settings,
        tensors=_suffixed("weight", _DECODER | _QK_NORM),
    ),
    "gpt2": Architecture(
        hf_class="GPT2LMHeadModel",
        hf_settings=_gpt2_settings,
        tensors=_suffixed("weight", _GPT2_EMBEDDINGS | _GPT2_BIASED) | _suffixed("bias", _GPT2_BIASED),
        transposed=frozenset(_suffixed("weight", _GPT2_PROJECTIONS)),
    ),
}
