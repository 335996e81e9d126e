"""Run an image with runc as a container engine would: processes, network and mounts of its own, no privileges."""

import ctypes
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from funitel_testing.container.build import Image
from funitel_testing.servers import wait_until

READY_SECONDS = 120.0
_CLONE_NEWNET = 0x40000000
_NAMESPACES = ("pid", "network", "ipc", "uts", "mount", "cgroup")
_TMPFS = ["nosuid", "nodev", "mode=1777"]


class Container:
    """A running container: a read-only root, no capabilities, no new privileges."""

    def __init__(
        self,
        image: Image,
        folder: Path,
        *arguments: str,
        environ: Mapping[str, str] | None = None,
        mounts: Mapping[str, Path] | None = None,
        read_only: Sequence[str] = (),
        user: tuple[int, int] | None = None,
        memory_bytes: int | None = None,
        entrypoint: Sequence[str] | None = None,
    ) -> None:
        """Start it.

        Args:
            image: what to run.
            folder: for its files; one for each container.
            arguments: what a user writes after the image's name.
            environ: variables beside those of the image.
            mounts: folders of the host by their place in the container.
            read_only: those of `mounts` that cannot be written.
            user: (uid, gid) instead of the image's.
            memory_bytes: limit of its control group.
            entrypoint: instead of the image's.
        """
        self.name = f"funitel-{uuid.uuid4().hex[:12]}"
        self._image = image
        self._state = folder / "state"
        self._log = folder / "log"
        self._pid_file = folder / "pid"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
        command = [*(entrypoint or image.config["Entrypoint"]), *(arguments or image.config.get("Cmd") or ())]
        bound = {"/etc/hosts": folder / "hosts", **(mounts or {})}
        spec = self._spec(command, environ or {}, bound, read_only, user, memory_bytes)
        (folder / "config.json").write_text(json.dumps(spec))
        words = ["run", "--bundle", str(folder), "--pid-file", str(self._pid_file), self.name]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen([*self._runc, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def _runc(self) -> list[str]:
        return ["runc", "--root", str(self._state)]

    def _spec(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        mounts: Mapping[str, Path],
        read_only: Sequence[str],
        user: tuple[int, int] | None,
        memory_bytes: int | None,
    ) -> dict[str, Any]:
        """The container in the runtime's own form."""
        uid, gid = user or _user(self._image.config["User"])
        variables = dict(word.split("=", 1) for word in self._image.config["Env"]) | dict(environ)
        self._process = {
            "user": {"uid": uid, "gid": gid},
            "args": list(command),
            "env": [f"{name}={value}" for name, value in ({"HOSTNAME": self.name} | variables).items()],
            "cwd": self._image.config.get("WorkingDir") or "/",
            "capabilities": {},
            "noNewPrivileges": True,
        }
        resources: dict[str, Any] = {} if memory_bytes is None else {"memory": {"limit": memory_bytes}}
        return {
            "ociVersion": "1.0.2",
            "process": self._process,
            "root": {"path": str(self._image.root), "readonly": True},
            "hostname": self.name,
            "mounts": [
                _mount("/proc", "proc"),
                _mount("/dev", "tmpfs", "nosuid", "mode=755"),
                _mount("/dev/shm", "tmpfs", *_TMPFS, "size=64m"),
                _mount("/sys", "sysfs", "nosuid", "noexec", "nodev", "ro"),
                _mount("/sys/fs/cgroup", "cgroup", "nosuid", "noexec", "nodev", "ro"),
                _mount("/tmp", "tmpfs", *_TMPFS),
                *(
                    _mount(place, "bind", "rbind", "ro" if place in read_only else "rw", source=str(source))
                    for place, source in mounts.items()
                ),
            ],
            "linux": {
                "namespaces": [{"type": kind} for kind in _NAMESPACES],
                "resources": resources,
                "cgroupsPath": f"/{self.name}",
                "sysctl": {"net.ipv4.ip_unprivileged_port_start": "0"},  # as Docker sets it
            },
        }

    @property
    def pid(self) -> int:
        """Process id of its PID 1 on the host."""
        wait_until(lambda: self._pid_file.exists() or self.process.poll() is not None, READY_SECONDS)
        return int(self._pid_file.read_text())

    @property
    def log(self) -> str:
        """What it wrote to stdout and stderr."""
        return self._log.read_text(errors="replace")

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command in it, as `docker exec` does, with the user and variables of its own process."""
        process = self._log.with_name("exec.json")
        process.write_text(json.dumps(self._process | {"args": list(command)}))
        return subprocess.run(
            [*self._runc, "exec", "--process", str(process), self.name], capture_output=True, text=True, timeout=60
        )

    def health(self) -> "subprocess.CompletedProcess[str]":
        """Run the image's health check."""
        kind, *command = self._image.config["Healthcheck"]["Test"]
        return self.run(*(["/bin/sh", "-c", *command] if kind == "CMD-SHELL" else command))

    @contextmanager
    def request(self, port: int, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        """The answer of a port of it for the length of a `with`: to GET, or to POST of a JSON body."""
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.sock = _connect(self.pid, port)
        with closing(connection):
            if body is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                yield response

    def call(self, port: int, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of an answer; None where it has no body."""
        with self.request(port, path, body) as response:
            text = response.read()
            return response.status, json.loads(text) if text else None

    def wait_ready(self, port: int) -> "Container":
        """Wait until /health answers 200; fail with its log if it ends."""

        def is_ready() -> bool:
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.log[-3000:]}"
            try:
                return self.call(port, "/health")[0] == 200
            except (OSError, http.client.HTTPException):
                return False

        wait_until(is_ready, READY_SECONDS, f"not ready:\n{self.log[-3000:]}")
        return self

    def processes(self) -> dict[int, str]:
        """State of each of its processes, by process id on the host."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == namespace:
                    found[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its PID 1."""
        subprocess.run([*self._runc, "kill", self.name, str(int(number))], check=True)

    def wait(self, seconds: float = READY_SECONDS) -> int:
        """Wait for its end and return its exit code."""
        return self.process.wait(seconds)

    def remove(self) -> None:
        """Kill what is left of it."""
        if self.process.poll() is None:
            subprocess.run([*self._runc, "kill", "--all", self.name, "KILL"], capture_output=True)
            self.process.wait(10)
        subprocess.run([*self._runc, "delete", "--force", self.name], capture_output=True)
        shutil.rmtree(self._state, ignore_errors=True)


@contextmanager
def running(image: Image, folder: Path, *arguments: str, port: int = 80, **options: Any) -> Iterator[Container]:
    """A ready container for the length of a `with`."""
    container = Container(image, folder, *arguments, **options)
    try:
        yield container.wait_ready(port)
    finally:
        container.remove()


def _mount(place: str, kind: str, *options: str, source: str | None = None) -> dict[str, Any]:
    return {"destination": place, "type": kind, "source": source or kind, "options": list(options)}


def _user(text: str) -> tuple[int, int]:
    uid, _, gid = text.partition(":")
    return int(uid or 0), int(gid or 0)


def _connect(pid: int, port: int) -> socket.socket:
    """A connection from inside a container's network; a socket stays in the network where it was made."""
    made: list[socket.socket | OSError] = []

    def connect() -> None:
        try:
            with open(f"/proc/{pid}/ns/net", "rb") as network:
                if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            made.append(socket.create_connection(("127.0.0.1", port), timeout=READY_SECONDS))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=connect)  # setns changes the network of this thread alone
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]
