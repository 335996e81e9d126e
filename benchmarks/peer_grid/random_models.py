"""Write models with random weights: GGUF files in blocks of any format, and bf16 checkpoints.

Every number comes from a small pool of random blocks, so that a file is written as fast as the disk takes it; the speed
of a matrix product does not depend on the values. Weights have the deviation that keeps the size of activations.
Embeddings of tokens that are no whole text (special, padding, parts of a character) are zero, so that greedy decoding
never chooses one: every token is then an event with text at every server. The tokenizer is the demo model's, with
padding up to the vocabulary of the shape.
"""

import json
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, TokenType, dequantize

from funitel.model_server.convert.gguf_reader import read_gguf
from funitel.model_server.convert.gguf_tokenizer import build_tokenizer

from .shapes import DEMO_SHAPE, Shape, Tensor, Type, tensors_of, type_of

Bytes = npt.NDArray[np.uint8]
Random = np.random.Generator

POOL_BLOCKS = 1 << 16
CONTEXT, NORM_EPS = 8192, 1e-5


def write_gguf(path: Path, shape: Shape, form: str, demo: Path) -> None:
    """Write a model of a shape in a format.

    Args:
        demo: the demo model's GGUF, the tokenizer of which is taken.
    """
    writer = GGUFWriter(path, shape.architecture)
    _add_sizes(writer, shape)
    silent = _add_tokenizer(writer, shape, demo)
    tensors = [(tensor, type_of(tensor, shape, form)) for tensor in tensors_of(shape)]
    for tensor, kind in tensors:
        writer.add_tensor_info(
            tensor.gguf_name, tensor.sizes, np.dtype(np.float16), _tensor_bytes(tensor, kind), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, kind in tensors:
        # The library writes an array at once; the pool is repeated in a view of the file instead.
        writer.write_padding(_file(writer), _file(writer).tell())
        for piece in _pieces(tensor, kind, silent):
            piece.tofile(_file(writer))
        writer.write_padding(_file(writer), _tensor_bytes(tensor, kind))
    writer.close()


def write_checkpoint(folder: Path, shape: Shape, demo: Path) -> None:
    """Write the folder of a Hugging Face checkpoint in bfloat16, with random weights but for the demo model's shape.

    Args:
        demo: the demo model's GGUF, the tokenizer of which is taken.
    """
    pieces = partial(_demo_pieces, GGUFReader(demo)) if shape is DEMO_SHAPE else _random_bf16_pieces
    built = build_tokenizer(read_gguf(demo))
    built.tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", built.settings)
    write_json(folder / "config.json", _config(shape))
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    silent = silent_tokens(built.tokenizer.get_vocab_size(), demo)
    tensors, header, offset = list(tensors_of(shape)), dict[str, Any](), 0
    for tensor in tensors:
        end = offset + 2 * tensor.num_elements
        header[tensor.hf_name] = {"dtype": "BF16", "shape": tensor.sizes, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            for piece in pieces(tensor, silent):
                piece.tofile(file)


def _random_bf16_pieces(tensor: Tensor, silent: frozenset[int]) -> Iterator[Bytes]:
    return _pieces(tensor, Type.BF16, silent)


def _demo_pieces(reader: GGUFReader, tensor: Tensor, silent: frozenset[int]) -> Iterator[Bytes]:
    """The demo model's own weights; a GGUF interleaves the halves of a head of queries and keys."""
    (found,) = (each for each in reader.tensors if each.name == tensor.gguf_name)
    values = dequantize(found.data, found.tensor_type).reshape(tensor.sizes)
    if ".attn_q." in tensor.gguf_name or ".attn_k." in tensor.gguf_name:
        pairs = values.reshape(-1, DEMO_SHAPE.head_dim // 2, 2, values.shape[-1])
        values = pairs.swapaxes(1, 2).reshape(values.shape)
    yield _bfloat16(np.ascontiguousarray(values, np.float32).reshape(-1)).view(np.uint8)


def silent_tokens(num_tokens: int, demo: Path) -> frozenset[int]:
    """Ids below `num_tokens` of tokens that are no whole text by themselves."""
    tokenizer = build_tokenizer(read_gguf(demo)).tokenizer
    return frozenset(
        token
        for token in range(num_tokens)
        if not (text := tokenizer.decode([token])) or "\N{REPLACEMENT CHARACTER}" in text
    )


def _file(writer: GGUFWriter) -> Any:
    assert writer.fout is not None
    return writer.fout[0]


def _add_sizes(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_name(f"random {shape.name}")
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(NORM_EPS)
    writer.add_vocab_size(shape.vocab)
    if shape.num_experts:
        writer.add_expert_count(shape.num_experts)
        writer.add_expert_used_count(shape.experts_per_token)
        writer.add_expert_feed_forward_length(shape.intermediate)


def _add_tokenizer(writer: GGUFWriter, shape: Shape, demo: Path) -> frozenset[int]:
    """The demo model's tokenizer, padded; the tokens without text are returned."""
    fields = {name: field for name, field in GGUFReader(demo).fields.items() if name.startswith("tokenizer.")}
    tokens, kinds = fields.pop("tokenizer.ggml.tokens").contents(), fields.pop("tokenizer.ggml.token_type").contents()
    num_tokens = len(tokens)
    writer.add_token_list([*tokens, *(f"[PAD{number}]" for number in range(num_tokens, shape.vocab))])
    writer.add_token_types([*kinds, *[TokenType.UNUSED] * (shape.vocab - num_tokens)])
    for name, field in fields.items():
        is_list = field.types[0] == GGUFValueType.ARRAY
        writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if is_list else None)
    return silent_tokens(num_tokens, demo) | frozenset(range(num_tokens, shape.vocab))


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.is_tied,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(content, indent=1))


def _tensor_bytes(tensor: Tensor, kind: GGMLQuantizationType) -> int:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    return tensor.num_elements // block * block_bytes


def _pieces(tensor: Tensor, kind: GGMLQuantizationType, silent: frozenset[int]) -> Iterator[Bytes]:
    """The bytes of a tensor, in pieces of whole rows where it has a row for each token."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if len(tensor.sizes) == 1:
        ones = np.ones(tensor.num_elements, np.float32)
        yield (ones if kind == Type.F32 else _bfloat16(ones)).view(np.uint8)
        return
    random = np.random.default_rng(crc32(tensor.gguf_name.encode()))
    num_blocks = POOL_BLOCKS if block > 1 else POOL_BLOCKS * 32
    pool = random_blocks(kind, num_blocks, tensor.sizes[-1] ** -0.5, random)
    pool = np.concatenate([pool, pool])  # any place in it begins a run of `num_blocks`
    blocks_of_row = tensor.sizes[-1] // block
    num_rows = tensor.num_elements // tensor.sizes[-1]
    rows_at_once = max(1, num_blocks // blocks_of_row)
    for first in range(0, num_rows, rows_at_once):
        count = min(rows_at_once, num_rows - first)
        start = int(random.integers(num_blocks))
        taken = pool[start : start + count * blocks_of_row]
        if tensor.is_vocabulary:
            taken = taken.copy()
            rows = taken.reshape(count, blocks_of_row * block_bytes)
            rows[[token - first for token in silent if first <= token < first + count]] = 0
        yield taken


def random_blocks(kind: GGMLQuantizationType, count: int, deviation: float, random: Random) -> Bytes:
    """`count` blocks of a type as bytes, [count, bytes of a block]; their values have mean zero and the deviation."""
    blocks = _RANDOM[kind](count, deviation, random)
    return np.ascontiguousarray(blocks).view(np.uint8).reshape(count, GGML_QUANT_SIZES[kind][1])


def _half(values: npt.ArrayLike, count: int) -> Bytes:
    return np.broadcast_to(np.asarray(values, np.float16), (count,)).copy().view(np.uint8).reshape(count, 2)


def _bits(count: int, width: int, random: Random) -> Bytes:
    return random.integers(0, 256, (count, width), np.uint8)


def _uniform_deviation(num_values: int) -> float:
    """Standard deviation of the whole numbers below `num_values`."""
    return float(np.sqrt((num_values**2 - 1) / 12))


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def _random_bf16(count: int, deviation: float, random: Random) -> npt.NDArray[Any]:
    return _bfloat16(random.standard_normal(count, np.float32) * np.float32(deviation))


def _random_f32(count: int, deviation: float, random: Random) -> npt.NDArray[Any]:
    return random.standard_normal(count, np.float32) * np.float32(deviation)


def _random_q4_0(count: int, deviation: float, random: Random) -> npt.NDArray[Any]:
    values = random.integers(1, 16, (2, count, 16), np.uint8)  # without 0, which stands for -8 and has no +8
    return np.hstack([_half(deviation / _uniform_deviation(15), count), values[0] | values[1] << 4])


def _random_q5_0(count: int, deviation: float, random: Random) -> npt.NDArray[Any]:
    return np.hstack([_half(deviation / _uniform_deviation(32), count), _bits(count, 20, random)])


def _random_q8_0(count: int, deviation: float, random: Random) -> npt.NDArray[Any]:
    values = random.integers(-127, 128, (count, 32), np.int8).view(np.uint8)
    return np.hstack([_half(deviation / _uniform_deviation(255), count), values])


def _random_q4_k(count: int, deviation: float, random: Random) -> npt.NDArray[Any]:
    """A scale for 32 inputs, and as the minimum 7.5 times of it, so that the mean is zero."""
    scales = random.integers(8, 16, (count, 8), np.uint8)  # below 16, so that the upper bits of the six are zero
    packed = np.hstack([scales[:, :4], scales[:, :4], scales[:, 4:] | scales[:, 4:] << 4])
    step = deviation / _uniform_deviation(16) / 11.7  # root of the mean square of the scales
    return np.hstack([_half(step, count), _half(7.5 * step, count), packed, _bits(count, 128, random)])


def _random_q6_k(count: int, deviation: float, random: Random) -> npt.NDArray[Any]:
    scales = random.integers(16, 33, (count, 16), np.int8).view(np.uint8)
    step = deviation / _uniform_deviation(64) / 24.5
    return np.hstack([_bits(count, 192, random), scales, _half(step, count)])


_RANDOM: dict[GGMLQuantizationType, Callable[[int, float, Random], npt.NDArray[Any]]] = {
    Type.F32: _random_f32,
    Type.BF16: _random_bf16,
    Type.Q4_0: _random_q4_0,
    Type.Q5_0: _random_q5_0,
    Type.Q8_0: _random_q8_0,
    Type.Q4_K: _random_q4_k,
    Type.Q6_K: _random_q6_k,
}


def types_of(path: Path) -> dict[str, str]:
    """Name of each tensor of a GGUF -> name of its type."""
    return {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}
