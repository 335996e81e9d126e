"""A process that asked for it does not outlive its parent. Real processes: a stand-in would prove nothing."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import pytest

from funitel.proto.process import parent
from funitel.proto.process.parent import is_parent_ending, is_parent_gone, stop_with_parent

PATIENCE_SECONDS = 20

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")

CHILD = """
import os, time
from funitel.proto.process.parent import stop_with_parent
stop_with_parent(os.getppid())
print("ready", flush=True)
time.sleep(600)
"""
PARENT = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {CHILD!r}])
time.sleep(600)
"""
LATE = """
import os, time
from funitel.proto.process.parent import stop_with_parent
stop_with_parent(os.getppid() + 1)
time.sleep(600)
"""


def start(code: str) -> "subprocess.Popen[str]":
    path = ":".join(entry for entry in sys.path if entry)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": path})


@linux_only
def test_it_ends_when_its_parent_is_killed() -> None:
    with start(PARENT) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        # Parent and child hold the same pipe: it ends when the last of them is gone.
        rest, _ = parent.communicate(timeout=PATIENCE_SECONDS)
    assert rest == ""
    assert parent.returncode == -signal.SIGKILL


@linux_only
def test_it_ends_when_its_parent_was_gone_before_it_asked() -> None:
    with start(LATE) as child:
        assert child.wait(PATIENCE_SECONDS) == -signal.SIGTERM


def test_elsewhere_nothing_is_asked_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", None)
    stop_with_parent(1)


def test_without_a_parent_that_matters_nothing_is_asked_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", None)
    stop_with_parent(None)


def test_it_can_be_asked_whether_the_parent_is_gone() -> None:
    assert not is_parent_gone(os.getppid())
    assert is_parent_gone(os.getppid() + 1)
    assert not is_parent_gone(None)


@linux_only
def test_one_whose_first_thread_has_ended_is_lost_soon() -> None:
    code = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            assert not is_parent_ending(os.getppid())
            assert not is_parent_ending(None)
            end = time.monotonic() + 10
            while parent._state_of(process.pid) != "Z" and time.monotonic() < end:
                time.sleep(0.01)
            assert parent._state_of(process.pid) == "Z"
            assert process.poll() is None, "its other thread goes on"
        finally:
            process.kill()
    assert parent._state_of(process.pid) == ""
