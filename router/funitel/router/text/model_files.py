"""Read the files of a model folder: tokenizer, templates, special tokens, origin and recommended sampling.

The launcher gives the router a folder. A name is for routers started by hand: the files of a hub repository are
fetched, without weights. `generation_config.json` recommends sampling for hub checkpoints that sample by default;
`funitel.json`, written beside converted weights, for models of the catalogue.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from funitel.proto.errors import StartupError, translating
from funitel.router.text.control_tokens import control_text
from funitel.router.text.template_renderer import TemplateTexts

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
        """Read the origin of a model folder."""
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
    "processor_config.json",
    "preprocessor_config.json",
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
    return fetch_files(name, revision, _FILES, f"--tokenizer-name {name}")


def fetch_files(repository: str, revision: str | None, patterns: Sequence[str], given: str) -> Path:
    """Return the folder of a hub repository's files that match a pattern; blocks while they are fetched.

    Raises:
        StartupError: there is no such repository, or the hub cannot be reached; begins with `given`.
    """
    from huggingface_hub import snapshot_download  # half a second to import, and rarely wanted
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(patterns)))
    except HFValidationError as error:
        raise StartupError(f"{given} cannot be the name of a hub repository") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        at = f" at revision {revision}" if revision else ""
        raise StartupError(f"{given}{at} cannot be had from the hub: {reason}") from error


@dataclass(frozen=True, slots=True)
class RecommendedSampling:
    """None where nothing is recommended; temperature 0 is greedy."""

    temperature: float | None = None
    top_p: float | None = None


def read_recommended(folder: Path) -> RecommendedSampling:
    """Read the sampling that a model folder recommends, used on `/v1` where a request says nothing about it.

    Raises:
        StartupError: a file is not a JSON object, or recommends what cannot be.
    """
    values = _json(folder / "generation_config.json")
    if not values.get("do_sample"):
        values = _json(folder / "funitel.json").get("sampling", {})
    temperature, top_p = values.get("temperature"), values.get("top_p")
    for name, value, most in (("temperature", temperature, 100.0), ("top_p", top_p, 1.0)):
        if value is not None and not (isinstance(value, float | int) and 0 <= value <= most):
            raise StartupError(f"{folder} recommends {name} {value!r}, which must be >= 0 and <= {most}")
    return RecommendedSampling(temperature, None if top_p == 1.0 else top_p)


_MAX_TOKEN_ID = 2**32 - 1  # that the tokenizers library takes
MAX_TEMPLATE_BYTES = 1 << 22
_TOOL_USE = "tool_use"  # the name of a template of its own for chats with tools


class ModelFiles:
    """The files of a model folder that say how to tokenize."""

    def __init__(self, folder: Path, config_path: Path | None = None) -> None:
        self._folder = folder
        if config_path is not None and not config_path.is_file():
            raise StartupError(f"--tokenizer-config-path {config_path} is not a file")
        self._config = _json(config_path or folder / "tokenizer_config.json")
        self._is_own_config = config_path is not None

    @property
    def tokenizer_path(self) -> Path:
        """Of tokenizer.json."""
        return self._folder / "tokenizer.json"

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Read tokenizer.json."""
        path = self.tokenizer_path
        if not path.is_file():
            raise StartupError(f"{path} does not exist: --tokenizer-name must be a folder that has it")
        with translating(lambda error: StartupError(f"{path} cannot be read: {error}")):  # it raises bare Exception
            return tokenizers.Tokenizer.from_file(str(path))

    def model_vocab_size(self) -> int | None:
        """Rows of the model's embedding, as config.json says."""
        config = _json(self._folder / "config.json")
        text_config = config.get("text_config")
        size = config.get("vocab_size") or (text_config.get("vocab_size") if isinstance(text_config, dict) else None)
        return size if isinstance(size, int) else None

    def template_texts(self, tokenizer: tokenizers.Tokenizer) -> TemplateTexts | None:
        """The template and what it may use; None if there is none."""
        source = self._template_source("default")
        if source is None:
            return None
        tool_source = self._template_source(_TOOL_USE)
        control = control_text(tokenizer, source, tool_source)
        return TemplateTexts(source, self.special_tokens(tokenizer), tool_source, control)

    def _template_source(self, name: str) -> str | None:
        """A config the user gave comes first; then files of their own, chat_template.json, tokenizer_config.json."""
        own = _pick_template(self._config.get("chat_template"), name)
        if own is not None and self._is_own_config:
            return own
        is_default = name == "default"
        path = "chat_template.jinja" if is_default else f"additional_chat_templates/{name}.jinja"
        jinja_file = self._folder / path
        if jinja_file.is_file():
            if (size := jinja_file.stat().st_size) > MAX_TEMPLATE_BYTES:
                raise StartupError(f"{jinja_file} has {size} bytes, at most {MAX_TEMPLATE_BYTES} are read")
            return jinja_file.read_text(encoding="utf-8")
        return _pick_template(_json(self._folder / "chat_template.json").get("chat_template"), name) or own

    def json(self, name: str) -> dict[str, Any]:
        """A file of the folder, which must be a JSON object where it is there; empty where it is not."""
        return _json(self._folder / name)

    def special_tokens(self, tokenizer: tokenizers.Tokenizer) -> dict[str, str]:
        """`bos_token`, `eos_token` and the like; the ids of config.json help where no text is given."""
        named = _json(self._folder / "special_tokens_map.json") | self._config
        tokens = {name: _token_text(value) for name, value in named.items() if name.endswith("_token")}
        special = {name: text for name, text in tokens.items() if text is not None}
        ids = _json(self._folder / "config.json") | _json(self._folder / "generation_config.json")
        for name in ("bos_token", "eos_token"):
            text = _text_of_id(tokenizer, ids.get(f"{name}_id"))
            if name not in special and text is not None:
                special[name] = text
        return special


def _pick_template(value: Any, name: str) -> str | None:
    """The template of a name; one that has none is the default."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get(name)
    elif name != "default":
        value = None
    return value if isinstance(value, str) else None


def _token_text(value: Any) -> str | None:
    """A token is written as its text or as an object with it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _text_of_id(tokenizer: tokenizers.Tokenizer, token_id: Any) -> str | None:
    """An id may be one or a list of several, the first being the main one."""
    if isinstance(token_id, list):
        token_id = token_id[0] if token_id else None
    is_id = isinstance(token_id, int) and 0 <= token_id <= _MAX_TOKEN_ID
    return tokenizer.id_to_token(token_id) if is_id else None


def _json(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise StartupError(f"{path} is not a JSON object")
    return content
