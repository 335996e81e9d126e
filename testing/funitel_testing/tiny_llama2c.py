"""A Llama as llama2.c's own exporter writes it, and its tokenizer."""

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from funitel_testing.tiny_gguf import permuted

Array = npt.NDArray[np.float32]
_LAYER = "model.layers.{}.{}.weight"
_NAMES = {
    "att_norm": "input_layernorm",
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "w1": "mlp.gate_proj",
    "w2": "mlp.down_proj",
    "w3": "mlp.up_proj",
}


def write_llama2c(
    path: Path,
    tensors: Mapping[str, Array],
    *,
    version: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    context: int,
    group_size: int = 64,
) -> dict[str, Array]:
    """Write a Llama's tensors, by Hugging Face's names; returns what the file stands for, which int8 changes."""
    kept: dict[str, Array] = {}
    parts: list[bytes] = []

    def write(name: str, *, is_matrix: bool = False) -> None:
        values = tensors[name].astype(np.float32)
        heads = num_heads if "q_proj" in name else num_kv_heads if "k_proj" in name else 0
        turned = permuted(values, heads) if heads else values
        if version < 2 or not is_matrix:
            parts.append(turned.astype("<f4").tobytes())
            kept[name] = values
            return

        def rounded(rows: Array) -> tuple[npt.NDArray[np.int8], Array]:
            groups = rows.reshape(-1, group_size)
            scales = (np.abs(groups).max(axis=1) / 127).astype(np.float32)
            return np.round(groups / scales[:, None]).astype(np.int8), scales

        codes, scales = rounded(turned)
        parts.extend([codes.tobytes(), scales.astype("<f4").tobytes()])
        own_codes, own_scales = rounded(values)  # groups lie within rows, so their order changes nothing
        kept[name] = (own_codes * own_scales[:, None]).astype(np.float32).reshape(values.shape)

    def write_layers(*stems: str) -> None:
        for stem in stems:
            for i in range(num_layers):
                write(_LAYER.format(i, _NAMES[stem]), is_matrix="norm" not in stem)

    embedding = tensors["model.embed_tokens.weight"]
    inner = tensors[_LAYER.format(0, _NAMES["w1"])].shape[0]
    is_tied = "lm_head.weight" not in tensors
    vocab_size, hidden = embedding.shape
    sizes = (hidden, inner, num_layers, num_heads, num_kv_heads)
    if version == 0:
        parts.append(struct.pack("<7i", *sizes, vocab_size if is_tied else -vocab_size, context))
        write("model.embed_tokens.weight")
        write_layers("att_norm", "wq", "wk", "wv", "wo", "ffn_norm", "w1", "w2", "w3")
        write("model.norm.weight")
        parts.append(bytes(4 * context * (hidden // num_heads)))  # turns, which readers skip
    else:
        header = struct.pack("<Ii7iBi", 0x616B3432, version, *sizes, vocab_size, context, is_tied, group_size)
        parts.append(header.ljust(256, b"\0"))
        write_layers("att_norm", "ffn_norm")
        write("model.norm.weight")
        write("model.embed_tokens.weight", is_matrix=True)
        write_layers("wq", "wk", "wv", "wo", "w1", "w2", "w3")
    if not is_tied:
        write("lm_head.weight", is_matrix=True)
    path.write_bytes(b"".join(parts))
    return kept


def write_tokenizer(
    path: Path, vocab_size: int, pieces: tuple[str, ...] = ("he", "ll", "hell", "hello", " hello")
) -> None:
    """Write a tokenizer.bin: the special tokens, the bytes, then pieces with falling scores."""
    tokens = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, " ", *"abcdefhlo"]
    tokens += [f"<extra{i}>" for i in range(vocab_size - len(tokens))]
    content = struct.pack("<I", max(len(token.encode()) for token in tokens))
    for rank, token in enumerate(tokens[:vocab_size]):
        encoded = token.encode()
        content += struct.pack("<fi", -float(rank), len(encoded)) + encoded
    path.write_bytes(content)
