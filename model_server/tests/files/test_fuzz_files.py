"""The short form of `make fuzz` for files, and that it would notice what it looks for."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from funitel_testing import fuzz as module
from funitel_testing.fuzz import Report, fuzz
from funitel_testing.fuzz_mutants import KINDS, damaged, mutant


def test_every_damaged_file_loads_or_is_refused_in_one_line() -> None:
    report = fuzz(["gguf", "safetensors", "spec", "pickle"], 50, seed=1)
    assert report.failures == []
    assert sum(report.outcomes.values()) == 200
    assert all(report.outcomes[kind, "refused"] > 25 for kind in KINDS)
    assert not Path("/tmp/funitel-fuzz-ran").exists()


def test_files_are_the_same_every_time_and_differ() -> None:
    for kind in KINDS.keys() - {"pickle"}:  # in which torch writes addresses
        files = [mutant(kind, 3, number) for number in range(6)]
        assert files == [mutant(kind, 3, number) for number in range(6)]
        assert len(set(files)) == 6


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        ({"number": 1, "outcome": "ValueError", "message": "Traceback"}, "ValueError"),
        ({"number": 1, "outcome": "loaded", "message": "", "mib": 5000}, "too much memory"),
        ({"number": 1, "outcome": "not one printable line", "message": ""}, "not one printable line"),
    ],
)
def test_what_is_neither_loaded_nor_refused_is_a_failure(result: dict[str, Any], outcome: str) -> None:
    report = Report()
    report.add({"kind": "gguf", "seconds": 0.0, "mib": 0, **result})
    assert [failure["outcome"] for failure in report.failures] == [outcome]


# A worker that dies of its second file and hangs in its fourth.
WORKER = """
import json, os, pathlib, sys, time
print(json.dumps({"ready": True}), flush=True)
for kind, number in json.loads(pathlib.Path(sys.argv[1], "files.json").read_text())["files"]:
    if number == 1:
        os.abort()
    if number == 3:
        time.sleep(60)
    print(json.dumps({"kind": kind, "number": number, "outcome": "loaded", "mib": 0}), flush=True)
"""


def test_a_process_that_dies_or_hangs_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deadly_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(module, "KINDS", {"gguf": ("deadly_worker", 5)})
    monkeypatch.setattr(module, "MAX_SECONDS", 0.5)
    report = fuzz(["gguf"], 5)
    assert report.outcomes["gguf", "loaded"] == 3
    assert {failure["number"]: failure["outcome"] for failure in report.failures} == {
        1: "process ended with -6",
        3: "no end within 0.5 seconds",
    }, json.dumps(report.failures)
    assert report.row("gguf")[:4] == (5, 1, 1, 0)


def test_a_process_that_grows_is_a_leak() -> None:
    report = Report()
    report.add_growth([("gguf", 100 + 10 * number) for number in range(100)])
    assert [failure["outcome"] for failure in report.failures] == ["leak of 790 MiB"]
    assert report.row("gguf")[3] == 1


def test_an_answer_whose_cause_is_not_logged_has_its_column() -> None:
    report = Report()
    report.add({"kind": "bodies", "number": 1, "outcome": "5xx without a logged cause", "message": "", "mib": 0})
    assert report.row("bodies")[4] == 1


def test_damage_may_be_done_again_and_again() -> None:
    rng = random.Random(0)
    content = b"a few bytes"
    for _ in range(1000):
        content = damaged(content, rng) if len(content) < 100 else b""
    assert damaged(b"", rng) == b""
