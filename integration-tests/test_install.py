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

LOG = 'echo "$*" >>"$(dirname "$0")/log"'
TORCH = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
REPORT = '*"--dry-run --report"*)'
FAKE_PYTHON = f"""case "$*" in
  "-c import torch;"*) echo "{TORCH}+cpu None" ;;
  {REPORT}
    while [ "$1" != --report ]; do shift; done
    echo '{{"install": [{{"metadata": {{"name": "nvidia-cublas", "version": "1"}}}}]}}' > "$2" ;;
  *"print(sysconfig"*) dirname "$0" ;;
  *" install "*) {LOG} ;;
  *) exec {sys.executable} "$@" ;;
esac
"""
NO_TORCH = FAKE_PYTHON.replace(f'echo "{TORCH}+cpu None"', "exit 1")


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
    variables = dict(word.split("=", 1) for word in words[:start] if not word.startswith("--mount="))
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
        "constraints.txt",
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
    assert not (tmp_path / "compiled").exists()  # resolving takes seconds, compiling minutes


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


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_a_resolution_that_brings_cuda_is_refused(tmp_path: Path, installer: str) -> None:
    """An installer that answers every question with a CUDA build stands in for an index that has no other."""
    fake = Fake(tmp_path)
    fake.program("python", NO_TORCH)
    fake.program("uv", 'echo " + nvidia-cublas==1" >&2')
    result = fake.install("server", installer)
    assert result.returncode == 1
    assert result.stdout.count("passed over: torch==") == 3
    assert "would bring nvidia-cublas" in result.stdout
    assert result.stderr.startswith("error: no CPU build of torch")
    assert fake.installed() == []


@pytest.mark.parametrize(
    ("found", "asked", "is_replaced"),
    [
        (f"{TORCH}+cpu None", "cpu", False),
        (f"{TORCH} None", "cpu", False),
        (f"{TORCH} 13.0", "cpu", False),
        ("2.1.0+cpu None", "cpu", True),
        (f"{TORCH}+cpu None", "cuda", True),
        (f"{TORCH} 13.0", "cuda", False),
        ("2.1.0 13.0", "cuda", False),
    ],
)
def test_a_torch_that_the_package_would_not_replace_rightly_is(
    tmp_path: Path, found: str, asked: str, is_replaced: bool
) -> None:
    """Left to itself an installer takes a CUDA build over an old CPU build, and keeps a CPU build for a GPU."""
    fake = Fake(tmp_path)
    fake.program("python", FAKE_PYTHON.replace(f"{TORCH}+cpu None", found).replace("nvidia-cublas", "torch"))
    result = fake.install("server", "pip", "--torch", asked)
    assert result.returncode == 0, result.stderr
    assert [f"torch=={TORCH}" in line for line in fake.installed()] == [True, False][not is_replaced :]
    assert all("--force-reinstall" in line for line in fake.installed()[:-1])


def test_without_network_the_installers_reason_is_given(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    refusal = 'echo "ERROR: no route to the index" >&2; exit 1 ;; never)'
    fake.program("python", NO_TORCH.replace(REPORT, f"{REPORT} {refusal}"))
    result = fake.install("server", "pip")
    assert result.returncode == 1
    assert result.stderr.endswith("ERROR: no route to the index\n")
    assert result.stderr.count("\n") == 1


def test_an_install_after_which_torch_cannot_be_imported_is_not_marked_as_done(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    fake.program("python", NO_TORCH.replace("nvidia-cublas", "torch"))
    for _ in range(2):
        result = fake.install("server", "pip")
        assert result.returncode == 1
        assert result.stderr.startswith("error: torch cannot be imported: delete ")
    assert len(fake.installed()) == 4


def test_what_tests_need_is_added_to_what_serving_needs(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    fake.program("python", FAKE_PYTHON)
    for extras, installed in (("server", True), ("server", False), ("server,dev", True), ("server", False)):
        before = len(fake.installed())
        assert fake.install(extras, "pip").returncode == 0
        assert (len(fake.installed()) > before) is installed, extras
    assert any(line.endswith(".[server]") for line in fake.installed())
    assert all("--constraint constraints.txt" in line for line in fake.installed() if ".[" in line)


def test_uv_installs_where_there_is_one(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    fake.program("python", FAKE_PYTHON)
    fake.program("uv", LOG)
    assert fake.install("server", "uv").returncode == 0
    (line,) = fake.installed()
    assert line.startswith("pip install --quiet --python")


def test_pip_installs_what_uv_does_not(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    fake.program("python", FAKE_PYTHON)
    fake.program("uv", "exit 2")
    result = fake.install("server", "uv")
    assert (result.returncode, result.stderr) == (0, "")
    assert "trying pip" in result.stdout
    (line,) = fake.installed()
    assert line.startswith("-m pip")


def test_pips_settings_are_given_to_uv(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://a.test/simple\nextra-index-url = https://b.test/simple\n  https://c.test/simple\n"
    )
    variables = {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_FIND_LINKS": "/one /two", "PIP_NO_CACHE_DIR": "1"}
    names = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS", "UV_NO_CACHE")
    show = "; ".join(f'echo "${name}"' for name in names)
    clean = "unset " + " ".join(names)
    result = run(["bash", "-c", f'{clean}; eval "$({sys.executable} scripts/pip_settings.py)"; {show}'], variables)
    assert result.stdout.splitlines() == [
        "https://a.test/simple",
        "https://b.test/simple https://c.test/simple",
        "/one,/two",
        "1",
    ]


def test_without_extras_there_is_a_router_and_a_line_about_the_rest(tmp_path: Path) -> None:
    """As `pip install funitel` leaves it: a fresh environment, nothing of this one."""
    bin = tmp_path / "venv" / "bin"
    installed = run([INSTALL, "--extras", "", str(tmp_path / "venv")])
    assert installed.returncode == 0, installed.stdout + installed.stderr
    schema = run([str(bin / "funitel-router"), "print-schema"])
    assert "/generate" in schema.stdout, schema.stderr
    for program, *words in (("funitel",), ("funitel", "models"), ("funitel-server", "serve", "owner/model")):
        result = run([str(bin / program), *words])
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr.endswith("pip install 'funitel[server]'\n")
        assert result.stderr.count("\n") == 1


class Fake:
    """A virtual environment of programs that install nothing, and log what they were asked to install."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "venv"
        self.bin = self.folder / "bin"
        self.bin.mkdir(parents=True)

    def program(self, name: str, script: str) -> None:
        """Make the shell script of a program."""
        (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / name).chmod(0o755)

    def install(self, extras: str, installer: str, *options: str) -> "subprocess.CompletedProcess[str]":
        """Run the script with this environment's programs first."""
        variables = {"INSTALLER": installer, "PATH": f"{self.bin}:{os.environ['PATH']}"}
        return run([INSTALL, "--extras", extras, *options, str(self.folder)], variables)

    def installed(self) -> list[str]:
        """The command lines of installations."""
        log = self.bin / "log"
        return log.read_text().splitlines() if log.exists() else []
