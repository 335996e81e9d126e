"""Upload a finished folder to the hub, as `--upload-to-model-id` asks. The hub's library finds the token itself."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

from funitel.model_server.hub.huggingface import first_line
from funitel.proto.errors import SettingsError, StartupError

# Among its bases is the error of whichever HTTP library this version of huggingface_hub uses.
_HTTP_ERRORS = tuple(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))
_FAILURES: tuple[type[Exception], ...] = (HfHubHTTPError, OfflineModeIsEnabled, OSError, *_HTTP_ERRORS)


def check_upload(repository: str) -> None:
    """Find out, before hours of work, whether the hub knows us. Raises: `StartupError`."""
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise SettingsError(f"--upload-to-model-id must be OWNER/NAME, given {repository!r}")
    try:
        HfApi().whoami()
    except LocalTokenNotFoundError as error:
        raise StartupError(f"--upload-to-model-id {repository}: no token for the hub, set HF_TOKEN") from error
    except _FAILURES as error:
        raise StartupError(f"--upload-to-model-id {repository}: the hub refused: {first_line(error)}") from error


def upload(folder: Path, repository: str) -> None:
    """Create the repository if need be and put all files of `folder` there. Raises: `StartupError`."""
    try:
        api = HfApi()
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder)
    except HFValidationError as error:
        raise SettingsError(f"--upload-to-model-id {repository}: {first_line(error)}") from error
    except _FAILURES as error:
        raise StartupError(f"{folder} is complete but could not be uploaded: {first_line(error)}") from error
