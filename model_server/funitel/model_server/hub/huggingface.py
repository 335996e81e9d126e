"""Fetch a repository's snapshot from the Hugging Face hub by its library, and translate the library's errors."""

from pathlib import Path

from huggingface_hub import snapshot_download
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

from funitel.model_server.hub.advice import NO_PERMISSION, NO_ROOM, suggestion
from funitel.model_server.settings.catalogue import CATALOGUE
from funitel.proto.errors import StartupError, WeightsError

# Code is run with --trust-remote-code only, by shards.
_WANTED_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "tokenizer*", "*.py"]
_PICKLES = ["*.bin", "*.pt", "*.pth"]  # fetched where there are no safetensors
_UNWANTED_FILES = ["*/*", "consolidated*", "*args*", "*arguments*", "*training*", "*optimizer*", "*scheduler*"]

# Among its bases is the error of whichever HTTP library this version of huggingface_hub uses.
_HTTP_ERRORS = tuple(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))
_HUB_ERRORS: tuple[type[Exception], ...] = (HfHubHTTPError, EntryNotFoundError, *_HTTP_ERRORS)


def fetch_repository(model_id: str, repository: str, revision: str | None, cache_dir: Path | None) -> Path:
    """Let the hub's library bring its cache up to date, and return the folder; with no network it gives what it has.

    Raises: `WeightsError`, `StartupError`.
    """

    def fetch(wanted: list[str]) -> Path:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                cache_dir=cache_dir,
                allow_patterns=wanted,
                ignore_patterns=_UNWANTED_FILES,
            )
        )

    try:
        folder = fetch(_WANTED_FILES)
        return folder if any(folder.glob("*.safetensors")) else fetch(_WANTED_FILES + _PICKLES)
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
