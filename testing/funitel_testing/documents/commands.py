"""Check the commands in shell blocks that are not of our own programs: make, python, pytest, pip, curl, docker."""

import importlib.util
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

from funitel_testing.documents.blocks import ROOT
from funitel_testing.documents.command_lines import PROGRAMS
from funitel_testing.documents.requests import check_curl
from funitel_testing.documents.shell import Command, commands_of

_EXTRAS = re.compile(r"(?:funitel|^\.|\.whl)\[([\w,-]+)\]")
_IMAGE = re.compile(r"funitel(:[\w.-]+)?$")
_VARIABLE = re.compile(r"`([A-Z][A-Z0-9_]+)`")
_TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)
OTHER_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HF_TOKEN", "HF_HOME", "HF_HUB_CACHE", "OMP_NUM_THREADS", "PYTHON", "VENV")
OTHER_PROGRAMS = ("CMAKE_", "LLAMA_", "VLLM_")  # how variables of the servers begin that we are compared with


def own_commands(commands: Sequence[Command]) -> Iterator[Command]:
    """Those of our own programs, also where make or a container starts them."""
    for command in commands:
        words = tuple(word.removeprefix(".venv/bin/") for word in command.words[:1]) + command.words[1:]
        if not words:
            continue
        if words[0] in PROGRAMS:
            yield Command(words, command.variables)
        elif words[:2] == ("make", "serve"):
            arguments = [word.removeprefix("ARGS=") for word in words if word.startswith("ARGS=")]
            yield Command(("funitel", *(word for text in arguments for word in text.split())))
        elif words[0] in ("docker", "podman") and words[1:2] == ("run",):
            yield from _in_container(words)


def _in_container(words: Sequence[str]) -> Iterator[Command]:
    images = [place for place, word in enumerate(words) if _IMAGE.fullmatch(word) and words[place - 1] != "--name"]
    if images:
        rest = words[images[0] + 1 :]
        yield Command(tuple(rest) if rest and rest[0] in PROGRAMS else ("funitel", *rest))


def check_commands(text: str) -> list[Command]:
    """Check what does not need our parsers; return the commands of our own programs.

    Raises:
        ValueError: a file, target, module, extra, variable, flag, route or field does not exist; the message has which.
    """
    commands = list(commands_of(text))
    _check_variables(commands)
    for command in commands:
        for word in command.words:
            _check_extras(word)
        checker = CHECKERS.get(command.words[0]) if command.words else None
        if checker is not None:
            checker(command.words[1:])
    return list(own_commands(commands))


def _set_for_us(command: Command) -> set[str]:
    """Variables that a command sets for our programs."""
    if not command.words or command.words[0] in (*PROGRAMS, "export"):
        return set(command.variables)
    pairs = zip(command.words, command.words[1:], strict=False)
    return {word.partition("=")[0] for before, word in pairs if before in ("-e", "--env")}


def _check_variables(commands: Sequence[Command]) -> None:
    """Check the names of variables for our programs; a text of nothing but assignments is a file of them."""
    is_file = not any(command.words for command in commands)
    for command in commands:
        if command.words or is_file:
            unknown = sorted(_set_for_us(command) - variables())
            if unknown and not unknown[0].startswith(OTHER_PROGRAMS):
                raise ValueError(f"no variable {', '.join(unknown)}")


@cache
def variables() -> set[str]:
    """Variables that our programs read, and those of the programs that they start and of the libraries."""
    return {*_VARIABLE.findall((ROOT / "docs/settings.md").read_text()), *OTHER_VARIABLES}


def _check_extras(word: str) -> None:
    for listed in _EXTRAS.findall(word):
        unknown = set(listed.split(",")) - extras()
        if unknown:
            raise ValueError(f"{word}: the package has no extra {', '.join(sorted(unknown))}")


@cache
def extras() -> set[str]:
    """Extras of the package."""
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def _check_make(words: Sequence[str]) -> None:
    targets = set(_TARGET.findall((ROOT / "Makefile").read_text()))
    for word in words:
        if "=" not in word and word not in targets:
            raise ValueError(f"make has no target {word}")


def _check_python(words: Sequence[str]) -> None:
    if words[:1] == ("-m",) and len(words) > 1:
        if words[1].startswith("funitel") and importlib.util.find_spec(words[1]) is None:
            raise ValueError(f"no module {words[1]}")
    elif words and words[0].endswith(".py") and "/" in words[0] and not words[0].startswith("/"):
        _check_files(words[:1])


def _check_files(words: Sequence[str]) -> None:
    for word in words:
        path = word.partition("::")[0]
        if "/" in path and not path.startswith(("/", "-")) and not (ROOT / path).exists():
            raise ValueError(f"the repository has no {path}")


CHECKERS: Mapping[str, Callable[[Sequence[str]], None]] = {
    "curl": check_curl,
    "make": _check_make,
    "python": _check_python,
    "python3": _check_python,
    "pytest": _check_files,
}
