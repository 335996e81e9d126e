"""`funitel cached` and `funitel remove`: by the server, or on this machine where none runs."""

import json
import subprocess
import sys
from typing import Any
from urllib.parse import quote

from funitel.launcher.cli.fleet.requests import api_of, bytes_text, list_of, print_table, stdout
from funitel.launcher.cli.fleet.settings import FleetClientSettings, ListCachedSettings, RemoveSettings
from funitel.launcher.terminal_ui.http_client import Api
from funitel.launcher.terminal_ui.terminal import one_line
from funitel.proto.errors import FunitelError, InvalidRequest, NotReady, SettingsError
from funitel.proto.process.python import module_command

PATH = "/v1/cache/models"


def cached(settings: ListCachedSettings) -> None:
    """Print the models on the disk."""
    found = _disk(settings).listed()
    if settings.json:
        print(json.dumps(found))
    elif not found:
        print("no model is cached")
    else:
        rows = [
            [str(each.get("model_name")), bytes_text(each.get("bytes")), _use(each), str(each.get("path"))]
            for each in found
        ]
        print_table(stdout(), ["NAME", "SIZE", "IN USE", "PATH"], rows)


def _use(model: dict[str, Any]) -> str:
    return "yes" if model.get("in_use") else "no"


def remove(settings: RemoveSettings) -> None:
    """Delete a model from the disk, once the user has agreed.

    Raises:
        SettingsError: there is no terminal to ask on, and --yes is not given.
        FunitelError: there is no such model, or it is in use.
    """
    disk = _disk(settings)
    found = disk.remove(settings.name, check=True)
    for each in found:
        print(f"{one_line(str(each.get('path')))}  {bytes_text(each.get('bytes'))}")
    if settings.check:
        return
    if any(each.get("in_use") for each in found):
        raise InvalidRequest(f"{settings.name} is in use: it is not deleted")
    if not settings.yes:
        if not sys.stdin.isatty():
            raise SettingsError("nothing is deleted: give --yes, or run it on a terminal")
        if input(f"Delete {one_line(settings.name)}? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing is deleted")
            return
    disk.remove(settings.name, check=False)
    print(f"{one_line(settings.name)} is deleted")


class _ServerDisk:
    """The disk of a server."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def listed(self) -> list[dict[str, Any]]:
        """The models."""
        return list_of(self._api.send("GET", PATH), "list", self._api)

    def remove(self, name: str, *, check: bool) -> list[dict[str, Any]]:
        """Delete a model, or say what would go."""
        path = f"{PATH}?model_name={quote(name, safe='')}" + ("&check=true" if check else "")
        return list_of(self._api.send("DELETE", path), "list", self._api)


class _OwnDisk:
    """The disk of this machine, by the tools of the model server."""

    def listed(self) -> list[dict[str, Any]]:
        """The models."""
        return _run("cached", "--json")

    def remove(self, name: str, *, check: bool) -> list[dict[str, Any]]:
        """Delete a model, or say what would go."""
        return _run("remove-cached", "--json", *(["--check"] if check else []), "--", name)


def _disk(settings: FleetClientSettings) -> _ServerDisk | _OwnDisk:
    """The disk of the server that is named, or of one that runs at the usual place, or else of this machine."""
    api = api_of(settings)
    if settings.url is not None:
        return _ServerDisk(api)
    try:
        api.get("/info")
    except NotReady:
        return _OwnDisk()
    except FunitelError:
        pass  # it answers, if not to that
    return _ServerDisk(api)


def _run(*words: str) -> list[dict[str, Any]]:
    """The list that a tool prints; raises FunitelError with its reason."""
    done = subprocess.run([*module_command("funitel.model_server"), *words], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"funitel-server {words[0]} ended with {done.returncode}"]
        raise InvalidRequest(lines[-1].removeprefix("error: "))
    found: list[dict[str, Any]] = json.loads(done.stdout)["list"]
    return found
