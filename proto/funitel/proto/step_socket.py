"""Framing protocol of the step socket: numbered calls between router and shard on one machine, cheaper than gRPC.

A frame is a header, a trace context as JSON (usually empty), and a message of `generate.v3`. The router chooses the
numbers of its calls; an answer has the number of its call. `code` is the method in a call and the gRPC status in an
answer. The payload of an error is its message in UTF-8. ADR 10 gives the reasons.
"""

import asyncio
import json
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple, cast

SUFFIX = ".steps"  # of the gRPC socket's path
# gRPC keepalive between machines: interval and timeout of pings.
KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 20_000
MAX_BYTES = 1 << 28  # maximum size of a message, here and in gRPC

# Numbers of the gRPC statuses that either end produces.
OK = 0
DEADLINE_EXCEEDED = 4
UNAVAILABLE = 14
DATA_LOSS = 15

_HEADER = struct.Struct("<IIQB")  # bytes of payload, bytes of context, number of the call, code


class Method(IntEnum):
    """Methods of the step socket."""

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
    """Encode a trace context from `tracing.inject`."""
    return json.dumps(dict(headers)).encode() if headers else b""


def decode_context(context: bytes) -> dict[str, str]:
    """Decode a trace context; empty bytes give an empty one.

    Raises:
        ValueError: it is not a JSON object of strings.
    """
    try:
        headers = json.loads(context) if context else {}
    except (ValueError, RecursionError) as error:
        raise ValueError("the context is not JSON") from error
    if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
        raise ValueError("the context is no object of strings")
    return headers


class FrameProtocol(asyncio.Protocol):
    """Either end of a step socket; `take` receives complete frames."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._buffer = bytearray()

    def take(self, frame: Frame) -> None:
        """Receive the next frame."""
        raise NotImplementedError

    def refuse(self, reason: str) -> None:
        """Abort the connection: the data is no frame, so the start of the next one is unknown."""
        self._transport.abort()

    def send(self, frame: Frame) -> None:
        """Send a frame, after earlier ones."""
        header = _HEADER.pack(len(frame.payload), len(frame.context), frame.call_id, frame.code)
        self._transport.write(header + frame.context + frame.payload)

    def close(self) -> None:
        """Close the connection after all data is sent."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """Split the received data into frames."""
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
