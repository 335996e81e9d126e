"""The command line itself: help, version, usage errors, the `serve` word, what is announced."""

import socket
import subprocess
import sys

import pytest

from funitel.launcher.config.resolve import resolve
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.supervisor.announce import example, url


@pytest.fixture(params=["funitel", "funitel.launcher"])
def module(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(module: str, *argv: str, environ: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    variables = {"PYTHONPATH": ":".join(filter(None, sys.path))} | (environ or {})
    return subprocess.run([sys.executable, "-m", module, *argv], capture_output=True, text=True, env=variables)


def test_version(module: str) -> None:
    result = run(module, "--version")
    assert result.returncode == 0
    assert result.stdout.startswith("funitel ")


@pytest.mark.parametrize("words", [[], ["serve"]])
def test_unknown_flags_are_usage_errors_in_one_line(words: list[str]) -> None:
    result = run("funitel", *words, "--xyzzy")
    assert (result.returncode, result.stdout) == (2, "")
    program = " ".join(["python -m funitel", *words])
    assert result.stderr == f"error: No such option: --xyzzy; {program} --help=all lists all\n"


def test_contradicting_settings_are_one_line_and_exit_code_1() -> None:
    result = run("funitel", "serve", "--sharded", "true", "--num-shard", "1")
    assert result.returncode == 1
    assert result.stderr == "error: --sharded true needs --num-shard > 1, given 1\n"


@pytest.mark.parametrize(
    ("argv", "environ", "line"),
    [
        (["--quantize", "exl2"], {}, "--quantize exl2 cannot be honoured: "),
        ([], {"QUANTIZE": "bitsandbytes-nf4"}, "QUANTIZE=bitsandbytes-nf4 cannot be honoured: "),
        (["--ngrok"], {}, "--ngrok cannot be honoured: "),
    ],
)
def test_what_would_change_the_answer_is_one_line_and_exit_code_1(
    argv: list[str], environ: dict[str, str], line: str
) -> None:
    result = run("funitel", *argv, environ=environ)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {line}")
    assert result.stderr.count("\n") == 1


def test_what_changes_nothing_is_one_line_of_the_log_and_the_start_goes_on() -> None:
    argv = ("--model-id", "/nowhere", "--ngrok-edge", "x", "--env", "--shard-uds-path", "/tmp/funitel-test-flags")
    result = run("funitel", *argv, environ={"USAGE_STATS": "off"})
    assert result.stderr.count("--ngrok-edge x is accepted and changes nothing: ") == 1
    assert result.stderr.count("USAGE_STATS=off is accepted and changes nothing: ") == 1
    assert "Runtime environment:" in result.stderr
    assert "Python: 3." in result.stderr
    assert result.returncode == 1
    assert "no such folder or file: /nowhere" in result.stderr.splitlines()[-1]


def test_a_metrics_port_that_is_taken_is_named() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        uds = ("--shard-uds-path", "/tmp/funitel-test-metrics")
        result = run("funitel", "--model-id", "/nowhere", "--port", "0", "--prometheus-port", str(port), *uds)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(f"error: --prometheus-port {port} is already in use on 127.0.0.1")


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


def test_to_read_flags_and_variables_nothing_is_imported_that_takes_long() -> None:
    """A launcher starts the shard after that, and every program reads flags."""
    code = (
        "import sys; from funitel.launcher.__main__ import main\n"
        "sys.argv = ['funitel', '--model-id', '/nowhere', '--num-shard', '1', '--max-batch-size', 'many']\n"
        "try: main()\n"
        "finally: print(*sorted({'grpc._cython', 'pydantic', 'torch', 'sqlalchemy', 'importlib.metadata._adapters'}"
        " & {*sys.modules}))"
    )
    variables = {"PYTHONPATH": ":".join(filter(None, sys.path)), "MAX_CONCURRENT_REQUESTS": "7"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables)
    assert "'many' is not a valid integer" in ended.stderr, ended.stderr
    assert ended.stdout == "\n"
