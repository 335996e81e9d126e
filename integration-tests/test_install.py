"""What the Dockerfile and the Makefile install with: the very commands, on a clean environment.

By default everything is resolved and nothing is downloaded but metadata and small wheels; the slow test installs.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
INSTALL = "scripts/install.sh"


def dockerfile_lines() -> list[str]:
    """Instructions of the Dockerfile, continuation lines joined, comments left out."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    return text.replace("\\\n", " ").splitlines()


def install_command() -> tuple[dict[str, str], list[str], str]:
    """(variables, words, virtual environment) of the one RUN line that calls the install script."""
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)", "\n".join(dockerfile_lines()), re.MULTILINE))
    (line,) = [line for line in dockerfile_lines() if line.startswith("RUN") and INSTALL in line]
    words = shlex.split(re.sub(r"\$\{(\w+)\}", lambda match: defaults[match[1]], line.removeprefix("RUN ")))
    start = words.index(INSTALL)
    variables = dict(word.split("=", 1) for word in words[:start])
    return variables, words[start:-1], words[-1]


def run(words: Sequence[str], variables: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ |= {"PYTHON": sys.executable, **(variables or {})}
    return subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True)


def test_the_image_puts_the_environment_it_installs_on_the_path() -> None:
    _, _, environment = install_command()
    assert f"PATH={environment}/bin:" in (ROOT / "Dockerfile").read_text()


def test_the_image_copies_every_file_the_package_is_built_from() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept >= {
        "pyproject.toml",
        "hatch_build.py",
        "README.md",
        "LICENSE",
        "scripts",
        "proto",
        "router",
        "model_server",
        "launcher",
        "llm",
    }
    assert all((ROOT / name).exists() for name in kept)


def test_the_dockerfiles_install_command_resolves_without_cuda(tmp_path: Path) -> None:
    variables, words, _ = install_command()
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\ntouch {tmp_path / 'compiled'}\nexit 1\n")
    compiler.chmod(0o755)
    variables = {**variables, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = run([*words, "--dry-run", str(tmp_path / "venv")], variables)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "==> found: torch==" in result.stdout
    assert not (tmp_path / "compiled").exists()  # resolving takes seconds, compiling half a minute


@pytest.mark.slow
def test_the_dockerfiles_install_command_gives_working_programs(tmp_path: Path) -> None:
    variables, words, _ = install_command()
    result = run([*words, str(tmp_path / "venv")], variables)
    assert result.returncode == 0, result.stdout + result.stderr
    for program in ("text-generation-launcher", "text-generation-router", "text-generation-server"):
        answer = run([str(tmp_path / "venv" / "bin" / program), "--help"])
        assert answer.returncode == 0, answer.stderr
    packages = run([str(tmp_path / "venv/bin/python"), "-m", "pip", "list", "--format=freeze"]).stdout
    assert "nvidia-" not in packages
    assert f"funitel=={_version()}" in packages


def _version() -> str:
    match = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert match
    return match[1]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "give the folder"),
        (["--torch", "rocm", "venv"], "--torch must be cpu or cuda, given rocm"),
        (["--no-such-option", "venv"], "unknown option --no-such-option"),
    ],
)
def test_wrong_options_are_refused_in_one_line(words: list[str], why: str) -> None:
    result = run([INSTALL, *words])
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert why in result.stderr


def test_a_resolution_that_brings_cuda_is_refused(tmp_path: Path) -> None:
    """A pip that answers every question with a CUDA build stands in for an index that has no other."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    result = run([INSTALL, "--extras", "server", str(tmp_path / "venv")])
    assert result.returncode == 1
    assert result.stdout.count("passed over: torch==") == 3
    assert "would bring nvidia-cublas" in result.stdout
    assert result.stderr.startswith("error: no CPU build of torch")


FAKE_PYTHON = f"""#!/bin/sh
case "$*" in
  "-c import torch") exit 1 ;;
  *"--dry-run --report"*)
    while [ "$1" != --report ]; do shift; done
    echo '{{"install": [{{"metadata": {{"name": "nvidia-cublas", "version": "1"}}}}]}}' > "$2" ;;
  *" install "*) echo "nothing may be installed" >&2; exit 3 ;;
  *) exec {sys.executable} "$@" ;;
esac
"""
