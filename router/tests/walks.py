"""The modules of the router that one request enters, found by a profiler while a real router serves it."""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from fake_shards import fake_shards
from fakes import eventually, write_model

from funitel.router.app import build_app
from funitel.router.connect import connect
from funitel.router.settings import RouterSettings
from funitel.router.transport.server import Server

KEY = "sk-walks"
PLANNING = "StepLoop._send_steps"
"""What is called below it belongs to the next step, not to a token on its way out."""

WARMING = "Tokenizer.warm_up"
"""What a router does beside its first requests."""


class Walk:
    """Functions of the router that ran, by module, while it was recorded."""

    def __init__(self, without: str | None = None) -> None:
        self.calls: dict[str, set[str]] = {}
        self._without = without
        self._depth = 0  # of calls below `without`

    def __enter__(self) -> "Walk":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code.co_qualname == self._without:
            self._depth += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not self._depth:
            module = frame.f_globals.get("__name__", "")
            if module.startswith("funitel.router."):
                self.calls.setdefault(module.removeprefix("funitel."), set()).add(code.co_qualname)


@contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """Restore the handlers that a server of a process of its own replaces."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@asynccontextmanager
async def router(folder: Path) -> AsyncIterator[int]:
    """The port of a router with an API key over one shard that takes its steps by a step socket."""
    model = write_model(folder)
    async with fake_shards(folder, 1, pool_tokens=4000) as shards, AsyncExitStack() as undo:
        undo.enter_context(signal_handlers_kept())
        await shards[0].open_step_socket(str(folder / "steps"))
        uds_path = f"{folder}/shard-0"
        settings = RouterSettings(tokenizer_name=str(model), master_shard_uds_path=uds_path, api_key=KEY)
        server = Server(settings, partial(build_app, settings, connect), 100)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server._serve([listener]))
            port: int = listener.getsockname()[1]

            async def is_ready() -> bool:
                with suppress(OSError):
                    return b" 200 " in await ask(port, "GET", "/health")
                return False

            await eventually(is_ready, "ready")
            await asyncio.gather(*(task for task in asyncio.all_tasks() if qualified_name(task) == WARMING))
            yield port
            server.should_exit = True
            await serving


def qualified_name(task: "asyncio.Task[object]") -> str:
    """The name of the function that a task runs."""
    return str(getattr(task.get_coro(), "__qualname__", ""))


async def ask(
    port: int, method: str, path: str, body: dict[str, Any] | None = None, hear: Callable[[int], None] | None = None
) -> bytes:
    """Send one request and read its answer to the end; `hear` is told how many events have come whenever some have."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    answer = b""
    while piece := await reader.read(65536):
        answer += piece
        if hear is not None:
            hear(answer.count(b"data:"))
    writer.close()
    return answer
