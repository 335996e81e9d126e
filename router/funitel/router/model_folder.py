"""From the name of a model to a folder with its tokenizer: a folder as it is, else the files of a hub repository.

The launcher hands over a folder; names are for routers started by hand. Weights are never fetched here.
"""

from pathlib import Path

from funitel.proto.errors import StartupError

_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
]


def find_model_folder(name: str, revision: str | None = None) -> Path:
    """Return the folder of a model; blocks while its files are fetched.

    Raises:
        StartupError: there is neither such a folder nor such a repository, or the hub cannot be reached.
    """
    folder = Path(name)
    if folder.is_dir() or name.startswith(("/", ".", "~")):
        if revision is not None:
            raise StartupError(
                f"--revision {revision} is for hub repositories, and --tokenizer-name {name} is a folder"
            )
        return folder.expanduser()
    if name.count("/") != 1:
        raise StartupError(
            f"--tokenizer-name {name} is neither a folder nor a hub repository (owner/name): give the folder that "
            "`funitel-server download-weights` prints"
        )
    return _fetch(name, revision)


def _fetch(repository: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # half a second to import, and rarely wanted
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=_FILES))
    except HFValidationError as error:
        raise StartupError(f"--tokenizer-name {repository} cannot be the name of a hub repository") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        at = f" at revision {revision}" if revision else ""
        raise StartupError(f"--tokenizer-name {repository}{at} cannot be had from the hub: {reason}") from error
