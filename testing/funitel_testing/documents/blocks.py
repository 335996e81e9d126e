"""Find the fenced blocks of the pages.

A block that the tests run has a line `<!-- run: TEXT -->` before it; its output must contain TEXT.
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
_FENCE = re.compile(r"^( *)(`{3,})([^`]*)$")
_RUN = re.compile(r"^ *<!-- run: (.+?) -->$")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block.

    Attributes:
        page: path of the page from the root of the repository.
        line: of the opening fence, from 1.
        language: the first word after the fence; empty where there is none.
        expected: what its output must contain; None where it is not run.
    """

    page: str
    line: int
    language: str
    text: str
    expected: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages(root: Path = ROOT) -> list[Path]:
    """Every page with blocks that readers copy."""
    outside = [root / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/peers.md")]
    return [*outside, *sorted((root / "docs").rglob("*.md"))]


def blocks_of(text: str, page: str) -> Iterator[Block]:
    """The blocks of one page.

    Raises:
        ValueError: a fence is not closed.
    """
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        opening = _FENCE.match(lines[at])
        if opening is None:
            at += 1
            continue
        closing = re.compile(rf"^ *{opening[2]}`*$")
        end = next((n for n in range(at + 1, len(lines)) if closing.match(lines[n])), None)
        if end is None:
            raise ValueError(f"{page}:{at + 1}: the fence is not closed")
        mark = _RUN.match(lines[at - 1]) if at else None
        body = textwrap.dedent("\n".join(lines[at + 1 : end])) + "\n"
        yield Block(page, at + 1, opening[3].strip().partition(" ")[0], body, mark[1] if mark else None)
        at = end + 1


def all_blocks(root: Path = ROOT) -> list[Block]:
    """The blocks of all pages, in the order of the pages."""
    return [block for path in pages(root) for block in blocks_of(path.read_text("utf-8"), str(path.relative_to(root)))]


def misread_lines(text: str) -> Iterator[str]:
    """Lines that the site's Markdown reads otherwise than GitHub's: each as its number and what to do."""
    is_fenced = is_list = False
    before = ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("~~~"):
            yield f"{number}: fence with backticks"
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
            if (len(line) - len(line.lstrip())) % 4:
                yield f"{number}: indent the fence by four spaces"
        elif not is_fenced:
            is_item = re.match(r"\s*([-*]|\d+\.) ", line) is not None
            if is_item and before and not is_list:
                yield f"{number}: put an empty line before the list"
            is_list = is_item or (is_list and (not line or line.startswith(" ")))
            if line.startswith("    ") and not is_list and not before:
                yield f"{number}: put the code into a fence"
        before = line
