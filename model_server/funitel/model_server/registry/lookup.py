"""Look up the ModelSpec of a checkpoint: a JSON file that a user wrote, else the row of its architecture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from funitel.model_server.files.gguf_refusal import refuse_described
from funitel.model_server.files.integrity import read_json
from funitel.model_server.registry.decoders import FAMILIES
from funitel.model_server.registry.nearest import nearest_row
from funitel.model_server.registry.rules.row import (
    NUM_HEADS_KEYS,
    NUM_LAYERS_KEYS,
    ArchitectureRow,
    Config,
    reading_config,
)
from funitel.model_server.registry.unread_fields import read_by
from funitel.model_server.registry.wrapped import TEXTS, WRAPPED, text_of, wrapped
from funitel.model_server.spec.json_file import check_types, read_spec
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.proto.errors import NoRow, UnsupportedModel

_Defaults = Mapping[str, Any]


def _sizes(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, context: int, kv_heads: int | None = None
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": context,
        "num_key_value_heads": kv_heads,
    }


def _gpt(vocab: int, hidden: int, layers: int, heads: int, context: int) -> dict[str, Any]:
    return {"vocab_size": vocab, "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": context}


def _experts(count: int, chosen: int | None = None, size: int | None = None) -> dict[str, Any]:
    given = {"n_routed_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": size}
    return {key: value for key, value in given.items() if value is not None}


_QWEN = {"sliding_window": 4096, "max_window_layers": 28}
_GEMMA2 = {"head_dim": 256, "query_pre_attn_scalar": 256}
_GEMMA2_CAPPED = _GEMMA2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GLM = _sizes(151552, 4096, 13696, 40, 32, 131072, 2) | {
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
}
_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

_MINISTRAL_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_MISTRAL4_ROPE = _MINISTRAL_ROPE | {"rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}
_APERTUS_ROPE = {"rope_type": "llama3", "rope_theta": 1.2e7, "factor": 8.0, "original_max_position_embeddings": 8192}
_DELTA_NET = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MAMBA2 = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2}
_MAMBA = {"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 32, "state_size": 16, "conv_kernel": 4}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}

# What the architecture's class in transformers takes for fields that a `config.json` leaves out; one that is there and
# null is not left out. Named are those for which a rule of the row would take something else; each by the name that
# rules read last, so that one given by another name of it counts. The tests hold these against transformers.
CLASS_DEFAULTS: Mapping[str, _Defaults] = {
    "LlamaForCausalLM": _sizes(32000, 4096, 11008, 32, 32, 2048),
    "MistralForCausalLM": _sizes(32000, 4096, 14336, 32, 32, 131072, 8),
    "MinistralForCausalLM": _sizes(32000, 4096, 14336, 32, 32, 131072, 8),
    "Ministral3ForCausalLM": _sizes(131072, 4096, 14336, 34, 32, 262144, 8)
    | {"head_dim": 128, "rope_scaling": _MINISTRAL_ROPE},
    "ArceeForCausalLM": _sizes(32000, 2560, 18432, 32, 32, 4096),
    "Jais2ForCausalLM": _sizes(150272, 3328, 26624, 32, 26, 8192),
    "ApertusForCausalLM": _sizes(131072, 4096, 14336, 32, 32, 65536) | {"rope_scaling": _APERTUS_ROPE},
    "SeedOssForCausalLM": _sizes(155136, 4096, 27648, 64, 80, 524288, 8) | {"head_dim": 128},
    "NemotronForCausalLM": _sizes(256000, 6144, 24576, 32, 48, 4096),
    "HeliumForCausalLM": _sizes(48000, 2560, 7040, 24, 20, 4096, 20) | {"head_dim": 128},
    "Exaone4ForCausalLM": _sizes(102400, 4096, 16384, 32, 32, 2048, 32),
    "ExaoneMoeForCausalLM": _sizes(102400, 4096, 16384, 32, 32, 2048, 32) | _experts(64, 8, 1024),
    "Ernie4_5ForCausalLM": _sizes(103424, 1024, 3072, 18, 16, 131072, 2) | {"head_dim": 128},
    "Ernie4_5_MoeForCausalLM": _sizes(103424, 2560, 12288, 28, 20, 131072, 4)
    | {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536},
    "Dots1ForCausalLM": _sizes(152064, 4608, 10944, 62, 32, 2048, 32)
    | {"moe_intermediate_size": 1408, "sliding_window": 4096, "max_window_layers": 62},
    "PhimoeForCausalLM": _sizes(32064, 4096, 6400, 32, 32, 131072, 8) | _experts(16),
    "HunYuanDenseV1ForCausalLM": _sizes(290943, 4096, 11008, 32, 32, 2048),
    "HunYuanMoEV1ForCausalLM": _sizes(290943, 4096, 11008, 32, 32, 2048),
    "MiniMaxForCausalLM": _sizes(32000, 4096, 14336, 32, 32, 131072, 8)
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "MiniMaxM2ForCausalLM": _sizes(200064, 3072, 1536, 62, 48, 196608, 8) | {"head_dim": 128} | _experts(256, 8),
    "Glm4MoeLiteForCausalLM": _sizes(154880, 2048, 10240, 47, 20, 202752, 20)
    | _experts(64, 4, 1536)
    | {"kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256},
    "GptOssForCausalLM": _sizes(201088, 2880, 2880, 36, 64, 131072, 8)
    | {"head_dim": 64, "rope_scaling": _GPT_OSS_ROPE}
    | _experts(128, 4),
    "Llama4ForCausalLM": _sizes(202048, 5120, 8192, 48, 40, 131072, 8)
    | {"head_dim": 128, "intermediate_size_mlp": 16384}
    | _experts(16, 1),
    "Cohere2MoeForCausalLM": _sizes(256000, 8192, 22528, 40, 64, 8192)
    | {"head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2},
    "Qwen2ForCausalLM": _sizes(151936, 4096, 22016, 32, 32, 32768, 32) | _QWEN,
    "Qwen3ForCausalLM": _sizes(151936, 4096, 22016, 32, 32, 32768, 32) | _QWEN | {"head_dim": 128},
    "GemmaForCausalLM": _sizes(256000, 3072, 24576, 28, 16, 8192, 16) | {"head_dim": 256},
    "Gemma2ForCausalLM": _sizes(256000, 2304, 9216, 26, 8, 8192, 4) | _GEMMA2_CAPPED,
    "VaultGemmaForCausalLM": _sizes(256000, 2304, 9216, 26, 8, 8192, 4) | _GEMMA2_CAPPED,
    "Gemma3ForCausalLM": _sizes(262208, 2304, 9216, 26, 8, 131072, 4) | _GEMMA2,
    "Gemma3nForCausalLM": _sizes(262400, 2048, 16384, 35, 8, 32768, 2) | {"head_dim": 256},
    "Gemma4ForCausalLM": _sizes(262144, 2304, 9216, 30, 8, 131072, 4) | {"head_dim": 256},
    "Gemma4UnifiedForCausalLM": _sizes(262144, 2304, 9216, 30, 8, 262144, 4) | {"head_dim": 256},
    "PhiForCausalLM": _sizes(51200, 2048, 8192, 24, 32, 2048) | {"layer_norm_eps": 1e-5},
    "Phi3ForCausalLM": _sizes(32064, 3072, 8192, 32, 32, 4096)
    | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "GPT2LMHeadModel": _gpt(50257, 768, 12, 12, 1024),
    "GPTBigCodeForCausalLM": _gpt(50257, 768, 12, 12, 1024),
    "GPTJForCausalLM": _gpt(50400, 4096, 28, 16, 2048),
    "GPTNeoForCausalLM": {
        "vocab_size": 50257,
        "hidden_size": 2048,
        "num_layers": 24,
        "num_heads": 16,
        "max_position_embeddings": 2048,
        "attention_types": [[["global", "local"], 12]],
    },
    "GPTNeoXForCausalLM": _sizes(50432, 6144, 24576, 44, 64, 2048) | {"layer_norm_eps": 1e-5},
    "Starcoder2ForCausalLM": _sizes(49152, 3072, 12288, 30, 24, 4096, 2),
    "OPTForCausalLM": {
        "vocab_size": 50272,
        "hidden_size": 768,
        "ffn_dim": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
    },
    "XGLMForCausalLM": {
        "vocab_size": 256008,
        "d_model": 1024,
        "ffn_dim": 4096,
        "num_layers": 24,
        "attention_heads": 16,
        "max_position_embeddings": 2048,
    },
    "BloomForCausalLM": {"vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8},
    "FalconForCausalLM": {"vocab_size": 65024, "hidden_size": 4544, "n_layer": 32, "n_head": 71},
    "MptForCausalLM": {"vocab_size": 50368, "d_model": 2048, "n_layers": 24, "n_heads": 16, "max_seq_len": 2048},
    "StableLmForCausalLM": _sizes(50304, 2560, 6912, 32, 32, 4096, 32),
    "OlmoForCausalLM": _sizes(50304, 4096, 11008, 32, 32, 2048),
    "Olmo2ForCausalLM": _sizes(50304, 4096, 11008, 32, 32, 2048),
    "Olmo3ForCausalLM": _sizes(50304, 4096, 11008, 32, 32, 2048),
    "CohereForCausalLM": _sizes(256000, 8192, 22528, 40, 64, 8192) | {"rope_theta": 5e5},
    "Cohere2ForCausalLM": _sizes(256000, 8192, 22528, 40, 64, 8192),
    "GraniteForCausalLM": _sizes(32000, 4096, 11008, 32, 32, 2048),
    "SmolLM3ForCausalLM": _sizes(128256, 2048, 11008, 36, 16, 32768, 4) | {"rope_theta": 2e6},
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": _GLM,
    "MixtralForCausalLM": _sizes(32000, 4096, 14336, 32, 32, 131072, 8) | _experts(8, 2) | {"rope_theta": 1e6},
    "Qwen2MoeForCausalLM": _sizes(151936, 2048, 5632, 24, 16, 32768, 16)
    | _experts(60, 4, 1408)
    | _QWEN
    | {"shared_expert_intermediate_size": 5632},
    "Qwen3MoeForCausalLM": _sizes(151936, 2048, 6144, 24, 32, 32768, 4) | _experts(128, 8, 768) | _QWEN,
    "Qwen3VLMoeTextModel": _sizes(151936, 2048, 5632, 24, 16, 128000, 16)
    | _experts(60, 4, 1408)
    | {"rope_theta": 5e5, "tie_word_embeddings": True},
    "OlmoeForCausalLM": _sizes(50304, 2048, 2048, 16, 16, 4096) | _experts(64, 8),
    "GraniteMoeForCausalLM": _sizes(32000, 4096, 11008, 32, 32, 2048) | _experts(8, 2),
    "GraniteMoeSharedForCausalLM": _sizes(32000, 4096, 11008, 32, 32, 2048) | _experts(8, 2),
    "GraniteMoeSWAForCausalLM": _sizes(32000, 4096, 11008, 32, 32, 2048) | _experts(8, 2),
    "GraniteSWAForCausalLM": _sizes(100352, 2560, 8192, 24, 20, 8192, 4),
    "AfmoeForCausalLM": _sizes(200192, 2048, 6144, 32, 16, 16384) | {"head_dim": 128} | _experts(64, 6, 1408),
    "FlexOlmoForCausalLM": _sizes(100352, 4096, 11008, 32, 32, 4096) | _experts(7, 5),
    "MellumForCausalLM": _sizes(98304, 2304, 7168, 28, 32, 131072, 4) | {"head_dim": 128} | _experts(64, 8, 896),
    "SolarOpenForCausalLM": _sizes(196608, 4096, 1280, 48, 64, 131072, 8) | {"head_dim": 128} | _experts(128, 8, 1280),
    "HYV3ForCausalLM": _sizes(120832, 4096, 13312, 80, 64, 131072, 8) | {"head_dim": 128} | _experts(192, 8, 1536),
    "Mistral4ForCausalLM": _sizes(131072, 4096, 12288, 36, 32, 1048576, 32)
    | _experts(128, 4, 2048)
    | {"kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128}
    | {"n_shared_experts": 1, "rope_scaling": _MISTRAL4_ROPE},
    "MiniCPM3ForCausalLM": _sizes(73448, 2560, 6400, 62, 40, 32768, 40)
    | {"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32},
    "DeepseekV2ForCausalLM": _sizes(102400, 4096, 11008, 32, 32, 2048)
    | _experts(64, size=1407)
    | _LATENT
    | {"n_shared_experts": 2},
    "DeepseekV3ForCausalLM": _sizes(129280, 7168, 18432, 61, 128, 4096, 128)
    | _experts(256, 8, 2048)
    | _LATENT
    | {"n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3},
    "KimiLinearForCausalLM": _sizes(163840, 2304, 9216, 27, 32, 1048576, 32)
    | {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    | {"num_local_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "n_shared_experts": 1}
    | {"routed_scaling_factor": 2.446, "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4},
    "Qwen3NextForCausalLM": _sizes(151936, 2048, 5632, 48, 16, 32768, 2)
    | _experts(512, 10, 512)
    | {"head_dim": 256, "shared_expert_intermediate_size": 512}
    | _DELTA_NET,
    "Qwen3_5ForCausalLM": _sizes(248320, 4096, 12288, 32, 16, 32768, 4) | {"head_dim": 256} | _DELTA_NET,
    "Qwen3_5MoeForCausalLM": _sizes(248320, 2048, 512, 40, 16, 32768, 2)
    | _experts(256, 8, 512)
    | {"head_dim": 256, "shared_expert_intermediate_size": 512}
    | _DELTA_NET,
    "Lfm2ForCausalLM": _sizes(65536, 2560, 12288, 32, 32, 128000, 8) | {"conv_L_cache": 3},
    "Lfm2MoeForCausalLM": _sizes(65536, 2048, 7168, 32, 32, 128000, 8)
    | _experts(32, 4, 1792)
    | {"num_dense_layers": 2, "conv_L_cache": 3},
    "GraniteMoeHybridForCausalLM": _sizes(32000, 4096, 11008, 32, 32, 2048)
    | _experts(8, 2)
    | {"shared_intermediate_size": 1024}
    | _MAMBA2,
    "BambaForCausalLM": _sizes(128000, 4096, 14336, 32, 32, 262144, 8) | _MAMBA2,
    "FalconH1ForCausalLM": _sizes(128000, 4096, 14336, 32, 32, 8192, 8) | _MAMBA2 | {"mamba_d_ssm": 1024},
    "Mamba2ForCausalLM": {"vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128}
    | {"head_dim": 64, "state_size": 128, "conv_kernel": 4, "n_groups": 8},
    "MambaForCausalLM": _MAMBA,
    "FalconMambaForCausalLM": _MAMBA,
    "JambaForCausalLM": _sizes(65536, 4096, 14336, 32, 32, 262144, 8)
    | {"num_experts": 16, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1}
    | {"attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2},
    "OlmoHybridForCausalLM": _sizes(100352, 3840, 11008, 32, 30, 65536) | {"linear_conv_kernel_dim": 4},
    "NemotronHForCausalLM": _sizes(131072, 4096, 21504, 4, 32, 4096, 8)
    | _experts(8, 2, 7688)
    | {"head_dim": 128, "moe_shared_expert_intermediate_size": 7688, "ssm_state_size": 128, "mamba_num_heads": 128}
    | {"mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4},
    "DeepseekV32ForCausalLM": _sizes(129280, 7168, 18432, 61, 128, 163840, 128)
    | _experts(256, 8, 2048)
    | _LATENT
    | {"n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
    "GlmMoeDsaForCausalLM": _sizes(154880, 6144, 12288, 78, 64, 202752, 64)
    | _experts(256, 8, 2048)
    | _LATENT
    | {"q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5}
    | {"n_shared_experts": 1, "routed_scaling_factor": 2.5},
    "Glm4MoeForCausalLM": _sizes(151552, 4096, 10944, 46, 96, 131072, 8)
    | _experts(128, 8, 1408)
    | {"n_shared_experts": 1, "first_k_dense_replace": 1},
}


NUM_KV_HEADS_KEYS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", *NUM_HEADS_KEYS)


def spec_of(config: Config) -> ModelSpec:
    """Derive the spec of a checkpoint from its `config.json`. A field left out means what transformers takes for it.

    Raises:
        NoRow: the architecture, or a choice it makes, is in no row of the table.
        UnsupportedModel: a field is missing, or has a value of the wrong kind.
    """
    architectures = config.get("architectures") or []
    holder = next((name for name in architectures if name in WRAPPED), None)
    if holder is not None:
        text = text_of(holder, config)
        return _checked(wrapped(_spec_of(text, {**FAMILIES, **TEXTS}), holder, text), text)
    return _spec_of(config, FAMILIES)


def _spec_of(config: Config, rows: Mapping[str, ArchitectureRow]) -> ModelSpec:
    architectures = config.get("architectures") or []
    architecture = next((name for name in architectures if name in rows), None)
    if architecture is None:
        raise NoRow(
            f"architecture {', '.join(map(str, architectures)) or 'not named in config.json'} is not supported: "
            f"{_alternative(nearest_row(config))}",
            why="no row of the table is for it",
        )
    with reading_config(architectures[0]):
        try:
            defaults = CLASS_DEFAULTS.get(architecture)
            known = config if defaults is None else {**defaults, **read_by(architecture, config)}
            spec = rows[architecture].spec(known)
        except UnsupportedModel as error:
            raise NoRow(error.message) from error
    return _checked(spec, config)


def _checked(spec: ModelSpec, config: Config) -> ModelSpec:
    try:
        check_types(spec)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"config.json of {spec.architecture}: {_as_written(error.message, config)}") from error
    return spec


def _alternative(nearest: str) -> str:
    """What to do about a model of which no row is, but one is near."""
    return (
        f"the nearest of {len(FAMILIES)} rows (docs/models.md) is {nearest}; if the model differs by values only, "
        f"funitel spec show MODEL --architecture {nearest} prints a spec to edit, and --model-spec serves it"
    )


def holds_more_than_text(spec: ModelSpec) -> bool:
    """Whether the checkpoint of a spec is one of a model for images too, of which the spec describes the text."""
    return spec.architecture in WRAPPED


def _as_written(message: str, config: Config) -> str:
    """A message that begins with a field of a spec, with the name in front that the config has for it, if another."""
    field = message.partition(" ")[0].partition("[")[0]
    keys = {"num_layers": NUM_LAYERS_KEYS, "num_heads": NUM_HEADS_KEYS, "num_kv_heads": NUM_KV_HEADS_KEYS}
    written = next((key for key in keys.get(field, ()) if config.get(key) is not None), field)
    return message if written == field else f"{written}: {message}"


def choose_spec(model_spec: str | None, folder: Path) -> ModelSpec:
    """The spec that a user wrote, else the one of the checkpoint's architecture. Raises: `StartupError`."""
    if model_spec is not None:
        return read_spec(Path(model_spec))
    refuse_described(folder)
    return spec_of(read_json(folder / "config.json"))
