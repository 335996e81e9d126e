"""`funitel register`, `unregister` and `registrations`."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from funitel.launcher.cli.fleet.requests import api_of, print_table, stdout
from funitel.launcher.cli.fleet.settings import RegisterSettings, RegistrationsSettings, UnregisterSettings
from funitel.launcher.terminal_ui.terminal import one_line
from funitel.proto.errors import FunitelError, InvalidRequest, SettingsError

PATH = "/v1/model_registrations"
MAX_FILE_BYTES = 1 << 23


def register(settings: RegisterSettings) -> None:
    """Register the model of a file."""
    definition = _read(Path(settings.file))
    body = {"model": definition, "persist": settings.persist}
    answer = api_of(settings).send("POST", f"{PATH}/{settings.type}", body)
    name = answer.get("model_name") if isinstance(answer, dict) else None
    print(f"{one_line(str(name))} is registered")


def _read(path: Path) -> Any:
    """The JSON object of a file; raises SettingsError or InvalidRequest."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidRequest(f"{path} has more than {MAX_FILE_BYTES} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"{path} must have a JSON object")
    return content


def unregister(settings: UnregisterSettings) -> None:
    """Remove a registration."""
    api_of(settings).send("DELETE", f"{PATH}/{settings.type}/{quote(settings.name, safe='')}")
    print(f"{one_line(settings.name)} is unregistered")


def registrations(settings: RegistrationsSettings) -> None:
    """List the registrations of a type."""
    api = api_of(settings)
    found = api.send("GET", f"{PATH}/{settings.type}")
    if not isinstance(found, list):
        raise FunitelError(f"{api.url} gives an answer that funitel cannot read")
    if settings.json:
        print(json.dumps(found))
    elif not found:
        print(f"no model of type {settings.type} is registered")
    else:
        rows = [
            [str(each.get("model_name")), str(each.get("model")), "disk" if each.get("persist") else "memory"]
            for each in found
        ]
        print_table(stdout(), ["NAME", "MODEL", "KEPT IN"], rows)
