"""The file that names the processes of a deployment, beside its sockets, and what ends with a launcher. Linux only.

Children of a launcher that has died wait for another one: its process id in the file. Without the file they end with
their parent, see `parent.py`.
"""

import json
import os
import select
import shutil
import signal
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from threading import Thread
from typing import Any

from funitel.proto.process.locks import lock_of, try_lock
from funitel.proto.process.parent import is_parent_ending, stop_with_parent
from funitel.proto.process.start_times import start_of

VERSION = 1
POLL_SECONDS = 0.1
_SUFFIX = ".deployment.json"

Content = Mapping[str, Any]
"""`version`, `launcher` (`pid`, `started`), `adopt_timeout` in seconds, and what else the launcher notes, in which each
process is an object with `pid` and `started`."""


def file_of(path: str) -> str:
    """Name of the deployment file of the shards' socket path."""
    return f"{path}{_SUFFIX}"


def path_of_file(name: str) -> str:
    """The shards' socket path of a deployment file."""
    return name.removesuffix(_SUFFIX)


def logs_of(path: str) -> str:
    """Name of the folder of what children that outlive a launcher write, beside the shards' socket path."""
    return f"{path}.logs"


def read(name: str) -> Content | None:
    """The content of a deployment file of this user; None where there is none that can be used."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if facts.st_uid != os.getuid() or not stat.S_ISREG(facts.st_mode) or facts.st_mode & 0o022:
            return None
        try:
            content = json.loads(file.read())
            is_known = content["version"] == VERSION
            _, _, _ = content["launcher"]["pid"], content["launcher"]["started"], float(content["adopt_timeout"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
    return content if is_known else None


def write(name: str, content: Content) -> None:
    """Replace a deployment file at once. Raises OSError."""
    scratch = f"{name}.{os.getpid()}"
    with suppress(FileNotFoundError):
        os.unlink(scratch)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump({"version": VERSION, **content}, file)
        os.replace(scratch, name)
    except OSError:
        with suppress(OSError):
            os.unlink(scratch)
        raise


def processes_in(content: object) -> Iterator[Mapping[str, Any]]:
    """Every process that a deployment file names, the launcher included."""
    if isinstance(content, dict):
        if isinstance(content.get("pid"), int) and isinstance(content.get("started"), int):
            yield content
        for value in content.values():
            yield from processes_in(value)
    elif isinstance(content, list):
        for value in content:
            yield from processes_in(value)


def runs(process: Mapping[str, Any]) -> bool:
    """Whether the process of `pid` and `started` runs, and is of this user."""
    try:
        is_ours = os.stat(f"/proc/{process['pid']}").st_uid == os.getuid()
    except OSError:
        return False
    return is_ours and start_of(process["pid"]) == process["started"]


def end_with_launcher(parent: int | None, name: str | None) -> None:
    """Have this process get SIGTERM when its launcher has ended and no other one has adopted it in time.

    Args:
        parent: process id of the launcher that has started it; None means no launcher to watch.
        name: of the deployment file; without one this process ends with its parent.
    """
    if parent is None or name is None:
        stop_with_parent(parent)
        return
    Thread(target=_follow, args=(parent, name), name="launcher watch", daemon=True).start()


def is_launcher_gone(parent: int | None, name: str | None) -> bool:
    """Whether the launcher of this process has ended, and no other one has adopted it."""
    if parent is None or name is None:
        return is_parent_ending(parent)
    content = read(name)
    return not runs(content["launcher"]) if content is not None else start_of(parent) is None


def remove_deployment_file(name: str) -> None:
    """Remove a deployment file that no launcher holds, and the files beside it."""
    base = path_of_file(name)
    lock = try_lock(lock_of(base))
    if lock is not None:
        shutil.rmtree(logs_of(base), ignore_errors=True)
        for path in (name, lock_of(base)):
            with suppress(OSError):
                os.unlink(path)
        os.close(lock)


def _follow(parent: int, name: str) -> None:
    started = start_of(parent)
    launcher = _next_launcher(name) if started is None else {"pid": parent, "started": started}
    while launcher is not None:
        _wait_for_end(launcher)
        launcher = _next_launcher(name)
    os.kill(os.getpid(), signal.SIGTERM)


def _wait_for_end(process: Mapping[str, Any]) -> None:
    try:
        pidfd = os.pidfd_open(process["pid"])
    except OSError:
        return
    try:
        if start_of(process["pid"]) == process["started"]:  # asked after the pidfd was opened: it is of this process
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            poller.poll()
    finally:
        os.close(pidfd)


def _next_launcher(name: str) -> Mapping[str, Any] | None:
    """The launcher that has adopted this process; None where none does in time, which the last one has set."""
    began = time.monotonic()
    last = read(name)
    seconds = 0.0 if last is None else float(last["adopt_timeout"])
    me = {"pid": os.getpid(), "started": start_of(os.getpid())}
    while True:
        content = read(name)
        if content is not None and runs(content["launcher"]):
            is_listed = any(
                me["pid"] == each["pid"] and me["started"] == each["started"] for each in processes_in(content)
            )
            return content["launcher"] if is_listed else None
        if time.monotonic() - began >= seconds:
            return None
        time.sleep(POLL_SECONDS)
