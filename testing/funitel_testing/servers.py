"""A real deployment for tests: launcher, router and shards as processes, on a free port, with logs kept."""

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

STARTUP_SECONDS = 180.0
PLAIN = False  # `verify` of clients of plain HTTP: else each reads all certificates, which takes 25 ms
MARK = "FUNITEL_TEST_MARK"  # in the environment of everything a test starts, also of what outlives its parent

MAX_SHARDS = 8  # of any deployment in a test
_SHARD = re.compile(r" -m (funitel\.model_server|funitel_testing\.faulty_shard) serve ")
LAUNCHER = "funitel.launcher"
ADOPTED = "adopted the processes of an earlier launcher"
FAULTY_LAUNCHER = "funitel_testing.faulty_launcher"  # its shards go wrong as a test says


def free_port() -> int:
    """A free port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def descendants(pid: int) -> set[int]:
    """All processes below `pid`, read from /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found: set[int] = set()
    grown = {pid}
    while grown:
        grown = {child for child, parent in parents.items() if parent in grown}
        found |= grown
    return found


def alive(pids: set[int]) -> set[int]:
    """Those of `pids` that still run (zombies do not)."""
    running = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            running.add(pid)
    return running


def marked(mark: str) -> set[int]:
    """All living processes with `mark` in their environment, of any parent."""
    wanted = f"{MARK}={mark}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
            except OSError:
                continue
    return alive(found)


def flag_value(pid: int, flag: str) -> str | None:
    """What a process was given for a flag on its command line."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return words[words.index(flag) + 1] if flag in words else None


def listens(port: int) -> bool:
    """Whether something on this machine accepts connections on `port`."""
    with socket.socket() as sock:
        sock.settimeout(5)
        return sock.connect_ex(("127.0.0.1", port)) == 0


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock file at `path`."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def wait_until(
    holds: Callable[[], bool], seconds: float, message: str = "not in time", interval: float = 0.05
) -> float:
    """Wait for something to become true, asked each `interval` seconds.

    Returns the seconds that it took; fails after `seconds`.
    """
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > seconds:
            raise AssertionError(f"{message} (waited {seconds} s)")
        time.sleep(interval)
    return time.monotonic() - began


def samples_of(text: str) -> dict[str, float]:
    """Every sample of a page of metrics by its full name, labels included."""
    lines = (line for line in text.splitlines() if line and line[0] != "#")
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@dataclass(frozen=True)
class Footprint:
    """What one running deployment takes of the machine."""

    mark: str
    ports: tuple[int, ...]
    uds_path: str
    shared_memory: frozenset[str]  # what was there before it started
    processes: frozenset[int] = frozenset()  # also those without the mark: sandboxes inherit no environment

    def left(self) -> list[str]:
        """What of it is still there."""
        found = [f"process {pid}: {_command(pid)}" for pid in marked(self.mark) | alive({*self.processes})]
        found += [f"port {port}" for port in self.ports if listens(port)]
        found += [f"shared memory {name}" for name in shared_memory() - self.shared_memory]
        lock = Path(f"{self.uds_path}.lock")
        if not is_locked(lock):  # else another deployment has taken the path over
            bases = (self.uds_path, *(f"{self.uds_path}-replica-{replica}" for replica in range(1, MAX_SHARDS)))
            sockets = (Path(f"{b}-{rank}{s}") for b in bases for rank in range(MAX_SHARDS) for s in ("", ".steps"))
            found += [str(path) for path in (lock, *sockets) if path.exists()]
        return found

    def wait_gone(self, seconds: float = 5) -> None:
        """Fail if anything is left after `seconds`."""
        deadline = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, f"left behind: {left}"


def shared_memory() -> frozenset[str]:
    """Names of POSIX shared memory."""
    return frozenset(path.name for path in Path("/dev/shm").iterdir())


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@dataclass(frozen=True)
class Ended:
    """A launcher that ended on its own."""

    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        """Last line of its stderr."""
        return (self.err.splitlines() or [""])[-1]


def run_launcher(*args: str, environ: dict[str, str] | None = None, timeout: float = 60) -> Ended:
    """Start a launcher that cannot succeed and wait for its end.

    Its port is a free one where neither a flag nor `environ` says another: other tests run beside it.
    """
    command = [sys.executable, "-m", "funitel.launcher", *args]
    mark = uuid.uuid4().hex
    port = {"PORT": str(free_port())}
    try:
        done = subprocess.run(
            command,
            env={**port, **os.environ, **(environ or {}), MARK: mark},
            capture_output=True,
            timeout=timeout,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as expired:
        output = (expired.stderr or b"").decode(errors="replace")
        raise AssertionError(f"it still runs after {timeout} s:\n{output[-3000:]}") from None
    finally:
        left = marked(mark)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert not left, f"it left {len(left)} processes"
    return Ended(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


class Server:
    """One launcher and what it started. `url` is the router's base."""

    def __init__(
        self,
        folder: Path,
        *args: str,
        environ: dict[str, str] | None = None,
        program: str = LAUNCHER,
        port: int | None = None,
        python: str = sys.executable,
        command: tuple[str, ...] = (),
    ) -> None:
        given = args[args.index("--port") + 1] if "--port" in args else None
        self.port = int(given) if given else port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"server-{self.port}.log"
        self.out = folder / f"server-{self.port}.out"
        self.mark = uuid.uuid4().hex
        self._shared_memory = shared_memory()
        flags = args if given else ("--port", str(self.port), *args)
        self._argv = [python, "-m", program, *command, *flags]
        self._environment = {**os.environ, **(environ or {}), MARK: self.mark}
        self.log.unlink(missing_ok=True)
        self.out.unlink(missing_ok=True)
        self.process = self._started()

    def _started(self) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log, self.out.open("ab") as out:
            return subprocess.Popen(self._argv, stdout=out, stderr=log, env=self._environment, start_new_session=True)

    def wait_ready(self) -> "Server":
        """Wait until /health is 200; fail with the log if the launcher ends or time runs out."""
        deadline = time.monotonic() + STARTUP_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the launcher ended with {self.process.returncode}:\n{self.tail()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5, verify=PLAIN).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"not ready after {STARTUP_SECONDS} s:\n{self.tail()}")

    def tail(self, num_chars: int = 3000) -> str:
        """End of the launcher's stderr."""
        return self.log.read_text(errors="replace")[-num_chars:]

    def wait_log(self, text: str, seconds: float = 5) -> str:
        """Wait until the launcher's stderr contains `text` and return all of it; lines of its children come late."""
        wait_until(lambda: text in self.log.read_text(errors="replace"), seconds, f"{text!r} is not in the log")
        return self.log.read_text(errors="replace")

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its full name, labels included.

        Raises:
            httpx.HTTPStatusError: the router refused, as it does with 503 what came in while it was restarted.
        """
        return samples_of(httpx.get(f"{self.url}/metrics", timeout=10, verify=PLAIN).raise_for_status().text)

    def wait_steps(self, count: int, seconds: float = 60) -> None:
        """Wait until `count` steps more than now have been answered."""
        last = self.metrics()["funitel_steps_total"] + count
        wait_until(lambda: self.metrics()["funitel_steps_total"] >= last, seconds, f"no {count} further steps", 0.005)

    def shard_pids(self) -> list[int]:
        """Process ids of the shards, in rank order, those of the first replica first."""
        found = {}
        for pid in self.processes():
            if _SHARD.search(_command(pid)):
                path = flag_value(pid, "--uds-path") or ""
                found[len(path), path, int(flag_value(pid, "--rank") or 0)] = pid
        return [found[place] for place in sorted(found)]

    def footprint(self) -> Footprint:
        """What it takes of the machine; asked while it runs with at least one shard."""
        shards = self.shard_pids()
        master_ports = {flag_value(shard, "--master-port") for shard in shards} - {None}
        uds_path = flag_value(shards[0], "--uds-path")
        assert uds_path is not None, "the shard was given no socket path"
        ports = (self.port, *(int(port) for port in master_ports if port))
        return Footprint(self.mark, ports, uds_path, self._shared_memory, frozenset(self.processes()))

    def processes(self) -> set[int]:
        """What it started, and what it adopted of an earlier launcher."""
        return descendants(self.process.pid) | (marked(self.mark) - {self.process.pid})

    def kill_launcher(self) -> None:
        """Kill the launcher alone."""
        self.process.kill()
        self.process.wait()

    def relaunch(self) -> None:
        """Start another launcher with the same flags, and wait until it has adopted what the first one has left."""
        told = self.log.read_text(errors="replace").count(ADOPTED)
        self.process = self._started()
        wait_until(lambda: self.log.read_text(errors="replace").count(ADOPTED) > told, 60, "nothing was adopted")

    def router_pid(self) -> int:
        """Process id of the router; raises ProcessLookupError where none runs."""
        return self._first(self.router_pids(), "router")

    def router_pids(self) -> list[int]:
        """Process ids of routers: of two, while one replaces the other."""
        return self._pids_of("funitel.router")

    def keeper_pid(self) -> int:
        """Process id of the keeper; raises ProcessLookupError where none runs."""
        return self._first(self._pids_of("funitel.launcher.keeper"), "keeper")

    def _pids_of(self, module: str) -> list[int]:
        commands = {pid: _command(pid) for pid in self.processes()}
        return [pid for pid, command in commands.items() if f" -m {module} " in command]

    @staticmethod
    def _first(pids: list[int], role: str) -> int:
        if not pids:
            raise ProcessLookupError(f"no {role} runs")
        return pids[0]

    def error_lines(self) -> list[str]:
        """The launcher's own error lines; those of its children come with a prefix."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith("error:")]

    def stop(self, number: int = signal.SIGTERM, timeout: float = 60) -> int:
        """Signal the launcher and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(f"the launcher did not stop:\n{self.tail()}") from None

    def kill_all(self) -> None:
        """End whatever is left of it, for tests that fail."""
        for pid in marked(self.mark):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def serving(
    folder: Path,
    *args: str,
    environ: dict[str, str] | None = None,
    program: str = LAUNCHER,
    python: str = sys.executable,
) -> Iterator[Server]:
    """A ready server for the length of a `with`."""
    server = Server(folder, *args, environ=environ, program=program, python=python)
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def cpu_seconds(pid: int) -> float:
    """CPU time that all threads of a process have taken, user and system; those that have ended are left out."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
