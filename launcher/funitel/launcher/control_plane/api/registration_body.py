"""The body of a registration: a model in our form, or a custom model in Xinference's."""

import json
import time
from collections.abc import Mapping
from typing import Any

from funitel.launcher.control_plane.api.xinference_model import of_xinference
from funitel.launcher.control_plane.checks import Fields, check_name, local_place, wrong
from funitel.launcher.control_plane.model_settings import check_flags
from funitel.launcher.control_plane.records import ModelType, Registration
from funitel.model_server.settings.catalogue import CATALOGUE
from funitel.proto.errors import InvalidRequest

MAX_CONTEXT = 2**31 - 1
_OWN = {"model_id": "model", "served_model_name": "model_name", "num_replicas": "replicas of a launch"}
_NAMES, _PLACES = ("model_name", "name"), ("model", "model_uri", "path")
_DESCRIPTIONS = ("model_description", "description")


def registration_of(type: str, body: Any) -> Registration:
    """The registration that a body describes.

    Args:
        type: of the path, a `ModelType`.
        body: `{"model": JSON text or object, "persist": boolean}`.

    Raises:
        InvalidRequest: a field is unknown or wrong; `param` names it.
    """
    check_type(type)
    given = Fields(body)
    model, persist = given.raw("model"), given.boolean("persist")
    if given.raw("worker_ip") is not None:
        raise wrong("worker_ip", "cannot be honoured: a registration is for all workers", given.raw("worker_ip"))
    given.finish()
    definition = _parsed(model)
    if "model_specs" in definition:
        registration = of_xinference(type, definition)
    else:
        registration = _ours(type, definition)
    name_field = next((name for name in _NAMES if name in definition), "model_name")
    check_name(registration.name, name_field)
    if registration.name in CATALOGUE:
        raise wrong(name_field, "is a name of the catalogue: choose another", registration.name)
    check_flags(registration.settings, own=_OWN)
    values = registration.to_json() | {
        "persist": persist is not False,
        "definition": definition,
        "created": time.time(),
        "settings": _with_context(registration),
    }
    return Registration.from_json(values)


def check_type(type: str) -> str:
    """A type of models that are served; raises InvalidRequest."""
    if type not in tuple(ModelType):
        raise wrong("model_type", f"must be one of {', '.join(ModelType)}", type)
    return type


def _parsed(model: Any) -> dict[str, Any]:
    """The definition, given as an object or as the JSON text of one."""
    if model is None:
        raise InvalidRequest("`model` must be given: the definition, as JSON", "model")
    if isinstance(model, str):
        try:
            model = json.loads(model)
        except ValueError as error:
            raise InvalidRequest(f"`model` is not JSON: {error}", "model") from error
    if not isinstance(model, dict):
        raise wrong("model", "must be a JSON object, or the text of one", model)
    return model


def _ours(type: str, definition: Mapping[str, Any]) -> Registration:
    given = Fields(definition)
    name, place = _one_of(given, _NAMES), _one_of(given, _PLACES)
    description = _one_of(given, _DESCRIPTIONS, is_required=False)
    settings, spec = given.mapping("settings") or {}, given.mapping("spec")
    context_length, template = given.whole("context_length", 1, MAX_CONTEXT), given.text_of_lines("chat_template")
    model_type = given.text("model_type", tuple(ModelType))
    if model_type not in (None, type):
        raise wrong("model_type", f"must be {type}, as the path of the request says", model_type)
    given.finish()
    for flag, field in (("model_spec", "spec"), ("tokenizer_config_path", "chat_template")):
        if flag in settings and field in definition:
            raise wrong(f"settings.{flag}", f"and {field} are the same setting: give one", settings[flag])
    place_field = next(each for each in _PLACES if each in definition)
    return Registration(
        type=type,
        name=name,
        model=local_place(place, place_field),
        description=description,
        context_length=context_length,
        chat_template=template,
        settings=settings,
        spec=spec,
    )


def _one_of(given: Fields, names: tuple[str, ...], *, is_required: bool = True) -> str:
    """The text of the one field that is given of several with the same meaning."""
    found = {name: value for name in names if (value := given.text(name)) is not None}
    if len(found) > 1:
        raise InvalidRequest(f"`{'` and `'.join(found)}` are the same: give one", given.path([*found][1]))
    if not found and is_required:
        raise InvalidRequest(f"`{names[0]}` must be given", given.path(names[0]))
    return next(iter(found.values()), "")


def _with_context(registration: Registration) -> dict[str, Any]:
    """The flags with the one that the context length asks for."""
    flag = "max_total_tokens" if registration.type == ModelType.LLM else "max_input_tokens"
    length = {} if registration.context_length is None else {flag: registration.context_length}
    return length | dict(registration.settings)
