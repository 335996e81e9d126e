"""Damaged files, each made of a kind, a seed and a number: safetensors, GGUF, specs as JSON, and PyTorch's pickles.

Most are changed by what the format means (a count, an offset, a type), so that they get past the first check; some are
changed byte by byte. The base of every kind is one tiny Llama that loads.
"""

import io
import json
import math
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

VOCAB_SIZE, HIDDEN, INNER, CONTEXT = 264, 32, 64, 64
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 0,
}
_LAYER = "model.layers.0."
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
    f"{_LAYER}input_layernorm.weight": (HIDDEN,),
    f"{_LAYER}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    f"{_LAYER}self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
    f"{_LAYER}self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
    f"{_LAYER}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    f"{_LAYER}post_attention_layernorm.weight": (HIDDEN,),
    f"{_LAYER}mlp.gate_proj.weight": (INNER, HIDDEN),
    f"{_LAYER}mlp.up_proj.weight": (INNER, HIDDEN),
    f"{_LAYER}mlp.down_proj.weight": (HIDDEN, INNER),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCAB_SIZE, HIDDEN),
}
HUGE = (0, 1, 2, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 7, 1 << 31, 1 << 63, -(1 << 63), 10**400),
    *(0.5, -0.0, 1e-300, 1e300, math.inf, math.nan),
    *("", "x", "\0", "\n\r\t", "\x1b[31m", "\ud800", "{i}", "{i.__class__}", "{0}", "{"),
    *("(" * 200, "(a+)+$", "\u00e9" * 300, "x" * 5000),
    *([], [[]], {}, {"x": {}}, [0] * 3000, [None] * 3, [-1, 1 << 62], {"": None}, ["x", 1, None, {}]),
)


def mutant(kind: str, seed: int, number: int) -> bytes:
    """One damaged file."""
    rng = random.Random(f"{kind} {seed} {number}")
    return KINDS[kind](rng)


def tensor_bytes(shape: tuple[int, ...], rng: random.Random) -> bytes:
    """Floats near zero."""
    return np.random.default_rng(rng.getrandbits(32)).normal(0, 0.1, math.prod(shape)).astype("<f4").tobytes()


def damaged(content: bytes, rng: random.Random, within: int | None = None) -> bytes:
    """Some bytes changed, cut out, put in, doubled, or all from some place on gone; of nothing, nothing."""
    if not content:
        return content
    end = max(1, len(content) if within is None else min(within, len(content)))
    at, count = rng.randrange(end), rng.choice((1, 1, 2, 4, 8, 64))
    some = rng.randbytes(count)
    match rng.randrange(6):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + content[at + count :]
        case 2:
            return content[:at] + some + content[at:]
        case 3:
            return content[:at] + content[at : at + count] * 2 + content[at + count :]
        case 4:
            return content[:at] + struct.pack("<Q", rng.choice(HUGE)) + content[at + 8 :]
    changed = bytearray(content)
    for _ in range(rng.choice((1, 3, 20))):
        changed[rng.randrange(end)] = rng.randrange(256)
    return bytes(changed)


# safetensors


def _safetensors(rng: random.Random) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, shape in SHAPES.items():
        values = tensor_bytes(shape, rng)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = None
    is_changed = rng.random() < 0.75
    if is_changed:
        text = _change_header(header, rng)
    if rng.random() < 0.1:
        data = struct.pack("<f", rng.choice((math.nan, math.inf, 3e38))) * (len(data) // 4)
    encoded = json.dumps(header).encode() if text is None else text
    content = struct.pack("<Q", len(encoded)) + encoded + data
    if not is_changed or rng.random() < 0.3:
        content = damaged(content, rng, rng.choice((8, 8 + len(encoded), None)))
    return content


def _change_header(header: dict[str, Any], rng: random.Random) -> bytes | None:
    """Change what a header says, or give one that JSON's own words cannot build."""
    name = rng.choice(list(SHAPES))
    entry, other = header[name], header[rng.choice(list(SHAPES))]
    match rng.randrange(13):
        case 0:
            entry["data_offsets"][rng.randrange(2)] = rng.choice((*HUGE, -1, 0.5, "8", None, math.nan))
        case 1:
            entry["data_offsets"] = other["data_offsets"]
        case 2:
            entry["data_offsets"] = entry["data_offsets"][::-1]
        case 3:
            entry["data_offsets"] = rng.choice(STRANGE)
        case 4:
            entry["shape"] = rng.choice(([1 << 62, 4], [1 << 32, 1 << 32], [], [0], [-1, 4], [HIDDEN] * 50, [1.5]))
        case 5:
            entry["shape"] = entry["shape"][::-1] if rng.random() < 0.5 else rng.choice(STRANGE)
        case 6:
            entry["dtype"] = rng.choice(("F16", "F64", "I64", "BOOL", "U8", "F8_E4M3", "F4", "f32", "", None, 3))
        case 7:
            entry["dtype"], entry["shape"] = "F16", [*entry["shape"], 2]
        case 8:
            header[rng.choice(("", "a\nb", "\x00", "x" * 3000, "\ud800", name + " "))] = header.pop(name)
        case 9:
            header["__metadata__"] = rng.choice(STRANGE)
        case 10:
            header[name] = rng.choice(STRANGE)
        case 11:
            inner = json.dumps(header).encode()[1:-1]
            return b"{" + inner + b"," + inner + b"}"  # every name twice
        case 12:
            depth = rng.choice((50, 1000, 100_000))
            nested = b"[" * depth + b"]" * depth
            return rng.choice(
                (nested, b'{"x":' * depth, b'{"__metadata__":' + nested + b"}", b"\xff\xfe{}", b"{}  \xc3")
            )
    return None


# GGUF


def _gguf_text(text: str | bytes) -> bytes:
    encoded = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


_FORMS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}


def _gguf_value(kind: int, value: Any) -> bytes:
    if kind == 8:
        return _gguf_text(value)
    if kind == 9:
        item, items = value
        return struct.pack("<IQ", item, len(items)) + b"".join(_gguf_value(item, each) for each in items)
    return struct.pack(_FORMS[kind], value)


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    f"{_LAYER}input_layernorm": "blk.0.attn_norm",
    f"{_LAYER}self_attn.q_proj": "blk.0.attn_q",
    f"{_LAYER}self_attn.k_proj": "blk.0.attn_k",
    f"{_LAYER}self_attn.v_proj": "blk.0.attn_v",
    f"{_LAYER}self_attn.o_proj": "blk.0.attn_output",
    f"{_LAYER}post_attention_layernorm": "blk.0.ffn_norm",
    f"{_LAYER}mlp.gate_proj": "blk.0.ffn_gate",
    f"{_LAYER}mlp.up_proj": "blk.0.ffn_up",
    f"{_LAYER}mlp.down_proj": "blk.0.ffn_down",
}
_F32, _Q4_0, _Q8_0 = 0, 2, 8
_BLOCK_BYTES = {_Q4_0: 18, _Q8_0: 34}


def _gguf(rng: random.Random) -> bytes:
    values = _metadata(rng)
    tensors: list[list[Any]] = []
    data = b""
    for name, shape in SHAPES.items():
        kind = rng.choice((_F32, _Q4_0, _Q8_0)) if len(shape) == 2 and rng.random() < 0.3 else _F32
        if kind == _F32:
            part = tensor_bytes(shape, rng)
        else:  # scales are whatever the bytes say: numbers, infinities, no numbers
            part = rng.randbytes(math.prod(shape) // 32 * _BLOCK_BYTES[kind])
        tensors.append([f"{_GGUF_NAMES[name.removesuffix('.weight')]}.weight", list(shape[::-1]), kind, len(data)])
        data += part + bytes(-len(part) % 32)
    counts = {"version": 3, "tensors": len(tensors), "keys": len(values)}
    encoded = [[_gguf_text(key), struct.pack("<I", kind), _gguf_value(kind, value)] for key, kind, value in values]
    is_changed = rng.random() < 0.75
    if is_changed:
        _change_gguf(counts, values, encoded, tensors, rng)
    head = b"GGUF" + struct.pack("<IQQ", counts["version"], counts["tensors"], counts["keys"])
    head += b"".join(part for parts in encoded for part in parts)
    for name, dims, kind, offset in tensors:
        head += _gguf_text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    content = head + bytes(-len(head) % 32) + data
    if not is_changed or rng.random() < 0.3:
        content = damaged(content, rng, rng.choice((24, len(head), None)))
    return content


def _metadata(rng: random.Random) -> list[tuple[str, int, Any]]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [*map(chr, printable), *(chr(256 + rank) for rank in range(256 - len(printable)))]
    tokens = ["<unk>", "<s>", "</s>", *letters, "he", "ll"]
    is_bpe = rng.random() < 0.5
    tokenizer = (
        [("tokenizer.ggml.model", 8, "gpt2"), ("tokenizer.ggml.pre", 8, rng.choice(("gpt-2", "llama-bpe", "qwen2")))]
        if is_bpe
        else [("tokenizer.ggml.model", 8, "llama"), ("tokenizer.ggml.scores", 9, (6, [-1.0 * i for i in range(261)]))]
    )
    return [
        ("general.architecture", 8, "llama"),
        ("llama.context_length", 4, CONTEXT),
        ("llama.embedding_length", 4, HIDDEN),
        ("llama.block_count", 4, 1),
        ("llama.feed_forward_length", 4, INNER),
        ("llama.attention.head_count", 4, 4),
        ("llama.attention.head_count_kv", 4, 2),
        ("llama.attention.layer_norm_rms_epsilon", 6, 1e-5),
        ("llama.rope.freq_base", 6, 10000.0),
        *tokenizer,
        ("tokenizer.ggml.tokens", 9, (8, tokens)),
        ("tokenizer.ggml.token_type", 9, (5, [2, 3, 3, *[1] * 258])),
        ("tokenizer.ggml.merges", 9, (8, ["h e", "l l"])),
        ("tokenizer.ggml.unknown_token_id", 4, 0),
        ("tokenizer.ggml.bos_token_id", 4, 1),
        ("tokenizer.ggml.eos_token_id", 4, 2),
        ("tokenizer.chat_template", 8, "{{ messages }}"),
    ]


def _change_gguf(
    counts: dict[str, int],
    values: list[tuple[str, int, Any]],
    encoded: list[list[bytes]],
    tensors: list[list[Any]],
    rng: random.Random,
) -> None:
    place, tensor, other = rng.randrange(len(encoded)), rng.choice(tensors), rng.choice(tensors)
    match rng.randrange(16):
        case 0:
            counts["version"] = rng.choice((0, 1, 2, 4, 3 << 16, (1 << 32) - 1))
        case 1:
            counts[rng.choice(("tensors", "keys"))] = rng.choice(HUGE)
        case 2:
            encoded[place][0] = rng.choice(
                (struct.pack("<Q", rng.choice(HUGE)), _gguf_text(b"\xff\xfe"), _gguf_text(""))
            )
        case 3:
            encoded[place][1] = struct.pack("<I", rng.choice((*range(14), 255, (1 << 32) - 1)))
        case 4 | 5:  # a value of another kind
            kind = rng.choice((*_FORMS, 8))
            encoded[place][1] = struct.pack("<I", kind)
            size = struct.calcsize(_FORMS.get(kind, "<Q"))
            encoded[place][2] = (
                _gguf_text(rng.choice(("", "x", "a\nb", "\x1b[31m", "x" * 5000))) if kind == 8 else rng.randbytes(size)
            )
        case 6:  # an array that says it is longer, or of other things
            item = rng.choice((*range(13), 99))
            encoded[place][1:] = [struct.pack("<I", 9), struct.pack("<IQ", item, rng.choice(HUGE)) + rng.randbytes(64)]
        case 7:  # arrays of arrays
            depth = rng.choice((2, 100, 20_000))
            encoded[place][1:] = [struct.pack("<I", 9), struct.pack("<IQ", 9, 1) * depth]
        case 8:
            encoded.append(list(encoded[place]))
            counts["keys"] += 1
        case 9:
            key = values[place][0].encode()
            encoded[place] = [_gguf_text(key[: rng.randrange(len(key))]), *encoded[place][1:]]
        case 10:
            encoded.append([_gguf_text("general.alignment"), struct.pack("<II", 4, rng.choice((0, 1, 3, 64, 1 << 31)))])
            encoded[-1].append(b"")
            counts["keys"] += 1
        case 11:
            tensor[0] = rng.choice((b"\xff\xff", "", "a\nb\x1b", "x" * 5000, other[0], "blk.99999999999.attn_q.weight"))
        case 12:
            tensor[1] = rng.choice(([], [0], [1 << 63, 2], [1 << 32, 1 << 32], [32] * 5, [1] * 300, tensor[1][::-1]))
        case 13:
            tensor[2] = rng.choice((*range(45), 255, (1 << 32) - 1))
        case 14:
            tensor[3] = rng.choice((*HUGE, other[3], other[3] + 32, 33, 17))
        case 15:
            integers = [i for i, (_, kind, _) in enumerate(values) if kind in (4, 6)]
            encoded[rng.choice(integers)][2] = rng.choice((struct.pack("<I", rng.choice(HUGE[:7])), b"\0\0\xc0\x7f"))


# specs


def _spec(rng: random.Random) -> bytes:
    spec: dict[str, Any] = {
        "architecture": "Mine",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": INNER,
        "max_position_embeddings": CONTEXT,
        "norm": "rms",
        "norm_eps": 1e-5,
        "norm_placement": "pre",
        "activation": "silu",
        "is_gated": True,
        "position": "rotary",
        "rotary": {"base": 10000.0, "dims": 8, "scaling": {"kind": "linear", "factor": 2.0}},
        "sliding_windows": [None],
        "attention_scale": 0.3,
        "has_qkv_bias": False,
        "names": {"prefix": "model.", "q": "layers.{i}.self_attn.q_proj", "ignored": ["x$"]},
    }
    for _ in range(rng.choice((1, 1, 2, 3))):
        part = rng.choice((spec, spec, spec["rotary"], spec["names"], spec["rotary"].get("scaling"), spec))
        if not isinstance(part, dict) or not part:
            continue
        key = rng.choice(list(part))
        if rng.random() < 0.15:
            del part[key]
        elif rng.random() < 0.15:
            part[rng.choice(("x", "", "vocab_sise", "a\nb", "\ud800", "__class__"))] = rng.choice(STRANGE)
        else:
            part[key] = rng.choice(STRANGE)
        if not isinstance(spec.get("rotary"), dict) or not isinstance(spec.get("names"), dict):
            break
    text = json.dumps(spec)
    if rng.random() < 0.3:
        depth = rng.choice((100, 990, 5000, 200_000))
        number = rng.choice(
            ("1e999", "-1e999", "9" * 4000, "9" * 5000, "NaN", "-Infinity", "0x10", "1_000", "[" * depth)
        )
        text = text.replace(rng.choice((": 1,", ": 4", ": 0.3", ": true", ": null")), f": {number},", 1)
    content = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:
        content = rng.choice((b"\xef\xbb\xbf" + content, content.replace(b"{", b'{"vocab_size": 1, ', 1), content * 2))
    return damaged(content, rng) if rng.random() < 0.4 else content


# PyTorch's own files


class _Call:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, ("echo > /tmp/funitel-fuzz-ran",)


def _pickle(rng: random.Random) -> bytes:
    """A file as `torch.save` writes them, of a pickle that asks for something, or damaged."""
    import torch

    generator = np.random.default_rng(rng.getrandbits(32))
    tensors: dict[Any, Any] = {
        name: torch.from_numpy(generator.normal(0, 0.1, shape).astype(np.float32)) for name, shape in SHAPES.items()
    }
    what = rng.randrange(4)
    if what == 0:
        tensors[rng.choice(list(tensors))] = _Call()
    if what == 1:
        return pickle.dumps({"w": _Call()}, rng.randrange(6))
    buffer = io.BytesIO()
    torch.save(tensors, buffer, _use_new_zipfile_serialization=rng.random() < 0.6)
    if what == 2 and zipfile.is_zipfile(buffer):
        return _with_damaged_pickle(buffer, rng)
    return damaged(buffer.getvalue(), rng) if what else buffer.getvalue()


def _with_damaged_pickle(buffer: io.BytesIO, rng: random.Random) -> bytes:
    """A whole zip with a damaged pickle."""
    result = io.BytesIO()
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(result, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            new.writestr(info, damaged(content, rng) if info.filename.endswith("data.pkl") else content)
    return result.getvalue()


KINDS: dict[str, Callable[[random.Random], bytes]] = {
    "safetensors": _safetensors,
    "gguf": _gguf,
    "spec": _spec,
    "pickle": _pickle,
}
