"""Find processes of an earlier control plane that its state does not know, since it was killed in between."""

import os
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path


def end_orphans(run_folder: Path, known: Collection[int], proc: Path = Path("/proc")) -> list[int]:
    """Kill the shards with sockets in a folder that are not known; returns their pids."""
    ended = []
    for pid in _shards_in(run_folder, proc):
        if pid not in known:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # each shard leads a group
                ended.append(pid)
    return ended


def _shards_in(run_folder: Path, proc: Path) -> Iterator[int]:
    prefix = os.fsencode(f"{run_folder}/")
    return _leaders(b"--uds-path", lambda place: place.startswith(prefix), proc)


def routers_of(control_socket: Path, proc: Path = Path("/proc")) -> Iterator[int]:
    """The pids of routers that a control plane with this socket has started."""
    wanted = os.fsencode(control_socket)
    return _leaders(b"--control-socket", lambda place: place == wanted, proc)


def _leaders(flag: bytes, is_ours: Callable[[bytes], bool], proc: Path) -> Iterator[int]:
    """The pids of processes that lead a group and were started with a flag of ours."""
    for folder in proc.iterdir():
        if not folder.name.isdecimal():
            continue
        with suppress(OSError):
            words = _words(folder)
            places = [words[i + 1] for i, word in enumerate(words[:-1]) if word == flag]
            if any(map(is_ours, places)) and os.getpgid(int(folder.name)) == int(folder.name):
                yield int(folder.name)


def command_of(pid: int, proc: Path = Path("/proc")) -> list[bytes]:
    """The command line of a process; empty where it has ended."""
    try:
        return _words(proc / str(pid))
    except OSError:
        return []


def _words(folder: Path) -> list[bytes]:
    return (folder / "cmdline").read_bytes().split(b"\0")
