"""Processes that outlive the one that started them, and the files that they write to."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from funitel.launcher.processes import file_tail
from funitel.launcher.processes.file_tail import FileTail
from funitel.launcher.processes.watched import WatchedProcess, how_it_ended, start_of
from funitel.proto.errors import FunitelError
from funitel_testing.lifecycles import eventually

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


async def test_a_process_is_found_again_by_pid_and_start_time(tmp_path: Path) -> None:
    started = WatchedProcess.started_as("sleeper", SLEEPER, {}, tmp_path / "log")
    found = WatchedProcess.found("sleeper", started.identity)
    assert found is not None
    assert WatchedProcess.found("sleeper", {"pid": started.pid, "started": started.started + 1}) is None, "another one"
    assert await found.stop(10)
    assert await started.exited == -15
    assert await found.exited is None, "the exit code is its parent's"
    assert WatchedProcess.found("sleeper", started.identity) is None
    assert start_of(started.pid) is None
    assert how_it_ended("sleeper", -15) == "sleeper exited with code -15 (killed by SIGTERM)"


async def test_what_a_process_leaves_behind_is_killed(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print(child.pid, flush=True)"
    )
    log = tmp_path / "log"
    process = WatchedProcess.started_as("parent", [sys.executable, "-c", code], dict(os.environ), log)
    assert await process.exited == 0
    child = int(log.read_text())
    for _ in range(100):
        if start_of(child) is None:
            return
        await asyncio.sleep(0.05)
    pytest.fail("its child runs on")


async def test_a_process_that_has_the_pid_of_one_that_has_ended_is_spared(tmp_path: Path) -> None:
    log = tmp_path / "log"
    later = WatchedProcess.started_as("later", SLEEPER, {}, log)
    ended = await asyncio.create_subprocess_exec("sleep", "0.1")
    earlier = WatchedProcess("earlier", later.pid, os.pidfd_open(ended.pid), later.started - 1, None)
    earlier.kill()
    assert await earlier.exited is None
    await ended.wait()
    await asyncio.sleep(0.2)
    assert not later.has_exited
    await later.stop(5)


async def test_a_stubborn_process_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    process = WatchedProcess.started_as("stubborn", [sys.executable, "-c", code], {}, log)
    await eventually(log.read_text, "its first line")
    assert not await process.stop(0.2)
    assert process.exited.result() == -9


async def test_a_program_that_is_missing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FunitelError, match="sleeper cannot be started: No such file"):
        WatchedProcess.started_as("sleeper", ["/nowhere/program"], {}, tmp_path / "log")


async def test_a_file_is_followed_from_its_end_and_emptied_when_it_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_tail, "MAX_FILE_BYTES", 100)
    monkeypatch.setattr(file_tail, "POLL_SECONDS", 0.01)
    path, lines = tmp_path / "log", list[str]()
    path.write_text("before\n")
    tail = FileTail(path, lines.append)
    tail.start()
    with path.open("a") as log:
        print("one", "error: two", "", "x" * 100, sep="\n", file=log, flush=True)
        for _ in range(200):
            if path.stat().st_size == 0:
                break
            await asyncio.sleep(0.02)
        assert path.stat().st_size == 0
        print("after", end="", file=log, flush=True)
        tail.stop()
    assert lines == ["one", "error: two", "", "x" * 100, "after"]
    assert tail.error == "two"
    assert tail.last_line == "after"
