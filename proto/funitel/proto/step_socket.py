"""Frames of the step socket: numbered calls between a router and a shard of one machine, without gRPC's cost for each.

A frame is a header and two pieces of bytes: the context of a trace as JSON, mostly empty, and a message of
`generate.v3`. The router numbers its calls as it likes; an answer bears the number of its call. Its `code` is the
method in a call and gRPC's status in an answer, where a failure's payload is what was wrong, in UTF-8. Why there is
such a socket beside gRPC: ADR 10.
"""

import asyncio
import json
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple, cast

SUFFIX = ".steps"  # of the gRPC socket's path
# Of gRPC between machines: how often an end without news asks for some, and how long it waits.
KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 20_000
MAX_BYTES = 1 << 28  # of a message, here and in gRPC: prompts of all sequences of a step, or all that is said of them

# gRPC's numbers of statuses that either end gives itself.
OK = 0
DEADLINE_EXCEEDED = 4
UNAVAILABLE = 14
DATA_LOSS = 15

_HEADER = struct.Struct("<IIQB")  # bytes of payload, bytes of context, number of the call, code


class Method(IntEnum):
    """Calls a step socket takes."""

    PREFILL = 1
    DECODE = 2
    FILTER_BATCH = 3
    CLEAR_CACHE = 4

    @property
    def rpc(self) -> str:
        """Its name in gRPC."""
        return "".join(word.title() for word in self.name.split("_"))


class Frame(NamedTuple):
    """A call or an answer."""

    call_id: int
    code: int
    payload: bytes
    context: bytes = b""


def encode_context(headers: Mapping[str, str]) -> bytes:
    """Write the context of a trace, as `tracing.inject` gives it."""
    return json.dumps(dict(headers)).encode() if headers else b""


def decode_context(context: bytes) -> dict[str, str]:
    """Read the context of a trace; empty where there is none.

    Raises:
        ValueError: it is anything else.
    """
    try:
        headers = json.loads(context) if context else {}
    except (ValueError, RecursionError) as error:
        raise ValueError("the context is not JSON") from error
    if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
        raise ValueError("the context is no object of strings")
    return headers


class FrameProtocol(asyncio.Protocol):
    """Either end of a step socket: whole frames come to `take`."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._buffer = bytearray()

    def take(self, frame: Frame) -> None:
        """Receive the next frame."""
        raise NotImplementedError

    def refuse(self, reason: str) -> None:
        """Hang up at once: what came is no frame, and nobody knows where the next one begins."""
        self._transport.abort()

    def send(self, frame: Frame) -> None:
        """Send a frame, after all that were sent before."""
        header = _HEADER.pack(len(frame.payload), len(frame.context), frame.call_id, frame.code)
        self._transport.write(header + frame.context + frame.payload)

    def close(self) -> None:
        """Hang up once everything is sent."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the way out."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """Cut what came into frames."""
        buffer = self._buffer
        buffer += data
        begin = 0
        while len(buffer) - begin >= _HEADER.size:
            num_payload, num_context, call_id, code = _HEADER.unpack_from(buffer, begin)
            if num_payload + num_context > MAX_BYTES:
                buffer.clear()
                self.refuse(f"a frame of {num_payload + num_context} bytes, at most {MAX_BYTES} are allowed")
                return
            payload_begin = begin + _HEADER.size + num_context
            end = payload_begin + num_payload
            if len(buffer) < end:
                break
            context = bytes(buffer[begin + _HEADER.size : payload_begin])
            self.take(Frame(call_id, code, bytes(buffer[payload_begin:end]), context))
            begin = end
        del buffer[:begin]
