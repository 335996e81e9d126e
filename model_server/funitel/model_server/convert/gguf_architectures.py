"""The table of GGUF architectures: each one's metadata as a Hugging Face configuration. A family is a row."""

from collections.abc import Mapping

from funitel.model_server.convert.gguf_dense_rows import DENSE_ROWS
from funitel.model_server.convert.gguf_expert_rows import DEEPSEEK3, EXPERT_ROWS, MIXTRAL, SIGMOID, SOFTMAX
from funitel.model_server.convert.gguf_reader import GgufFile
from funitel.model_server.convert.gguf_row import Architecture
from funitel.proto.errors import UnsupportedModel

ARCHITECTURES: Mapping[str, Architecture] = DENSE_ROWS | EXPERT_ROWS


def find_architecture(gguf: GgufFile) -> Architecture:
    """The row for a file: by its architecture, a Llama's by whether it has experts, DeepSeek's by their scores.

    Raises:
        UnsupportedModel: there is none.
    """
    name = gguf.architecture
    if name == "llama" and gguf.integer(gguf.key("expert_count"), 0):
        return MIXTRAL
    if name == "deepseek2":
        _check_latent(gguf)
        if gguf.integer(gguf.key("expert_gating_func"), SOFTMAX) == SIGMOID:
            return DEEPSEEK3
    if name not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(f"{gguf.path}: architecture {name} is not supported; supported: {supported}")
    return ARCHITECTURES[name]


def _check_latent(gguf: GgufFile) -> None:
    """Refuse a file that has the parts of one matrix apart, each of its heads turned round."""
    if "blk.0.attn_kv_b.weight" not in gguf.tensors and "blk.0.attn_k_b.weight" in gguf.tensors:
        message = "has attn_k_b and attn_v_b, which are not supported; a file with attn_kv_b is"
        raise UnsupportedModel(f"{gguf.path}: {message}")
