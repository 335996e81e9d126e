"""The guides name flags, metrics, figures and lines of errors that exist: each is looked up in the code or its page."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from funitel.router.telemetry import metrics, replica_metrics, roofline

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GUIDES = ("migrate", "comparison", "tuning", "troubleshooting", "compose", "kubernetes")
MEASURED = ("benchmarks", "cpu", "overload", "log")  # pages with the command of each figure
OTHERS = {"--pids-limit", "--strict"}  # flags of other programs
NO_FIGURES = {"0.20", "0.32", "3.3", "2025", "2026"}  # versions and years
PACKAGES = ("proto", "launcher", "router", "model_server")
ANY = "…"  # what differs, on the page and in a template of the code
FORMAT = re.compile(r"%[-.\w]*?[sdgr]|\{\w+\}")
FIELD = re.compile(r"`\$(\w+)`")  # a field of a rule, of which each API says its own name


def guide(name: str) -> str:
    """The text of a page."""
    return (DOCS / f"{name}.md").read_text()


def without_code(text: str) -> str:
    """A page without its blocks and spans of code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("name", GUIDES)
def test_flags_of_a_guide_exist(name: str) -> None:
    prose = re.sub(r"^```.*?^```", "", guide(name), flags=re.MULTILINE | re.DOTALL)
    named = {
        flag for span in re.findall(r"`([^`\n]*)`", prose) for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", span)
    }
    known = set(re.findall(r"`(--[\w-]+)`", guide("settings")))
    assert named - known <= OTHERS


@pytest.mark.parametrize("name", GUIDES)
def test_metrics_of_a_guide_exist(name: str) -> None:
    code = "".join(Path(module.__file__).read_text() for module in (metrics, roofline, replica_metrics))
    named = set(re.findall(r"`((?:tgi|funitel)_\w+)", guide(name)))
    missing = {found for found in named if f'"{found.removesuffix("_total")}"' not in code}
    assert missing <= {"tgi_batch_total_tokens"}  # which migrate.md calls absent


@pytest.mark.parametrize("name", ["comparison", "tuning"])
def test_figures_of_a_guide_are_measured(name: str) -> None:
    measured = set(re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", " ".join(map(guide, MEASURED))))
    figures = set(
        re.findall(r"(?<![\w.])(?:\d+\.\d+|\d{1,3}(?:,\d{3})+|\d{3,})(?![\w.]*\w)", without_code(guide(name)))
    )
    assert len(figures) > 10
    assert figures - measured <= NO_FIGURES


# Lines of errors


def text_of(node: ast.AST) -> str | None:
    """The text of a string in the code, with `ANY` for what it inserts; None for any other expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return FORMAT.sub(ANY, FIELD.sub(r"`\1`", node.value))
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or ANY for part in node.values)
    return None


@cache
def texts() -> tuple[str, ...]:
    """All strings of the code but docstrings."""
    found = []
    for package in PACKAGES:
        for path in (ROOT / package / "funitel").rglob("*.py"):
            tree = ast.parse(path.read_text())
            documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            nodes = (node for node in ast.walk(tree) if id(node) not in documents)
            found += [text for node in nodes if (text := text_of(node)) is not None and len(text) > 8]
    return tuple(found)


def can_say(line: str) -> bool:
    """Whether one string of the code has the fixed parts of a line, in their order."""
    parts = [re.escape(part) for part in line.split(ANY)]
    wanted = re.compile(".*".join(parts), re.DOTALL)
    return any(wanted.search(text) for text in texts())


def quoted() -> Iterator[str]:
    """The first cells of the page's rows, without the marks of code."""
    for row in re.findall(r"^\| (.*?) \|", guide("troubleshooting"), re.MULTILINE):
        if "`" in row:
            yield row.removeprefix("`").removesuffix("`") if row.count("`") == 2 else row


LINES = list(quoted())


@pytest.mark.parametrize("line", LINES)
def test_the_code_can_say_a_line_of_the_page(line: str) -> None:
    assert len(line.replace(ANY, "")) > 4
    assert can_say(line)


def test_the_check_knows_lines_that_are_gone() -> None:
    assert len(LINES) > 60
    assert len(set(LINES)) == len(LINES)
    assert can_say("no such folder or file: …")
    assert not can_say("no such file or folder: …")
    assert not can_say("tokens must have less than …")
