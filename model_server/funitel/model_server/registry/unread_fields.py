"""Leave out of a config.json what rules of the table would read and the architecture's class in transformers does not.

Such a field changes nothing in transformers, so it changes nothing here. The tests hold the table against its classes.
"""

from collections.abc import Mapping

from funitel.model_server.registry.rules.row import Config

_GPT = ("GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTJForCausalLM")
_GATED_EXPERTS = (
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Mistral4ForCausalLM",
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
)
_ROUTED_EXPERTS = (*_GATED_EXPERTS, "Dots1ForCausalLM", "SolarOpenForCausalLM")
_QWEN_EXPERTS = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3VLMoeTextModel")
_COHERE = ("CohereForCausalLM", "Cohere2ForCausalLM", "Cohere2MoeForCausalLM")
_EXAONE = ("Exaone4ForCausalLM", "ExaoneMoeForCausalLM")

_READERS: Mapping[str, tuple[str, ...]] = {
    "decoder_sparse_step": _QWEN_EXPERTS,
    "first_k_dense_replace": (*_GATED_EXPERTS, "ExaoneMoeForCausalLM", "Dots1ForCausalLM", "Cohere2MoeForCausalLM"),
    "kv_channels": (),
    "layer_norm_eps": (*_COHERE, "PhiForCausalLM", "GPTNeoXForCausalLM", "StableLmForCausalLM", "Jais2ForCausalLM"),
    "layer_norm_epsilon": (
        *_GPT,
        "GPTNeoForCausalLM",
        "BloomForCausalLM",
        "FalconForCausalLM",
        "MptForCausalLM",
        "NemotronHForCausalLM",
    ),
    "mlp_only_layers": _QWEN_EXPERTS,
    "n_embed": ("BloomForCausalLM", "FalconForCausalLM"),
    "n_routed_experts": (*_ROUTED_EXPERTS, "NemotronHForCausalLM"),
    "n_shared_experts": _ROUTED_EXPERTS,
    "norm_epsilon": ("Starcoder2ForCausalLM",),
    "rotary_emb_base": ("GPTNeoXForCausalLM",),
    "rotary_pct": ("GPTNeoXForCausalLM",),
    "routed_scaling_factor": (
        *_ROUTED_EXPERTS,
        "ExaoneMoeForCausalLM",
        "Lfm2MoeForCausalLM",
        "NemotronHForCausalLM",
    ),
    "sliding_window_pattern": (*_EXAONE, "Cohere2ForCausalLM", "Cohere2MoeForCausalLM", "Gemma3ForCausalLM"),
    "use_sliding_window": (
        *_QWEN_EXPERTS,
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "SmolLM3ForCausalLM",
    ),
}
"""Fields that few classes read, and these."""

_STRANGERS: Mapping[str, tuple[str, ...]] = {
    "layer_types": (
        "MistralForCausalLM",
        "Ministral3ForCausalLM",
        "MixtralForCausalLM",
        "Phi3ForCausalLM",
        "PhimoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "Starcoder2ForCausalLM",
    ),
    "max_position_embeddings": ("MptForCausalLM",),
    "mlp_bias": ("Glm4MoeLiteForCausalLM", "DeepseekV3ForCausalLM", "Mistral4ForCausalLM"),
    "moe_intermediate_size": (
        "PhimoeForCausalLM",
        "MiniMaxM2ForCausalLM",
        "GraniteMoeForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "GraniteMoeSWAForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "FlexOlmoForCausalLM",
        "GptOssForCausalLM",
        "MixtralForCausalLM",
        "OlmoeForCausalLM",
    ),
    "n_embd": ("XGLMForCausalLM", "MptForCausalLM"),
    "n_head": ("GPTNeoForCausalLM", "XGLMForCausalLM", "MptForCausalLM"),
    "n_heads": ("GPTNeoForCausalLM", "XGLMForCausalLM"),
    "n_layer": ("GPTNeoForCausalLM", "XGLMForCausalLM", "MptForCausalLM"),
    "n_layers": ("GPTNeoForCausalLM", "XGLMForCausalLM"),
    "n_positions": ("MptForCausalLM",),
    "num_key_value_heads": (
        "GPT2LMHeadModel",
        "GPTJForCausalLM",
        "GPTNeoForCausalLM",
        "GPTNeoXForCausalLM",
        "OPTForCausalLM",
        "XGLMForCausalLM",
        "BloomForCausalLM",
        "MptForCausalLM",
    ),
    "num_local_experts": ("DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM"),
    "rms_norm_eps": ("PhiForCausalLM", "GPTNeoXForCausalLM"),
    "rope_interleave": ("DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
}
"""Fields that most classes read, and those that do not."""


def read_by(architecture: str, config: Config) -> Config:
    """The fields of a config that the class of an architecture in transformers reads, of those that rules know."""
    return {key: value for key, value in config.items() if _is_read(architecture, key)}


def _is_read(architecture: str, key: str) -> bool:
    return architecture in _READERS.get(key, (architecture,)) and architecture not in _STRANGERS.get(key, ())
