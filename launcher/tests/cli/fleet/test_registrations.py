"""X3, X18: registrations and the disk from the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from funitel.launcher.cli.fleet import requests as requests_module
from funitel.launcher.config.sockets import free_port

Server = Any
Run = Callable[..., Any]


def test_x3_register_list_and_unregister(server: Server, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps({"model_name": "o/tiny", "model": str(tmp_path)}))
    assert run("registrations").out == "no model of type LLM is registered\n"
    assert run("register", str(file), "--no-persist").out == "o/tiny is registered\n"
    assert run("registrations").out.splitlines()[1].split() == ["o/tiny", str(tmp_path), "memory"]
    assert run("register", str(file), "--type", "embedding").out == "o/tiny is registered\n"
    (found,) = json.loads(run("registrations", "--type", "embedding", "--json").out)
    assert (found["model_name"], found["persist"]) == ("o/tiny", True)
    assert run("unregister", "o/tiny").out == "o/tiny is unregistered\n"
    assert run("unregister", "o/tiny").error == "no model o/tiny of type LLM is registered"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must have a JSON object"),
        ('{"model_name": "x"}', "`model` must be given"),
        ('{"model_name": "x", "model": "o/r", "colour": 1}', "`colour` is an unknown field"),
        (None, "No such file or directory"),
    ],
)
def test_x3_a_definition_that_is_wrong_is_one_line(
    server: Server, run: Run, tmp_path: Path, content: str | None, message: str
) -> None:
    file = tmp_path / "x.json"
    if content is not None:
        file.write_text(content)
    assert message in run("register", str(file)).error
    assert server.fleet.registered == {}


def test_x18_the_disk_of_a_server(server: Server, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    table = run("cached").out.splitlines()
    assert table[0].split() == ["NAME", "SIZE", "IN", "USE", "PATH"]
    assert table[1].split() == ["smollm2-135m-instruct", "97.2", "MiB", "yes", "/cache/smol"]
    assert len(json.loads(run("cached", "--json").out)) == 2
    assert run("remove", "owner/tiny", "--check").out == "/hub/models--owner--tiny  4.9 KiB\n"
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    refused = run("remove", "owner/tiny")
    assert (refused.code, refused.err) == (1, "error: nothing is deleted: give --yes, or run it on a terminal\n")
    assert len(server.fleet.disk) == 2
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert run("remove", "owner/tiny").out.endswith("nothing is deleted\n")
    assert len(server.fleet.disk) == 2
    assert run("remove", "owner/tiny", "--yes").out.endswith("owner/tiny is deleted\n")
    assert len(server.fleet.disk) == 1
    assert run("remove", "owner/tiny", "--yes").error == "no model owner/tiny is cached"
    in_use = run("remove", "smollm2-135m-instruct", "--yes")
    assert in_use.err == "error: smollm2-135m-instruct is in use: it is not deleted\n"


def test_x18_the_disk_of_this_machine_without_a_server(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FUNITEL_URL", raising=False)
    monkeypatch.setattr(requests_module, "LOCAL_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("FUNITEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert run("cached").out == "no model is cached\n"
    folder = tmp_path / "hub" / "models--owner--tiny"
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / "0").write_bytes(bytes(2048))
    assert run("cached").out.splitlines()[1].split() == ["owner/tiny", "2.0", "KiB", "no", str(folder)]
    assert run("remove", "owner/tiny", "--check").out == f"{folder}  2.0 KiB\n"
    assert folder.exists()
    assert run("remove", "owner/tiny", "--yes").out.endswith("owner/tiny is deleted\n")
    assert not folder.exists()
    assert run("remove", "owner/tiny", "--yes").error == "no model owner/tiny is cached; funitel cached lists them"
