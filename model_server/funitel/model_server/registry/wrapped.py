"""Models for images too, of which the text model is served: the row of the text, as `text_config` has it."""

from collections.abc import Mapping
from dataclasses import replace

from funitel.model_server.registry.decoders import FAMILIES
from funitel.model_server.registry.rules.experts import experts
from funitel.model_server.registry.rules.row import ArchitectureRow, Config
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.proto.errors import NoRow

WRAPPED: Mapping[str, Mapping[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Llama4ForConditionalGeneration": {"llama4_text": "Llama4ForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral": "MinistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral4": "Mistral4ForCausalLM",
    },
    "Qwen2VLForConditionalGeneration": dict.fromkeys(("qwen2_vl_text", "qwen2_vl"), "Qwen2ForCausalLM"),
    "Qwen2_5_VLForConditionalGeneration": dict.fromkeys(("qwen2_5_vl_text", "qwen2_5_vl"), "Qwen2ForCausalLM"),
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    "Qwen3VLMoeForConditionalGeneration": {"qwen3_vl_moe_text": "Qwen3VLMoeTextModel"},
    "Gemma3nForConditionalGeneration": {"gemma3n_text": "Gemma3nForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
}
"""Architecture -> the row of its text, by the `model_type` of that."""

_QWEN3_MOE = FAMILIES["Qwen3MoeForCausalLM"]
TEXTS: Mapping[str, ArchitectureRow] = {
    "Qwen3VLMoeTextModel": replace(
        _QWEN3_MOE,
        fields={**_QWEN3_MOE.fields, "experts": experts(is_normalized=True), "sliding_windows": ()},
        names={"is_stack_transposed": True},
    ),
}
"""Rows of texts that there are in models for images only."""

_OTHERS = r"^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|audio_tower|(embed|vision)_[a-z]+)\."


def text_of(architecture: str, config: Config) -> Config:
    """The config of the text model, which may be one with the whole. Raises: `NoRow`: there is no row for it."""
    text = config.get("text_config") or config
    row = WRAPPED[architecture].get(text.get("model_type") or "")
    if row is None:
        message = f"{architecture} with a text_config of model_type {text.get('model_type')!r} is not supported"
        raise NoRow(message, why="no row of the table is for its text")
    outer = {key: config[key] for key in ("tie_word_embeddings",) if config.get(key) is not None}
    return {**outer, **text, **_plain_positions(text), "architectures": [row]}


def _plain_positions(text: Config) -> Config:
    """The rotary positions where those of images are told apart: of text all three are the same."""
    given = {key: text[key] for key in ("rope_parameters", "rope_scaling") if isinstance(text.get(key), dict)}
    kinds = {key: value.get("rope_type") or value.get("type") for key, value in given.items()}
    return {key: {**given[key], "rope_type": "default"} for key, kind in kinds.items() if kind == "mrope"}


def wrapped(spec: ModelSpec, architecture: str) -> ModelSpec:
    """The spec of a text model as that of the model that holds it: its other tensors are left aside."""
    return replace(spec, architecture=architecture, names=replace(spec.names, ignored=(*spec.names.ignored, _OTHERS)))
