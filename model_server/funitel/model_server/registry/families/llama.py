"""Rows of Llama, Mistral and the families that differ from them by a few values."""

import math
from typing import Any

from funitel.model_server.registry.rules.asked_windows import asked_windows
from funitel.model_server.registry.rules.common import ATTENTION_BIAS, ATTENTION_BIASES, TIED
from funitel.model_server.registry.rules.experts import experts
from funitel.model_server.registry.rules.row import (
    HIDDEN_SIZE,
    NUM_LAYERS,
    ArchitectureRow,
    Config,
    activation,
    first,
    rotary,
    row,
    when,
    windows,
)
from funitel.model_server.registry.rules.scaling import growing_queries
from funitel.model_server.spec.model_spec import ExpertScore, Position, QkNorm, QkvLayout, QueryGrowthSpec


def _unrotated_layers(config: Config) -> tuple[int, ...]:
    """Of SmolLM3: those that a list marks with 0, or each so-many-th."""
    layers, step = range(NUM_LAYERS(config)), first("no_rope_layer_interval", default=4)(config)
    is_rotated = first("no_rope_layers", default=[(i + 1) % step for i in layers])(config)
    return tuple(i for i in layers if not is_rotated[i])


def _listed_or_spaced(config: Config) -> list[Any]:
    """Of Llama 4: for each layer whether it has rotary positions, as listed or all but each so-many-th."""
    step = first("no_rope_layer_interval", default=4)(config)
    return list(config.get("no_rope_layers") or ((i + 1) % step for i in range(NUM_LAYERS(config))))


def _chunk_sizes(config: Config) -> tuple[int | None, ...]:
    """Of Llama 4: layers attend within chunks that `layer_types` says so of, or that have rotary positions."""
    size = config.get("attention_chunk_size", 8192)
    kinds = config.get("layer_types") or [
        "chunked_attention" if is_rotated else "full_attention" for is_rotated in _listed_or_spaced(config)
    ]
    found = tuple(size if kind == "chunked_attention" else None for kind in kinds[: NUM_LAYERS(config)])
    return found if any(found) else ()


def _spaced_experts(config: Config) -> tuple[int, ...]:
    """Of Llama 4: the layers without experts."""
    step = first("interleave_moe_layer_step", default=1)(config)
    every = range(NUM_LAYERS(config))
    listed = config.get("moe_layers")
    return tuple(i for i in every if i not in (every[step - 1 :: step] if listed is None else listed))


ROWS: dict[str, ArchitectureRow] = {
    "LlamaForCausalLM": row(**ATTENTION_BIASES, has_mlp_bias=first("mlp_bias", default=False)),
    "MistralForCausalLM": row(sliding_windows=windows(default=4096)),
    "MinistralForCausalLM": row(sliding_windows=windows(default=4096)),
    "Ministral3ForCausalLM": row(
        norm_eps=first("rms_norm_eps", default=1e-5), sliding_windows=windows(), query_growth=growing_queries
    ),
    "ArceeForCausalLM": row(
        **ATTENTION_BIASES,
        norm_eps=first("rms_norm_eps", default=1e-5),
        has_mlp_bias=first("mlp_bias", default=False),
        is_gated=False,
        activation=activation("hidden_act", default="relu2"),
    ),
    "ApertusForCausalLM": row(
        **ATTENTION_BIASES,
        norm_eps=first("rms_norm_eps", default=1e-5),
        is_gated=False,
        activation=activation("hidden_act", default="xielu"),
        rotary=rotary(base=1.2e7),
        qk_norm=QkNorm.HEAD,
        names={
            "attention_norm": "layers.{i}.attention_layernorm",
            "mlp_norm": "layers.{i}.feedforward_layernorm",
            "ignored": (r"rotary_emb\.inv_freq$", r"\.act_fn\.(beta|eps)$"),
        },
    ),
    "SeedOssForCausalLM": row(
        has_qkv_bias=first("attention_bias", default=True),
        has_out_bias=first("attention_out_bias", default=False),
        has_mlp_bias=first("mlp_bias", default=False),
    ),
    "HeliumForCausalLM": row(
        has_qkv_bias=ATTENTION_BIAS,
        has_mlp_bias=first("mlp_bias", default=False),
        norm_eps=first("rms_norm_eps", default=1e-8),
        rotary=rotary(base=1e5, is_interleaved=True),
    ),
    "Llama4ForCausalLM": row(
        **ATTENTION_BIASES,
        norm_eps=first("rms_norm_eps", default=1e-5),
        intermediate_size=first("intermediate_size_mlp"),
        rotary=rotary(base=5e5, is_interleaved=True),
        unrotated_layers=lambda c: tuple(
            i for i, turns in enumerate(_listed_or_spaced(c)[: NUM_LAYERS(c)]) if not turns
        ),
        qk_norm=when(first("use_qk_norm", default=True), QkNorm.PLAIN, QkNorm.NONE),
        is_qk_norm_last=first("use_qk_norm", default=True),
        chunk_sizes=_chunk_sizes,
        query_growth=when(
            first("attn_temperature_tuning", default=True),
            lambda c: QueryGrowthSpec(
                rate=float(c.get("attn_scale", 0.1)),
                period=c.get("floor_scale", 8192),
                offset=1,
                is_unrotated_only=True,
            ),
            None,
        ),
        experts=experts(
            intermediate_size=first("intermediate_size"),
            dense_layers=_spaced_experts,
            score=ExpertScore.SIGMOID,
            is_normalized=False,
            scale=1.0,
            shared_size=first("intermediate_size"),
            is_input_scaled=True,
        ),
        names={
            "gate": "layers.{i}.feed_forward.gate_proj",
            "up": "layers.{i}.feed_forward.up_proj",
            "down": "layers.{i}.feed_forward.down_proj",
            "router": "layers.{i}.feed_forward.router",
            "expert_gate": "layers.{i}.feed_forward.experts.{j}.gate_proj",  # as quantisers leave them
            "expert_up": "layers.{i}.feed_forward.experts.{j}.up_proj",
            "expert_gate_up": "layers.{i}.feed_forward.experts.gate_up_proj[{j}]",
            "expert_down": "layers.{i}.feed_forward.experts.{j}.down_proj"
            "|layers.{i}.feed_forward.experts.down_proj[{j}]",
            "is_stack_transposed": True,
            "shared_gate": "layers.{i}.feed_forward.shared_expert.gate_proj",
            "shared_up": "layers.{i}.feed_forward.shared_expert.up_proj",
            "shared_down": "layers.{i}.feed_forward.shared_expert.down_proj",
        },
    ),
    "SmolLM3ForCausalLM": row(
        **TIED,
        **ATTENTION_BIASES,
        has_mlp_bias=first("mlp_bias", default=False),
        unrotated_layers=_unrotated_layers,
        sliding_windows=asked_windows(lambda c, i: i in _unrotated_layers(c)),
    ),
    "MiniCPMForCausalLM": row(
        **TIED,
        **ATTENTION_BIASES,
        embedding_scale=first("scale_emb", default=1.0),
        residual_scale=lambda c: c.get("scale_depth", math.sqrt(NUM_LAYERS(c))) / math.sqrt(NUM_LAYERS(c)),
        logit_scale=lambda c: c.get("dim_model_base", HIDDEN_SIZE(c)) / HIDDEN_SIZE(c),
    ),
    "InternLM3ForCausalLM": row(
        has_qkv_bias=first("qkv_bias", default=False),
        has_out_bias=first("bias", default=False),
        has_mlp_bias=first("bias", default=False),
    ),
    "IQuestCoderForCausalLM": row(
        **ATTENTION_BIASES,
        norm_eps=first("rms_norm_eps", default=1e-5),
        has_mlp_bias=first("mlp_bias", default=False),
        fixed={"clip_qkv": None, "use_sliding_window": False},
    ),
    "InternLM2ForCausalLM": row(
        has_qkv_bias=first("bias", default=False),
        has_out_bias=first("bias", default=False),
        qkv_layout=QkvLayout.GROUPED,
        names={
            "embedding": "tok_embeddings",
            "attention_norm": "layers.{i}.attention_norm",
            "qkv": "layers.{i}.attention.wqkv",
            "out": "layers.{i}.attention.wo",
            "mlp_norm": "layers.{i}.ffn_norm",
            "gate": "layers.{i}.feed_forward.w1",
            "up": "layers.{i}.feed_forward.w3",
            "down": "layers.{i}.feed_forward.w2",
            "head": "output",
        },
    ),
    "BaichuanForCausalLM": row(
        # The 13B models have no rotary positions, and no context but the tokenizer's; the second generation, told by
        # its vocabulary, normalises the head.
        position=lambda c: Position.ROTARY if "max_position_embeddings" in c else Position.ALIBI,
        is_head_normalized=lambda c: c["vocab_size"] == 125696,
        names={"qkv": "layers.{i}.self_attn.W_pack"},
    ),
    "MixtralForCausalLM": row(
        norm_eps=first("rms_norm_eps", default=1e-5),
        sliding_windows=windows(),
        experts=experts(is_normalized=True),
        names={
            "router": "layers.{i}.block_sparse_moe.gate|layers.{i}.mlp.gate",
            "expert_gate": "layers.{i}.block_sparse_moe.experts.{j}.w1",
            "expert_up": "layers.{i}.block_sparse_moe.experts.{j}.w3",
            "expert_down": "layers.{i}.block_sparse_moe.experts.{j}.w2|layers.{i}.mlp.experts.down_proj[{j}]",
        },
    ),
}
ROWS["BaiChuanForCausalLM"] = ROWS["BaichuanForCausalLM"]
