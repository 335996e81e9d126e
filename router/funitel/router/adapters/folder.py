"""The folder of an adapter in PEFT's layout: where it may be, what must be in it, and which version of it it is.

The weights are read by the shards alone, which also check ranks, targets and shapes.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from funitel.proto.errors import InvalidRequest, StartupError
from funitel.proto.printable import shortened
from funitel.proto.settings.adapter_list import AdapterSource
from funitel.router.core.request import Adapter
from funitel.router.text.model_files import fetch_files

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MAX_CONFIG_BYTES = 1_000_000
VERSION_CHARACTERS = 16
MAX_SHOWN = 100  # characters of a path in a message
PATH = "lora_path"  # the field of a request that names the folder


class NoSuchFolder(InvalidRequest):
    """The folder of an adapter does not exist."""

    http_status = 404
    error_type = "not_found"


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A folder that has been looked at: the adapter, and the base model that its config names, if it does."""

    adapter: Adapter
    base: str | None


def locate(source: AdapterSource) -> Path:
    """Return the folder of a listed adapter; blocks while the files of a hub repository are fetched.

    Raises:
        StartupError: the hub does not have it.
    """
    if source.folder is not None:
        return Path(source.folder).expanduser()
    given = f"--lora-adapters {source}"
    return fetch_files(source.repository or "", source.revision, (CONFIG, WEIGHTS), given)


def check_root(root: str | None) -> None:
    """Raise StartupError if the folder for adapters that are loaded at run time is none."""
    if root is not None and not Path(root).expanduser().is_dir():
        raise StartupError(f"--lora-folder must be a folder, given {root}")


def locate_below(root: str | None, path: str) -> Path:
    """Return the folder that a request names, which must be below `root`; symbolic links are followed.

    Raises:
        InvalidRequest: it is elsewhere, or there is no root.
        NoSuchFolder: there is no such folder.
    """
    if root is None:
        raise InvalidRequest("adapters can be loaded at run time with --lora-folder only, which is not given", PATH)
    if not path.strip() or "\0" in path:
        raise InvalidRequest("`lora_path` cannot be empty, or have a zero byte", PATH)
    with _followed(path):
        top = Path(root).expanduser().resolve()
        folder = (top / path).resolve()
        for found in (folder, folder / CONFIG, folder / WEIGHTS):
            if not found.resolve().is_relative_to(top):
                words = "`lora_path` must be below the folder of --lora-folder"
                raise InvalidRequest(f"{words}. Given: {_shown(path)}", PATH)
        if not folder.is_dir():
            raise NoSuchFolder(f"`lora_path` must be a folder. Given: {_shown(path)}", PATH)
    return folder


@contextmanager
def _followed(path: str) -> Iterator[None]:
    """Refuse a path that the system cannot follow: too long, a loop of links, closed to this process."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is no path"
        if isinstance(error, RuntimeError):
            reason = "its symbolic links form a loop"
        raise InvalidRequest(f"`lora_path` cannot be followed: {reason}. Given: {_shown(path)}", PATH) from error


def _shown(path: str) -> str:
    return shortened(ascii(path), MAX_SHOWN)


def inspect(name: str, folder: Path) -> AdapterFolder:
    """Look at the folder of an adapter.

    Raises:
        NoSuchFolder: it does not exist.
        InvalidRequest: it is no adapter of PEFT's layout with its weights in safetensors.
    """
    with _followed(str(folder)):
        if not folder.is_dir():
            raise NoSuchFolder(f"`lora_path` must be a folder. Given: {str(folder)!r}", PATH)
        has_weights, has_pickle = (folder / WEIGHTS).is_file(), (folder / PICKLE).exists()
    config = _read_config(folder)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise InvalidRequest(f"{CONFIG} must have `peft_type` LORA. Given: {kind!r}", PATH)
    if not has_weights:
        pickle = f"; {PICKLE}, a pickle, is never read" if has_pickle else ""
        raise InvalidRequest(f"the adapter has no {WEIGHTS}{pickle}", PATH)
    base = config.get("base_model_name_or_path")
    path = folder.resolve()
    return AdapterFolder(Adapter(name, str(path), adapter_id(name, path)), base if isinstance(base, str) else None)


def adapter_id(name: str, folder: Path) -> str:
    """Return the id of an adapter on the shards: its name and a hash of which files it has now.

    Files are told apart by number, size and times, and not read: they may have gigabytes.

    Raises:
        NoSuchFolder: a file is not there any more.
    """
    found = hashlib.sha256(os.fsencode(folder))
    for file in (CONFIG, WEIGHTS):
        try:
            stat = os.stat(folder / file)
        except OSError as error:
            raise NoSuchFolder(f"{file} of adapter {name!r} cannot be read: {error.strerror}", PATH) from error
        found.update(f"{stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns};".encode())
    return f"{name}@{found.hexdigest()[:VERSION_CHARACTERS]}"


def check_unchanged(adapter: Adapter) -> None:
    """Raise InvalidRequest if the files of an adapter are not those that it was registered with."""
    if adapter_id(adapter.name, Path(adapter.path)) != adapter.id:
        raise InvalidRequest(
            f"the files of adapter {adapter.name!r} have changed since it was loaded: load it again, with load_inplace",
            PATH,
        )


def _read_config(folder: Path) -> dict[str, object]:
    try:
        with (folder / CONFIG).open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        raise InvalidRequest(f"the folder has no {CONFIG}: it is no adapter. Given: {str(folder)!r}", PATH) from None
    except OSError as error:
        raise InvalidRequest(f"{CONFIG} cannot be read: {error.strerror}", PATH) from error
    try:
        config = json.loads(text) if len(text) <= MAX_CONFIG_BYTES else None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise InvalidRequest(f"{CONFIG} must be a JSON object of at most {MAX_CONFIG_BYTES} bytes", PATH)
    return config
