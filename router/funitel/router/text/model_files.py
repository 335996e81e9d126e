"""From the name of a model to a folder with its tokenizer: a folder as it is, else the files of a hub repository.

The launcher hands over a folder; names are for routers started by hand. Weights are never fetched here.

What a model folder says about where its model comes from and what it is for. Nothing is fetched.

The sampling recommended for a model, used on `/v1` where a request says nothing about sampling.

`generation_config.json` says it for hub checkpoints that sample by default; `funitel.json`, written beside converted
weights, for models of the catalogue. Native routes keep TGI's defaults.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from funitel.proto.errors import StartupError

_SHA = re.compile(r"[0-9a-f]{40}")
_PIPELINE_TAG = re.compile(r"^pipeline_tag:[ \t]*[\"']?([\w-]+)", re.MULTILINE)
MAX_CARD_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """The hub's commit, where the folder is a snapshot of one; the purpose, where a model card names it."""

    sha: str | None = None
    pipeline_tag: str | None = None

    @classmethod
    def of(cls, folder: Path) -> "ModelOrigin":
        """Read a model folder."""
        is_snapshot = folder.parent.name == "snapshots" and _SHA.fullmatch(folder.name) is not None
        return cls(folder.name if is_snapshot else None, _pipeline_tag(folder / "README.md"))


def _pipeline_tag(card: Path) -> str | None:
    """The tag in the YAML that begins a model card."""
    try:
        with card.open(encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_CARD_BYTES)
    except OSError:
        return None
    _, opening, rest = text.partition("---\n")
    header, closing, _ = rest.partition("\n---")
    found = _PIPELINE_TAG.search(header) if opening and closing else None
    return found[1] if found else None


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


@dataclass(frozen=True, slots=True)
class RecommendedSampling:
    """None where nothing is recommended; temperature 0 is greedy."""

    temperature: float | None = None
    top_p: float | None = None


def read_recommended(folder: Path) -> RecommendedSampling:
    """Read a model folder.

    Raises:
        StartupError: a file is not JSON, or recommends what cannot be.
    """
    values = _json(folder / "generation_config.json")
    if not values.get("do_sample"):
        values = _json(folder / "funitel.json").get("sampling", {})
    temperature, top_p = values.get("temperature"), values.get("top_p")
    for name, value, most in (("temperature", temperature, 100.0), ("top_p", top_p, 1.0)):
        if value is not None and not (isinstance(value, float | int) and 0 <= value <= most):
            raise StartupError(f"{folder} recommends {name} {value!r}, which must be >= 0 and <= {most}")
    return RecommendedSampling(temperature, None if top_p == 1.0 else top_p)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StartupError(f"{path} is not readable JSON: {error}") from error
    return values if isinstance(values, dict) else {}
