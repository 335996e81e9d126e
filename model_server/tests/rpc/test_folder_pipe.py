"""A shard that was started before the model was present is told the folder through a pipe."""

import os
from pathlib import Path

import pytest

from funitel.model_server.rpc import serve
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import WeightsError
from funitel_testing.tiny import save_tiny


def told(words: bytes) -> Path:
    read_end, write_end = os.pipe()
    os.write(write_end, words)
    os.close(write_end)
    try:
        return serve._resolve(ModelServerSettings(model_id="owner/model", revision="main", folder_fd=read_end))
    finally:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(read_end)


def test_the_folder_is_what_the_line_says(tmp_path: Path) -> None:
    folder = tmp_path / "with\xe9 spaces"
    save_tiny("llama", folder)
    assert told(os.fsencode(folder) + b"\n") == folder


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no config\.json"):
        told(os.fsencode(tmp_path) + b"\n")


@pytest.mark.parametrize("words", [b"", b"/half/a/pa"])
def test_a_pipe_that_ends_without_a_line_ends_the_process(words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit) as ended:
        told(words)
    assert ended.value.code == 0
