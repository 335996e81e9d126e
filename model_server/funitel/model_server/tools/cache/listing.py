"""List the models on this disk: those of the hub's cache, and what this program fetched or converted."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from funitel.model_server.files.integrity import read_json
from funitel.model_server.hub.resolve import cache_folder
from funitel.model_server.settings.catalogue import CATALOGUE, IndexFolder, IndexPackage
from funitel.proto.errors import WeightsError

_OURS = re.compile(r"(?P<stem>.+)-(?P<digest>[0-9a-f]{16})(-v\d+|\.gguf)?")
_GENERATED = ("config.json", "source.json")


@dataclass(frozen=True, slots=True)
class Cached:
    """A model on this disk.

    Attributes:
        name: by which it is removed: the catalogue's, that of the hub repository, or the path of the file that it was
            converted from.
        paths: folders and files that hold it; the first is that of the model.
    """

    name: str
    paths: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its files; one that has several names counts once."""
        sizes = {(facts.st_dev, facts.st_ino): facts.st_size for facts in _facts(self.paths)}
        return sum(sizes.values())


def cached_models(cache_dir: str | None) -> list[Cached]:
    """All of them, by name."""
    return sorted([*_of_ours(cache_folder(cache_dir)), *_of_hub()], key=lambda each: each.name)


def hub_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of the hub's cache, by the variables of the hub's library in its order."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            return Path(environ[name]).expanduser()
    home = environ.get("HF_HOME") or f"{environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(home).expanduser() / "hub"


def _of_hub() -> Iterator[Cached]:
    """The repositories of the hub's cache."""
    folder = hub_cache()
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        kind, *parts = path.name.split("--")
        if kind == "models" and parts and path.is_dir() and not path.is_symlink():
            yield Cached("/".join(parts), (path,))


def _of_ours(folder: Path) -> Iterator[Cached]:
    """What lies in the folder of `--cache-dir`: conversions, files they were made of, folders of wheels."""
    names = _catalogue_names()
    found: dict[str, list[Path]] = {}
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    for path in entries:
        match = _OURS.fullmatch(path.name)
        if match is None or path.name.startswith(".") or not _is_model(path):
            continue
        name = names.get(match["digest"]) or _source_of(path) or path.name
        found.setdefault(name, []).append(path)
    for name, paths in found.items():
        yield Cached(name, tuple(sorted(paths, key=lambda path: (not path.is_dir(), path.name))))


def _is_model(path: Path) -> bool:
    return any((path / name).is_file() for name in _GENERATED) if path.is_dir() else path.suffix == ".gguf"


def _catalogue_names() -> dict[str, str]:
    """The names of the catalogue, by the digest in the names of their folders and files."""
    sources = ((name, source) for name, listed in CATALOGUE.items() for source in listed)
    return {source.sha256[:16]: name for name, source in sources if isinstance(source, (IndexPackage, IndexFolder))}


def _source_of(path: Path) -> str | None:
    """The file that a folder was converted from."""
    try:
        source = read_json(path / "source.json") if path.is_dir() else {}
    except WeightsError:
        return None
    found = next((value for value in source.values() if isinstance(value, str) and value.startswith("/")), None)
    return found


def _facts(paths: Iterable[Path]) -> Iterator[os.stat_result]:
    """Of each file that is no link."""
    for path in paths:
        for each in [path] if path.is_file() else path.rglob("*"):
            if each.is_file() and not each.is_symlink():
                yield each.stat()


def users_of(paths: Sequence[Path]) -> list[int]:
    """The processes that have a file of the paths open or mapped, or are told of one on their command line.

    Processes of other users are seen by root alone.
    """
    places = {str(place) for path in paths for place in (path.absolute(), path.resolve())}
    own = os.getpid()
    pids = sorted(int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit())
    return [pid for pid in pids if pid != own and any(_is_within(each, places) for each in _named_by(pid))]


def _is_within(path: str, places: set[str]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)


def _named_by(pid: int) -> Iterator[str]:
    """The paths of files that a process has open or mapped, and the words of its command line."""
    folder = Path(f"/proc/{pid}")
    try:
        yield from (word.rpartition("=")[2] for word in (folder / "cmdline").read_text(errors="replace").split("\0"))
        for line in (folder / "maps").read_text(errors="replace").splitlines():
            yield line.partition("/")[1] + line.partition("/")[2]
        for descriptor in (folder / "fd").iterdir():
            yield os.readlink(descriptor)
    except OSError:  # it has ended, or is another user's
        return
