"""`server`: a control socket over a fleet without processes, in a thread; `run`: a command line, in process."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from funitel.launcher.cli.program import program
from funitel.launcher.control_plane.api.app import build_app
from funitel.launcher.control_plane.api.server import ControlServer
from funitel.launcher.control_plane.model_tools import ModelTools
from funitel.proto.settings.fields import run_app
from funitel_testing.fake_fleet import FakeFleet

T = TypeVar("T")


class Server:
    """A running control socket."""

    def __init__(self, path: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.fleet = self.do(self._made())
        self._server = ControlServer(build_app(self.fleet, ModelTools(os.environ)), path)
        self.do(self._server.start())
        self.url = f"unix://{path}"

    async def _made(self) -> FakeFleet:
        return FakeFleet()

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        """Run something in the loop of the server."""
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(20)

    def hold(self) -> None:
        """Hold launches while they download."""
        self.loop.call_soon_threadsafe(self.fleet.gate.clear)

    def go_on(self) -> None:
        """Let launches go on."""
        self.loop.call_soon_threadsafe(self.fleet.gate.set)

    def stop(self) -> None:
        self.do(self._server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    running = Server(tmp_path / "s")
    monkeypatch.setenv("FUNITEL_URL", running.url)
    yield running
    running.stop()


class Ran:
    """What one command line led to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: str) -> None:
        monkeypatch.setattr(sys, "argv", ["funitel", *argv])
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        with pytest.raises(SystemExit) as ended:
            run_app(program(os.environ, lambda given: None, lambda settings: None))
        for number, handler in handlers.items():
            signal.signal(number, handler)
        self.code = ended.value.code
        self.out, self.err = capsys.readouterr()

    @property
    def error(self) -> str:
        """The one line of a failure."""
        assert (self.code, self.err.count("\n")) == (1, 1), self.err
        assert self.err.startswith("error: ")
        return self.err.removeprefix("error: ").strip()


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *argv: Ran(monkeypatch, capsys, *argv)
