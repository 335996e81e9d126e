"""The likely mistakes of a newcomer through the real program: one line that says what to do, and the exit code."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from funitel_testing.fake_api import FakeApi, serving

# A process of root reads everything, unless these capabilities are taken from it.
_AS_A_USER = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()


@dataclass(frozen=True)
class Mistake:
    """A command line, in a folder with `models/llama`, `empty` and `notes.txt`, and what must be said of it."""

    words: str
    says: str
    code: int = 1
    environ: dict[str, str] = field(default_factory=dict)


MISTAKES = (
    Mistake("serev", "did you mean serve?", 2),
    Mistake("--prot 80", "did you mean --port?", 2),
    Mistake("serve ./modles/llama", "no such folder or file: ./modles/llama: did you mean ./models/llama?"),
    Mistake("serve /no/such", "no such folder or file: /no/such"),
    Mistake("serve empty", "empty has no config.json"),
    Mistake("serve notes.txt", "is not a GGUF file"),
    Mistake("serve org/model", "check the network, or name a folder", environ={"HF_ENDPOINT": "http://127.0.0.1:1"}),
    Mistake("serve smollm2-135m-instrct", "did you mean smollm2-135m-instruct?", environ={"HF_HUB_OFFLINE": "1"}),
    Mistake("serve --cache-dir notes.txt", "cannot prepare smollm2-135m-instruct in"),
    Mistake("serve models/llama --port BUSY", "--port BUSY is already in use on 127.0.0.1 by process ME ("),
    Mistake("generate hi --url 127.0.0.1:1", "start one by funitel serve MODEL, or name another by --url"),
    Mistake("chat --url KEYED", "--api-key"),
    Mistake("generate hi --url KEYED --api-key wrong", "--api-key"),
    Mistake("bench --url KEYED --api-key wrong", "--api-key"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "models" / "llama").mkdir(parents=True)
    (folder / "models" / "llama" / "config.json").write_text("{}")
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("not a model\n")
    return folder


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, str]]:
    """A port that is taken by this process, and a server that wants a key."""
    with socket.create_server(("127.0.0.1", 0)) as busy, serving(FakeApi(status=401)) as keyed:
        yield {"BUSY": str(busy.getsockname()[1]), "KEYED": keyed.url, "ME": str(os.getpid())}


def run(folder: Path, words: str, environ: dict[str, str], *before: str) -> "subprocess.CompletedProcess[str]":
    variables = {"PYTHONPATH": ":".join(filter(None, sys.path)), "HOME": str(folder), "PATH": os.environ["PATH"]}
    command = [*before, sys.executable, "-m", "funitel", *words.split()]
    return subprocess.run(command, cwd=folder, env=variables | environ, capture_output=True, text=True, input="hi\n")


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.words)
def test_a_mistake_is_one_line_that_says_what_to_do(mistake: Mistake, folder: Path, names: dict[str, str]) -> None:
    words, says = mistake.words, mistake.says
    for name, value in names.items():
        words, says = words.replace(name, value), says.replace(name, value)
    done = run(folder, words, mistake.environ)
    assert (done.returncode, done.stdout) == (mistake.code, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root reads everything")
@pytest.mark.parametrize("place", ["llama/config.json", "llama", "."])
def test_what_may_not_be_read_is_named(place: str, tmp_path: Path) -> None:
    model = tmp_path / "models" / "llama"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    locked = tmp_path / "models" / place
    mode = locked.stat().st_mode
    locked.chmod(0)
    try:
        done = run(tmp_path, "serve models/llama", {}, *_AS_A_USER)
    finally:
        locked.chmod(mode)
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot read models/llama")
    assert "Permission denied: let this user read it" in done.stderr
    assert done.stderr.count("\n") == 1
