"""The command line itself: help, version, usage errors, the `serve` word, what is announced."""

import subprocess
import sys

import pytest

from funitel.launcher.announce import example, url
from funitel.launcher.resolve import resolve
from funitel.launcher.settings import LauncherSettings


@pytest.fixture(params=["funitel", "funitel.launcher"])
def module(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(module: str, *argv: str) -> "subprocess.CompletedProcess[str]":
    path = ":".join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-m", module, *argv], capture_output=True, text=True, env={"PYTHONPATH": path}
    )


def test_version(module: str) -> None:
    result = run(module, "--version")
    assert result.returncode == 0
    assert result.stdout.startswith("funitel ")


@pytest.mark.parametrize("words", [[], ["serve"]])
def test_unknown_flags_are_usage_errors_in_one_line(words: list[str]) -> None:
    result = run("funitel", *words, "--no-such-flag")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: No such option: --no-such-flag\n"


def test_contradicting_settings_are_one_line_and_exit_code_1() -> None:
    result = run("funitel", "serve", "--sharded", "true", "--num-shard", "1")
    assert result.returncode == 1
    assert result.stderr == "error: --sharded true needs --num-shard > 1, given 1\n"


def test_help_names_every_setting() -> None:
    result = run("funitel", "--help")
    assert result.returncode == 0
    assert "--model-id" in result.stdout
    assert "--version" in result.stdout


def test_the_launcher_needs_no_torch() -> None:
    code = "import sys, funitel.launcher.__main__; sys.exit('torch' in sys.modules)"
    path = ":".join(filter(None, sys.path))
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}).returncode == 0


@pytest.mark.parametrize(
    ("hostname", "expected"),
    [
        ("0.0.0.0", "http://localhost:3000"),
        ("::", "http://localhost:3000"),
        ("10.0.0.7", "http://10.0.0.7:3000"),
        ("fe80::1", "http://[fe80::1]:3000"),
    ],
)
def test_the_url_is_one_that_works_here(hostname: str, expected: str) -> None:
    assert url(resolve(LauncherSettings(hostname=hostname), 1, "/tmp/path")) == expected


def test_the_example_names_the_variable_and_not_the_key() -> None:
    plain = example(resolve(LauncherSettings(), 1, "/tmp/path"))
    keyed = example(resolve(LauncherSettings(api_key="sesame"), 1, "/tmp/path"))
    assert "Authorization" not in plain
    assert '-H "Authorization: Bearer $API_KEY" ' in keyed
    assert "sesame" not in keyed
