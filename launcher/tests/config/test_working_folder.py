"""The working folder may be that of a model somebody has downloaded: none of its files is run as code."""

import subprocess
import sys
from pathlib import Path

import pytest

from funitel.launcher.config.child_commands import Commands
from funitel.proto.process.python import module_command

ROOT = Path(__file__).parents[3]
# Modules that a process imports sooner or later; as files of a model they end it.
POISONED = ("random", "bisect", "typer", "json", "tokenizers", "sitecustomize")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in POISONED:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w'); raise SystemExit(9)")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        pytest.param((*Commands().router, "--help"), id="router"),
        pytest.param((*Commands().model_server, "--help"), id="model server"),
        pytest.param((*module_command("funitel.launcher.hosted"), "1", "--help"), id="launcher of a client"),
    ],
)
def test_no_file_of_the_working_folder_is_imported(command: tuple[str, ...], folder: Path) -> None:
    environ = {"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": "/bin"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    assert not (folder / "was-run").exists()
    assert done.returncode in (0, -15), done.stderr  # the second: the client that was named is not its parent


def test_every_module_is_started_so() -> None:
    """`module_command` alone may write `-m`."""
    found = []
    for part in ("router", "launcher", "model_server", "llm", "proto"):
        for path in (ROOT / part / "funitel").rglob("*.py"):
            found += [path.name] if '"-m"' in path.read_text() else []
    assert found == ["python.py"]
