"""The settings of one model: those of the server, changed by its registration and by the request of its launch."""

import logging
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, get_type_hints

import typer

from funitel.launcher.control_plane.checks import wrong
from funitel.launcher.control_plane.records import LaunchRequest, Registration
from funitel.launcher.settings import LauncherSettings
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import InvalidRequest, SettingsError
from funitel.proto.settings.bounds import ANY
from funitel.proto.settings.options import flag_of, option_of, parse_bool
from funitel.proto.settings.suggestions import did_you_mean
from funitel.proto.settings.tgi_flags import Refused
from funitel.router.settings import RouterSettings

logger = logging.getLogger(__name__)

OWN_FIELDS: Mapping[str, str] = {
    "model_id": "model",
    "served_model_name": "name",
    "num_replicas": "replicas",
    **{name: name for name in ("num_shard", "quantize", "dtype", "engine", "partition", "layers")},
}
"""Flags of `serve` for which a launch has fields of its own, with the names of these."""

SERVER_FLAGS = frozenset(
    "cache_dir huggingface_hub_cache validation_workers hostname default_hostname port prometheus_port address_file "
    "shutdown_delay "
    "shard_uds_path master_addr master_port allowed_media_domains max_image_fetch_size media_fetch_timeout_s "
    "allow_private_media_addresses payload_limit max_connections max_header_bytes header_timeout_seconds "
    "body_timeout_seconds idle_timeout_seconds max_total_body_bytes max_unread_bytes max_total_unread_bytes "
    "unread_timeout_seconds max_resume_seconds max_resume_bytes max_stored_responses max_stored_response_bytes "
    "batch_dir max_batch_requests max_batch_file_bytes api_key api_key_file max_wrong_keys ban_seconds share_prefixes "
    "protect_all_routes kv_disk_dir tls_cert tls_key tls_client_ca "
    "tls_probe_cert tls_probe_key cors_allow_origin allowed_host otlp_endpoint otlp_service_name otlp_decode_tokens "
    "users oidc_issuer oidc_client_id oidc_client_secret_file oidc_redirect_url oidc_role_claim "
    "console debug_routes config env json_output log_level strict_fields openai_errors wait_for_load state_dir "
    "database worker_port worker_hostname worker_tls_cert worker_tls_key worker_tls_ca worker_timeout insecure_workers "
    "ray_address memory_budget max_restarts graceful_termination_timeout control_socket trust_remote_code".split()
)
"""Flags that all models of a server share: those of its port, its log, its state and its access control."""

_FIELDS = {each.name: each for each in fields(LauncherSettings)}
_HINTS = get_type_hints(LauncherSettings)
_BOUNDS = {  # a field of the launcher that a child has too is checked by that
    each.name: each.metadata["setting"].bounds
    for cls in (LauncherSettings, ModelServerSettings, RouterSettings)
    for each in fields(cls)
    if "setting" in each.metadata
}
_FLAG = re.compile(r"--([a-z][a-z0-9-]*)")
_MAX_SHOWN = 80


def check_flags(given: Mapping[str, Any], field: str = "settings", own: Mapping[str, str] = OWN_FIELDS) -> None:
    """Check flags of `serve` for one model: that each is one, and that it takes the value.

    Args:
        given: values as JSON has them, or as texts of a command line.
        field: of the body, for messages.
        own: flags for which the body has fields of its own.

    Raises:
        InvalidRequest: the message and `param` name the flag.
    """
    for name, value in given.items():
        _value(name, value, f"{field}.{name}", own)


def settings_of(
    base: LauncherSettings,
    request: LaunchRequest,
    registration: Registration | None = None,
    files: Mapping[str, str] | None = None,
) -> LauncherSettings:
    """The settings of the model that a request asks for.

    Args:
        base: of the server.
        request: of the launch.
        registration: of the name that the request gives as the model, if there is one.
        files: paths of what the registration says, as flags; see `Registry.files`.

    Raises:
        InvalidRequest: a value is wrong, or no variant of the registration fits; `param` is the field.
    """
    changes: dict[str, Any] = {}
    model = request.model
    if registration is None:
        _check_unregistered(request)
    else:
        if request.model_type not in (None, registration.type):
            raise wrong("model_type", f"of {registration.name} is {registration.type}", request.model_type)
        model, of_variant = _variant(registration, request)
        for name, value in {**registration.settings, **of_variant, **(files or {})}.items():
            changes[name] = _value(name, value, f"registration.{name}")
    for name, value in request.settings.items():
        changes[name] = _value(name, value, f"settings.{name}", own=OWN_FIELDS)
    for name in ("num_shard", "quantize", "dtype", "engine", "partition", "layers"):
        value = getattr(request, name)
        if value is not None:
            changes[name] = _value(name, value, name)
    changes |= {"model_id": model, "served_model_name": request.served_name, "num_replicas": request.replicas}
    try:
        return replace(base, **changes)
    except SettingsError as error:
        raise InvalidRequest(error.message, _field_at_fault(error.message)) from error


def _check_unregistered(request: LaunchRequest) -> None:
    """Refuse what a launch says of a model's format that its id does not; raises InvalidRequest."""
    of_variant, is_gguf = request.variant, ".gguf" in request.model.lower() or ":" in request.model
    if (size := of_variant.get("size")) is not None:
        rule = "is for registered models that have several sizes; the name of any other says which it is"
        raise wrong("model_size_in_billions", rule, size)
    form, quantization = of_variant.get("format"), of_variant.get("quantization")
    if form is not None and (form == "ggufv2") != is_gguf:
        raise wrong("model_format", f"of {request.model} is {'ggufv2' if is_gguf else 'none of GGUF'}", form)
    is_said = quantization == request.quantize or str(quantization).lower() in request.model.lower()
    if quantization is not None and not is_said:
        raise wrong("quantization", f"is none that {request.model} names, nor one of --quantize", quantization)


def _variant(registration: Registration, request: LaunchRequest) -> tuple[str, Mapping[str, Any]]:
    """Model and flags of the first variant of a registration that has all that the request says of it."""
    if not registration.variants:
        return registration.model, {}
    for variant in registration.variants:
        if all(_same(variant.get(name), value) for name, value in request.variant.items()):
            return variant["model"], variant.get("settings", {})
    asked = ", ".join(f"{name} {value}" for name, value in request.variant.items())
    there = "; ".join(
        ", ".join(f"{name} {variant[name]}" for name in ("format", "size", "quantization") if variant.get(name))
        for variant in registration.variants
    )
    raise InvalidRequest(f"{registration.name} has no variant with {asked}, it has: {there}", "model")


def _same(there: Any, asked: Any) -> bool:
    """Whether sizes, formats or quantizations are the same; 1.8 and "1_8" are, and so are "none" and None."""
    return _plain(there) == _plain(asked)


def _plain(value: Any) -> str:
    text = "none" if value is None else str(value).lower().replace("_", ".")
    return text.removesuffix(".0")


def _field_at_fault(message: str) -> str | None:
    """The field of a launch that the first flag in a message is of."""
    found = _FLAG.search(message)
    if found is None:
        return None
    name = found[1].replace("-", "_")
    return OWN_FIELDS.get(name) or (f"settings.{name}" if name in _FIELDS else None)


def _value(name: str, value: Any, field: str, own: Mapping[str, str] | None = None) -> Any:
    """A value in the type of the flag's field.

    Args:
        name: of the flag's field.
        value: as JSON has it, or as a text of a command line.
        field: of the body, for messages.
        own: flags that are given otherwise.

    Raises:
        InvalidRequest: no model has such a flag, or the flag does not take the value.
    """
    if own is not None and name in own:
        raise InvalidRequest(f"`{field}` is no further setting: give it as `{own[name]}`", field)
    if name in SERVER_FLAGS:
        raise InvalidRequest(f"`{field}` is a setting of the server, which all its models share", field)
    if name not in _FIELDS:
        others = [each for each in _FIELDS if each not in SERVER_FLAGS and each not in OWN_FIELDS]
        hint = did_you_mean(name, others) or "; funitel serve --help=all lists the flags"
        raise InvalidRequest(f"`{field}` is no flag of funitel serve{hint}", field)
    meta = _FIELDS[name].metadata["setting"]
    if isinstance(value, str) and value in meta.refused:
        raise InvalidRequest(Refused(name=name, why=meta.refused[value]).refusal(f"{flag_of(name)} {value}"), field)
    try:
        parsed = _parsed(name, value)
        bounds = _BOUNDS.get(name, ANY)
        if isinstance(parsed, (int, float)) and not isinstance(parsed, bool) and parsed not in bounds:
            raise ValueError(f"must be {bounds}. Given: {parsed}")
        if isinstance(parsed, str) and parsed in meta.translated:
            logger.info(meta.translated[parsed].remark(name, f"{flag_of(name)} {parsed}"))
            return meta.translated[parsed].value
        return parsed
    except (typer.BadParameter, ValueError) as error:
        reason = error.message if isinstance(error, typer.BadParameter) else str(error)
        raise InvalidRequest(f"`{field}`: {reason}", field) from error


def _parsed(name: str, value: Any) -> Any:
    """A value parsed as that of the flag; raises ValueError or BadParameter."""
    hint = _HINTS[name]
    if value is None:
        if type(None) in getattr(hint, "__args__", ()):
            return None
        raise ValueError("must not be null")
    if isinstance(value, list) and not any(isinstance(each, (dict, list)) for each in value):
        if getattr(hint, "__origin__", None) is tuple:
            return tuple(map(str, value))
        value = ",".join(map(str, value))
    if isinstance(value, (dict, list)):
        raise ValueError("must be a text, a number or a boolean")
    if hint in (bool, bool | None):
        return value if isinstance(value, bool) else parse_bool(str(value))
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a value of {flag_of(name)}")
    text = str(value)
    if hint is tuple or getattr(hint, "__origin__", None) is tuple:
        return (text,)
    parser = getattr(option_of(_FIELDS[name], hint).default, "parser", None)
    return text if parser is None else parser(text)
