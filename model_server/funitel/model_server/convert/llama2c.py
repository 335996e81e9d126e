"""Convert a model of llama2.c (`stories15M.bin` and its like) into a Hugging Face folder: a Llama in float32.

Its tokenizer is a file beside it, `tokenizer.bin`. Three versions: a bare header and floats; the same with a header of
256 bytes; matrices as int8 with a scale for each group of weights.
Source: https://github.com/karpathy/llama2.c, the readers `run.c` and `runq.c`.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, processors

from funitel.model_server.convert.hf_folder import (
    PIECE_SPACE,
    Planned,
    sentencepiece_bpe,
    write_json,
    write_safetensors,
)
from funitel.model_server.files.integrity import LLAMA2C_TOKENIZER
from funitel.model_server.registry.lookup import spec_of
from funitel.proto.errors import UnsupportedModel, WeightsError

MAX_TOKEN_BYTES = 1 << 10
_MAGIC = 0x616B3432  # "ak42"
_HEADER = struct.Struct("<7i")
_HEADER_BYTES = 256  # of versions 1 and 2
_UNKNOWN, _BOS, _EOS, _FIRST_PIECE = 0, 1, 2, 259  # ids; bytes lie between
_NAMES = {
    "tok_emb": "model.embed_tokens",
    "att_norm": "model.layers.#.input_layernorm",
    "wq": "model.layers.#.self_attn.q_proj",
    "wk": "model.layers.#.self_attn.k_proj",
    "wv": "model.layers.#.self_attn.v_proj",
    "wo": "model.layers.#.self_attn.o_proj",
    "ffn_norm": "model.layers.#.post_attention_layernorm",
    "w1": "model.layers.#.mlp.gate_proj",
    "w2": "model.layers.#.mlp.down_proj",
    "w3": "model.layers.#.mlp.up_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
_SIZES = ("hidden_size", "inner_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size", "context")
_MATRICES = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")
_ORDERS = {
    0: ("tok_emb", "att_norm", "wq", "wk", "wv", "wo", "ffn_norm", "w1", "w2", "w3", "norm", "turns", "head"),
    1: ("att_norm", "ffn_norm", "norm", "tok_emb", *_MATRICES, "head"),
    2: ("att_norm", "ffn_norm", "norm", "tok_emb", *_MATRICES, "head"),
}


@dataclass(frozen=True, slots=True)
class _Model:
    """What a header says. `group_size` is 0 where matrices are floats."""

    version: int
    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    context: int
    is_tied: bool
    group_size: int = 0

    @property
    def start(self) -> int:
        """Bytes before the tensors."""
        return _HEADER_BYTES if self.version else _HEADER.size

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        size, kv_size = self.hidden_size, self.hidden_size // self.num_heads * self.num_kv_heads
        shapes = {
            "wq": (size, size),
            "wk": (kv_size, size),
            "wv": (kv_size, size),
            "wo": (size, size),
            "w1": (self.inner_size, size),
            "w2": (size, self.inner_size),
            "w3": (self.inner_size, size),
            "turns": (2, self.context, size // self.num_heads // 2),  # cosines and sines that are not needed
            **dict.fromkeys(("tok_emb", "head"), (self.vocab_size, size)),
        }
        return shapes.get(name, (size,))

    def num_bytes(self, name: str) -> int:
        """Bytes of one tensor in the file."""
        count = math.prod(self.shape(name))
        if self.group_size and len(self.shape(name)) == 2:
            return count + count // self.group_size * 4
        return count * 4

    def places(self) -> Iterator[tuple[str, int | None, int]]:
        """Every tensor in the file's order: its name, its layer where it has one, and where it begins."""
        at = self.start
        for name in _ORDERS[self.version]:
            if name == "head" and self.is_tied:
                continue
            for layer in range(self.num_layers) if "#" in _NAMES.get(name, "") else [None]:
                yield name, layer, at
                at += self.num_bytes(name)
        yield "", None, at  # the end


def convert_llama2c(path: Path, folder: Path) -> None:
    """Write `path` as config, generation config, float32 safetensors and tokenizer files into `folder`.

    Raises: `WeightsError` for a damaged file or tokenizer, `UnsupportedModel` for sizes that no model has.
    """
    model = _read_header(path)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.inner_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "max_position_embeddings": model.context,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.is_tied,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": _BOS,
        "eos_token_id": _EOS,
        "dtype": "float32",
    }
    try:
        spec_of(config)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error.message}") from error
    tokens, scores = _read_tokenizer(path.with_name(LLAMA2C_TOKENIZER), model.vocab_size)
    pieces = dict(zip(tokens[_FIRST_PIECE:], scores[_FIRST_PIECE:], strict=True))
    tokenizer = sentencepiece_bpe(pieces, tokens, unknown=tokens[_UNKNOWN])
    tokenizer.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i in (_UNKNOWN, _BOS, _EOS)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[tokens[_BOS], "$A"],
        pair=[tokens[_BOS], "$A", f"{tokens[_BOS]}:1", "$B:1"],
        special_tokens=[(tokens[_BOS], _BOS)],
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.context,
        "bos_token": tokens[_BOS],
        "eos_token": tokens[_EOS],
        "unk_token": tokens[_UNKNOWN],
    }
    write_json(folder / "config.json", config)
    # These models end a story with the token that begins one.
    write_json(folder / "generation_config.json", {"bos_token_id": _BOS, "eos_token_id": [_EOS, _BOS]})
    write_json(folder / "tokenizer_config.json", settings)
    tokenizer.save(str(folder / "tokenizer.json"))
    data = np.memmap(path, dtype=np.uint8, mode="r")
    tensors = []
    for name, layer, at in model.places():
        if name in _NAMES:
            shape = model.shape(name)
            hf_name = f"{_NAMES[name].replace('#', str(layer))}.weight"
            read = partial(_values, model, data, name, at)
            tensors.append(Planned(hf_name, "F32", shape, 4 * math.prod(shape), read))
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"}, f"converting {path.name}")


def _read_header(path: Path) -> _Model:
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
        size_bytes = path.stat().st_size
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}") from error
    if len(head) < _HEADER.size:
        raise WeightsError(f"{path} is no model of llama2.c: it has {size_bytes} bytes")
    (magic,) = struct.unpack_from("<I", head)
    if magic == _MAGIC:
        if len(head) < _HEADER_BYTES:
            raise WeightsError(f"{path} is truncated: its header has {_HEADER_BYTES} bytes, the file {size_bytes}")
        version, *sizes = struct.unpack_from("<8i", head, 4)
        is_tied, group_size = struct.unpack_from("<Bi", head, 36)
        if version not in (1, 2):
            raise UnsupportedModel(f"{path}: version {version} of llama2.c is not supported; supported: 0, 1, 2")
        group_size = group_size if version == 2 else 0
    else:
        *sizes, vocab_size, context = _HEADER.unpack_from(head)
        version, is_tied, group_size = 0, vocab_size > 0, 0
        sizes = [*sizes, abs(vocab_size), context]
    given = dict(zip(_SIZES, sizes, strict=True))
    model = _Model(version=version, is_tied=bool(is_tied), group_size=group_size, **given)
    _check_sizes(path, model, size_bytes)
    return model


def _check_sizes(path: Path, model: _Model, size_bytes: int) -> None:
    for name in _SIZES:
        if not 1 <= (given := getattr(model, name)) < 1 << 24:
            raise WeightsError(f"{path} is no model of llama2.c: {name} is {given}")
    if model.num_layers > 1 << 12:
        raise WeightsError(f"{path} is no model of llama2.c: num_layers is {model.num_layers}")
    if model.hidden_size % model.num_heads or model.num_heads % model.num_kv_heads:
        heads = f"{model.num_heads} and {model.num_kv_heads} heads"
        raise WeightsError(f"{path} is no model of llama2.c: hidden_size {model.hidden_size} with {heads}")
    if model.version == 2 and (model.group_size < 1 or model.hidden_size % model.group_size):
        raise WeightsError(f"{path}: group_size {model.group_size} does not divide hidden_size {model.hidden_size}")
    *_, (_, _, end) = model.places()
    if end != size_bytes:
        state = "truncated" if size_bytes < end else "too long"
        raise WeightsError(f"{path} is {state}: its header says {end} bytes, the file has {size_bytes}")


def _values(model: _Model, data: npt.NDArray[np.uint8], name: str, at: int) -> Iterator[npt.NDArray[np.float32]]:
    """A tensor's values; of queries and keys with the rows of each head as Hugging Face's rotary embedding has them."""
    shape = model.shape(name)
    count = math.prod(shape)
    if model.group_size and len(shape) == 2:
        codes = data[at : at + count].view(np.int8).reshape(-1, model.group_size)
        scales = data[at + count : at + model.num_bytes(name)].view("<f4")
        values = (codes * scales[:, None]).reshape(shape)
    else:
        values = data[at : at + 4 * count].view("<f4").reshape(shape)
    if name in ("wq", "wk"):
        num_heads = model.num_heads if name == "wq" else model.num_kv_heads
        values = values.reshape(num_heads, -1, 2, shape[1]).swapaxes(1, 2).reshape(shape)
    yield values


def _read_tokenizer(path: Path, vocab_size: int) -> tuple[Sequence[str], Sequence[float]]:
    """Tokens in SentencePiece's letters, and their scores."""
    try:
        content = path.read_bytes() if path.stat().st_size <= vocab_size * (MAX_TOKEN_BYTES + 8) + 4 else b""
    except OSError as error:
        raise WeightsError(f"{path}, the tokenizer of a llama2.c model, cannot be read: {error.strerror}") from error
    tokens: list[str] = []
    scores: list[float] = []
    at = 4  # after the longest token's length
    try:
        for _ in range(vocab_size):
            score, length = struct.unpack_from("<fi", content, at)
            if not 0 <= length <= min(MAX_TOKEN_BYTES, len(content) - at - 8):
                raise WeightsError(f"{path}: token {len(tokens)} has {length} bytes, which is not possible")
            tokens.append(content[at + 8 : at + 8 + length].decode().replace(" ", PIECE_SPACE))
            scores.append(score)
            at += 8 + length
    except (struct.error, UnicodeDecodeError) as error:
        raise WeightsError(f"{path}: token {len(tokens)} of {vocab_size} cannot be read: {error}") from error
    if at != len(content):
        raise WeightsError(f"{path} has {len(content)} bytes, {vocab_size} tokens take {at}")
    if len(tokens) < _FIRST_PIECE:
        raise WeightsError(f"{path} has {len(tokens)} tokens, fewer than the {_FIRST_PIECE} that come before pieces")
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    return ["<unk>", "<s>", "</s>", *byte_tokens, *tokens[_FIRST_PIECE:]], scores
