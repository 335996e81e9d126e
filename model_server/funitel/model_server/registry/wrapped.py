"""Models for images too: the row of their text model, as `text_config` has it, and how it takes images."""

from collections.abc import Mapping
from dataclasses import replace

from funitel.model_server.registry.decoders import FAMILIES
from funitel.model_server.registry.rules.experts import experts
from funitel.model_server.registry.rules.row import ArchitectureRow, Config, reading_config
from funitel.model_server.spec.model_spec import ModelSpec, RotarySpec, WholeSpans
from funitel.proto.errors import NoRow

_ANY = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
"""Texts of wrappers that take any, of which embeddings are not scaled behind the place where images come in."""
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
    "LlavaForConditionalGeneration": _ANY,
    "LlavaNextForConditionalGeneration": _ANY,
    "LlavaOnevisionForConditionalGeneration": _ANY,
    "InternVLForConditionalGeneration": _ANY,
    "Qwen2AudioForConditionalGeneration": {"qwen2": "Qwen2ForCausalLM"},
    "VoxtralForConditionalGeneration": {"llama": "LlamaForCausalLM"},
    "Idefics3ForConditionalGeneration": _ANY,
    "SmolVLMForConditionalGeneration": _ANY,
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

_UNNAMED_TEXTS: Mapping[str, str] = {
    "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "llama",
    "LlavaOnevisionForConditionalGeneration": "qwen2",
    "InternVLForConditionalGeneration": "qwen2",
    "Qwen2AudioForConditionalGeneration": "qwen2",
    "VoxtralForConditionalGeneration": "llama",
    "Idefics3ForConditionalGeneration": "llama",
    "SmolVLMForConditionalGeneration": "llama",
}
"""What a text_config is that does not say its `model_type`."""

_TIED_BY_TEXT = (
    "LlavaForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
)
"""Wrappers of which the head is tied where either config says so; that of the others where the outer one does."""

_AXES: Mapping[str, tuple[tuple[int, int, int], bool]] = {
    "Qwen2VLForConditionalGeneration": ((16, 24, 24), False),
    "Qwen2_5_VLForConditionalGeneration": ((16, 24, 24), False),
    "Qwen3VLForConditionalGeneration": ((24, 20, 20), True),
    "Qwen3VLMoeForConditionalGeneration": ((24, 20, 20), True),
    "Qwen3_5ForConditionalGeneration": ((11, 11, 10), True),
    "Qwen3_5MoeForConditionalGeneration": ((11, 11, 10), True),
}
"""Rotary sections where the config does not say, and whether they are mixed."""

_OTHERS = (
    r"^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|audio_tower|connector|image_newline"
    r"|(embed|vision)_[a-z]+)(\.|$)"
)


def text_of(architecture: str, config: Config) -> Config:
    """The config of the text model, which may be one with the whole. Raises: `NoRow`: there is no row for it."""
    text = config.get("text_config") or config
    kind = text.get("model_type") or (None if text is config else _UNNAMED_TEXTS.get(architecture))
    row = WRAPPED[architecture].get(kind or "")
    if row is None:
        message = f"{architecture} with a text_config of model_type {text.get('model_type')!r} is not supported"
        raise NoRow(message, why="no row of the table is for its text")
    tied = {} if config.get("tie_word_embeddings") is None else {"tie_word_embeddings": config["tie_word_embeddings"]}
    if architecture in _TIED_BY_TEXT and text.get("tie_word_embeddings"):
        tied = {}
    return {**text, **tied, **_plain_positions(text), "architectures": [row]}


def _plain_positions(text: Config) -> Config:
    """The rotary positions without the name of a kind that differs by its axes alone."""
    given = {key: text[key] for key in ("rope_parameters", "rope_scaling") if isinstance(text.get(key), dict)}
    kinds = {key: value.get("rope_type") or value.get("type") for key, value in given.items()}
    return {key: {**given[key], "rope_type": "default"} for key, kind in kinds.items() if kind == "mrope"}


def wrapped(spec: ModelSpec, architecture: str, text: Config) -> ModelSpec:
    """The spec of a text model as that of the model that holds it: its other tensors are left aside.

    Raises:
        UnsupportedModel: a field of the text's config has a value of the wrong kind.
    """
    names = replace(spec.names, ignored=(*spec.names.ignored, _OTHERS))
    held = replace(spec, architecture=architecture, names=names, whole_spans=_whole_spans(architecture, text))
    if architecture not in _AXES:
        return held
    with reading_config(architecture):
        return replace(held, rotary=_by_axes(spec.rotary, spec.head_dim, text, *_AXES[architecture]))


def _by_axes(rotary: RotarySpec, head_dim: int, text: Config, sections: tuple[int, ...], is_mixed: bool) -> RotarySpec:
    given = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = tuple(int(each) for each in given.get("mrope_section") or sections)
    if is_mixed:  # rows and columns as far as there are pairs, frames the others
        num_pairs = (rotary.dims or head_dim) // 2
        rows, columns = (len(range(axis, min(3 * sections[axis], num_pairs), 3)) for axis in (1, 2))
        sections = (num_pairs - rows - columns, rows, columns)
    return replace(rotary, sections=sections, has_mixed_sections=is_mixed)


def _whole_spans(architecture: str, text: Config) -> WholeSpans:
    """Source: the masks of Gemma 3 and 4 in transformers."""
    if architecture == "Gemma3ForConditionalGeneration":
        return WholeSpans.ALL
    default = "vision" if architecture == "Gemma4UnifiedForConditionalGeneration" else None
    is_of_gemma4 = architecture.startswith("Gemma4")
    is_whole = is_of_gemma4 and text.get("use_bidirectional_attention", default) == "vision"
    return WholeSpans.WINDOWS if is_whole else WholeSpans.NONE
