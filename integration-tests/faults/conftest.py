"""The table of faults: its rows as they are run, printed at the end and written with --write."""

from pathlib import Path

import pytest

from funitel_testing.faults.page import written
from funitel_testing.faults.table import Row, as_text

_ROWS: list[Row] = []
_PAGE = Path(__file__).parents[2] / "docs" / "faults.md"


def pytest_addoption(parser: pytest.Parser) -> None:
    """--write keeps the table in docs/faults.md."""
    parser.addoption("--write", action="store_true", help="write the table of faults to docs/faults.md")


@pytest.fixture(scope="session")
def rows() -> list[Row]:
    """Rows of the table that were run."""
    return _ROWS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table, and write it where that was asked for."""
    if not _ROWS:
        return
    terminalreporter.section("faults")
    terminalreporter.write_line(as_text(_ROWS))
    if config.getoption("--write"):
        _PAGE.write_text(written(_PAGE.read_text(), _ROWS))
