"""Say what to do about a model that is not found, cannot be read, or has no room."""

import errno
import os
from pathlib import Path

from funitel.model_server.settings.catalogue import CATALOGUE
from funitel.proto.settings.suggestions import did_you_mean, nearest

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)


def suggestion(model_id: str) -> str:
    """`: did you mean ...?` with a path of this disk or a name of the catalogue; nothing where none is similar."""
    if model_id in CATALOGUE:
        return ""
    path = nearest_path(Path(model_id).expanduser()) if "/" in model_id else None
    if path is not None:
        start = "./" if model_id.startswith("./") else ""
        return f": did you mean {start}{path}?"
    return did_you_mean(model_id, CATALOGUE)


def nearest_path(path: Path) -> Path | None:
    """The path that exists and differs from one that does not by the spelling of its parts; None where none does."""
    found = Path(path.anchor)
    for part in path.parts[1 if path.anchor else 0 :]:
        if not (found / part).exists():
            names = nearest(part, [each.name for each in found.iterdir()]) if found.is_dir() else []
            if not names:
                return None
            part = names[0]
        found /= part
    return found


def explained(error: OSError, model_id: str, cache_dir: Path) -> str:
    """Why the operating system refused to read a model or to write to a cache, and what to do."""
    place = Path(str(error.filename)) if error.filename else None
    if error.errno in NO_ROOM:
        where = place if place is not None else cache_dir
        return (
            f"cannot prepare {model_id} in {where}: {error.strerror}: free some, or name another folder by --cache-dir"
        )
    if error.errno not in NO_PERMISSION:
        return f"cannot prepare {model_id} in {cache_dir}: {error}"
    model = Path(model_id).expanduser()
    if place is not None and (place == model or model in place.parents or place in model.parents):
        return f"cannot read {place}: {error.strerror}: let this user read it, as chmod -R a+rX {model} does"
    return (
        f"cannot prepare {model_id} in {cache_dir}: {error}: name one that user {os.geteuid()} can write by --cache-dir"
    )
