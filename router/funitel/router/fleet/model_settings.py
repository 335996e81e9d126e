"""The settings of one model: those of the router, with the fields that the control plane gives for the model."""

from dataclasses import fields, replace
from functools import cache
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from funitel.proto.errors import StartupError
from funitel.proto.settings.adapter_list import AdapterList
from funitel.router.fleet.snapshot import FleetModel
from funitel.router.settings import RouterSettings

CONNECT_SECONDS = 60  # for a shard that the control plane has seen answer
TCP, UNIX = "tcp://", "unix://"


@cache
def _hints() -> dict[str, Any]:
    hints = get_type_hints(RouterSettings)
    return {field.name: hints[field.name] for field in fields(RouterSettings)}


def settings_of(router: RouterSettings, entry: FleetModel, address: str) -> RouterSettings:
    """Return the settings of a model with its first replica at an address.

    Raises:
        StartupError: the control plane gives a field that is none, or a wrong value.
    """
    given: dict[str, Any] = {name: _value(name, value) for name, value in entry.router.items()}
    limit = {} if entry.request_limit is None else {"max_concurrent_requests": entry.request_limit}
    return replace(
        router,
        **(
            {"lora_adapters": None, "served_model_name": entry.name}
            | given
            | limit
            | _place(address)
            | {
                "replica_address": (),
                "no_model": False,
                "shard_connect_timeout": CONNECT_SECONDS,
            }
        ),
    )


def _value(name: str, value: Any) -> Any:
    """The value of a field, from JSON."""
    hint = _hints().get(name)
    if hint is None:
        raise StartupError(f"the router has no setting {name!r}")
    try:
        if value is not None and AdapterList in get_args(hint):
            return AdapterList(value)
        return _adapter(name).validate_python(value)
    except (ValidationError, ValueError, TypeError):
        raise StartupError(f"the router's setting {name!r} cannot be {value!r}") from None


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(_hints()[name])


def _place(address: str) -> dict[str, Any]:
    """The settings that name the first replica."""
    if address.startswith(TCP):
        return {"master_shard_address": address.removeprefix(TCP)}
    if address.startswith(UNIX):
        return {"master_shard_address": None, "master_shard_uds_path": address.removeprefix(UNIX)}
    raise StartupError(f"the address of a replica must be unix:///path or tcp://host:port, given {address!r}")
