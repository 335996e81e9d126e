"""What shells complete: commands, flags, choices, models."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from funitel.launcher.cli.program import SHELLS, SUMMARIES, program
from funitel.proto.settings.fields import run_app

Complete = Any


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Complete:
    """`complete("funitel se")`: the words that bash would offer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["funitel"])

    def offered(line: str) -> list[str]:
        monkeypatch.setenv("_FUNITEL_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        with pytest.raises(SystemExit):
            run_app(program(os.environ, lambda given: None, lambda settings: None), "funitel")
        return capsys.readouterr().out.split()

    return offered


def test_commands(complete: Complete) -> None:
    assert complete("funitel ") == [*SUMMARIES]
    assert complete("funitel se") == ["serve"]
    assert complete("funitel help mo") == ["models"]
    assert complete("funitel key re") == ["revoke"]


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("funitel --po", "--port"),
        ("funitel serve --quant", "--quantize"),
        ("funitel serve x --port 80 --quant", "--quantize"),
        ("funitel chat --tem", "--temperature"),
        ("funitel bench --sl", "--slo-ttft-ms"),
        ("funitel key new --exp", "--expires"),
        ("funitel perplexity x --against-d", "--against-dtype"),
    ],
)
def test_flags(complete: Complete, line: str, flag: str) -> None:
    assert flag in complete(line)


def test_choices_without_those_that_are_refused(complete: Complete) -> None:
    assert complete("funitel serve --quantize g") == ["gptq", "gguf"]
    assert complete("funitel serve --quantize e") == []
    assert complete("funitel perplexity --tiers g") == ["gptq", "gguf"]
    assert complete("funitel perplexity --tiers gguf,g") == ["gguf,gptq"]
    assert complete("funitel --device c") == ["cpu", "cuda"]
    assert complete("funitel serve --prefix-caching f") == ["false"]


@pytest.mark.parametrize("line", ["funitel serve ", "funitel --model-id ", "funitel chat ", "funitel models "])
def test_models_of_the_catalogue_and_of_this_disk(complete: Complete, line: str) -> None:
    Path("small/model").mkdir(parents=True)
    Path("smile.gguf").touch()
    Path("smoke.txt").touch()
    assert complete(f"{line}sm") == ["smollm2-135m-instruct", "small/", "smile.gguf"]
    assert complete(f"{line}small/") == ["small/model/"]
    assert complete(f"{line}./sma") == ["./small/"]
    assert complete(f"{line}no/such/") == []


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_shown_and_installed(shell: str, tmp_path: Path) -> None:
    def run(*argv: str) -> "subprocess.CompletedProcess[str]":
        env = {"PYTHONPATH": ":".join(filter(None, sys.path)), "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
        code = "import sys; sys.argv[0] = 'funitel'; from funitel.launcher.__main__ import main; main()"
        return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, env=env)

    shown = run("--show-completion", shell)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"_FUNITEL_COMPLETE=complete_{shell}" in shown.stdout
    installed = run("--install-completion", shell)
    assert installed.returncode == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file() and "_FUNITEL_COMPLETE" in path.read_text()]
    assert len(files) == 1


def test_an_unknown_shell_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["funitel", "--show-completion", "csh"])
    with pytest.raises(SystemExit) as ended:
        run_app(program(os.environ, lambda given: None, lambda settings: None))
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: --show-completion takes bash, zsh, fish or nothing, given 'csh'\n"


def test_descriptions_are_one_line_each(
    complete: Complete, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_FUNITEL_COMPLETE", "complete_fish")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "funitel serve --")
    with pytest.raises(SystemExit):
        run_app(program(os.environ, lambda given: None, lambda settings: None), "funitel")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 100
    assert all(line.startswith("-") for line in lines)
