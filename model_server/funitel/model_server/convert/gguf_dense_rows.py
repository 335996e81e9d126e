"""Rows of the table of GGUF architectures without experts."""

from typing import Any

from funitel.model_server.convert.gguf_rope_rules import FACTORS, LONGROPE, longrope_scaling, rope_scaling, rope_theta
from funitel.model_server.convert.gguf_row import Architecture
from funitel.model_server.convert.gguf_rules import (
    BIASES,
    LAYER,
    MODERN,
    PART_ROPE,
    RMS,
    SIZES,
    WHOLE_ROPE,
    dense,
    expansion,
    gemma_query_scalar,
    head_dim,
    holds,
    integer,
    num_heads,
    num_kv_heads,
    number,
    optional,
    turning_part,
)

_LLAMA = MODERN | BIASES | {"model_type": "llama"}
_GEMMA = SIZES | RMS | WHOLE_ROPE | {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
_GPT: dict[str, Any] = {
    "n_embd": integer("embedding_length"),
    "n_inner": integer("feed_forward_length"),
    "n_layer": integer("block_count"),
    "n_head": num_heads,
    "n_positions": integer("context_length"),
    "layer_norm_epsilon": number("attention.layer_norm_epsilon"),
}

DENSE_ROWS: dict[str, Architecture] = {
    "llama": Architecture(hf_class="LlamaForCausalLM", settings=_LLAMA, is_permuted=True, factors=FACTORS),
    "qwen2": Architecture(
        hf_class="Qwen2ForCausalLM", settings=MODERN | {"model_type": "qwen2", "use_sliding_window": False}
    ),
    "qwen3": Architecture(
        hf_class="Qwen3ForCausalLM",
        settings=MODERN | {"model_type": "qwen3", "attention_bias": False, "use_sliding_window": False},
    ),
    "gemma": Architecture(hf_class="GemmaForCausalLM", settings=_GEMMA | {"model_type": "gemma"}),
    "gemma2": Architecture(
        hf_class="Gemma2ForCausalLM",
        settings=_GEMMA
        | {
            "model_type": "gemma2",
            "query_pre_attn_scalar": gemma_query_scalar(46),
            "attn_logit_softcapping": number("attn_logit_softcapping"),
            "final_logit_softcapping": number("final_logit_softcapping"),
            "sliding_window": integer("attention.sliding_window"),
        },
    ),
    "gemma3": Architecture(
        hf_class="Gemma3ForCausalLM",
        settings=_GEMMA
        | {
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": gemma_query_scalar(62),
            "attn_logit_softcapping": None,
            "final_logit_softcapping": optional("final_logit_softcapping"),
            "sliding_window": integer("attention.sliding_window"),
            "sliding_window_pattern": integer("attention.sliding_window_pattern", 6),
            "rope_theta": number("rope.freq_base", 1e6),
            "rope_local_base_freq": number("rope.freq_base_swa", 1e4),
        },
    ),
    "phi2": Architecture(
        hf_class="PhiForCausalLM",
        settings=SIZES | LAYER | PART_ROPE | {"model_type": "phi", "hidden_act": "gelu_new", "qk_layernorm": False},
    ),
    "phi3": Architecture(
        hf_class="Phi3ForCausalLM",
        settings=MODERN
        | {
            "model_type": "phi3",
            "head_dim": head_dim,
            "partial_rotary_factor": turning_part,
            "rope_scaling": longrope_scaling,
            "original_max_position_embeddings": integer("rope.scaling.original_context_length", 4096),
            "sliding_window": lambda gguf: gguf.integer(gguf.key("attention.sliding_window"), 0) or None,
        },
        factors=LONGROPE,
    ),
    "gpt2": Architecture(
        hf_class="GPT2LMHeadModel", settings=_GPT | {"model_type": "gpt2", "activation_function": "gelu_new"}
    ),
    "starcoder": Architecture(
        hf_class="GPTBigCodeForCausalLM",
        settings=_GPT
        | {
            "model_type": "gpt_bigcode",
            "activation_function": "gelu_pytorch_tanh",
            "multi_query": lambda gguf: num_kv_heads(gguf) == 1,
        },
    ),
    "starcoder2": Architecture(
        hf_class="Starcoder2ForCausalLM",
        settings=SIZES
        | WHOLE_ROPE
        | {
            "model_type": "starcoder2",
            "norm_epsilon": number("attention.layer_norm_epsilon"),
            "hidden_act": "gelu_pytorch_tanh",
            "use_bias": holds("blk.0.attn_q.bias"),
        },
    ),
    "gptneox": Architecture(
        hf_class="GPTNeoXForCausalLM",
        settings=SIZES
        | LAYER
        | {
            "model_type": "gpt_neox",
            "hidden_act": "gelu",
            "rotary_pct": turning_part,
            "rotary_emb_base": rope_theta,
            "rope_scaling": rope_scaling,
            "attention_bias": holds("blk.0.attn_qkv.bias"),
            "use_parallel_residual": lambda gguf: gguf.flag(gguf.key("use_parallel_residual"), True),
        },
    ),
    "bloom": Architecture(
        hf_class="BloomForCausalLM",
        settings={
            "model_type": "bloom",
            "hidden_size": integer("embedding_length"),
            "n_layer": integer("block_count"),
            "n_head": num_heads,
            "seq_length": integer("context_length"),
            "layer_norm_epsilon": number("attention.layer_norm_epsilon"),
        },
    ),
    "stablelm": Architecture(
        hf_class="StableLmForCausalLM",
        settings=SIZES
        | LAYER
        | PART_ROPE
        | {
            "model_type": "stablelm",
            "hidden_act": dense,
            "use_qkv_bias": holds("blk.0.attn_q.bias"),
            "use_parallel_residual": lambda gguf: "blk.0.ffn_norm.weight" not in gguf.tensors,
            "qk_layernorm": False,
        },
    ),
    "olmo": Architecture(
        hf_class="OlmoForCausalLM",
        settings=SIZES
        | WHOLE_ROPE
        | {
            "model_type": "olmo",
            "hidden_act": dense,
            "attention_bias": False,
            "clip_qkv": optional("attention.clamp_kqv"),
        },
        is_permuted=True,
    ),
    "olmo2": Architecture(
        hf_class="Olmo2ForCausalLM", settings=MODERN | {"model_type": "olmo2", "attention_bias": False}
    ),
    "command-r": Architecture(
        hf_class="CohereForCausalLM",
        settings=SIZES
        | LAYER
        | WHOLE_ROPE
        | {
            "model_type": "cohere",
            "hidden_act": dense,
            "attention_bias": False,
            "logit_scale": number("logit_scale"),
            "use_qk_norm": False,
        },
    ),
    "granite": Architecture(
        hf_class="GraniteForCausalLM",
        settings=MODERN
        | BIASES
        | {
            "model_type": "granite",
            "embedding_multiplier": number("embedding_scale"),
            "residual_multiplier": number("residual_scale"),
            "attention_multiplier": number("attention.scale"),
            "logits_scaling": number("logit_scale"),
        },
        is_permuted=True,
        factors=FACTORS,
    ),
    "minicpm": Architecture(  # the same arithmetic under other names; older files leave out the first model's values
        hf_class="GraniteForCausalLM",
        settings=MODERN
        | BIASES
        | {
            "model_type": "granite",
            "embedding_multiplier": number("embedding_scale", 12.0),
            "residual_multiplier": lambda gguf: gguf.number(
                gguf.key("residual_scale"), 1.4 / max(gguf.integer(gguf.key("block_count")), 1) ** 0.5
            ),
            "attention_multiplier": lambda gguf: max(head_dim(gguf), 1) ** -0.5,
            "logits_scaling": lambda gguf: gguf.number(
                gguf.key("logit_scale"), gguf.integer(gguf.key("embedding_length")) / 256
            ),
        },
        is_permuted=True,
        factors=FACTORS,
    ),
    "smollm3": Architecture(
        hf_class="SmolLM3ForCausalLM",
        settings=MODERN | BIASES | {"model_type": "smollm3", "no_rope_layer_interval": 4},
        is_permuted=True,
        factors=FACTORS,
    ),
    "mpt": Architecture(
        hf_class="MptForCausalLM",
        settings={
            "model_type": "mpt",
            "d_model": integer("embedding_length"),
            "n_layers": integer("block_count"),
            "n_heads": num_heads,
            "max_seq_len": integer("context_length"),
            "expansion_ratio": expansion,
            "layer_norm_epsilon": number("attention.layer_norm_epsilon"),
            "attn_config": lambda gguf: {
                "alibi_bias_max": gguf.number(gguf.key("attention.max_alibi_bias")),
                "clip_qkv": optional("attention.clamp_kqv")(gguf),
            },
        },
    ),
    "qwen": Architecture(
        hf_class="QWenLMHeadModel",
        settings={
            "model_type": "qwen",
            "hidden_size": integer("embedding_length"),
            "intermediate_size": integer("feed_forward_length"),  # twice the units of the MLP, as config.json has it
            "num_hidden_layers": integer("block_count"),
            "num_attention_heads": num_heads,
            "kv_channels": head_dim,
            "seq_length": integer("context_length"),
            "layer_norm_epsilon": number("attention.layer_norm_rms_epsilon"),
            "rotary_emb_base": rope_theta,
            "no_bias": True,
        },
    ),
    "chatglm": Architecture(
        hf_class="ChatGLMModel",
        settings={
            "model_type": "chatglm",
            "hidden_size": integer("embedding_length"),
            "ffn_hidden_size": integer("feed_forward_length"),
            "num_layers": integer("block_count"),
            "num_attention_heads": num_heads,
            "kv_channels": lambda gguf: gguf.integer(gguf.key("embedding_length")) // num_heads(gguf),
            "multi_query_attention": True,
            "multi_query_group_num": num_kv_heads,
            "seq_length": integer("context_length"),
            "layernorm_epsilon": number("attention.layer_norm_rms_epsilon"),
            "add_qkv_bias": holds("blk.0.attn_qkv.bias"),
            "add_bias_linear": False,
            "rope_ratio": lambda gguf: rope_theta(gguf) / 1e4,
        },
    ),
    "glm4": Architecture(
        hf_class="Glm4ForCausalLM",
        settings=SIZES
        | RMS
        | PART_ROPE
        | {"model_type": "glm4", "hidden_act": "silu", "attention_bias": holds("blk.0.attn_q.bias")},
    ),
    "internlm2": Architecture(hf_class="LlamaForCausalLM", settings=_LLAMA, is_permuted=True, factors=FACTORS),
}
