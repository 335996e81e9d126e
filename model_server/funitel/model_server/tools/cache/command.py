"""The commands `cached` and `remove-cached`."""

import json
from pathlib import Path
from typing import Any

from funitel.model_server.files.atomic_folder import exclusive, remove
from funitel.model_server.settings import CachedSettings, RemoveCachedSettings
from funitel.model_server.tools.cache.listing import Cached, cached_models, users_of
from funitel.proto.errors import SettingsError, StartupError
from funitel.proto.printable import printable
from funitel.proto.settings.suggestions import did_you_mean

_GB = 1e9


def list_cached(settings: CachedSettings) -> str:
    """The models on this disk, as a table or as JSON."""
    found = cached_models(settings.cache_dir)
    if settings.json:
        return json.dumps({"list": [_shown(each) for each in found]})
    if not found:
        return "no model is cached"
    return "\n".join(f"{each.num_bytes / _GB:8.2f} GB  {printable(each.name)}  {each.paths[0]}" for each in found)


def remove_cached(settings: RemoveCachedSettings) -> str:
    """Delete a model from this disk; with `check` only say what would go.

    Raises:
        SettingsError: no model of that name is cached.
        StartupError: a process uses it or prepares it, or it cannot be deleted; nothing is deleted.
    """
    found = [each for each in cached_models(settings.cache_dir) if each.name == settings.name]
    if not found:
        names = [each.name for each in cached_models(settings.cache_dir)]
        hint = did_you_mean(settings.name, names) or "; funitel cached lists them"
        raise SettingsError(f"no model {settings.name} is cached{hint}")
    shown = [_shown(each) for each in found]
    if not settings.check:
        for each in found:
            _delete(each)
    if settings.json:
        return json.dumps({"list": shown})
    verb = "would delete" if settings.check else "deleted"
    lines = (
        f"{verb} {path} of {printable(each.name)}, {each_shown['bytes'] / _GB:.2f} GB in all"
        for each, each_shown in zip(found, shown, strict=True)
        for path in each.paths
    )
    return "\n".join(lines)


def _shown(cached: Cached) -> dict[str, Any]:
    return {
        "model_name": cached.name,
        "path": str(cached.paths[0]),
        "paths": [str(path) for path in cached.paths],
        "bytes": cached.num_bytes,
        "in_use": bool(users_of(cached.paths)),
    }


def _delete(cached: Cached) -> None:
    """Delete a model that no process uses or prepares."""
    try:
        with exclusive(cached.paths[0], waits=False):
            _check_unused(cached)
            for path in cached.paths:
                _delete_path(path)
    except BlockingIOError as error:
        raise StartupError(f"{cached.name} is being prepared by another process: it is not deleted") from error
    except OSError as error:
        raise StartupError(f"{cached.name} cannot be deleted: {error}") from error


def _check_unused(cached: Cached) -> None:
    if pids := users_of(cached.paths):
        shown = ", ".join(map(str, pids[:3]))
        raise StartupError(f"{cached.name} is in use by process {shown}: it is not deleted")


def _delete_path(path: Path) -> None:
    if path.is_dir():
        remove(path)
    else:
        path.unlink(missing_ok=True)
