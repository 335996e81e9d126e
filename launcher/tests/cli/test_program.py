"""The program `funitel`: its commands, its help, and one line for each likely mistake."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from funitel.launcher.cli.fleet.commands import FLEET_COMMANDS, TITLE
from funitel.launcher.cli.program import COMMANDS, OF_USERS, SUMMARIES, program
from funitel.launcher.config.command_line import ParsedCommandLine
from funitel.launcher.settings import LauncherSettings
from funitel.proto.settings.fields import run_app


class Ran:
    """What one command line led to, in process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: str) -> None:
        served: list[ParsedCommandLine] = []
        monkeypatch.setattr(sys, "argv", ["funitel", *argv])
        with pytest.raises(SystemExit) as ended:
            run_app(program(os.environ, served.append, lambda settings: None))
        self.code = ended.value.code
        self.out, self.err = capsys.readouterr()
        self.settings: LauncherSettings | None = served[0].settings if served else None
        self.served = served


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    for name in ("MODEL_ID", "PORT", "FUNITEL_CONFIG", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return lambda *argv: Ran(monkeypatch, capsys, *argv)


# The model


@pytest.mark.parametrize(
    ("argv", "model", "port"),
    [
        ([], "smollm2-135m-instruct", 3000),
        (["serve"], "smollm2-135m-instruct", 3000),
        (["--model-id", "x"], "x", 3000),
        (["--port", "80"], "smollm2-135m-instruct", 80),
        (["serve", "x"], "x", 3000),
        (["serve", "--port", "80", "x"], "x", 80),
        (["serve", "x", "-p", "80"], "x", 80),
        (["serve", "--model-id", "x"], "x", 3000),
        (["serve", "x", "--model-id", "x"], "x", 3000),
        (["serve", "--", "x"], "x", 3000),
        (["serve", "--served-model-name", "x", "y"], "y", 3000),
    ],
)
def test_a_model_is_served(run: Any, argv: list[str], model: str, port: int) -> None:
    ran = run(*argv)
    assert (ran.code, ran.err) == (0, "")
    assert (ran.settings.model_id, ran.settings.port) == (model, port)


def test_a_positional_model_beats_the_variable_and_stays_at_a_reload(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_ID", "other")
    ran = run("serve", "x")
    assert ran.settings.model_id == "x"
    assert ran.served[0].reread().settings.model_id == "x"


def test_a_positional_model_beats_the_file(run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "funitel.conf"
    file.write_text("MODEL_ID=other\nPORT=81\n")
    ran = run("serve", "x", "--config", str(file))
    assert (ran.settings.model_id, ran.settings.port) == ("x", 81)
    assert "MODEL_ID" in caplog.text
    assert "has no effect" in caplog.text


# Help


def test_the_page_of_the_program_lists_every_command(run: Any) -> None:
    ran = run("--help")
    assert (ran.code, ran.err) == (0, "")
    for name, summary in SUMMARIES.items():
        if name in (*FLEET_COMMANDS, *OF_USERS):  # named only, so that the page stays short
            continue
        assert re.search(rf"^  {name} +{re.escape(summary[:20])}", ran.out, re.MULTILINE)
    (named,) = re.findall(rf"^{TITLE}:\n((?:  .*\n)+)", ran.out, re.MULTILINE)
    assert re.split(r",\s+", named.strip()) == [*FLEET_COMMANDS, *OF_USERS]
    for name in FLEET_COMMANDS:
        assert run("help", name).out.startswith(f"Usage: {run('--help').out.split()[1]} {name} ")


@pytest.mark.parametrize("width", ["60", "80"])
@pytest.mark.parametrize("words", [[], *([name] for name in SUMMARIES if name != "help"), ["bench", "kernels"]])
def test_a_page_is_short_and_not_cut(run: Any, monkeypatch: pytest.MonkeyPatch, words: list[str], width: str) -> None:
    monkeypatch.setenv("COLUMNS", width)
    pages = [run(*words, "--help"), run(*words, "-h"), run("help", *words)]
    assert all(page.code == 0 for page in pages)
    assert pages[0].out == pages[1].out
    assert pages[0].out == pages[2].out
    lines = pages[0].out.splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= int(width)
    assert "…" not in pages[0].out
    assert "│" not in pages[0].out


def test_help_of_commands_of_two_words(run: Any) -> None:
    for words in (["bench", "kernels"], ["key", "new"]):
        assert run("help", *words).out == run(*words, "--help").out
    assert run("help", "help").out == run("--help").out


@pytest.mark.parametrize("words", [[], ["serve"], ["chat"], ["models"]])
def test_all_flags_a_group_and_a_word(run: Any, words: list[str]) -> None:
    whole = run(*words, "--help=all").out
    flags = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", whole, re.MULTILINE))
    assert {"--model-id", "--help"} <= flags
    model = run(*words, "--help=model").out
    assert "--model-id" in model
    assert "--help" not in re.sub(r"--help=", "", model).split()
    ran = run(*words, "--help=xyzzy")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)


def test_every_flag_of_the_launcher_is_on_the_page_of_all(run: Any) -> None:
    text = run("--help=all").out
    for name in LauncherSettings.__dataclass_fields__:
        assert re.search(rf"--{name.replace('_', '-')}\b", text), name


def test_values_that_are_refused_are_not_offered(run: Any) -> None:
    text = run("serve", "--help=quantize").out + run("serve", "--quantize", "x").err
    assert "gptq" in text
    for word in ("exl2", "eetq", "marlin", "bitsandbytes"):
        assert word not in text


# Mistakes: (words, exit code, what the one line says)

USAGE = [
    (["serev"], "did you mean serve?"),
    (["bnech"], "did you mean bench?"),
    (["xyzzy"], "funitel --help lists them"),
    (["version"], "did you mean --version?"),
    (["port", "80"], "did you mean --port?"),
    ([""], "must be a command or a flag"),
    (["smollm2-135m-instruct"], "run funitel serve smollm2-135m-instruct"),
    (["./a/model"], "run funitel serve ./a/model"),
    (["--port", "80", "serve"], "serve comes before the flags"),
    (["--port", "80", "x"], "run funitel serve x"),
    (["--prot", "80"], "did you mean --port?"),
    (["serve", "--prot=80"], "did you mean --port?"),
    (["chat", "--modelid", "x"], "did you mean --model-id?"),
    (["serve", "--xyzzy"], "funitel serve --help=all lists all"),
    (["serve", "a", "b"], "unexpected argument 'b': funitel serve takes one MODEL"),
    (["serve", "a", "--model-id", "b"], "a and --model-id b are different models: give one"),
    (["serve", ""], "MODEL must not be empty"),
    (["serve", "--port", "abc"], "'abc' is not a valid integer"),
    (["serve", "--port"], "--port"),
    (["serve", "--port", "1", "--port", "2"], "--port is given 2 times: give it once"),
    (["serve", "--json-output", "--no-json-output"], "--json-output is given 2 times"),
    (["serve", "--quantize", "gtpq"], "did you mean gptq?"),
    (["serve", "--dtype", "bf16"], "float32, float16, bfloat16"),
    (["serve", "--help=prto"], "did you mean port"),
    (["generate"], "PROMPT"),
    (["generate", "a model", "a prompt"], "funitel generate takes PROMPT"),
    (["spec", "show", "--model-id", "x"], "give MODEL without a flag"),
    (["download-weights", "--model-id=x"], "give MODEL without a flag"),
    (["models", "a", "b"], "funitel models takes MODEL"),
    (["bench", "a", "--model-id", "b"], "are different models"),
    (["perplexity", "--text", "x"], "MODEL"),
    (["perplexity", "m", "--tiers", "int8,int9"], "'int9'"),
    (["key"], "funitel key needs a command: new, list, group, import, revoke"),
    (["key", "nwe"], "did you mean new?"),
]


@pytest.mark.parametrize(("argv", "words"), USAGE, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_usage_mistake_is_one_line_that_says_what_to_do(run: Any, argv: list[str], words: str) -> None:
    ran = run(*argv)
    assert (ran.code, ran.out, ran.served) == (2, "", [])
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert words in ran.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model-id", " "], "--model-id must not be empty"),
        (["serve", "--quantize", "exl2"], "--quantize exl2 cannot be honoured"),
        (["perplexity", "m"], "--text FILE is missing"),
        (["perplexity", "m", "--text", "x", "--window", "8", "--stride", "9"], "--stride must be at most --window 8"),
        (["perplexity", "m", "--text", "x", "--quantize", "exl2"], "--quantize exl2 cannot be honoured"),
    ],
)
def test_a_setting_that_cannot_be_is_one_line(run: Any, argv: list[str], words: str) -> None:
    ran = run(*argv)
    assert (ran.code, ran.out, ran.served, ran.err.count("\n")) == (1, "", [], 1)
    assert words in ran.err


# The other programs


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("words", ["router", "model_server", "model_server serve"])
def test_pages_of_router_and_shard_are_short_and_not_cut(words: str, width: int) -> None:
    name, *rest = words.split()
    code = f"import sys; sys.argv[0] = 'funitel-server'; from funitel.{name}.__main__ import main; main()"
    env = {"PYTHONPATH": ":".join(filter(None, sys.path)), "COLUMNS": str(width)}
    done = subprocess.run([sys.executable, "-c", code, *rest, "-h"], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert 5 < len(lines) <= 100
    assert max(map(len, lines)) <= width
    assert "…" not in done.stdout


# Loading


@pytest.mark.parametrize("words", [name for name in COMMANDS])
def test_every_command_can_be_loaded(run: Any, words: str) -> None:
    assert run(*words.split(), "-h").code == 0


def test_help_imports_neither_torch_nor_what_serves() -> None:
    code = (
        "import sys; from funitel.launcher.__main__ import main; sys.argv = ['funitel', '--help']\n"
        "try: main()\n"
        "except SystemExit: print([n for n in ('torch', 'numpy', 'uvloop', 'rich') if n in sys.modules])"
    )
    path = ":".join(filter(None, sys.path))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": path})
    assert result.stdout.splitlines()[-1] == "[]"
