"""A tiny random checkpoint for every architecture of the family table, and what computes the same in transformers.

Families that transformers does not have are a class of it that computes the same, with its tensors renamed and
packed as the family's checkpoints have them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from funitel_testing.zoo_hybrid import HYBRIDS

Tensors = dict[str, torch.Tensor]
Oracle = Callable[[Any, list[int], int], torch.Tensor]

VOCAB_SIZE, HIDDEN, HEADS, KV_HEADS, INNER, LAYERS, CONTEXT = 288, 48, 6, 3, 100, 2, 256
# Uneven on purpose: six query heads in three groups, so that two ranks get two groups and one.
_MODERN: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": CONTEXT,
}
_MODELS = {"Qwen3_5Text": "Qwen3_5ForCausalLM", "Qwen3_5MoeText": "Qwen3_5MoeForCausalLM"}
_HEADS_ALIKE = {key: value for key, value in _MODERN.items() if key != "num_key_value_heads"}
_GPT = {"vocab_size": VOCAB_SIZE, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": CONTEXT}
_NO_SPECIAL = {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": None}


def at_once(model: Any, ids: list[int], num_decode: int) -> torch.Tensor:
    """Logits of every position by one forward: the same as step by step where positions alone decide."""
    logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def by_steps(model: Any, ids: list[int], num_decode: int) -> torch.Tensor:
    """Logits of every position: the prompt in one forward, then token by token on its cache."""
    prompt = len(ids) - num_decode
    answer = model(torch.tensor([ids[:prompt]]), use_cache=True)
    logits = [answer.logits[0]]
    cache = "cache_params" if "cache_params" in answer else "past_key_values"
    for position in range(prompt, len(ids)):
        answer = model(torch.tensor([[ids[position]]]), **{cache: answer[cache]}, use_cache=True)
        logits.append(answer.logits[0])
    return torch.cat(logits)


def by_told_positions(model: Any, ids: list[int], num_decode: int) -> torch.Tensor:
    """As `by_steps` for models that count positions from 0 in each forward unless they are told."""
    prompt = len(ids) - num_decode
    answer = model(torch.tensor([ids[:prompt]]), use_cache=True)
    logits = [answer.logits[0]]
    for position in range(prompt, len(ids)):
        places = torch.tensor([[position]])
        given = {"position_ids": places, "past_key_values": answer.past_key_values, "use_cache": True}
        answer = model(torch.tensor([[ids[position]]]), **given)
        logits.append(answer.logits[0])
    return torch.cat(logits)


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """One checkpoint: transformers' class and configuration, and how both become the family's own where they differ."""

    kind: str  # transformers' name without Config
    model: str = ""  # its class, where that is not kind + ForCausalLM
    config: Mapping[str, Any] = field(default_factory=dict)
    family_config: Mapping[str, Any] | None = None  # config.json of a family that transformers does not carry
    pack: Callable[[Tensors], Tensors] | None = None  # transformers' tensors -> the family's
    oracle: Oracle = at_once
    is_stacked: bool = False  # experts lie in one tensor, as transformers has them in memory
    attention: str = "eager"  # transformers' implementation; in its eager one Falcon's ALiBi counts twice

    @property
    def architecture(self) -> str:
        """The name of transformers' class."""
        return self.model or f"{self.kind}ForCausalLM"

    def configure(self) -> Any:
        """The configuration in transformers."""
        return getattr(transformers, f"{self.kind}Config")(**(_NO_SPECIAL | dict(self.config)))

    def build(self, seed: int = 0) -> Any:
        """The model in transformers: weights large enough that a wrong norm or bias shows, none of them 0 or 1."""
        config = self.configure()
        config._attn_implementation = self.attention
        config._experts_implementation = "eager"
        torch.manual_seed(seed)
        model = getattr(transformers, self.architecture)(config).float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or "ln_" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                else:
                    parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.3))
            for name, buffer in model.named_buffers():
                if "correction" in name:
                    buffer.copy_(torch.randn_like(buffer) * 0.2)
                elif "layer_scalar" in name:
                    buffer.add_(torch.randn_like(buffer) * 0.2)
        return model

    def save(self, folder: Path) -> Any:
        """Save the checkpoint as the family's are; returns the model in transformers."""
        model = self.build()
        if self.family_config is None:
            model.save_pretrained(folder, save_original_format=not self.is_stacked)
            return model
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.family_config, indent=2))
        tensors = model.state_dict() if self.pack is None else self.pack(model.state_dict())
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        return model


def _alibi_llama(model: Any, ids: list[int], num_decode: int) -> torch.Tensor:
    """A Llama with ALiBi: positions of its rotary embedding all 0, the bias in the mask."""
    positions = torch.arange(len(ids))
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])  # of six heads
    distances = positions[None, :] - positions[:, None]
    mask = (slopes[:, None, None] * distances).masked_fill(distances > 0, torch.finfo(torch.float32).min)
    zeros = torch.zeros(1, len(ids), dtype=torch.long)
    logits: torch.Tensor = model(torch.tensor([ids]), attention_mask=mask[None], position_ids=zeros).logits[0]
    return logits


def _renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    found = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = tensor
    return found


def _qkv_joined(tensors: Tensors, stem: str, *, grouped: bool = False) -> Tensors:
    """Replace q_proj, k_proj and v_proj by one tensor `stem`."""
    found = dict(tensors)
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [found.pop(name.replace("q_proj", which)) for which in ("q_proj", "k_proj", "v_proj")]
        if grouped:  # for each KV head: its queries, its key, its value
            parts = [part.unflatten(0, (KV_HEADS, -1)) for part in parts]
            found[name.replace("q_proj", stem)] = torch.cat(parts, dim=1).flatten(0, 1)
        else:
            found[name.replace("q_proj", stem)] = torch.cat(parts)
    return found


def _internlm2(tensors: Tensors) -> Tensors:
    names = {
        "self_attn.q_proj": "attention.wqkv",
        "self_attn.wqkv": "attention.wqkv",
        "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
    }
    return _renamed(_qkv_joined(tensors, "wqkv", grouped=True), names)


def _baichuan(tensors: Tensors) -> Tensors:
    return _qkv_joined(tensors, "W_pack")


def _chatglm(tensors: Tensors) -> Tensors:
    names = {
        "model.layers": "transformer.encoder.layers",
        "model.norm": "transformer.encoder.final_layernorm",
        "model.embed_tokens": "transformer.embedding.word_embeddings",
        "lm_head": "transformer.output_layer",
        "self_attn.query_key_value": "self_attention.query_key_value",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }
    return _renamed(_qkv_joined(tensors, "query_key_value"), names)


def _qwen1(tensors: Tensors) -> Tensors:
    names = {
        "model.layers": "transformer.h",
        "model.norm": "transformer.ln_f",
        "model.embed_tokens": "transformer.wte",
        "self_attn.c_attn": "attn.c_attn",
        "self_attn.o_proj": "attn.c_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "mlp.gate_proj": "mlp.w2",
        "mlp.up_proj": "mlp.w1",
        "mlp.down_proj": "mlp.c_proj",
    }
    return _renamed(_qkv_joined(tensors, "c_attn"), names)


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **values}}


_LONGROPE = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.5, 2.0, 3.0, 4.0]}
_LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
_SHORT_YARN = {"factor": 16.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}
# Beyond the trained context only the amplitude differs: transformers has the divisors of short sequences there too.
_TWO_AMPLITUDES = {
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 1.1, 1.3, 1.7],
    "short_mscale": 1.1,
    "long_mscale": 1.3,
}
# Experts with hidden units that two ranks do not share evenly.
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 21}
_LATENT: dict[str, Any] = _HEADS_ALIKE | {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}

# Contexts of the tests are several times what a token attends to; with few heads some scores would be equal, all 0.
_INDEXED: dict[str, Any] = (
    _LATENT
    | _EXPERTS
    | {"n_routed_experts": 12, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 22}
    | {"index_topk": 13, "index_head_dim": 16, "index_n_heads": 24}
)
_FIVE_KINDS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
_GEMMA3N: dict[str, Any] = _MODERN | {
    "num_hidden_layers": 5,
    "intermediate_size": [INNER, INNER, 75, INNER, INNER],
    "activation_sparsity_pattern": [0.8, 0.8, 0.0, 0.0, 0.0],
    "head_dim": 16,
    "sliding_window": 20,
    "layer_types": _FIVE_KINDS,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 200,
    "laurel_rank": 7,
    "altup_num_inputs": 3,
}
_GEMMA4: dict[str, Any] = _MODERN | {
    "num_hidden_layers": 5,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 20,
    "layer_types": _FIVE_KINDS,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "final_logit_softcapping": 30.0,
}

ZOO: dict[str, Tiny] = {
    "llama": Tiny(kind="Llama", config=_MODERN),
    "llama_bias": Tiny(kind="Llama", config=_MODERN | {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama_3.1": Tiny(kind="Llama", config=_MODERN | _rope("llama3", **_LLAMA3)),
    "llama_linear": Tiny(kind="Llama", config=_MODERN | _rope("linear", factor=2.0)),
    "llama_dynamic": Tiny(
        kind="Llama",
        config=_MODERN | {"max_position_embeddings": 64} | _rope("dynamic", factor=2.0),
        oracle=by_steps,
    ),
    "llama_yarn": Tiny(kind="Llama", config=_MODERN | _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "mistral": Tiny(kind="Mistral", config=_MODERN | {"sliding_window": 24, "head_dim": 8}),
    "ministral": Tiny(
        kind="Ministral",
        config=_MODERN | {"head_dim": 8, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "ministral3": Tiny(
        kind="Ministral3",
        config=_MODERN
        | {"head_dim": 16, "sliding_window": 40}
        | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "llama_4_scaling_beta": 0.3, **_SHORT_YARN}},
    ),
    "arcee": Tiny(kind="Arcee", config=_MODERN | {"attention_bias": True, "mlp_bias": True}),
    "jais2": Tiny(kind="Jais2", config=_MODERN | {"head_dim": 8}),
    "vaultgemma": Tiny(
        kind="VaultGemma", config=_MODERN | {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 24}
    ),
    "granite_swa": Tiny(
        kind="GraniteSWA",
        config=_MODERN
        | {"num_hidden_layers": 3, "sliding_window": 20, "layer_rope_theta": [1e5, 1e4, 0], "mlp_bias": True}
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "granite_moe_swa": Tiny(
        kind="GraniteMoeSWA",
        config=_MODERN
        | {"intermediate_size": 22, "num_local_experts": 5, "num_experts_per_tok": 3, "shared_intermediate_size": 25}
        | {"sliding_window": 20, "attention_multiplier": 0.2},
    ),
    "flex_olmo": Tiny(
        kind="FlexOlmo",
        config=_MODERN | {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 22, "pad_token_id": 0},
    ),
    "mellum": Tiny(
        kind="Mellum",
        config=_MODERN
        | _EXPERTS
        | {"num_experts": 8, "head_dim": 16, "sliding_window": 20, "mlp_layer_types": ["dense", "sparse"]}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "afmoe": Tiny(
        kind="Afmoe",
        config=_MODERN
        | _EXPERTS
        | {"num_experts": 8, "num_shared_experts": 2, "head_dim": 16, "route_scale": 1.7, "mup_enabled": True}
        | {"sliding_window": 20, "global_attn_every_n_layers": 2, "attention_bias": True},
    ),
    "solar_open": Tiny(
        kind="SolarOpen",
        config={key: value for key, value in _MODERN.items() if key != "intermediate_size"}
        | _EXPERTS
        | {"n_routed_experts": 8, "n_shared_experts": 2, "head_dim": 16, "n_group": 4, "topk_group": 2}
        | {"attention_bias": True, "routed_scaling_factor": 1.7},
    ),
    "hy_v3": Tiny(
        kind="HYV3",
        config=_MODERN
        | _EXPERTS
        | {"num_experts": 8, "num_shared_experts": 2, "head_dim": 16, "attention_bias": True, "mlp_bias": True},
    ),
    "apertus": Tiny(kind="Apertus", config=_MODERN | {"attention_bias": True}),
    "seed_oss": Tiny(kind="SeedOss", config=_MODERN | {"head_dim": 16, "attention_out_bias": True}),
    "nemotron": Tiny(kind="Nemotron", config=_MODERN | {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "helium": Tiny(
        kind="Helium", config=_MODERN | {"head_dim": 8, "attention_bias": True, "mlp_bias": True, "pad_token_id": 0}
    ),
    "exaone4": Tiny(kind="Exaone4", config=_MODERN | {"sliding_window": 20, "sliding_window_pattern": 2}),
    "exaone4_whole": Tiny(
        kind="Exaone4", config=_MODERN | {"sliding_window": None, "layer_types": ["full_attention"] * LAYERS}
    ),
    "exaone_moe": Tiny(
        kind="ExaoneMoe",
        config=_MODERN
        | _EXPERTS
        | {"num_experts": 8, "num_shared_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
        | {"sliding_window": 20, "sliding_window_pattern": 2},
    ),
    "ernie": Tiny(kind="Ernie4_5", config=_MODERN | {"head_dim": 16, "use_bias": True}),
    "ernie_moe": Tiny(
        kind="Ernie4_5_Moe",
        model="Ernie4_5_MoeForCausalLM",
        config=_MODERN
        | {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 21, "moe_num_shared_experts": 2}
        | {"use_bias": True, "moe_layer_start_index": 1},
    ),
    "dots1": Tiny(
        kind="Dots1",
        config=_MODERN
        | _EXPERTS
        | {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        | {"sliding_window": 20, "max_window_layers": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.7},
    ),
    "phimoe": Tiny(
        kind="Phimoe",
        config=_MODERN
        | {"num_local_experts": 5, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.3}
        | {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **_TWO_AMPLITUDES}},
        oracle=by_steps,
    ),
    "hunyuan": Tiny(
        kind="HunYuanDenseV1",
        config=_MODERN
        | {"head_dim": 8, "attention_bias": True, "pad_token_id": 0}
        | _rope("dynamic", alpha=1000.0, factor=1.0),
    ),
    "hunyuan_moe": Tiny(
        kind="HunYuanMoEV1",
        config=_MODERN
        | {"num_experts": 6, "moe_topk": [3, 3], "intermediate_size": 22, "head_dim": 8, "pad_token_id": 0},
    ),
    "minimax_m2": Tiny(
        kind="MiniMaxM2",
        config=_MODERN
        | {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 22, "head_dim": 16, "rotary_dim": 8},
    ),
    "glm4_moe_lite": Tiny(
        kind="Glm4MoeLite",
        config=_LATENT
        | _EXPERTS
        | {"n_routed_experts": 8, "n_shared_experts": 2, "q_lora_rank": 22, "attention_bias": True}
        | {"n_group": 4, "topk_group": 2}
        | _rope("yarn", mscale=1.0, mscale_all_dim=1.0, **_YARN),
    ),
    "granite_moe_shared": Tiny(
        kind="GraniteMoeShared",
        config=_MODERN
        | {"intermediate_size": 22, "num_local_experts": 5, "num_experts_per_tok": 3, "shared_intermediate_size": 25}
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "cohere2_moe": Tiny(
        kind="Cohere2Moe",
        config=_MODERN
        | {"num_hidden_layers": 3, "num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 2, "head_dim": 8}
        | {"intermediate_size": 22, "prefix_dense_intermediate_size": 31, "first_k_dense_replace": 1}
        | {"sliding_window": 20, "sliding_window_pattern": 2},
    ),
    "cohere2_moe_sigmoid": Tiny(
        kind="Cohere2Moe",
        config=_MODERN
        | {"num_experts": 6, "head_dim": 8, "rms_norm_eps": 1e-5, "expert_selection_fn": "sigmoid"}
        | {"num_shared_experts": 1, "shared_expert_combination_strategy": "sum", "sliding_window_pattern": 2},
    ),
    "gpt_oss": Tiny(
        kind="GptOss",
        config=_MODERN
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 22, "head_dim": 16}
        | {"sliding_window": 20, "swiglu_limit": 1.3}
        | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.5e5, "truncate": False, **_YARN}},
    ),
    "gpt_oss_square": Tiny(
        kind="GptOss",
        config=_MODERN
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": HIDDEN, "head_dim": 16}
        | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.5e5, "truncate": False, **_YARN}},
    ),
    "llama4": Tiny(
        kind="Llama4Text",
        model="Llama4ForCausalLM",
        config=_MODERN
        | {"num_hidden_layers": 4, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 22}
        | {"intermediate_size_mlp": 35, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 3, "head_dim": 16}
        | {"attention_chunk_size": 16, "floor_scale": 8, "attn_scale": 0.4, "attention_bias": True},
    ),
    "qwen2": Tiny(
        kind="Qwen2", config=_MODERN | {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    ),
    "qwen3": Tiny(kind="Qwen3", config=_MODERN | {"head_dim": 16}),
    "gemma": Tiny(kind="Gemma", config=_MODERN | {"head_dim": 16}),
    "gemma2": Tiny(kind="Gemma2", config=_MODERN | {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 24}),
    "gemma3": Tiny(
        kind="Gemma3Text",
        model="Gemma3ForCausalLM",
        config=_MODERN
        | {
            "head_dim": 16,
            "sliding_window": 20,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3n": Tiny(kind="Gemma3nText", model="Gemma3nForCausalLM", config=_GEMMA3N),
    "gemma3n_flat": Tiny(
        kind="Gemma3nText",
        model="Gemma3nForCausalLM",
        config=_GEMMA3N | {"num_kv_shared_layers": 0, "altup_correct_scale": False, "intermediate_size": INNER},
    ),
    "gemma4": Tiny(kind="Gemma4Text", model="Gemma4ForCausalLM", config=_GEMMA4),
    "gemma4_shared": Tiny(
        kind="Gemma4Text",
        model="Gemma4ForCausalLM",
        config=_GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "vocab_size_per_layer_input": 288},
    ),
    "gemma4_unified": Tiny(
        kind="Gemma4UnifiedText",
        model="Gemma4UnifiedForCausalLM",
        config={key: value for key, value in _GEMMA4.items() if "per_layer" not in key},
    ),
    "gemma4_moe": Tiny(
        kind="Gemma4Text",
        model="Gemma4ForCausalLM",
        config=_GEMMA4
        | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 21}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0},
    ),
    "phi": Tiny(kind="Phi", config=_MODERN | {"partial_rotary_factor": 0.5}),
    "phi_qk_norm": Tiny(kind="Phi", config=_MODERN | {"qk_layernorm": True}),
    "phi3": Tiny(kind="Phi3", config=_MODERN | {"sliding_window": 24, "pad_token_id": 0}),
    "phi3_longrope": Tiny(
        kind="Phi3",
        config=_MODERN
        | {"pad_token_id": 0, "original_max_position_embeddings": 64}
        | {"rope_scaling": {"type": "longrope", **_LONGROPE}},
        oracle=by_steps,
    ),
    "gpt2": Tiny(kind="GPT2", model="GPT2LMHeadModel", config=_GPT | {"n_inner": INNER}),
    "gpt2_scaled": Tiny(
        kind="GPT2",
        model="GPT2LMHeadModel",
        config=_GPT | {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
    ),
    "gpt_bigcode": Tiny(kind="GPTBigCode", config=_GPT),
    "gpt_bigcode_heads": Tiny(kind="GPTBigCode", config=_GPT | {"multi_query": False}),
    "gptj": Tiny(kind="GPTJ", config=_GPT | {"rotary_dim": 4}),
    "gpt_neo": Tiny(
        kind="GPTNeo",
        config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "max_position_embeddings": CONTEXT,
            "window_size": 20,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    "gpt_neox": Tiny(kind="GPTNeoX", config=_HEADS_ALIKE | {"rotary_pct": 0.25}),
    "gpt_neox_sequential": Tiny(
        kind="GPTNeoX", config=_HEADS_ALIKE | {"use_parallel_residual": False, "rotary_pct": 1.0}
    ),
    "starcoder2": Tiny(kind="Starcoder2", config=_MODERN | {"sliding_window": 24}),
    "opt": Tiny(
        kind="OPT",
        config=_HEADS_ALIKE | {"ffn_dim": INNER, "word_embed_proj_dim": HIDDEN},
    ),
    "opt_350m": Tiny(
        kind="OPT", config=_HEADS_ALIKE | {"ffn_dim": INNER, "word_embed_proj_dim": 24, "do_layer_norm_before": False}
    ),
    "xglm": Tiny(
        kind="XGLM",
        config={
            "vocab_size": VOCAB_SIZE,
            "d_model": HIDDEN,
            "ffn_dim": INNER,
            "num_layers": LAYERS,
            "attention_heads": HEADS,
            "max_position_embeddings": CONTEXT,
        },
    ),
    "bloom": Tiny(
        kind="Bloom", config={"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}
    ),
    "falcon_7b": Tiny(kind="Falcon", config=_HEADS_ALIKE),
    "falcon_40b": Tiny(
        kind="Falcon", config=_HEADS_ALIKE | {"new_decoder_architecture": True, "num_kv_heads": KV_HEADS}
    ),
    "falcon_11b": Tiny(
        kind="Falcon",
        config=_HEADS_ALIKE
        | {"new_decoder_architecture": True, "num_kv_heads": KV_HEADS, "num_ln_in_parallel_attn": 1},
    ),
    "falcon_rw": Tiny(
        kind="Falcon",
        config=_HEADS_ALIKE | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        attention="sdpa",
    ),
    "mpt": Tiny(
        kind="Mpt",
        config={
            "vocab_size": VOCAB_SIZE,
            "d_model": HIDDEN,
            "n_heads": HEADS,
            "n_layers": LAYERS,
            "max_seq_len": CONTEXT,
            "attn_config": {"clip_qkv": 1.0, "softmax_scale": 0.3},
        },
    ),
    "stablelm": Tiny(kind="StableLm", config=_MODERN | {"use_qkv_bias": True}),
    "stablelm_2_12b": Tiny(kind="StableLm", config=_MODERN | {"qk_layernorm": True, "use_parallel_residual": True}),
    "olmo": Tiny(kind="Olmo", config=_MODERN | {"clip_qkv": 1.0}),
    "olmo2": Tiny(kind="Olmo2", config=_MODERN),
    "olmo3": Tiny(
        kind="Olmo3",
        config=_MODERN
        | {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
        | _rope("yarn", **_YARN),
    ),
    "olmo3_flat": Tiny(kind="Olmo3", config=_MODERN | {"num_hidden_layers": 4, "sliding_window": 20}),
    "cohere": Tiny(kind="Cohere", config=_MODERN),
    "cohere_plus": Tiny(kind="Cohere", config=_MODERN | {"use_qk_norm": True}),
    "cohere2": Tiny(
        kind="Cohere2",
        config=_MODERN | {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "granite": Tiny(
        kind="Granite",
        config=_MODERN
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "smollm3": Tiny(kind="SmolLM3", config=_MODERN | {"no_rope_layer_interval": 2}),
    "glm": Tiny(kind="Glm", config=_MODERN | {"head_dim": 8}),
    "glm4": Tiny(kind="Glm4", config=_MODERN | {"head_dim": 8}),
    "mixtral": Tiny(kind="Mixtral", config=_MODERN | {"num_local_experts": 5, "sliding_window": 24}),
    "mixtral_stacked": Tiny(kind="Mixtral", config=_MODERN | {"num_local_experts": 5}, is_stacked=True),
    "qwen2_moe": Tiny(
        kind="Qwen2Moe",
        config=_MODERN
        | _EXPERTS
        | {"mlp_only_layers": [0], "num_experts": 8, "shared_expert_intermediate_size": 25}
        | {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2},
    ),
    "qwen2_moe_stacked": Tiny(
        kind="Qwen2Moe",
        config=_MODERN | _EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 25, "norm_topk_prob": True},
        is_stacked=True,
    ),
    "qwen3_moe": Tiny(
        kind="Qwen3Moe",
        config=_MODERN
        | _EXPERTS
        | {"num_experts": 8, "head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    "olmoe": Tiny(kind="Olmoe", config=_MODERN | {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 22}),
    "granite_moe": Tiny(
        kind="GraniteMoe",
        config=_MODERN
        | {"intermediate_size": 22, "num_local_experts": 5, "num_experts_per_tok": 3}
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "granite_moe_stacked": Tiny(
        kind="GraniteMoe", config=_MODERN | {"intermediate_size": 22, "num_local_experts": 5}, is_stacked=True
    ),
    "glm4_moe": Tiny(
        kind="Glm4Moe",
        config=_MODERN
        | _EXPERTS
        | {"n_routed_experts": 8, "head_dim": 8, "use_qk_norm": True, "attention_bias": True}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.7},
    ),
    "deepseek_v2": Tiny(
        kind="DeepseekV2",
        config=_LATENT
        | _EXPERTS
        | {"n_routed_experts": 12, "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 16.0}
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": 22}
        | {"attention_bias": True, "mlp_bias": True}
        | _rope("yarn", mscale=0.8, mscale_all_dim=0.7, **_YARN),
    ),
    "deepseek_v2_lite": Tiny(
        kind="DeepseekV2",
        config=_LATENT | _EXPERTS | {"n_routed_experts": 8, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v2_stacked": Tiny(
        kind="DeepseekV2", config=_LATENT | _EXPERTS | {"n_routed_experts": 8, "q_lora_rank": None}, is_stacked=True
    ),
    "deepseek_v3": Tiny(
        kind="DeepseekV3",
        config=_LATENT
        | _EXPERTS
        | {"n_routed_experts": 12, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 22}
        | {"n_group": 4, "topk_group": 2}
        | _rope("yarn", mscale=1.0, mscale_all_dim=1.0, **_YARN),
    ),
    "deepseek_v3_halves": Tiny(
        kind="DeepseekV3",
        config=_LATENT
        | _EXPERTS
        | {"n_routed_experts": 8, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_interleave": False}
        | {"norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    "deepseek_v32": Tiny(
        kind="DeepseekV32",
        config=_INDEXED | {"n_group": 4, "topk_group": 2} | _rope("yarn", mscale=1.0, mscale_all_dim=1.0, **_YARN),
    ),
    "glm_moe_dsa": Tiny(
        kind="GlmMoeDsa",
        config=_INDEXED | {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "mistral4": Tiny(
        kind="Mistral4",
        config=_LATENT
        | _EXPERTS
        | {"n_routed_experts": 12, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 22}
        | {"n_group": 4, "topk_group": 2, "attention_bias": True}
        | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "llama_4_scaling_beta": 0.3, **_SHORT_YARN}},
    ),
    "minicpm3": Tiny(
        kind="MiniCPM3",
        config=_LATENT | {"q_lora_rank": 22, "attention_bias": True, "mlp_bias": True, "dim_model_base": 16},
    ),
    "minicpm": Tiny(
        kind="Granite",
        config=_MODERN
        | {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 1.4 / LAYERS**0.5,
            "attention_multiplier": 8**-0.5,
            "logits_scaling": HIDDEN / 16,
        },
        family_config=_MODERN
        | {"architectures": ["MiniCPMForCausalLM"], "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
        | {"tie_word_embeddings": False},
    ),
    "internlm3": Tiny(
        kind="Llama",
        config=_MODERN | {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
        family_config=_MODERN
        | {"architectures": ["InternLM3ForCausalLM"], "head_dim": 16, "qkv_bias": True, "bias": True},
    ),
    "iquestcoder": Tiny(
        kind="Llama",
        config=_MODERN | {"head_dim": 16, "mlp_bias": True, "rms_norm_eps": 1e-5},
        family_config=_MODERN
        | {"architectures": ["IQuestCoderForCausalLM"], "head_dim": 16, "mlp_bias": True, "use_sliding_window": False},
    ),
    "internlm2": Tiny(
        kind="Llama",
        config=_MODERN | {"max_position_embeddings": 64} | _rope("dynamic", factor=2.0),
        family_config=_MODERN
        | {"architectures": ["InternLM2ForCausalLM"], "max_position_embeddings": 64}
        | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        pack=_internlm2,
        oracle=by_steps,
    ),
    "baichuan_7b": Tiny(
        kind="Llama",
        config=_MODERN | {"num_key_value_heads": HEADS},
        family_config=_MODERN | {"architectures": ["BaichuanForCausalLM"], "num_key_value_heads": HEADS},
        pack=_baichuan,
    ),
    "baichuan_13b": Tiny(
        kind="Llama",
        config=_MODERN | {"num_key_value_heads": HEADS},
        family_config={key: value for key, value in _MODERN.items() if key[:3] not in ("num_k", "max")}
        | {"architectures": ["BaichuanForCausalLM"], "num_key_value_heads": HEADS, "model_max_length": CONTEXT},
        pack=_baichuan,
        oracle=_alibi_llama,
    ),
    "chatglm3": Tiny(
        kind="Glm",
        config=_MODERN | {"head_dim": 8, "attention_bias": True, "rope_theta": 5e5, "rms_norm_eps": 1e-5},
        family_config={
            "architectures": ["ChatGLMModel"],
            "padded_vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN,
            "num_layers": LAYERS,
            "num_attention_heads": HEADS,
            "kv_channels": 8,
            "multi_query_attention": True,
            "multi_query_group_num": KV_HEADS,
            "ffn_hidden_size": INNER,
            "seq_length": CONTEXT,
            "rope_ratio": 50,
            "layernorm_epsilon": 1e-5,
            "rmsnorm": True,
            "add_qkv_bias": True,
            "add_bias_linear": False,
            "post_layer_norm": True,
        },
        pack=_chatglm,
    ),
    "qwen1": Tiny(
        kind="Qwen2",
        config=_MODERN | {"num_key_value_heads": HEADS},
        family_config={
            "architectures": ["QWenLMHeadModel"],
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "kv_channels": 8,
            "intermediate_size": 2 * INNER,
            "seq_length": CONTEXT,
            "layer_norm_epsilon": 1e-6,
            "no_bias": True,
        },
        pack=_qwen1,
    ),
}
ZOO |= {
    name: Tiny(
        kind=kind,
        model=_MODELS.get(kind, ""),
        config={**_MODERN, **config},
        oracle=by_told_positions if kind == "Bamba" else at_once,
    )
    for name, (kind, config) in HYBRIDS.items()
}
