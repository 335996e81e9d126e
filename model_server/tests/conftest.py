"""Models to test with: the demo model, fetched once, and tiny random ones written as GGUF."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from funitel_testing.cache import demo_folder

NUM_HEADS, NUM_KV_HEADS, HIDDEN_SIZE, VOCAB_SIZE, CONTEXT_LENGTH = 4, 2, 32, 384, 64

MakeGguf = Callable[..., PreTrainedModel]


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's folder, in the cache named by FUNITEL_CACHE or the default one."""
    return demo_folder()


@pytest.fixture(scope="session")
def make_gguf() -> MakeGguf:
    """Write a tiny random model as a GGUF and return the model it was made from."""
    return _make_gguf


def _make_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    metadata: Callable[[GGUFWriter], None] | None = None,
    tensors: dict[str, npt.NDArray[Any]] | None = None,
    settings: dict[str, Any] | None = None,
    types: dict[str, GGMLQuantizationType] | None = None,
    tensors_a_file: int = 0,
) -> PreTrainedModel:
    """`metadata` and `tensors` (bytes are Q4_1 blocks) add to the file, `settings` to the configuration.

    The model's own tensors that `types` names are quantised. With `tensors_a_file` it is split over files.
    """
    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(_config(architecture, settings or {}), dtype=torch.float32).eval()
    for parameter in model.parameters():  # biases and norms start as zeros and ones, which hide a swap
        torch.nn.init.normal_(parameter, std=0.2)
    writer = GGUFWriter(path, architecture, split_max_tensors=tensors_a_file)
    _add_settings(writer, architecture)
    _add_tokenizer(writer, architecture)
    if metadata is not None:
        metadata(writer)
    for name, values in (_gguf_tensors(model, architecture) | (tensors or {})).items():
        raw_dtype = GGMLQuantizationType.Q4_1 if values.dtype == np.uint8 else None
        if types and name in types:
            raw_dtype = types[name]
            values = quantize(values, raw_dtype)
        writer.add_tensor(name, values, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _config(architecture: str, settings: dict[str, Any]) -> PretrainedConfig:
    if architecture == "gpt2":
        shape: dict[str, Any] = {"n_embd": HIDDEN_SIZE, "n_inner": 48, "n_layer": 2, "n_head": NUM_HEADS}
        return GPT2Config(vocab_size=VOCAB_SIZE, n_positions=CONTEXT_LENGTH, **shape, **settings)
    configs: dict[str, Callable[..., PretrainedConfig]]
    configs = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    defaults: dict[str, Any] = {
        "rope_theta": 5000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": architecture == "qwen2",
    }
    if architecture == "qwen3":
        defaults["head_dim"] = 16
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "max_position_embeddings": CONTEXT_LENGTH,
    }
    return configs[architecture](**(shape | defaults | settings))


def _add_settings(writer: GGUFWriter, architecture: str) -> None:
    writer.add_block_count(2)
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(HIDDEN_SIZE)
    writer.add_feed_forward_length(48)
    writer.add_head_count(NUM_HEADS)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(1e-5)
        return
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    if architecture == "qwen3":
        writer.add_key_length(16)
        writer.add_value_length(16)


def _add_tokenizer(writer: GGUFWriter, architecture: str) -> None:
    if architecture == "llama":
        tokens, types, scores = sentencepiece_vocabulary()
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(scores)
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    else:
        tokens, types = byte_level_vocabulary()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2" if architecture == "gpt2" else "qwen2")
        writer.add_token_merges(["h e", "l l", "he ll", "hell o", "\u0120 hello"])
        writer.add_eos_token_id(0)
    writer.add_token_list(tokens)
    writer.add_token_types(types)


def sentencepiece_vocabulary() -> tuple[list[str], list[TokenType], list[float]]:
    """Tokens, types and scores of a small SentencePiece BPE; a better score merges first."""
    pieces = [
        "he",
        "ll",
        "hell",
        "hello",
        "\u2581hello",
        "\u2581w",
        "or",
        "ld",
        "wor",
        "world",
        "\u2581world",
        "\u2581\u2581",
    ]
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *pieces,
        *letters,
        "<|user|>",
    ]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    types += [TokenType.NORMAL] * (len(pieces) + len(letters)) + [TokenType.USER_DEFINED]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces) + len(letters))] + [0.0]
    return tokens, types, scores


def byte_level_vocabulary() -> tuple[list[str], list[TokenType]]:
    """Tokens and types of a small byte-level BPE; the letters are GPT-2's stand-ins for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (chr(256 + rank) for rank in range(256 - len(printable)))
    letters = [*map(chr, printable), *others]
    tokens = ["<|end|>", *letters, "he", "ll", "hell", "hello", "\u0120hello", "<tool>"]
    types = [TokenType.CONTROL, *[TokenType.NORMAL] * (len(tokens) - 2), TokenType.USER_DEFINED]
    return tokens, types


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def _gguf_tensors(model: PreTrainedModel, architecture: str) -> dict[str, npt.NDArray[np.float32]]:
    """Name and lay out a model's tensors as llama.cpp's converter does."""
    tensors = {}
    for hf_name, parameter in model.state_dict().items():
        if hf_name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, _, suffix = hf_name.rpartition(".")
        parts = stem.split(".")
        is_block = len(parts) > 2 and parts[2].isdigit()
        name = f"blk.{parts[2]}.{_NAMES['.'.join(parts[3:])]}" if is_block else _NAMES[stem]
        values = parameter.numpy()
        if architecture == "gpt2" and ".c_" in hf_name and suffix == "weight":
            values = values.T
        if architecture == "llama" and name.endswith(("attn_q", "attn_k")):
            values = _interleave(values, NUM_HEADS if name.endswith("attn_q") else NUM_KV_HEADS)
        tensors[f"{name}.{suffix}"] = np.ascontiguousarray(values)
    return tensors


def _interleave(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Put row i and row i + head_dim / 2 of each head next to each other."""
    heads = np.split(values, num_heads)
    rows = [row for head in heads for pair in zip(*np.split(head, 2), strict=True) for row in pair]
    return np.stack(rows)
