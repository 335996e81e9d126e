"""`benchmarks/neighbour.py`: a neighbour that is really busy, and ratios of what servers do with and without it."""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from funitel.launcher.bench.load import Run, run_level
from funitel.launcher.bench.target import Target
from funitel_testing.fake_streams import FakeStreams, streaming

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "neighbour.py"
PATIENCE_SECONDS = 30.0
ALONE_SECONDS, BESIDE_SECONDS = 1 / 64, 4 / 64  # between two tokens


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("neighbour", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_the_neighbour_is_busy_on_its_core_and_ends(module: ModuleType) -> None:
    core = min(os.sched_getaffinity(0))
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = set(children.read_text().split())
    with module.neighbour(core):
        (pid,) = set(children.read_text().split()) - before
        assert os.sched_getaffinity(int(pid)) == {core}
        ticks = lambda: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])  # noqa: E731
        begin, deadline = ticks(), time.monotonic() + PATIENCE_SECONDS
        while ticks() == begin:
            assert time.monotonic() < deadline, "it is idle"
            time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()


def test_ratios_are_of_the_same_server_with_and_without(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gaps = {"ours": ALONE_SECONDS, "theirs": ALONE_SECONDS}

    @contextmanager
    def slower(core: int) -> Iterator[None]:
        gaps["ours"] = BESIDE_SECONDS
        yield
        gaps["ours"] = ALONE_SECONDS

    async def run_level_at_pace(target: Target, *given: Any) -> Run:
        """What is measured over HTTP, but for the times, which would be those of a busy machine."""
        run = await run_level(target, *given)
        paced = [
            replace(each, arrivals=tuple(i * gaps[target.name] for i in range(len(each.arrivals))))
            for each in run.timelines
        ]
        return replace(run, timelines=paced)

    monkeypatch.setattr(module, "neighbour", slower)
    monkeypatch.setattr(module, "run_level", run_level_at_pace)
    with streaming(FakeStreams()) as fake, streaming(FakeStreams()) as steady:
        urls = ["--url", fake.url, "--name", "ours", "--url", steady.url, "--name", "theirs"]
        sizes = ["--rounds", "2", "--num-requests", "2", "--prompt-tokens", "9", "--output-tokens", "6"]
        monkeypatch.setattr(sys, "argv", ["neighbour.py", *urls, *sizes])
        module.main()
    *lines, last = capsys.readouterr().out.splitlines()
    results = json.loads(last)["results"]
    assert len(lines) == 6
    for measure in ("tpot_ms", "gap_ms_p99"):
        assert results["ours"][measure]["ratio"] == pytest.approx(4, rel=0.4)
        assert results["theirs"][measure]["ratio"] == pytest.approx(1, rel=0.4)
        assert results["ours"][measure]["alone"] >= 10


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--core", "4000"], "--core must be one this process may use, given 4000"),
        (["--rounds", "0"], "--rounds must be >= 1, given 0"),
        (["--name", "a", "--name", "b"], "--name must be given for each of 1 --url, given 2 times"),
        (["--url", "http://x"], "two servers have the same name"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    module: ModuleType, argv: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        module.parse(["--url", "http://x", *argv])
    assert why in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_one_line(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["neighbour.py", "--url", "http://127.0.0.1:9"])
    with pytest.raises(SystemExit, match="error: .*127.0.0.1:9"):
        module.main()
