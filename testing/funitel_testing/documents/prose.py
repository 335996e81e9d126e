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
OTHER_FLAGS = (
    "--build-arg",
    "--cap-add",
    "--ctx-size",
    "--gpus",
    "--parallel",
    "--restart",
    "--shm-size",
    "--target",
    "--threads",
)


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
    return found | {flag.replace("--", "--no-", 1) for flag in found} | {*OTHER_FLAGS}
