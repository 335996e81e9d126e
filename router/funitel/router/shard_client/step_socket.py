"""The client of a shard's step socket: numbered calls to a shard of this machine, without gRPC (ADR 10)."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from funitel.proto.errors import FunitelError
from funitel.proto.step_socket import (
    DATA_LOSS,
    DEADLINE_EXCEEDED,
    OK,
    UNAVAILABLE,
    Frame,
    FrameProtocol,
    Method,
    encode_context,
)
from funitel.proto.tracing import spans

Failure = Callable[[int, str], FunitelError]


def unreadable(error: object) -> str:
    """Say that an answer cannot be read, and why."""
    return f"the answer cannot be read: {error}"


@dataclass(frozen=True, slots=True)
class _Call:
    """A call in flight."""

    answer: "asyncio.Future[Any]"
    parse: Callable[[bytes], Any]
    timeout: asyncio.TimerHandle


class StepClient(FrameProtocol):
    """Calls to one shard; answers may come in any order. `failure` makes the error of a status."""

    def __init__(self, failure: Failure) -> None:
        super().__init__()
        self._failure = failure
        self._calls: dict[int, _Call] = {}
        self._num_calls = 0
        self._protocol_error = ""  # in what the shard sent
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(cls, path: str, failure: Failure) -> "StepClient":
        """Connect to a step socket. Raises OSError when that is not possible."""
        _, client = await asyncio.get_running_loop().create_unix_connection(lambda: cls(failure), path)
        return client

    def call(
        self, method: Method, payload: bytes, parse: Callable[[bytes], Any], timeout: float
    ) -> "asyncio.Future[Any]":
        """Send a call now; return a future of the parsed answer, or of a FunitelError."""
        self._num_calls += 1
        call_id, loop = self._num_calls, asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._calls[call_id] = _Call(answer, parse, loop.call_later(timeout, self._expire, call_id))
        self.send(Frame(call_id, method, payload, encode_context(spans.inject())))
        return answer

    def take(self, frame: Frame) -> None:
        """Resolve the call of a frame, by its number, if it still waits."""
        call = self._calls.pop(frame.call_id, None)
        if call is None:
            if not 0 < frame.call_id <= self._num_calls:
                self.refuse(f"it answers call {frame.call_id}, which was never made")
            return
        call.timeout.cancel()
        if call.answer.done():
            return
        if frame.code != OK:
            call.answer.set_exception(self._failure(frame.code, frame.payload.decode(errors="replace")))
            return
        try:
            answer = call.parse(frame.payload)
        except Exception as error:  # of the parser: the caller must get it
            call.answer.set_exception(self._failure(DATA_LOSS, unreadable(error)))
        else:
            call.answer.set_result(answer)

    def refuse(self, reason: str) -> None:
        """Close the connection to a shard that breaks the protocol; calls in flight fail for that reason."""
        self._protocol_error = unreadable(reason)
        super().refuse(reason)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail every call in flight: the shard has ended, or the client was closed."""
        status, details = UNAVAILABLE, "the connection has ended"
        if self._protocol_error:
            status, details = DATA_LOSS, self._protocol_error
        for call_id in tuple(self._calls):
            self._fail(call_id, status, details)
        if not self.lost.done():
            self.lost.set_result(None)

    def _expire(self, call_id: int) -> None:
        self._fail(call_id, DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _fail(self, call_id: int, status: int, details: str) -> None:
        call = self._calls.pop(call_id)
        call.timeout.cancel()
        if not call.answer.done():
            call.answer.set_exception(self._failure(status, details))
