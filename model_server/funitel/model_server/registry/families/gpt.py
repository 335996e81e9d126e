"""Rows of GPT and the families with its layer norms and plain MLPs."""

from itertools import islice
from typing import Any

from funitel.model_server.registry.rules.common import ATTENTION_BIASES, BIASES, LAYER, TIED, biases
from funitel.model_server.registry.rules.row import (
    NUM_HEADS,
    NUM_LAYERS,
    ArchitectureRow,
    Config,
    activation,
    first,
    head_dim,
    inner,
    rotary,
    row,
    windows,
)
from funitel.model_server.spec.model_spec import Position, QkvLayout

_GPT2: dict[str, Any] = (
    LAYER
    | BIASES
    | TIED
    | {
        "norm_eps": first("layer_norm_epsilon", default=1e-5),
        "intermediate_size": inner("n_inner"),
        "is_gated": False,
        "position": Position.LEARNED,
    }
)
_GPT2_NAMES = {
    "prefix": "transformer.",
    "embedding": "wte",
    "positions": "wpe",
    "attention_norm": "h.{i}.ln_1",
    "qkv": "h.{i}.attn.c_attn",
    "out": "h.{i}.attn.c_proj",
    "mlp_norm": "h.{i}.ln_2",
    "up": "h.{i}.mlp.c_fc",
    "down": "h.{i}.mlp.c_proj",
    "final_norm": "ln_f",
    "ignored": (r"\.attn\.(masked_)?bias$",),
}


def _neo_kinds(config: Config) -> list[str]:
    """Of GPT-Neo: "local" or "global" for each layer, as listed or by patterns and how often each comes."""
    patterns = first("attention_types", default=())(config)
    repeated = (kind for kinds, times in patterns for _ in range(times) for kind in kinds)
    return list(config.get("attention_layers") or islice(repeated, NUM_LAYERS(config) + 1))


ROWS: dict[str, ArchitectureRow] = {
    "Jais2ForCausalLM": row(
        **LAYER,
        **biases(first("attention_bias", default=True)) | {"has_mlp_bias": first("mlp_bias", default=True)},
        norm_eps=first("layer_norm_eps", default=1e-5),
        is_gated=False,
        activation=activation("hidden_act", default="relu2"),
    ),
    "NemotronForCausalLM": row(
        **LAYER,
        **ATTENTION_BIASES,
        norm_eps=first("norm_eps", default=1e-5),
        norm_offset=1.0,
        has_mlp_bias=first("mlp_bias", default=False),
        is_gated=False,
        activation=activation("hidden_act", default="relu2"),
        rotary=rotary(part=0.5),
    ),
    "GPT2LMHeadModel": row(
        **_GPT2,
        activation=activation("activation_function", default="gelu_new"),
        attention_scale=lambda c: None if c.get("scale_attn_weights", True) else 1.0,
        is_scaled_by_layer=first("scale_attn_by_inverse_layer_idx", default=False),
        names=_GPT2_NAMES | {"is_transposed": True},
    ),
    "GPTBigCodeForCausalLM": row(
        **_GPT2,
        activation=activation("activation_function", default="gelu_pytorch_tanh"),
        attention_scale=lambda c: None if c.get("scale_attn_weights", True) else 1.0,
        num_kv_heads=lambda c: 1 if c.get("multi_query", True) else NUM_HEADS(c),
        qkv_layout=QkvLayout.GROUPED,
        names=_GPT2_NAMES,
    ),
    "GPTJForCausalLM": row(
        **LAYER,
        norm_eps=first("layer_norm_epsilon", default=1e-5),
        has_mlp_bias=True,
        has_head_bias=True,
        is_parallel=True,
        is_gated=False,
        intermediate_size=inner("n_inner"),
        activation=activation("activation_function", default="gelu_new"),
        rotary=lambda c: rotary(part=first("rotary_dim", default=64)(c) / head_dim(c), is_interleaved=True)(c),
        names=_GPT2_NAMES
        | {
            "qkv": "",
            "q": "h.{i}.attn.q_proj",
            "k": "h.{i}.attn.k_proj",
            "v": "h.{i}.attn.v_proj",
            "out": "h.{i}.attn.out_proj",
            "mlp_norm": "",
            "up": "h.{i}.mlp.fc_in",
            "down": "h.{i}.mlp.fc_out",
        },
    ),
    "GPTNeoForCausalLM": row(
        **LAYER,
        **TIED,
        norm_eps=first("layer_norm_epsilon", default=1e-5),
        has_out_bias=True,
        has_mlp_bias=True,
        is_gated=False,
        intermediate_size=inner("intermediate_size"),
        activation=activation("activation_function", default="gelu_new"),
        position=Position.LEARNED,
        attention_scale=1.0,
        sliding_windows=lambda c: tuple(
            c.get("window_size", 256) if kind == "local" else None for kind in _neo_kinds(c)
        ),
        names=_GPT2_NAMES
        | {
            "qkv": "",
            "q": "h.{i}.attn.attention.q_proj",
            "k": "h.{i}.attn.attention.k_proj",
            "v": "h.{i}.attn.attention.v_proj",
            "out": "h.{i}.attn.attention.out_proj",
            "ignored": (r"\.attention\.(masked_)?bias$",),
        },
    ),
    "GPTNeoXForCausalLM": row(
        **LAYER,
        has_qkv_bias=first("attention_bias", default=True),
        has_out_bias=first("attention_bias", default=True),
        has_mlp_bias=True,
        is_parallel=first("use_parallel_residual", default=True),
        is_gated=False,
        activation=activation("hidden_act", default="gelu"),
        rotary=rotary(part=0.25),
        qkv_layout=QkvLayout.GROUPED,
        names={
            "prefix": "gpt_neox.",
            "embedding": "embed_in",
            "qkv": "layers.{i}.attention.query_key_value",
            "out": "layers.{i}.attention.dense",
            "up": "layers.{i}.mlp.dense_h_to_4h",
            "down": "layers.{i}.mlp.dense_4h_to_h",
            "final_norm": "final_layer_norm",
            "head": "embed_out",
            "ignored": (r"\.attention\.((masked_)?bias|rotary_emb\.inv_freq)$",),
        },
    ),
    "Starcoder2ForCausalLM": row(
        **LAYER,
        **TIED,
        **biases(first("use_bias", default=True)),
        norm_eps=first("norm_epsilon", default=1e-5),
        is_gated=False,
        activation=activation("hidden_act", default="gelu_pytorch_tanh"),
        sliding_windows=windows(),
        names={"up": "layers.{i}.mlp.c_fc", "down": "layers.{i}.mlp.c_proj"},
    ),
}
