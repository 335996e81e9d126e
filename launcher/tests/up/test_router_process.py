"""The process of the router of `funitel up`: found again, also where its record is missing."""

import os
import sys
from pathlib import Path

import pytest

from funitel.launcher.config.child_commands import Commands
from funitel.launcher.config.sockets import free_port
from funitel.launcher.control_plane.folders import Folders
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.up.router_process import RECORD, RouterProcess

COMMANDS = Commands(router=(sys.executable, "-c", "import time; time.sleep(600)"))


def router_of(folder: Path) -> RouterProcess:
    folders = Folders(run=folder / "run", state=folder)
    folders.run.mkdir(exist_ok=True)
    return RouterProcess(LauncherSettings(port=free_port()), "127.0.0.1", dict(os.environ), folders, COMMANDS)


async def test_a_router_that_was_not_recorded_is_found(tmp_path: Path) -> None:
    first, other = router_of(tmp_path), router_of(tmp_path)
    first.open()
    await first.start()
    try:
        (tmp_path / RECORD).unlink()
        assert other.adopt()
        assert other.pid == first.pid
        assert (tmp_path / RECORD).exists()
    finally:
        await other.stop(5)  # it may have adopted the keeper, with its listening sockets
        await first.stop(5)
    assert not router_of(tmp_path).adopt()


async def test_a_record_that_cannot_be_written_does_not_end_the_router(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    router = router_of(tmp_path)
    (tmp_path / RECORD).mkdir()
    router.open()
    await router.start()
    assert "router.json cannot be written" in caplog.text
    await router.stop(5)
