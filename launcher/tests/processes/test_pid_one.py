"""The launcher as the first process of a container: nothing stays as a zombie, and every exit code is its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., Any]
NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

PATIENCE_SECONDS = 30.0
PATHS = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

# Starts children, with orphans among them, as a process that adopts orphans like PID 1 does.
STORM = """
import asyncio, ctypes, json, sys
from pathlib import Path
from funitel.launcher.processes.pid_one import OWN_CHILDREN, OrphanReaper
from funitel.launcher.supervisor.process import Child

PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
ORPHANS = "import os\\nfor _ in range(5):\\n    if os.fork() == 0: os.setsid(); os._exit(99)\\nos._exit({code})"

async def main():
    OrphanReaper(OWN_CHILDREN)
    children = [Child(str(code), [sys.executable, "-Sc", ORPHANS.format(code=code)], {}, print) for code in range(24)]
    for child in children:
        await child.start()
    codes = [await child.wait() for child in children]
    rest = Path("/proc/self/task")
    while any((task / "children").read_text() for task in rest.iterdir()):
        await asyncio.sleep(0.05)
    print(json.dumps([codes, len(OWN_CHILDREN.pids)]))

asyncio.run(asyncio.wait_for(main(), 60))
"""


# Asks programs for their output while orphans are reaped.
ASK = """
import asyncio, json, sys
from funitel.launcher.control_plane.model_tools import ModelTools
from funitel.launcher.processes.pid_one import OWN_CHILDREN, OrphanReaper
from funitel.launcher.processes.program_output import json_of

ANSWER = [sys.executable, "-Sc", "print('{\\"list\\": []}')"]

async def main():
    OrphanReaper(OWN_CHILDREN)
    asked = [json_of(ANSWER, {}) for _ in range(10)]
    cached = [ModelTools({}, command=ANSWER).cached() for _ in range(10)]
    print(json.dumps([await asyncio.gather(*asked), await asyncio.gather(*cached), len(OWN_CHILDREN.pids)]))

asyncio.run(asyncio.wait_for(main(), 60))
"""


def test_programs_that_are_asked_keep_their_exit_codes() -> None:
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, env={**os.environ, **PATHS})
    assert "Unknown child process" not in done.stderr
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[[{"list": []}, ""]] * 10, [[]] * 10, 0]


def can_unshare() -> bool:
    try:
        return subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


needs_namespace = pytest.mark.skipif(not can_unshare(), reason="no right to make a PID namespace")


def eventually(claim: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not claim():
        assert time.monotonic() < deadline, f"in vain waited for: {what}"
        time.sleep(0.02)


def children_of(pid: int) -> dict[int, str]:
    """Children by process id, and the kernel's letter of the state of each."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found[int(path.parent.name)] = fields[0]
    return found


def init_of(unshare: int) -> int:
    """The first process of the namespace that a process made."""
    eventually(lambda: children_of(unshare), "the namespace has a process")
    return next(iter(children_of(unshare)))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="/proc is Linux's")
def test_a7_orphans_are_reaped_and_exit_codes_of_children_are_kept() -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", STORM], env=environ, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[*range(24)], 0]
    assert "Unknown child" not in done.stderr


@needs_namespace
def test_a7_as_pid_one_the_launcher_leaves_no_zombie_and_sees_its_children_end(launch: Launch) -> None:
    launched = launch("--num-shard", "1", "--device", "cpu", prefix=NAMESPACE).until_ready()
    init = init_of(launched.process.pid)
    before = set(children_of(init))
    assert len(before) == 3, "a shard, the router and the keeper"
    inside = ["nsenter", "--target", str(init), "--pid", "--mount", "sh", "-c", "sleep 0.2 & sleep 0.3 & exit 7"]
    assert subprocess.run(inside).returncode == 7
    eventually(lambda: len(children_of(init)) > len(before), "it has adopted the orphans")
    eventually(lambda: set(children_of(init)) == before, "they are gone")

    shard = next(pid for pid in before if b"model_server" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(shard, signal.SIGKILL)
    eventually(lambda: len(set(children_of(init)) - before) == 1, "the shard is started again")
    eventually(lambda: "Z" not in children_of(init).values(), "nothing stays as a zombie")
    eventually(lambda: "killed by SIGKILL" in launched.stderr, "its exit code is told")

    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in before & set(children_of(init))}
    assert not any(b"--deployment-file" in each for each in words.values()), "everything ends with the container"
    router = next(pid for pid in words if b"router" in words[pid])
    os.kill(router, signal.SIGKILL)
    launched.until_said("the router answers again")
    os.kill(init, signal.SIGKILL)
    assert launched.process.wait(PATIENCE_SECONDS) != 0
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in before), "it takes everything with it")


@needs_namespace
def test_a7_as_pid_one_the_launcher_ends_at_a_sigterm_before_its_loop_runs(tmp_path: Path) -> None:
    """It reads a file of keys that does not end here."""
    pipe = tmp_path / "keys"
    os.mkfifo(pipe)
    command = [*NAMESPACE, sys.executable, "-m", "funitel.launcher", "--api-key-file", str(pipe)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, env=environ) as process, pipe.open("wb"):  # opens once it is read
        os.kill(init_of(process.pid), signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM
