"""Deployments that faults are done to: started by the launcher, or process by process as on several hosts."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import httpx

from funitel_testing.faults.asks import CONTEXT
from funitel_testing.servers import LAUNCHER, MARK, Server, descendants, free_port, marked, wait_until

WHOLE_SECONDS = 120.0  # until a deployment serves as before, on a busy machine
# Each shard of the table computes with one thread: how a sum is divided among threads changes its last bits.
ALIKE = ("--num-threads", "1")
LIMITS = ("--max-batch-total-tokens", str(8 * CONTEXT), "--max-concurrent-requests", "256")

Here = Callable[[Path, Path], "AbstractContextManager[Launched]"]


def serves_wholly(url: str, num_replicas: int) -> bool:
    """Whether the router is ready, and all of several replicas serve."""
    try:
        if httpx.get(f"{url}/health", timeout=5).status_code != 200:
            return False
        page = httpx.get(f"{url}/metrics", timeout=5).text
    except httpx.TransportError:
        return False
    return num_replicas == 1 or f'funitel_replicas{{state="serving"}} {num_replicas}.0' in page


def _await(is_whole: Callable[[], bool], log: Path) -> None:
    try:
        wait_until(is_whole, WHOLE_SECONDS)
    except AssertionError as error:
        raise AssertionError(f"not whole again: {error}\n{log.read_text(errors='replace')[-3000:]}") from None


class Launched:
    """A deployment as the launcher starts it."""

    def __init__(self, folder: Path, flags: Sequence[str], environ: Mapping[str, str], program: str) -> None:
        """Start it; logs go to `folder`."""
        self._folder, self._flags, self._environ, self._program = folder, flags, dict(environ), program
        self.server = self._start(None)
        self.url = self.server.url
        self._num_shards = 0
        self._num_replicas = int(flags[flags.index("--num-replicas") + 1]) if "--num-replicas" in flags else 1

    def _start(self, port: int | None) -> Server:
        return Server(self._folder, *self._flags, environ=self._environ, port=port, program=self._program)

    def until_ready(self) -> None:
        """Wait for the first answer."""
        self.server.wait_ready()
        self._num_shards = len(self.server.shard_pids())

    def until_whole(self) -> None:
        """Wait until every shard runs and every replica serves."""
        _await(self._is_whole, self.server.log)

    def _is_whole(self) -> bool:
        return len(self.server.shard_pids()) == self._num_shards and serves_wholly(self.url, self._num_replicas)

    def grammar_workers(self) -> list[int]:
        """Process ids of those that check grammars."""
        return [
            pid for pid in descendants(self.server.router_pid()) if _runs(pid, "funitel.router.text.grammar_worker")
        ]

    def close(self) -> None:
        """End it."""
        with suppress(AssertionError):
            self.server.stop(timeout=15)
        self.server.kill_all()


def _runs(pid: int, module: str) -> bool:
    try:
        return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


@contextmanager
def launching(folder: Path, model: Path, *flags: str, program: str = LAUNCHER, **environ: str) -> Iterator[Launched]:
    """A deployment for the length of a `with`, whole at its beginning; its logs go to `folder`."""
    found = Launched(folder, ("--model-id", str(model), *LIMITS, *flags), environ, program)
    try:
        found.until_ready()
        yield found
    finally:
        found.close()


def launched(*flags: str, **environ: str) -> Here:
    """Scenes with these flags of the launcher and variables."""

    @contextmanager
    def scene(model: Path, folder: Path) -> Iterator[Launched]:
        with launching(folder, model, *ALIKE, *flags, **environ) as found:
            yield found

    return scene


BOUND_SECONDS = 8.0  # a step may take so long where a fault shall last longer
BOUND = ("--step-timeout-s", str(BOUND_SECONDS))

ONE = launched(*BOUND)
TWO_RANKS = launched("--num-shard", "2")
PAIR = launched("--num-replicas", "2")


class Program:
    """One process of a deployment without a launcher."""

    def __init__(self, log: Path, *argv: str, mark: str, inside: Sequence[str] = (), **environ: str) -> None:
        """`inside` is a command line that runs another, such as one that enters a namespace."""
        self._log = log
        self._argv = [*inside, sys.executable, "-m", *argv]
        self._environ = {**os.environ, **environ, MARK: mark}
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as log:
            return subprocess.Popen(self._argv, stdout=log, stderr=log, env=self._environ, start_new_session=True)

    def end(self, number: signal.Signals = signal.SIGTERM, seconds: float = WHOLE_SECONDS) -> int:
        """Signal it and wait for its end; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(seconds)
        finally:
            self.process.kill()
            self.process.wait()

    def start_again(self) -> None:
        """Start the same command line once more."""
        self.process = self._start()


class ByHand:
    """Two replicas of one shard each and a router, which outlive each other; the shards listen on TCP.

    Args:
        model: folder of the model.
        folder: for logs.
        hosts: how the router names the host of each shard.
        inside: a command line for each shard that runs it in a place of its own.
        router_inside: the same for the router.
        addresses: where each shard listens, when that is not what its host is called.
        router_flags: further ones.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        hosts: tuple[str, str] = ("127.0.0.1", "127.0.0.1"),
        inside: tuple[Sequence[str], Sequence[str]] = ((), ()),
        router_inside: Sequence[str] = (),
        addresses: tuple[str, str] | None = None,
        router_flags: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self._mark = uuid.uuid4().hex
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        ports = (free_port(), free_port())
        self.shards = [
            Program(
                folder / f"shard-{place}.log",
                *("funitel.model_server", "serve", str(model), *ALIKE, "--listen", f"{address}:{port}"),
                mark=self._mark,
                inside=prefix,
            )
            for place, (address, port, prefix) in enumerate(zip(addresses or hosts, ports, inside, strict=True))
        ]
        named = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
        route = ("--tokenizer-name", str(model), "--master-shard-address", named[0])
        self.router = Program(
            folder / "router.log",
            *("funitel.router", *route, "--replica-address", f"tcp://{named[1]}", "--port", str(self.port)),
            *(*LIMITS, *router_flags),
            mark=self._mark,
            inside=router_inside,
        )

    def until_whole(self) -> None:
        """Wait until both replicas serve."""
        _await(lambda: serves_wholly(self.url, 2), self.folder / "router.log")

    def close(self) -> None:
        """End all of it."""
        for program in (self.router, *self.shards):
            with suppress(subprocess.TimeoutExpired):
                program.end(seconds=10)
        for pid in marked(self._mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


Deployment = TypeVar("Deployment", bound=ByHand)


@contextmanager
def standing(found: Deployment) -> Iterator[Deployment]:
    """A deployment once it is whole, ended with the block."""
    try:
        found.until_whole()
        yield found
    finally:
        found.close()


def by_hand(model: Path, folder: Path) -> AbstractContextManager[ByHand]:
    """Two shards and a router on one host."""
    return standing(ByHand(model, folder))
