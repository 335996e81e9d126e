"""A custom model in Xinference's JSON, as a registration: each of its specs is a variant.

What describes the model for readers is kept in the definition; what cannot be honoured is refused with a reason.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from funitel.launcher.control_plane.checks import Fields, local_place, wrong
from funitel.launcher.control_plane.records import ModelType, Registration
from funitel.proto.errors import InvalidRequest
from funitel.router.settings import TOOL_CALL_PARSERS

ABILITIES = ("embed", "generate", "chat", "tools", "reasoning", "hybrid")
OTHER_ABILITIES = ("vision", "audio", "omni")
FORMATS = ("pytorch", "gptq", "awq", "fp8", "ggufv2")
OTHER_FORMATS = ("mlx", "bnb", "fp4")
MAX_CONTEXT, MAX_TOKEN_ID, MAX_DIMENSIONS = 2**31 - 1, 2**32 - 1, 1 << 20
_TOOL_PARSERS: Mapping[str, str] = {
    "qwen": "hermes",
    "llama3": "llama3_json",
    "deepseek-v3": "deepseek_v3",
    "deepseek-v3.1": "deepseek_v31",
    "glm4": "glm45",
    "minimax": "minimax_m2",
}
"""Xinference's names of parsers that differ from ours."""
_THINK = ("<think>", "</think>")


def of_xinference(type: str, definition: Mapping[str, Any]) -> Registration:
    """The registration; raises InvalidRequest with the field as `param`."""
    given = Fields(definition)
    name = given.required("model_name")
    given.whole("version", 1, 2)
    description = given.text_of_lines("model_description") or ""
    settings: dict[str, Any] = {}
    context_length, template = None, None
    if type == ModelType.LLM:
        settings, context_length, template = _llm(given)
    else:
        context_length = _encoder(given, type)
    _refuse(given, "virtualenv", "a model has no Python environment of its own")
    _refuse(given, "cache_config", "the KV cache is set by flags of serve, in `settings` of our own form")
    for ignored in ("model_family", "is_builtin", "architectures", "model_hub"):  # they describe
        given.raw(ignored)
    specs = given.raw("model_specs")
    if not isinstance(specs, list) or not specs:
        raise wrong("model_specs", "must be a list with at least one spec", specs)
    variants = [variant for index, each in enumerate(specs) for variant in _variants(each, f"model_specs[{index}]")]
    given.finish()
    return Registration(
        type=type,
        name=name,
        model=variants[0]["model"],
        variants=tuple(variants),
        description=description,
        context_length=context_length,
        chat_template=template,
        settings=settings,
    )


def _llm(given: Fields) -> tuple[dict[str, Any], int | None, str | None]:
    """Flags, context length and chat template of an LLM."""
    settings: dict[str, Any] = {}
    given.texts("model_lang")
    for index, ability in enumerate(given.texts("model_ability") or ()):
        field = f"model_ability[{index}]"
        if ability in OTHER_ABILITIES:
            raise wrong(field, "is not served: models read and write text", ability)
        if ability not in ABILITIES:
            raise wrong(field, f"must be one of {', '.join(ABILITIES)}", ability)
    if stop := given.texts("stop"):
        settings["default_stop"] = stop
    ids = given.raw("stop_token_ids")
    if ids is not None and not (isinstance(ids, list) and all(_is_token_id(each) for each in ids)):
        raise wrong("stop_token_ids", "must be a list of token ids", ids)
    if ids:
        settings["default_stop_token_ids"] = ids
    tags = given.text("reasoning_start_tag"), given.text("reasoning_end_tag")
    if tags not in ((None, None), _THINK):
        raise wrong("reasoning_start_tag", f"and reasoning_end_tag must be {' and '.join(_THINK)}", tags)
    if tags == _THINK:
        settings["reasoning_parser"] = "think"
    if (parser := given.text("tool_parser")) is not None:
        known = _TOOL_PARSERS.get(parser, parser)
        if known not in TOOL_CALL_PARSERS:
            raise wrong("tool_parser", f"must be one of {', '.join((*_TOOL_PARSERS, *TOOL_CALL_PARSERS))}", parser)
        settings["tool_call_parser"] = known
    return settings, given.whole("context_length", 1, MAX_CONTEXT), given.text_of_lines("chat_template")


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN_ID


def _encoder(given: Fields, type: str) -> int | None:
    """The most tokens of a text, of a model that computes embeddings or ranks."""
    given.texts("language")
    if type == ModelType.EMBEDDING:
        given.whole("dimensions", 1, MAX_DIMENSIONS)
    elif (kind := given.text("type")) not in (None, "normal", "unknown"):
        raise wrong("type", "must be normal: other rerankers are not served", kind)
    return given.whole("max_tokens", 1, MAX_CONTEXT)


def _refuse(given: Fields, name: str, reason: str) -> None:
    """Refuse a field that asks for something."""
    if value := given.raw(name):
        raise wrong(given.path(name), f"cannot be honoured: {reason}", value)


def _variants(body: Any, path: str) -> Iterator[dict[str, Any]]:
    """The variants of a spec: one for each quantization that it lists."""
    given = Fields(body, path)
    form = given.required("model_format")
    if form not in FORMATS:
        rule = "is not served" if form in OTHER_FORMATS else f"must be one of {', '.join(FORMATS)}"
        raise wrong(given.path("model_format"), rule, form)
    size = given.raw("model_size_in_billions")
    if size is not None and (isinstance(size, bool) or not isinstance(size, (int, float, str))):
        raise wrong(given.path("model_size_in_billions"), 'must be a number, or a text such as "1_8"', size)
    given.raw("activated_size_in_billions")  # it describes
    quantizations = given.texts("quantizations") or [given.text("quantization") or "none"]
    settings: dict[str, Any] = {} if form in ("pytorch", "ggufv2") else {"quantize": form}
    if (revision := given.text("model_revision")) is not None:
        settings["revision"] = revision
    if (draft := given.text("draft_model_id")) is not None:
        settings["draft_model"] = draft
    _refuse(given, "draft_quantizations", "the drafter is used as it is")
    _refuse(given, "draft_model_revision", "the drafter is that of the hub's main revision")
    _refuse(given, "multimodal_projectors", "models read and write text")
    _refuse(given, "model_file_name_split_template", "a GGUF in parts is named by its first part, in model_uri")
    _refuse(given, "quantization_parts", "a GGUF in parts is named by its first part, in model_uri")
    if (hub := given.text("model_hub")) not in (None, "huggingface"):
        raise wrong(given.path("model_hub"), "cannot be honoured: models come from the Hugging Face hub", hub)
    place = _Place(given, form)
    given.finish()
    for quantization in quantizations:
        yield {
            "model": place.model(quantization),
            "format": form,
            "size": size,
            "quantization": quantization,
            "settings": settings if place.is_hub else {k: v for k, v in settings.items() if k != "revision"},
        }


class _Place:
    """Where the models of a spec are."""

    def __init__(self, given: Fields, form: str) -> None:
        self._uri, self._id = given.text("model_uri"), given.text("model_id")
        self._template = given.text("model_file_name_template")
        self._given, self._form = given, form
        if self._uri is None and self._id is None:
            field = given.path("model_uri")
            raise InvalidRequest(f"`{field}` or `{given.path('model_id')}` must be given", field)
        if self._uri is None and form == "ggufv2" and self._template is None:
            field = given.path("model_file_name_template")
            raise InvalidRequest(f"`{field}` must be given for a GGUF of the hub", field)

    @property
    def is_hub(self) -> bool:
        """Whether it is on the hub, where there are revisions."""
        return self._uri is None

    def model(self, quantization: str) -> str:
        """The model id of a quantization; raises InvalidRequest."""
        from_template = "" if self._template is None else self._template.replace("{quantization}", quantization)
        if self._uri is None:
            return f"{self._id}/{from_template}" if self._form == "ggufv2" else str(self._id)
        uri = self._uri.replace("{quantization}", quantization)
        if self._form == "ggufv2" and from_template and not uri.endswith(".gguf"):
            uri = f"{uri.rstrip('/')}/{from_template}"
        return local_place(uri, self._given.path("model_uri"))
