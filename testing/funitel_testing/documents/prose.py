"""Commands and flags in the text between the blocks of a page."""

import re
from collections.abc import Iterator
from functools import cache

from funitel_testing.documents.blocks import ROOT

_BLOCK = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`]+)`")
_COMMAND = re.compile(r"(funitel(-router|-server)?|text-generation-\w+|make|python|pytest|curl) \S")
_FLAG = re.compile(r"--[a-z][a-z0-9-]+")
_NUMBER = re.compile(r"\bN\b")  # stands for a number
_TEST = re.compile(r"(?:([\w/]+\.py|S))?::(test_\w+)")
_MODULE = re.compile(r"[\w/]+\.py")
DOCKER_FLAGS = """--build-arg --cap-add --cap-drop --cpus --env-file --gpus --init --ipc --memory --network --no-cache
--no-healthcheck --pids-limit --privileged --read-only --restart --security-opt --shm-size --stop-timeout --sysctl
--target --time --tmpfs --user --volume""".split()
PEER_FLAGS = ("--ctx-size", "--parallel", "--threads")


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return _BLOCK.sub("", text)


def commands_in(text: str) -> Iterator[str]:
    """The commands that a page names in its text."""
    for code in _CODE.findall(prose(text)):
        line = " ".join(code.split())
        if _COMMAND.match(line):
            yield _NUMBER.sub("2", line)


def flags_in(text: str) -> set[str]:
    """The flags that a page names by themselves: `--port` or `--port 80`."""
    named = (code.split()[0].partition("=")[0] for code in _CODE.findall(prose(text)) if code.startswith("--"))
    return {flag for flag in named if _FLAG.fullmatch(flag)}


@cache
def known_flags() -> set[str]:
    """Flags of our programs, scripts and tests, with `--no-` for switches, and those of other programs on the pages."""
    scripts = [
        *(ROOT / "benchmarks").rglob("*.py"),
        *(ROOT / "testing").rglob("*.py"),
        ROOT / "integration-tests/conftest.py",
    ]
    texts = [(ROOT / "docs/settings.md").read_text(), *(path.read_text() for path in scripts)]
    found = {flag for text in texts for flag in _FLAG.findall(text)}
    return found | {flag.replace("--", "--no-", 1) for flag in found} | {*DOCKER_FLAGS, *PEER_FLAGS}


def missing_tests(text: str) -> list[str]:
    """The tests and modules that a page names, and that the repository does not have; `S` is test_security.py."""
    missing = []
    for code in _CODE.findall(prose(text)):
        for file, test in _TEST.findall(code):
            wanted = "test_security.py" if file == "S" else file
            if not any(path.endswith(wanted) for path in tests_by_name().get(test, ())):
                missing.append(f"{file}::{test}")
        if _MODULE.fullmatch(code) and not any(f"/{path}".endswith(f"/{code}") for path in modules()):
            missing.append(code)
    return missing


@cache
def modules() -> list[str]:
    """Every module of the repository, tests included."""
    parts = (
        "proto",
        "router",
        "model_server",
        "launcher",
        "llm",
        "testing",
        "scripts",
        "benchmarks",
        "integration-tests",
        "deploy",
        "docs",
    )
    paths = [*ROOT.glob("*.py"), *(path for part in parts for path in (ROOT / part).rglob("*.py"))]
    return [str(path.relative_to(ROOT)) for path in paths]


@cache
def tests_by_name() -> dict[str, list[str]]:
    """The modules that have each test."""
    found: dict[str, list[str]] = {}
    for path in modules():
        for name in re.findall(r"def (test_\w+)", (ROOT / path).read_text()) if "/test_" in path else ():
            found.setdefault(name, []).append(path)
    return found
