"""Walk TGI's contract, row by row, against live servers with a tiny random model, and say how many rows hold.

The rows are data, in `funitel_testing.conformance`; what no live server can be brought to do is pointed to.
"""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from funitel_testing.conformance import ROWS
from funitel_testing.conformance.elsewhere import COMPLAINTS, ELSEWHERE, Pointer
from funitel_testing.conformance.native import LONG_TOTAL
from funitel_testing.conformance.page import PAGE, render
from funitel_testing.servers import Server, serving
from funitel_testing.tiny import save_tiny

ROOT = Path(__file__).parents[1]
LIMITS = ("--dtype", "float32", "--max-batch-total-tokens", "4096")
FLAGS = {
    "open": ("--enable-prefill-logprobs", "--hostname", "0.0.0.0"),  # on loopback, browsers are kept out
    "guarded": (
        *("--api-key", "secret"),
        *("--cors-allow-origin", "http://mine"),
        *("--payload-limit", "4000"),
        *("--max-concurrent-requests", "1"),
        "--disable-grammar-support",
    ),
    "long": (),  # a model with a longer context
}
VARIABLES = {"AIP_PREDICT_ROUTE": "/predict", "AIP_HEALTH_ROUTE": "/alive"}


@pytest.fixture(scope="module", params=FLAGS)
def server(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server]]:
    """Each of the servers in turn; none may log a traceback."""
    name: str = request.param
    folder, model = tmp_path_factory.mktemp("server"), tiny_model
    if name == "long":
        model = save_tiny("llama", tmp_path_factory.mktemp("long"), max_position_embeddings=LONG_TOTAL)
    with serving(folder, "--model-id", str(model), *LIMITS, *FLAGS[name], environ=VARIABLES) as running:
        yield name, running
        assert "Traceback" not in running.log.read_text(), running.tail()


def test_the_contract(server: tuple[str, Server], figures: dict[str, object]) -> None:
    """Every row is tried, so that one failure does not hide another."""
    name, running = server
    rows = [row for row in ROWS if row.server == name]
    failures = []
    with httpx.Client(base_url=running.url, timeout=60) as client:
        for row in rows:
            failures += [f"{row.name}: {problem}" for problem in row.problems(row.send(client))]
    assert not failures, f"{len(failures)} of {len(rows)} rows:\n" + "\n".join(failures)
    figures[f"contract rows that hold on the {name} server"] = len(rows)


def test_every_row_is_tried_and_no_two_are_one(figures: dict[str, object]) -> None:
    names = [(row.server, row.name, repr(row.body), repr(row.headers)) for row in ROWS]
    assert len(names) == len(set(names))
    assert {row.server for row in ROWS} == FLAGS.keys()
    different = [row for row in ROWS if row.differs]
    figures["contract rows walked, of which deliberately different"] = f"{len(ROWS)}, {len(different)}"
    for row in different:
        figures[f"different: {row.name}"] = row.differs


def test_the_page_of_differences_is_up_to_date() -> None:
    assert PAGE.read_text() == render(), "run make pages"


@pytest.mark.parametrize("pointer", ELSEWHERE + COMPLAINTS, ids=lambda pointer: f"{pointer.section} {pointer.claim}")
def test_what_is_shown_elsewhere_is(pointer: Pointer) -> None:
    for test in pointer.tests:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), test
