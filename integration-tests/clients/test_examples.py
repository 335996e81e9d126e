"""The programs of docs/examples, as they are but for the server's address: each prints what it says."""

import contextlib
import io
from pathlib import Path

import pytest

from funitel_testing.servers import Server

PROGRAMS = sorted((Path(__file__).parents[2] / "docs" / "examples").glob("*.py"))
MOST_LINES = 30


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of text-generation, which is written for pydantic 1
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_an_example_prints_what_it_says(program: Path, server: Server, request: pytest.FixtureRequest) -> None:
    source = program.read_text()
    code, _, printed = source.partition("\n# prints:\n")
    expected = [line.removeprefix("#").removeprefix(" ") for line in printed.splitlines()]
    assert expected
    assert len(code.splitlines()) <= MOST_LINES
    code = code.replace("http://localhost:3000", server.url)
    if "http://localhost:3001" in code:
        code = code.replace("http://localhost:3001", request.getfixturevalue("encoder").url)
    assert "localhost" not in code
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, str(program), "exec"), {"__name__": "__main__"})
    assert said.getvalue().splitlines() == expected
