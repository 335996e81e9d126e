"""Parse command lines of this project's programs as these do, without running them.

As a program it reads a JSON list of [words, variables] from stdin and writes a list: what is wrong with each, or null.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer.completion

from funitel.proto.settings import fields

PROGRAMS = {
    "funitel": "launcher",
    "funitel-router": "router",
    "funitel-server": "model_server",
    "text-generation-launcher": "launcher",
    "text-generation-router": "router",
    "text-generation-server": "model_server",
}


def problems_of(lines: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> list[str | None]:
    """What is wrong with each command line, in a process of its own; the first word names the program."""
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps([(list(words), dict(variables)) for words, variables in lines]),
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[str | None] = json.loads(done.stdout)
    return found


def _parse_only() -> None:
    """Make every command of every program end after its command line is parsed."""
    as_command = fields.as_command

    def parsing(cls: type[Any], run: Callable[[Any], None], *args: Any, **named: Any) -> Callable[..., None]:
        return as_command(cls, lambda settings: None, *args, **(named | {"set_up": lambda settings: None}))

    fields.as_command = parsing
    # It would write into the files that the user's shell reads, whatever shell that is.
    typer.completion.install = lambda **_: ("bash", Path("nowhere"))


def _problem(words: list[str], variables: Mapping[str, str], mains: Mapping[str, Callable[[], Any]]) -> str | None:
    main = mains[PROGRAMS[words[0]]]
    said = io.StringIO()
    before = dict(os.environ)
    os.environ.update(variables)
    sys.argv = words
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            main()
    except SystemExit as ended:
        return None if not ended.code else said.getvalue().strip() or f"exit code {ended.code}"
    finally:
        os.environ.clear()
        os.environ.update(before)
    return None


def _main() -> None:
    _parse_only()
    from funitel.launcher import __main__ as launcher  # after the change above
    from funitel.model_server import __main__ as model_server
    from funitel.router import __main__ as router

    mains: dict[str, Callable[[], Any]] = {
        "launcher": launcher.main,
        "model_server": model_server.main,
        "router": router.main,
    }

    def replace(_: str, argv: Sequence[str]) -> NoReturn:
        """Go on in the program that would replace this process."""
        place = next(at for at, word in enumerate(argv) if word.startswith("funitel."))
        sys.argv = [argv[place], *argv[place + 1 :]]
        mains[argv[place].removeprefix("funitel.")]()
        sys.exit(0)

    os.execv = replace  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty"
        empty.touch()
        found = [_problem(_with_file(words, str(empty)), variables, mains) for words, variables in json.load(sys.stdin)]
    print(json.dumps(found))


def _with_file(words: list[str], path: str) -> list[str]:
    """The words with a file that exists for that of `--config`, which is read while the line is parsed."""
    return [path if place and words[place - 1] == "--config" else word for place, word in enumerate(words)]


if __name__ == "__main__":
    _main()
