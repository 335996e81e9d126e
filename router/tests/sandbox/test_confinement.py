"""What a task can reach that has escaped from Python's own limits: it runs any code here, and gets next to nothing."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from funitel.router.sandbox import confinement
from funitel.router.sandbox.pool import SandboxPool

MEMORY_LIMIT = 512 << 20
SECRET = "sk-not-for-children"

WORKER = """
import ctypes, os, resource, signal, socket, subprocess, sys, threading, time
from pathlib import Path
from funitel.router.sandbox.worker import serve
libc = ctypes.CDLL(None, use_errno=True)

def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)

def answer(code):
    names = dict(globals())
    try:
        exec(code, names)
    except Exception as error:
        return type(error).__name__
    return names.get("found", "done")

serve(lambda setup: answer)
"""

Run = Callable[[str], Awaitable[Any]]

has_landlock = pytest.mark.skipif(
    not Path("/proc/self/status").exists() or confinement.landlock_version() < 1, reason="a kernel without Landlock"
)
is_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="seccomp is Linux's")


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the workers, in a working folder with a secret."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "obeys.py").write_text(WORKER)
    (modules / "lazy_module.py").write_text("value = 'imported'")
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "named").write_text("of the setup")
    monkeypatch.syspath_prepend(modules)
    monkeypatch.chdir(tmp_path)
    for name, value in {"API_KEY": SECRET, "HF_TOKEN": SECRET, "TZ": "Asia/Kolkata"}.items():
        monkeypatch.setenv(name, value)
    return modules


@pytest.fixture
async def run(modules: Path) -> AsyncIterator[Run]:
    """Runs code in a sandbox process; `found` of the code is the answer, or the name of the exception."""
    named = str(modules.with_name("named"))
    pool = SandboxPool("obeys", None, most=1, time_limit=30, memory_limit=MEMORY_LIMIT, readable=[named])
    async with asyncio.timeout(60):
        yield pool.run
    await pool.close()


@is_linux
def test_a4_a_sandbox_process_has_its_pipes_and_no_other_descriptor(modules: Path) -> None:
    """The router's loop is uvloop's, which leaves to its children what the launcher left inheritable to the router."""

    async def descriptors() -> list[str]:
        pool = SandboxPool("obeys", None, most=1, time_limit=30, memory_limit=MEMORY_LIMIT)
        pid = await pool.run("found = os.getpid()")
        names = await asyncio.to_thread(os.listdir, f"/proc/{pid}/fd")
        await pool.close()
        return sorted(names)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        os.set_inheritable(listener.fileno(), True)
        assert uvloop.run(descriptors()) == ["0", "1", "2"]


async def test_a4_its_environment_says_where_packages_are_and_nothing_else(run: Run) -> None:
    pid = await run("found = os.getpid()")
    variables = await asyncio.to_thread(Path(f"/proc/{pid}/environ").read_text)
    assert sorted(each.partition("=")[0] for each in variables.split("\0") if each) == [
        "PYTHONPATH",
        "TOKENIZERS_PARALLELISM",
        "TZ",
    ]
    assert await run("found = time.strftime('%Z')") == "IST"


ATTEMPTS = {
    "connects": "socket.create_connection(('127.0.0.1', 9))",
    "listens": "socket.create_server(('127.0.0.1', 0))",
    "sends a datagram": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "makes a Unix socket": "socket.socket(socket.AF_UNIX)",
    "makes a pair": "socket.socketpair()",
    "forks": "os.fork() or os._exit(0)",
    "runs a program": "os.execv(sys.executable, [sys.executable, '-c', ''])",
    "starts a program": "subprocess.run(['true'])",
    "spawns": "os.posix_spawn('/bin/true', ['true'], {})",
    "kills the router": "os.kill(os.getppid(), 0)",
    "kills its group": "os.kill(0, 0)",
    "kills all": "os.kill(-1, 0)",
    "kills by descriptor": "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0)",
    "outlives the router": "call('prctl', 1, 0, 0, 0, 0)",
    "traces": "call('ptrace', 16, os.getppid(), 0, 0)",
    "reads memory": "call('process_vm_readv', os.getppid(), 0, 0, 0, 0, 0)",
    "writes a file": "open('written', 'w')",
    "appends": "open('secret', 'a')",
    "creates": "os.open('written', os.O_CREAT)",
    "truncates": "os.open('secret', os.O_RDONLY | os.O_TRUNC)",
    "truncates a path": "os.truncate('secret', 0)",
    "removes": "os.unlink('secret')",
    "renames": "os.rename('secret', 'moved')",
    "makes a folder": "os.mkdir('made')",
    "makes a link": "os.symlink('secret', 'link')",
    "makes a hard link": "os.link('secret', 'link')",
    "changes a mode": "os.chmod('secret', 0o777)",
    "changes times": "os.utime('secret')",
    "makes a file in memory": "os.memfd_create('x')",
    "lifts a limit": "resource.setrlimit(resource.RLIMIT_FSIZE, (9, 9))",
    "takes other cores": "os.sched_setaffinity(0, {0})",
    "loads a BPF program": "call('syscall', 321 if os.uname().machine == 'x86_64' else 280, 0, 0, 0)",
    "uses io_uring": "call('syscall', 425, 1, 0)",
    "leaves its namespace": "call('unshare', 0)",
    "calls what is unknown here": "call('syscall', 461, 0)",
}


@is_linux
async def test_a4_the_filter_refuses_what_no_task_needs(run: Run) -> None:
    got = {name: await run(code) for name, code in ATTEMPTS.items()}
    allowed = {
        name: answer for name, answer in got.items() if answer not in ("PermissionError", "OSError", "ValueError")
    }
    assert not allowed


READS = {
    "a file of the working folder": "found = open('secret').read()",
    "the router's environment": "found = open(f'/proc/{os.getppid()}/environ').read()",
    "the user's password file": "found = open('/etc/passwd').read()",
    "a folder": "found = os.listdir('/')",
}


@has_landlock
async def test_a4_it_reads_packages_and_what_it_was_given_only(run: Run) -> None:
    assert {name: await run(code) for name, code in READS.items()} == dict.fromkeys(READS, "PermissionError")
    assert await run("found = open('named').read()") == "of the setup"


async def test_a4_what_tasks_need_still_works(run: Run) -> None:
    assert await run("import lazy_module; found = lazy_module.value") == "imported"
    assert await run("import decimal, zoneinfo; found = str(zoneinfo.ZoneInfo('Europe/Paris'))") == "Europe/Paris"
    thread = "found = []; t = threading.Thread(target=found.append, args=[len(os.urandom(4))]); t.start(); t.join()"
    assert await run(thread) == [4]


@is_linux
@pytest.mark.parametrize(
    ("failing", "named"), [("_CREATE_RULESET = 9999", "Landlock"), ("_SET_FILTER = 9999", "seccomp")]
)
async def test_a4_a_missing_layer_is_logged_once_for_a_pool(
    failing: str, named: str, modules: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"from funitel.router.sandbox import confinement\nconfinement.{failing}\n" + WORKER
    (modules / "obeys_less.py").write_text(text)
    pool = SandboxPool("obeys_less", None, most=2, time_limit=30, memory_limit=MEMORY_LIMIT)
    with caplog.at_level(logging.DEBUG, "funitel.router.sandbox.pool"):
        await pool.warm_up()
        await pool.warm_up()
        assert await pool.run("pass") == "done"
    await pool.close()
    assert [record.message for record in caplog.records if named in record.message] == [
        f"the sandbox of obeys_less goes without {named}"
    ]
