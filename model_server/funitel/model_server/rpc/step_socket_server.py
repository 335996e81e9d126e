"""Serve the step socket of a shard: numbered calls of a router on this machine, without gRPC (ADR 10)."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from funitel.model_server.rpc.dispatcher import Dispatcher, ReplyCallbacks
from funitel.model_server.rpc.tracing import CallSpans, open_spans, status_of
from funitel.proto import generate_pb2 as pb
from funitel.proto.errors import FunitelError, InvalidRequest, StartupError
from funitel.proto.process.private_socket import bind_private
from funitel.proto.step_socket import OK, Frame, FrameProtocol, Method, decode_context

Message = Any  # protobuf messages share no useful base
Parse = Callable[[bytes], Message]
Call = Callable[[Message, ReplyCallbacks[Message]], None]

FLUSH_SECONDS = 1.0  # that a router has at the end to read what was answered


class StepServer:
    """Listens on the Unix socket at `path`; any number of routers may be connected."""

    def __init__(self, dispatcher: Dispatcher, path: str) -> None:
        self.methods: dict[int, tuple[Method, Parse, Call]] = {
            Method.PREFILL: (Method.PREFILL, pb.PrefillRequest.FromString, dispatcher.prefill),
            Method.DECODE: (Method.DECODE, pb.DecodeRequest.FromString, dispatcher.decode),
            Method.FILTER_BATCH: (Method.FILTER_BATCH, pb.FilterBatchRequest.FromString, dispatcher.filter_batch),
            Method.CLEAR_CACHE: (Method.CLEAR_CACHE, pb.ClearCacheRequest.FromString, dispatcher.clear_cache),
        }
        self.dispatcher = dispatcher
        self.connections: set[StepConnection] = set()
        self._path = Path(path)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; a file of that name is replaced.

        Raises:
            StartupError: the path is too long or not ours.
        """
        self._path.unlink(missing_ok=True)
        try:
            loop = asyncio.get_running_loop()
            listener = bind_private(str(self._path))
            self._server = await loop.create_unix_server(partial(StepConnection, self), sock=listener)
        except OSError as error:
            raise StartupError(f"cannot listen on {self._path}: {error}") from error

    def stop_listening(self) -> None:
        """Take neither connections nor calls any more; those that have come are still answered."""
        if self._server is not None:
            self._server.close()
        for connection in self.connections:
            connection.stop_reading()

    async def stop(self) -> None:
        """Close connections once the answers are sent, or after `FLUSH_SECONDS` where a router does not read them."""
        self.stop_listening()
        connections = tuple(self.connections)
        for connection in connections:
            connection.close()
        self._path.unlink(missing_ok=True)
        try:
            async with asyncio.timeout(FLUSH_SECONDS):
                for connection in connections:
                    await connection.lost.wait()
        except TimeoutError:
            for connection in self.connections:
                connection.abort()


class StepConnection(FrameProtocol):
    """One router's connection."""

    def __init__(self, server: StepServer) -> None:
        super().__init__()
        self._server = server
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Add this connection to the server's."""
        super().connection_made(transport)
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Calls in flight go on; their answers are dropped."""
        self._server.connections.discard(self)
        self.lost.set()

    def stop_reading(self) -> None:
        """Read no more of what the router sends."""
        self._transport.pause_reading()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def take(self, frame: Frame) -> None:
        """Begin a call."""
        try:
            method, parse, call = self._server.methods[frame.code]
            request, headers = parse(frame.payload), decode_context(frame.context)
        except KeyError:
            self._refuse(frame.call_id, InvalidRequest(f"the step socket has no method {frame.code}"))
        except DecodeError:
            self._refuse(frame.call_id, InvalidRequest("the payload is no message of its method"))
        except ValueError as error:
            self._refuse(frame.call_id, InvalidRequest(str(error)))
        else:
            spans = open_spans(method.rpc, headers)
            reply = ReplyCallbacks(
                partial(self._answer, frame.call_id, spans), partial(self._fail, frame.call_id, spans)
            )
            self._server.dispatcher.make(call, request, reply)

    def _answer(self, call_id: int, spans: CallSpans, message: Message) -> None:
        spans.end(message)
        self._reply(Frame(call_id, OK, message.SerializeToString()))

    def _fail(self, call_id: int, spans: CallSpans, error: FunitelError) -> None:
        spans.fail(error, status_of(error))
        self._refuse(call_id, error)

    def _refuse(self, call_id: int, error: FunitelError) -> None:
        self._reply(Frame(call_id, status_of(error).value[0], error.message.encode()))

    def _reply(self, frame: Frame) -> None:
        if self in self._server.connections:
            self.send(frame)
