"""A folder that is watched: a function is called after each write to one of its files."""

import asyncio
from pathlib import Path

import pytest

from funitel.launcher.processes.folder_watch import FolderWatch


async def test_functions_are_called_after_a_write_until_they_are_removed(tmp_path: Path) -> None:
    file, watch, written = tmp_path / "file", FolderWatch(tmp_path), asyncio.Event()
    file.touch()
    for _ in range(2):
        written.clear()
        watch.add(written.set)
        with file.open("a") as opened:
            opened.write("a line\n")
        await asyncio.wait_for(written.wait(), 10)
        watch.remove(written.set)
    written.clear()
    file.write_text("more")
    await asyncio.sleep(0.05)
    assert not written.is_set()


async def test_without_the_folder_no_function_is_called(tmp_path: Path) -> None:
    calls: list[int] = []
    watch = FolderWatch(tmp_path / "missing")

    def call() -> None:
        calls.append(1)

    watch.add(call)
    watch.remove(call)
    assert calls == []


async def test_many_writes_between_two_turns_of_the_loop_are_all_taken(tmp_path: Path) -> None:
    watch, calls = FolderWatch(tmp_path), []
    watch.add(lambda: calls.append(1))
    for number in range(2000):
        (tmp_path / str(number % 7)).write_text("words")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), 0.2)
    assert 1 <= len(calls) <= 60
