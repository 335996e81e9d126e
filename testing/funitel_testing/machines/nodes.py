"""Machines for tests: namespaces of network, processes, names and mounts, each a cable away from a common bridge."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path

_numbers = count()  # of the hubs of this process: what is left of one must not meet the next


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True, timeout=20)


class Node:
    """One machine: processes that run there see only each other; `kill` ends all of them at once, as a power cut."""

    def __init__(self, number: int, tag: str, bridge: str, network: str) -> None:
        self.name = f"fn{tag}-{number}"
        self.address = f"{network}.{number + 2}"
        self._near, self._far = f"fa{tag}-{number}", "eth0"
        self._init: subprocess.Popen[bytes] | None = None
        self._root = 0  # process id of the first process there, seen from here
        try:
            self._lay(bridge)
            self.boot()
        except BaseException:
            self.remove()
            raise

    def _lay(self, bridge: str) -> None:
        """Make the namespace of the network and the cable to the bridge."""
        _ip("netns", "add", self.name)
        _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self.name)
        _ip("link", "set", self._near, "master", bridge, "up")
        _ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", self._far)
        _ip("-n", self.name, "link", "set", "lo", "up")
        _ip("-n", self.name, "link", "set", self._far, "up")

    def boot(self) -> None:
        """Let processes run there; after `kill`, again."""
        ready = f"hostname {self.name} && echo up && exec sleep infinity"
        words = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "sh", "-c", ready)
        enter = ("ip", "netns", "exec", self.name, *words)
        self._root = 0
        self._init = subprocess.Popen(enter, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._init.stdout is not None
        with self._init.stdout as told:
            assert told.readline() == b"up\n"
        self._root = _child_of(self._init)

    def entered(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs another there."""
        return ["nsenter", "--target", str(self._root), "--net", "--pid", "--mount", "--uts", *argv]

    def start(self, log: Path, *argv: str, **environ: str) -> "subprocess.Popen[bytes]":
        """Start a program of this Python there: `-m` and what follows it."""
        with log.open("ab") as out:
            return subprocess.Popen(
                self.entered([sys.executable, "-m", *argv]), stdout=out, stderr=out, env={**os.environ, **environ}
            )

    @staticmethod
    def send(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
        """Signal a program that `start` has started."""
        os.kill(_child_of(process), number)

    def kill(self) -> None:
        """SIGKILL to everything that runs there."""
        if self._init is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self._root or self._init.pid, signal.SIGKILL)
        self._init.wait(20)

    def cut(self) -> None:
        """Drop every packet silently."""
        _ip("link", "set", self._near, "down")

    def join(self) -> None:
        """Let packets through again."""
        _ip("link", "set", self._near, "up")

    def remove(self) -> None:
        """Take it away, as far as it is there. The kernel ends a namespace later, so its cable is cut by hand."""
        with suppress(subprocess.SubprocessError):
            self.kill()
        for words in (("link", "delete", self._near), ("netns", "delete", self.name)):
            with suppress(subprocess.SubprocessError):
                _ip(*words)


def _child_of(process: "subprocess.Popen[bytes]") -> int:
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


class Hub:
    """This machine on the bridge, and the nodes; `address` is what nodes reach it by."""

    def __init__(self, count: int) -> None:
        tag = f"{os.getpid()}-{next(_numbers)}"  # with what stands before and after it at most 15 characters
        self._bridge = f"fb{tag}"
        network = f"10.214.{os.getpid() % 250}"
        self.address = f"{network}.1"
        self.nodes: list[Node] = []
        _ip("link", "add", self._bridge, "type", "bridge")
        try:
            _ip("address", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for number in range(count):
                self.nodes.append(Node(number, tag, self._bridge, network))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Take nodes and bridge away."""
        for node in self.nodes:
            node.remove()
        with suppress(subprocess.SubprocessError):
            _ip("link", "delete", self._bridge)


@contextmanager
def hub(count: int) -> Iterator[Hub]:
    """So many nodes for the length of a `with`."""
    found = Hub(count)
    try:
        yield found
    finally:
        found.remove()


@cache
def no_nodes() -> str:
    """Why there can be no nodes here; empty where there can."""
    try:
        with hub(1) as found, socket.socket() as probe:
            probe.settimeout(5.0)
            is_reached = probe.connect_ex((found.nodes[0].address, 9)) == errno.ECONNREFUSED
    except (OSError, subprocess.SubprocessError):
        return "no namespaces of network and processes can be made here"
    return "" if is_reached else "the nodes cannot be reached"
