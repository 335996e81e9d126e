"""Tiny models as GGUF files, named and laid out as llama.cpp's converter does; names come from the `gguf` library."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from funitel_testing.zoo import ZOO, Tiny

Array = npt.NDArray[Any]
Lay = Callable[[str, Array], Array]  # a tensor's GGUF name and values -> the values as the file has them

HEADS, KV_HEADS, CONTEXT, LAYERS = 6, 3, 256, 2
_TOKENS = 264


@dataclass(frozen=True, kw_only=True)
class TinyGguf:
    """One architecture: the checkpoint it is made of, its own metadata, and how its tensors lie."""

    tiny: Tiny
    name: str = ""  # in general.architecture, where it differs from the key in the table
    metadata: Mapping[str, Any] = field(default_factory=dict)
    is_permuted: bool = False
    pre: str = "gpt-2"  # the pre-tokenizer that its files name
    lay: Lay = lambda name, values: values
    factors: Mapping[str, list[float]] = field(default_factory=dict)

    def write(self, path: Path, architecture: str) -> Any:
        """Write the file; returns the model in transformers."""
        model = self.tiny.build()
        tensors = model.state_dict()
        if model.config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        packed = tensors if self.tiny.pack is None or architecture == "internlm2" else self.tiny.pack(tensors)
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in (_sizes(model.config) | dict(self.metadata)).items():
            _add(writer, f"{architecture}.{key}", value)
        add_byte_tokenizer(writer, self.pre)
        number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
        names = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
        for hf_name, tensor in _with_halves(packed).items():
            places = (names.get_name(each, (".weight", ".bias")) for each in (hf_name, hf_name.partition(".")[2]))
            name = next(place for place in places if place is not None)
            values = self.lay(name, tensor.numpy())
            if self.is_permuted and ".attn_q." in name or self.is_permuted and ".attn_k." in name:
                values = permuted(values, HEADS if ".attn_q." in name else model.config.num_key_value_heads)
            writer.add_tensor(name, np.ascontiguousarray(values))
        for name, factors in self.factors.items():
            writer.add_tensor(name, np.array(factors, np.float32))
        finish(writer)
        return model


def _with_halves(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors with stacks of experts as files have them: gates by themselves."""
    found = {}
    for name, tensor in tensors.items():
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = name.replace("block_sparse_moe.router.", "mlp.gate.").replace("block_sparse_moe.", "mlp.")
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            found[f"{stem}gate_proj.weight"], found[f"{stem}up_proj.weight"] = tensor.chunk(2, dim=1)
        else:
            found[f"{name}.weight" if name.endswith("experts.down_proj") else name] = tensor
    return found


def _sizes(config: Any) -> dict[str, Any]:
    inner = next(
        (value for key in ("intermediate_size", "n_inner") if (value := getattr(config, key, None))),
        4 * config.hidden_size,
    )
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    return {
        **({} if theta is None else {"rope.freq_base": float(theta)}),
        "context_length": CONTEXT,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": inner,
        "attention.head_count": HEADS,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_byte_tokenizer(writer: gguf.GGUFWriter, pre: str = "gpt-2") -> None:
    """A byte-level vocabulary with an end token."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [*map(chr, printable), *(chr(256 + rank) for rank in range(256 - len(printable)))]
    tokens = ["<|end|>", *letters, "he", "ll", "hell"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(tokens) - 1)])
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_eos_token_id(0)


def permuted(values: Array, num_heads: int) -> Array:
    """Put row i and row i + head_dim / 2 of each head next to each other."""
    heads = np.split(values, num_heads)
    rows = [row for head in heads for pair in zip(*np.split(head, 2), strict=True) for row in pair]
    return np.stack(rows)


def _plus_one(name: str, values: Array) -> Array:
    return values + 1 if "norm" in name else values


def _stacked(name: str, values: Array) -> Array:
    """The queries, key and value of each head in turn -> all queries, all keys, all values."""
    if "attn_qkv" not in name:
        return values
    heads = values.reshape(HEADS, 3, -1, *values.shape[1:])
    return np.concatenate([heads[:, i].reshape(-1, *values.shape[1:]) for i in range(3)])


def _without_transposition(name: str, values: Array) -> Array:
    is_linear = any(part in name for part in ("attn_qkv", "attn_output", "ffn_")) and values.ndim == 2
    return values.T if is_linear else values


def _changed(name: str, **config: Any) -> Tiny:
    return replace(ZOO[name], config={**ZOO[name].config, **config})


_RMS = {"attention.layer_norm_rms_epsilon": 1e-6, "attention.head_count_kv": KV_HEADS}
_LAYER = {"attention.layer_norm_epsilon": 1e-5}
_WIDE = {"attention.key_length": 16, "attention.value_length": 16}
_MOE = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 21}
_LONGROPE = {"short": [1.0, 1.1, 1.3, 1.7], "long": [1.5, 2.0, 3.0, 4.0]}
_GRANITE = {"embedding_scale": 3.0, "residual_scale": 0.3, "attention.scale": 0.2, "logit_scale": 2.0}

_GRANITE_MOE = _GRANITE | {"expert_count": 5, "expert_used_count": 3}
_GLM_MOE = {
    "expert_used_count": 3,
    "expert_feed_forward_length": 21,
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.7,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
}
_LATENT = {
    "attention.head_count": 3,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.kv_lora_rank": 20,
    "attention.key_length": 20,
    "attention.value_length": 10,
    "rope.dimension_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 21,
}

# By a name of their own: architectures with several forms have several.
TINY_GGUFS: dict[str, TinyGguf] = {
    "llama": TinyGguf(tiny=ZOO["llama"], metadata=_RMS, is_permuted=True),
    "llama_bias": TinyGguf(name="llama", tiny=ZOO["llama_bias"], metadata=_RMS | _WIDE, is_permuted=True),
    "qwen2": TinyGguf(pre="qwen2", tiny=_changed("qwen2", use_sliding_window=False), metadata=_RMS),
    "qwen3": TinyGguf(pre="qwen2", tiny=ZOO["qwen3"], metadata=_RMS | _WIDE),
    "mixtral": TinyGguf(
        name="llama",
        tiny=_changed("mixtral", sliding_window=None, rms_norm_eps=1e-6),
        metadata=_RMS | {"expert_count": 5, "expert_used_count": 2},
        is_permuted=True,
    ),
    "qwen2moe": TinyGguf(
        pre="qwen2",
        tiny=_changed("qwen2_moe", decoder_sparse_step=1, mlp_only_layers=[], use_sliding_window=False),
        metadata=_RMS | _MOE | {"expert_shared_feed_forward_length": 25},
    ),
    "qwen3moe": TinyGguf(
        pre="qwen2",
        tiny=_changed("qwen3_moe", norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]),
        metadata=_RMS | _WIDE | _MOE,
    ),
    "olmoe": TinyGguf(pre="olmo", tiny=_changed("olmoe", rms_norm_eps=1e-6), metadata=_RMS | _MOE),
    "gemma": TinyGguf(tiny=ZOO["gemma"], metadata=_RMS | _WIDE, lay=_plus_one),
    "gemma2": TinyGguf(
        tiny=_changed("gemma2", query_pre_attn_scalar=16),
        metadata=_RMS
        | _WIDE
        | {"attention.sliding_window": 20, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        lay=_plus_one,
    ),
    "gemma3": TinyGguf(
        tiny=_changed(
            "gemma3",
            query_pre_attn_scalar=16,
            num_hidden_layers=6,
            layer_types=[*["sliding_attention"] * 5, "full_attention"],
        ),
        metadata=_RMS
        | _WIDE
        | {
            "attention.sliding_window": 20,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        lay=_plus_one,
    ),
    "phi2": TinyGguf(
        pre="phi-2", tiny=ZOO["phi"], metadata=_LAYER | {"attention.head_count_kv": KV_HEADS, "rope.dimension_count": 4}
    ),
    "phi3": TinyGguf(
        pre="dbrx",
        tiny=_changed("phi3", rms_norm_eps=1e-6),
        metadata=_RMS | {"attention.sliding_window": 24},
    ),
    "phi3_longrope": TinyGguf(
        name="phi3",
        pre="gpt-4o",
        tiny=_changed("phi3_longrope", rms_norm_eps=1e-6),
        metadata=_RMS | {"rope.scaling.original_context_length": 64},
        factors={f"rope_factors_{name}.weight": values for name, values in _LONGROPE.items()},
    ),
    "gpt2": TinyGguf(tiny=ZOO["gpt2"], metadata=_LAYER, lay=_without_transposition),
    "starcoder": TinyGguf(pre="starcoder", tiny=ZOO["gpt_bigcode"], metadata=_LAYER | {"attention.head_count_kv": 1}),
    "starcoder2": TinyGguf(
        pre="starcoder",
        tiny=_changed("starcoder2", sliding_window=None),
        metadata=_LAYER | {"attention.head_count_kv": KV_HEADS},
    ),
    "gptneox": TinyGguf(pre="olmo", tiny=ZOO["gpt_neox"], metadata=_LAYER | {"rope.dimension_count": 2}, lay=_stacked),
    "gptneox_sequential": TinyGguf(
        name="gptneox",
        tiny=ZOO["gpt_neox_sequential"],
        metadata=_LAYER | {"rope.dimension_count": 8, "use_parallel_residual": False},
        lay=_stacked,
    ),
    "bloom": TinyGguf(pre="bloom", tiny=ZOO["bloom"], metadata=_LAYER, lay=_stacked),
    "stablelm": TinyGguf(
        tiny=ZOO["stablelm"],
        metadata=_LAYER | {"attention.head_count_kv": KV_HEADS, "rope.dimension_count": 2},
    ),
    "stablelm_parallel": TinyGguf(
        name="stablelm",
        pre="stablelm2",
        tiny=_changed("stablelm_2_12b", qk_layernorm=False),
        metadata=_LAYER | {"attention.head_count_kv": KV_HEADS, "rope.dimension_count": 2},
    ),
    "olmo": TinyGguf(
        pre="olmo",
        tiny=ZOO["olmo"],
        metadata=_LAYER | {"attention.head_count_kv": KV_HEADS, "attention.clamp_kqv": 1.0},
        is_permuted=True,
    ),
    "olmo2": TinyGguf(pre="dbrx", tiny=_changed("olmo2", rms_norm_eps=1e-6), metadata=_RMS),
    "command-r": TinyGguf(
        pre="command-r",
        tiny=ZOO["cohere"],
        metadata=_LAYER | {"attention.head_count_kv": KV_HEADS, "logit_scale": 0.0625, "rope.scaling.type": "none"},
    ),
    "granite": TinyGguf(pre="refact", tiny=ZOO["granite"], metadata=_RMS | _GRANITE, is_permuted=True),
    "minicpm": TinyGguf(
        tiny=replace(_changed("minicpm", logits_scaling=48 / 256), family_config=None),
        metadata=_RMS,
        is_permuted=True,
    ),
    "smollm3": TinyGguf(
        tiny=_changed("smollm3", no_rope_layer_interval=4, num_hidden_layers=4), metadata=_RMS, is_permuted=True
    ),
    "mpt": TinyGguf(
        pre="mpt",
        tiny=_changed("mpt", attn_config={"clip_qkv": 1.0}),
        metadata=_LAYER | {"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 1.0},
    ),
    "qwen": TinyGguf(
        pre="qwen2", tiny=ZOO["qwen1"], metadata={"attention.layer_norm_rms_epsilon": 1e-6, "feed_forward_length": 200}
    ),
    "chatglm": TinyGguf(
        pre="chatglm-bpe",
        tiny=ZOO["chatglm3"],
        metadata=_RMS | {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 5e5, "rope.dimension_count": 4},
    ),
    "glm4": TinyGguf(pre="glm4", tiny=_changed("glm4", rms_norm_eps=1e-6), metadata=_RMS | {"rope.dimension_count": 4}),
    "granitemoe": TinyGguf(
        pre="refact", tiny=_changed("granite_moe", rms_norm_eps=1e-6), metadata=_RMS | _GRANITE_MOE, is_permuted=True
    ),
    "glm4moe": TinyGguf(
        pre="glm4",
        tiny=_changed("glm4_moe", rms_norm_eps=1e-6, norm_topk_prob=True),
        metadata=_RMS
        | _GLM_MOE
        | {"attention.key_length": 8, "attention.value_length": 8, "rope.dimension_count": 4, "expert_count": 8},
    ),
    "deepseek2": TinyGguf(
        pre="deepseek-llm",
        tiny=_changed("deepseek_v2_lite", rms_norm_eps=1e-6, n_shared_experts=2, routed_scaling_factor=1.5),
        metadata=_LATENT | {"expert_count": 8, "expert_shared_count": 2, "expert_weights_scale": 1.5},
    ),
    "deepseek3": TinyGguf(
        name="deepseek2",
        pre="deepseek-v3",
        tiny=_changed("deepseek_v3", rms_norm_eps=1e-6),
        metadata=_LATENT
        | {
            "attention.key_length": 28,  # of the vector that is cached, as newer files have it
            "attention.value_length": 20,
            "attention.key_length_mla": 20,
            "attention.value_length_mla": 10,
            "attention.q_lora_rank": 22,
            "leading_dense_block_count": 1,
            "expert_count": 12,
            "expert_shared_count": 1,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_log_multiplier": 0.1,
        },
    ),
    "internlm2": TinyGguf(tiny=ZOO["llama"], metadata=_RMS, is_permuted=True),
}
