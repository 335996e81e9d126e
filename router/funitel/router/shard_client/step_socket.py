"""The router's end of a shard's step socket: numbered calls to a shard of this machine, without gRPC (ADR 10)."""

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
    """Words for an answer that `error` was raised by, or is said of."""
    return f"the answer cannot be read: {error}"


@dataclass(frozen=True, slots=True)
class _Call:
    """A call under way."""

    answer: "asyncio.Future[Any]"
    parse: Callable[[bytes], Any]
    timeout: asyncio.TimerHandle


class StepClient(FrameProtocol):
    """Calls to one shard; answers may come in any order. `failure` says what the number of a status means."""

    def __init__(self, failure: Failure) -> None:
        super().__init__()
        self._failure = failure
        self._calls: dict[int, _Call] = {}
        self._num_calls = 0
        self._complaint = ""  # what was wrong with what the shard sent
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(cls, path: str, failure: Failure) -> "StepClient":
        """Connect to a step socket. Raises OSError when that is not possible."""
        _, client = await asyncio.get_running_loop().create_unix_connection(lambda: cls(failure), path)
        return client

    def call(
        self, method: Method, payload: bytes, parse: Callable[[bytes], Any], timeout: float
    ) -> "asyncio.Future[Any]":
        """Send a call now; its future gives the message that `parse` makes of the answer, or a FunitelError."""
        self._num_calls += 1
        call_id, loop = self._num_calls, asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._calls[call_id] = _Call(answer, parse, loop.call_later(timeout, self._give_up, call_id))
        self.send(Frame(call_id, method, payload, encode_context(spans.inject())))
        return answer

    def take(self, frame: Frame) -> None:
        """Answer the call that a frame bears the number of, if it is still waited for."""
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
        except Exception as error:  # whatever the parser makes of what is no answer, the caller must hear of it
            call.answer.set_exception(self._failure(DATA_LOSS, unreadable(error)))
        else:
            call.answer.set_result(answer)

    def refuse(self, reason: str) -> None:
        """Hang up on a shard that makes no sense; calls under way fail for that reason."""
        self._complaint = unreadable(reason)
        super().refuse(reason)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail every call under way: the shard is gone, or we have hung up."""
        status, details = UNAVAILABLE, "the connection has ended"
        if self._complaint:
            status, details = DATA_LOSS, self._complaint
        for call_id in tuple(self._calls):
            self._fail(call_id, status, details)
        if not self.lost.done():
            self.lost.set_result(None)

    def _give_up(self, call_id: int) -> None:
        self._fail(call_id, DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _fail(self, call_id: int, status: int, details: str) -> None:
        call = self._calls.pop(call_id)
        call.timeout.cancel()
        if not call.answer.done():
            call.answer.set_exception(self._failure(status, details))
