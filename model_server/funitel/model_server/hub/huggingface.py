"""Fetch a snapshot or one GGUF of a Hugging Face repository by the hub's library, and translate its errors."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase as fnmatch
from glob import escape
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.constants import DEFAULT_REVISION, HF_HUB_CACHE
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name

from funitel.model_server.files.discard import discarding
from funitel.model_server.files.progress import reports_wanted
from funitel.model_server.hub.advice import NO_PERMISSION, NO_ROOM, suggestion
from funitel.model_server.hub.gguf_choice import HubGguf, HubName, choose, described, models_among, parse_hub_name
from funitel.model_server.hub.hub_progress import HubProgress
from funitel.model_server.settings.catalogue import CATALOGUE
from funitel.proto.errors import StartupError, WeightsError

logger = logging.getLogger(__name__)

# Code is run with --trust-remote-code only, by shards.
_WANTED_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "tokenizer*", "*.py"]
_PICKLES = ["*.bin", "*.pt", "*.pth"]  # fetched where there are no safetensors
_UNWANTED_FILES = ["*/*", "consolidated*", "*args*", "*arguments*", "*training*", "*optimizer*", "*scheduler*"]

# Among its bases is the error of whichever HTTP library this version of huggingface_hub uses.
_HTTP_ERRORS = tuple(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))
_HUB_ERRORS: tuple[type[Exception], ...] = (HfHubHTTPError, EntryNotFoundError, *_HTTP_ERRORS)
_UNREACHABLE: tuple[type[Exception], ...] = (*_HUB_ERRORS, OfflineModeIsEnabled)


def fetch_repository(model_id: str, repository: str, revision: str | None, cache_dir: Path | None) -> Path:
    """Let the hub's library bring its cache up to date; with no network it gives what it has.

    Returns: the folder; or the first file of a GGUF, where `repository` names one or has no safetensors, but GGUFs.

    Raises: `WeightsError`, `StartupError`.
    """
    wanted = parse_hub_name(repository)
    snapshot = _Snapshot(wanted.repository, revision, cache_dir)
    with explained_errors(model_id, wanted.repository, revision):
        cached = snapshot.cached()
        if not wanted.wants_gguf and any(is_weights(name) for name in cached):
            return snapshot.fetch_weights()
        files, unreachable = snapshot.listed(cached)
        models = models_among(files)
        if wanted.wants_gguf or models and not any(map(is_weights, files)):
            return snapshot.fetch_gguf(_chosen(models, wanted, unreachable))
        return snapshot.fetch_weights()


def _chosen(models: Sequence[HubGguf], wanted: HubName, unreachable: Exception | None) -> HubGguf:
    """Choose, and say what was chosen where the user did not."""
    try:
        model = choose(models, wanted)
    except WeightsError as error:
        if unreachable is None:
            raise
        why = f" on this machine, and the hub is unreachable: {first_line(unreachable)}"
        raise StartupError(error.message + why) from error
    if not wanted.wants_gguf:
        more = f"; name another as {wanted.repository}:TAG, one of {described(models)}" if len(models) > 1 else ""
        logger.warning("%s: the GGUF %s is served%s", wanted.repository, model.name, more)
    return model


def is_weights(name: str) -> bool:
    """Whether a file of a repository is among the weights that are fetched."""
    return fnmatch(name, "*.safetensors") and not any(fnmatch(name, each) for each in _UNWANTED_FILES)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A repository at a revision, on the hub and in the cache of its library."""

    repository: str
    revision: str | None
    cache_dir: Path | None

    def cached(self) -> list[str]:
        """The files of it that are on this disk, by their paths in the repository; none where it is not."""
        try:
            folder = self._download([], None, is_local=True)
        except LocalEntryNotFoundError:
            return []
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]

    def listed(self, cached: list[str]) -> tuple[list[str], Exception | None]:
        """The files of it: on the hub, or where that cannot be reached those that are cached, and why."""
        try:
            info = HfApi().model_info(self.repository, revision=self.revision or DEFAULT_REVISION)
        except RevisionNotFoundError:
            raise
        except _UNREACHABLE as error:
            if cached:
                return cached, error
            status = getattr(getattr(error, "response", None), "status_code", None)
            if isinstance(error, RepositoryNotFoundError) or status == 401:
                raise
            raise LocalEntryNotFoundError(f"{type(error).__name__}: {first_line(error)}") from error
        return [each.rfilename for each in info.siblings or ()], None

    def fetch_weights(self) -> Path:
        """The folder with its safetensors, else its pickles, and the small files beside them."""
        folder = self._download(_WANTED_FILES, _UNWANTED_FILES)
        if any(folder.glob("*.safetensors")):
            return folder
        return self._download(_WANTED_FILES + _PICKLES, _UNWANTED_FILES)

    def fetch_gguf(self, model: HubGguf) -> Path:
        """The first file of a GGUF, with its other files beside it; nothing else of the repository is fetched."""
        folder = self._download([escape(name) for name in model.files], None)
        for name in model.files:
            if not (folder / name).is_file():
                raise StartupError(f"the hub failed to deliver {name} of {self.repository}: try again")
        return folder / model.files[0]

    def _download(self, wanted: list[str], unwanted: list[str] | None, *, is_local: bool = False) -> Path:
        with discarding(self._unfinished):
            return Path(
                snapshot_download(
                    self.repository,
                    revision=self.revision,
                    cache_dir=self.cache_dir,
                    allow_patterns=wanted,
                    ignore_patterns=unwanted,
                    local_files_only=is_local,
                    tqdm_class=HubProgress if reports_wanted() else None,
                )
            )

    def _unfinished(self) -> list[Path]:
        """Files of this repository that are being fetched."""
        folder = repo_folder_name(repo_id=self.repository, repo_type="model")
        return [*(Path(self.cache_dir or HF_HUB_CACHE) / folder / "blobs").glob("*.incomplete")]


@contextmanager
def explained_errors(model_id: str, repository: str, revision: str | None) -> Iterator[None]:
    """Turn what the hub's library raises into one line for the user."""
    try:
        yield
    except HFValidationError as error:
        names = ", ".join(CATALOGUE)
        message = f"{model_id} is no folder, GGUF file or hub repository, nor in the catalogue ({names})"
        message += suggestion(model_id)
        raise WeightsError(message) from error
    except GatedRepoError as error:
        message = f"hub repository {repository} is gated: accept its terms there and set HF_TOKEN"
        raise StartupError(message) from error
    except RepositoryNotFoundError as error:
        message = f"the hub has no repository {repository}, or HF_TOKEN may not read it{suggestion(model_id)}"
        raise StartupError(message) from error
    except RevisionNotFoundError as error:
        raise StartupError(f"hub repository {repository} has no revision {revision}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        known = "" if model_id in CATALOGUE else f" (catalogue: {', '.join(CATALOGUE)})"
        advice = suggestion(model_id) or "; check the network, or name a folder that has the model"
        message = f"{repository} is not on this machine{known} and the hub is unreachable: {first_line(error)}{advice}"
        raise StartupError(message) from error
    except _HUB_ERRORS as error:
        if isinstance(error, OSError) and error.errno in (*NO_ROOM, *NO_PERMISSION):
            raise
        if getattr(getattr(error, "response", None), "status_code", None) == 401:
            raise StartupError(f"the hub refuses HF_TOKEN for {repository}: set a valid token, or none") from error
        raise StartupError(f"the hub failed to deliver {repository}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """What an error of the hub's client says first; the rest is advice and addresses."""
    return next(iter(str(error).splitlines()), type(error).__name__)
