"""What llama.cpp takes to compute a GGUF, by the file's header: no weight is read, and the library is not needed."""

from dataclasses import dataclass
from pathlib import Path

from funitel.model_server.convert.gguf_reader import GgufFile, read_gguf

_KV_BYTES = 2  # keys and values are float16


@dataclass(frozen=True, slots=True)
class LlamaCppNeeds:
    """Bytes of the weights and of a token's keys and values; the architecture by llama.cpp's name; tokens of a context.

    Sizes of layers with states, or of keys that are compressed, are not in the header in one form: there the bytes of a
    token are those of plain attention, which are an upper bound.
    """

    architecture: str
    weights: int
    a_token: int
    context: int


def llama_cpp_needs(path: Path) -> LlamaCppNeeds:
    """Read the header of a GGUF, of a split one those of all parts. Raises: `WeightsError`, `UnsupportedModel`."""
    gguf = read_gguf(path)
    return LlamaCppNeeds(
        architecture=gguf.architecture,
        weights=sum(tensor.data.nbytes for tensor in gguf.tensors.values()),
        a_token=_token_bytes(gguf),
        context=gguf.integer(gguf.key("context_length")),
    )


def _token_bytes(gguf: GgufFile) -> int:
    num_layers = gguf.integer(gguf.key("block_count"))
    heads = _per_layer(gguf, "attention.head_count", num_layers, 1)
    kv_heads = _per_layer(gguf, "attention.head_count_kv", num_layers, heads)
    usual = gguf.integer(gguf.key("embedding_length")) // max(1, max(heads))
    key_dim = gguf.integer(gguf.key("attention.key_length"), usual)
    value_dim = gguf.integer(gguf.key("attention.value_length"), usual)
    return sum(kv_heads) * (key_dim + value_dim) * _KV_BYTES


def _per_layer(gguf: GgufFile, name: str, num_layers: int, default: int | list[int]) -> list[int]:
    """A number that a file gives once for all layers, or for each."""
    found = gguf.metadata.get(gguf.key(name), default)
    if isinstance(found, list) and len(found) == num_layers and all(isinstance(each, int) for each in found):
        return found
    return [gguf.integer(gguf.key(name), default if isinstance(default, int) else default[0])] * num_layers
