"""A shard that hangs is killed, whoever listens there, and nobody else is."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from funitel.router.shard_client.fencing import fence

LISTEN = "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(1); print('up'); "


def listening(path: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", LISTEN + "time.sleep(60)", str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_process_that_listens_is_killed_stopped_or_not(tmp_path: Path, *, is_stopped: bool) -> None:
    with listening(tmp_path / "s") as process:
        if is_stopped:
            process.send_signal(signal.SIGSTOP)
        fence(f"unix://{tmp_path}/s")
        assert process.wait(10) == -signal.SIGKILL
        fence(f"unix://{tmp_path}/s")  # nobody is there any more


def test_this_process_is_spared_and_so_are_other_machines(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(str(tmp_path / "own"))
        own.listen()
        fence(f"unix://{tmp_path}/own")
        fence("tcp://127.0.0.1:1")
        fence(f"unix://{tmp_path}/nobody")


def test_who_cannot_be_reached_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fence(f"unix://{tmp_path}/" + "x" * 200)
    assert "cannot be killed" in caplog.text
