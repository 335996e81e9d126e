"""`launch`: the launcher as a process of its own, over imitated children."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from funitel.launcher.config.sockets import free_port

FAKE_LAUNCHER = Path(__file__).with_name("fake_launcher.py")
PATIENCE_SECONDS = 30.0


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(claim: Callable[[], object], what: str) -> None:
    """Wait until `claim` holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not claim():
        assert time.monotonic() < deadline, f"in vain waited for: {what}"
        time.sleep(0.02)


class Launched:
    """One launcher process and what its children noted in their diary."""

    def __init__(
        self,
        folder: Path,
        flags: tuple[str, ...],
        fake: dict[str, Any],
        environ: dict[str, str],
        prefix: tuple[str, ...] = (),
    ) -> None:
        self.port = free_port()
        self.uds_path = str(folder / "socket")
        self.diary = folder / "diary.jsonl"
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"
        with self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, str(FAKE_LAUNCHER), *self._flags(flags)],
                env=self._environ(fake) | environ,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def _environ(self, fake: dict[str, Any]) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in ("HOSTNAME", "PORT")}
        path = os.pathsep.join(filter(None, sys.path))
        return inherited | {"PYTHONPATH": path, "FAKE": json.dumps(fake), "FAKE_LOG": str(self.diary)}

    def _flags(self, flags: tuple[str, ...]) -> list[str]:
        given = [] if "--port" in flags else ["--port", str(self.port)]
        given += [] if {"--default-uds-path", "--shard-uds-path"} & {*flags} else ["--shard-uds-path", self.uds_path]
        return [*given, *(flag for flag in flags if flag != "--default-uds-path")]

    @property
    def stdout(self) -> str:
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    @property
    def entries(self) -> list[dict[str, Any]]:
        text = self.diary.read_text() if self.diary.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    @property
    def events(self) -> list[str]:
        return [f"{entry['process']} {entry['event']}" for entry in self.entries]

    def entry(self, event: str) -> dict[str, Any]:
        return next(e for e in self.entries if f"{e['process']} {e['event']}" == event)

    def of(self, process: str, event: str) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if (entry["process"], entry["event"]) == (process, event)]

    def answering(self) -> int:
        """The pid of the router that answers."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/pid", timeout=PATIENCE_SECONDS) as answer:
            return int(answer.read())

    def pids(self) -> set[int]:
        return {e["pid"] for e in self.entries} | {e["child"] for e in self.entries if "child" in e}

    def until_ready(self) -> "Launched":
        eventually(lambda: "ready:" in self.stdout or self.process.poll() is not None, "the ready line")
        assert self.process.poll() is None, self.stderr
        return self

    def until(self, event: str, count: int = 1) -> None:
        eventually(lambda: self.events.count(event) >= count, event)

    def until_said(self, text: str) -> None:
        eventually(lambda: text in self.stderr, text)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_SECONDS)

    def assert_nothing_left(self) -> None:
        eventually(lambda: not any(map(is_alive, self.pids())), "the end of every child")
        assert not list(Path(self.uds_path).parent.glob("socket*"))

    def end(self) -> None:
        self.process.kill()  # first: it would start again what ends
        self.process.wait()
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Start launchers: `launch("--num-shard", "2", fake={"shard-1": {...}}, environ={...})`; `prefix` runs them."""
    all_launched: list[Launched] = []

    def start(
        *flags: str,
        fake: dict[str, Any] | None = None,
        environ: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> Launched:
        all_launched.append(Launched(tmp_path_factory.mktemp("l"), flags, fake or {}, environ or {}, prefix))
        return all_launched[-1]

    yield start
    for launched in all_launched:
        launched.end()
