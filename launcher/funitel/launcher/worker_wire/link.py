"""One connection between a worker and the control plane: a JSON object a line, each way; calls with answers over it."""

import asyncio
import json
import ssl
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import ValidationError

from funitel.launcher.worker_wire.messages import METHODS, WireMessage
from funitel.proto.errors import StartupError

MAX_LINE_BYTES = 4 << 20
MAX_UNSENT_BYTES = 16 << 20  # the other end has stopped reading

T = TypeVar("T", bound=WireMessage)


class WorkerLost(StartupError):
    """A worker is not connected, so that nothing can be asked of it."""


class Link:
    """Sends and receives objects; each has a `type`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @property
    def peer(self) -> str:
        """Address of the other end."""
        name = self._writer.get_extra_info("peername")
        return str(name[0]) if name else "an unknown address"

    @property
    def own_address(self) -> str:
        """Address of this end."""
        return str(self._writer.get_extra_info("sockname")[0])

    def send(self, kind: str, **fields: Any) -> None:
        """Send an object; on a connection that is closed, or not read from, nothing."""
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.close()
            return
        self._writer.write(json.dumps({"type": kind, **fields}).encode() + b"\n")

    async def receive(self, seconds: float) -> dict[str, Any] | None:
        """The next object; None at the end of the connection, or when nothing came in so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                line = await self._reader.readline()
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError, RecursionError, TimeoutError):  # ValueError: not JSON, or longer than the limit
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        """Close the connection at once."""
        self._writer.transport.abort()

    async def finish(self, seconds: float) -> None:
        """Close the connection once everything is sent."""
        self._writer.close()
        with suppress(OSError, TimeoutError, ssl.SSLError):
            async with asyncio.timeout(seconds):
                await self._writer.wait_closed()


class WorkerCalls:
    """WorkerCalls of the control plane to one worker, answered in any order."""

    def __init__(self, link: Link, worker: str) -> None:
        self._link = link
        self._worker = worker
        self._next = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._is_over = False

    async def call(self, method: str, order: WireMessage, kind: type[T]) -> T:
        """The answer to an order.

        Raises:
            StartupError: the worker refuses; with its reason.
            WorkerLost: the connection is gone.
        """
        assert METHODS[method] == (type(order), kind), method
        if self._is_over:
            raise self._lost()
        number, self._next = self._next, self._next + 1
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._link.send("call", id=number, method=method, body=order.model_dump(mode="json"))
        try:
            answer = await future
        finally:
            del self._waiting[number]
        if (reason := answer.get("error")) is not None:
            raise StartupError(f"worker {self._worker}: {reason}")
        try:
            return kind.model_validate(answer.get("body"))
        except ValidationError as error:
            raise StartupError(f"worker {self._worker} answers {method} with {first_fault(error)}") from error

    def take(self, answer: dict[str, Any]) -> None:
        """Give an answer to the call that waits for it."""
        number = answer.get("id")
        future = self._waiting.get(number) if isinstance(number, int) else None
        if future is not None and not future.done():
            future.set_result(answer)

    def end(self) -> None:
        """Fail the calls that wait, and later ones: the connection is gone."""
        self._is_over = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._lost())

    def _lost(self) -> WorkerLost:
        return WorkerLost(f"worker {self._worker} is not connected")


def first_fault(error: ValidationError) -> str:
    """The first field at fault, in one line."""
    fault = error.errors()[0]
    field = ".".join(map(str, fault["loc"])) or "the object"
    return f"{field}: {fault['msg'].lower()}"
