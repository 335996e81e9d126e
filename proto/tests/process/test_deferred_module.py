"""Modules that are executed at their first use, each case in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from funitel.proto.process.deferred_module import deferred

PRELUDE = "import json, sys, threading; from funitel.proto.process.deferred_module import DeferredModule, deferred; "


@pytest.fixture
def run(tmp_path: Path) -> "Run":
    return Run(tmp_path)


class Run:
    """Runs code beside a package `slow`, whose module `work` says in a list of `sys` that it is executed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        package = folder / "slow"
        package.mkdir()
        (package / "__init__.py").write_text("")
        lines = (
            "import sys, time",
            "sys.executed = [*getattr(sys, 'executed', []), __name__]",
            "time.sleep(0.1)",
            "n = 7",
        )
        (package / "work.py").write_text("\n".join(lines))
        (package / "broken.py").write_text("raise ImportError('no such library')")

    def __call__(self, code: str) -> object:
        done = subprocess.run([sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, cwd=self._folder)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def test_the_first_attribute_executes_it_once(run: Run) -> None:
    code = (
        "work = deferred('slow.work'); before = getattr(sys, 'executed', None); found = work.n; "
        "import slow.work; again = slow.work.n + deferred('slow.work').n; "
        "print(json.dumps([before, found, again, sys.executed, type(work).__name__, hasattr(work, 'nothing')]))"
    )
    assert run(code) == [None, 7, 14, ["slow.work"], "module", False]


def test_what_is_imported_from_it_executes_it(run: Run) -> None:
    code = "deferred('slow.work'); from slow.work import n; print(json.dumps([n, sys.executed]))"
    assert run(code) == [7, ["slow.work"]]


def test_what_is_imported_already_is_not_deferred(run: Run) -> None:
    code = "import slow.work; print(json.dumps([type(deferred('slow.work')).__name__, sys.executed]))"
    assert run(code) == ["module", ["slow.work"]]


def test_other_threads_wait_until_it_is_executed(run: Run) -> None:
    code = (
        "work = deferred('slow.work'); found = []; ask = lambda: found.append(work.n); "
        "threads = [threading.Thread(target=ask) for _ in range(4)]; [t.start() for t in threads]; "
        "[t.join() for t in threads]; print(json.dumps([found, sys.executed]))"
    )
    assert run(code) == [[7] * 4, ["slow.work"]]


def test_what_cannot_be_executed_says_so_each_time(run: Run) -> None:
    code = """
broken, said = deferred("slow.broken"), []
for _ in range(2):
    try:
        broken.anything
    except ImportError as error:
        said.append(str(error))
print(json.dumps(said))
"""
    assert run(code) == ["no such library"] * 2


def test_what_is_not_there_is_not_deferred() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'json\.nothing'"):
        deferred("json.nothing")
