"""Malformed calls to a tiny shard in this process: it may refuse what it likes, and goes on as before.

Kinds: `messages`, calls with invalid fields; `frames`, spoilt bytes on the step socket. A worker of
`fuzz`.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from funitel.model_server.rpc.serve import CallServer
from funitel.proto import generate_pb2 as pb
from funitel.proto import wire
from funitel.proto.errors import FunitelError
from funitel.proto.step_socket import OK, Frame, Method, encode_context
from funitel_testing import fuzz_inputs
from funitel_testing.executors import load_executor, start
from funitel_testing.fuzz_inputs import Try
from funitel_testing.fuzz_mutants import damaged
from funitel_testing.step_peer import StepPeer
from funitel_testing.tiny import save_tiny

PROMPT = list(range(40, 60))
ANSWER_SECONDS = 10.0  # for a sound call
REFUSAL_SECONDS = 0.1  # for a spoilt one; some wait for a predecessor that will not come
HEADROOM_BYTES = 2 << 30  # of addresses, beside those of the libraries and the model

EXTREMES: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.CPPTYPE_INT32: (0, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_INT64: (0, -1, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 3, 287, 288, 65_535, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2, 2**31, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: (0.0, -0.0, -1.0, 1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
    FieldDescriptor.CPPTYPE_FLOAT: (0.0, -0.0, -1.0, 1e38, 1e-45, float("nan"), float("inf"), float("-inf")),
    FieldDescriptor.CPPTYPE_BOOL: (True, False),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 77),
    FieldDescriptor.CPPTYPE_STRING: ("", "a", "\0", "x" * 10_000, "(a|a)*b", '{"type": "object"}', "\U0001f600"),
}


class Shard:
    """A served executor, and its router."""

    def __init__(self, path: str, expected: bytes) -> None:
        self._path = path
        self._expected = expected
        self.failures: list[FunitelError] = []

    async def messages(self, rng: random.Random) -> str:
        """Send calls of which some are spoilt field by field."""
        frames = []
        for number in range(rng.choice((1, 2, 4))):
            method, message = _sound(number, rng)
            for _ in range(rng.choice((0, 1, 1, 3))):
                mangle(message, rng)
            frames.append(Frame(number, method, message.SerializeToString()))
        return await self._try([_bytes(frame) for frame in frames])

    async def frames(self, rng: random.Random) -> str:
        """Send frames of which some are spoilt byte by byte."""
        pieces = []
        for number in range(rng.choice((1, 2, 4))):
            method, message = _sound(number, rng)
            payload = message.SerializeToString()
            context = rng.choice((b"", encode_context({"traceparent": "00-x"}), b"[" * 5000, b"\xff"))
            payload = damaged(payload, rng) if payload and rng.random() < 0.5 else payload
            content = _bytes(Frame(rng.choice((number, 2**64 - 1)), rng.choice((method, 0, 255)), payload, context))
            pieces.append(damaged(content, rng, within=17) if rng.random() < 0.3 else content)
        return await self._try(pieces)

    async def _try(self, pieces: list[bytes]) -> str:
        """Send bytes as a router of their own; then another router must be served as ever."""
        _, stranger = await asyncio.get_running_loop().create_unix_connection(StepPeer, self._path)
        try:
            for piece in pieces:
                stranger._transport.write(piece)
            with suppress(TimeoutError):
                async with asyncio.timeout(REFUSAL_SECONDS):
                    for _ in pieces:
                        await stranger.answers.get()
        finally:
            stranger.close()
        tokens = await sound_tokens(self._path)
        if self.failures:
            return f"the shard gives up: {self.failures.pop().message}"
        return "" if tokens == self._expected else f"another answer: {tokens!r}"


async def sound_tokens(path: str) -> bytes:
    """What a router that begins anew gets for a prompt: the tokens of a prefill and a decode."""
    _, router = await asyncio.get_running_loop().create_unix_connection(StepPeer, path)
    async with asyncio.timeout(ANSWER_SECONDS):
        router.send(Frame(1, Method.CLEAR_CACHE, b""))
        await router.answers.get()
        router.send(Frame(2, Method.PREFILL, _prefill(1, 1).SerializeToString()))
        prefilled = await _answered(router, 2)
        cached = wire.decode_cached(pb.PrefillResponse.FromString(prefilled).batch)
        router.send(Frame(3, Method.DECODE, wire.encode_decode([cached], (), 2).SerializeToString()))
        decoded = await _answered(router, 3)
    router.close()
    answers = (pb.PrefillResponse.FromString(prefilled), pb.DecodeResponse.FromString(decoded))
    return repr([generation.tokens.ids for answer in answers for generation in answer.generations]).encode()


async def _answered(router: StepPeer, call_id: int) -> bytes:
    frame = await router.answers.get()
    if (frame.call_id, frame.code) != (call_id, OK):
        raise AssertionError(f"call {call_id} was answered with {frame}")
    return frame.payload


def _prefill(batch_id: int, step_seq: int | None, **fields: Any) -> pb.PrefillRequest:
    batch = wire.encode_batch(batch_id, [start(batch_id, PROMPT, **fields)], 4)
    return wire.encode_prefill(batch, None, (), step_seq)


def _sound(number: int, rng: random.Random) -> tuple[Method, Message]:
    """A call as a router makes it, the `number`-th of its batch."""
    step_seq = rng.choice((None, number + 1))
    kind = 0 if number == 0 else rng.randrange(4)
    if kind == 0:
        rich = {"temperature": 0.5, "top_k": 3, "do_sample": True, "stop_sequences": ("x",), "logit_bias": ((5, 1.0),)}
        return Method.PREFILL, _prefill(number + 1, step_seq, **(rich if rng.random() < 0.5 else {}))
    cached = pb.CachedBatch(id=1, request_ids=[1], size=1, max_tokens=28, current_tokens=21)
    if kind == 1:
        decode = pb.DecodeRequest(batches=[cached])
        if step_seq is not None:
            decode.step_seq = step_seq
        return Method.DECODE, decode
    if kind == 2:
        return Method.FILTER_BATCH, pb.FilterBatchRequest(batch_id=1, request_ids=[1])
    return Method.CLEAR_CACHE, pb.ClearCacheRequest(id=1)


def mangle(message: Message, rng: random.Random) -> None:
    """Change one field of a message, or of one within it."""
    field = rng.choice(message.DESCRIPTOR.fields)
    if field.is_repeated:
        _mangle_list(message, field, rng)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        if rng.random() < 0.2:
            message.ClearField(field.name)
        else:
            mangle(getattr(message, field.name), rng)
    else:
        setattr(message, field.name, _extreme(field, rng))


def _mangle_list(message: Message, field: FieldDescriptor, rng: random.Random) -> None:
    items = getattr(message, field.name)
    match rng.randrange(4):
        case 0:
            message.ClearField(field.name)
        case 1 if items:
            del items[rng.randrange(len(items))]
        case _ if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            if items and rng.random() < 0.5:
                mangle(rng.choice(items), rng)
            elif items:
                items.add().CopyFrom(rng.choice(items))
            else:
                mangle(items.add(), rng)
        case _:
            items.extend(_extreme(field, rng) for _ in range(rng.choice((1, 1, 3, 5000))))


def _extreme(field: FieldDescriptor, rng: random.Random) -> Any:
    value = rng.choice(EXTREMES[field.cpp_type])
    return value.encode() if field.type == FieldDescriptor.TYPE_BYTES else value


def _bytes(frame: Frame) -> bytes:
    """A frame as it stands on the socket."""
    peer, written = StepPeer(), bytearray()
    peer._transport = type("Transport", (), {"write": staticmethod(written.extend)})()  # type: ignore[assignment]
    peer.send(frame)
    return bytes(written)


@asynccontextmanager
async def prepare(work: Path) -> AsyncIterator[Mapping[str, Try]]:
    """A shard for the length of the job."""
    (work / "model").mkdir()
    executor = load_executor(save_tiny("llama", work / "model"))
    path = f"{work}/shard.steps"
    with ThreadPoolExecutor(1) as compute:
        failures: list[FunitelError] = []
        server = CallServer(executor, 1, path, compute, failures.append)
        await server.start()
        shard = Shard(path, await sound_tokens(path))
        shard.failures = failures
        yield {"messages": shard.messages, "frames": shard.frames}
        await server.stop()


if __name__ == "__main__":
    fuzz_inputs.run(prepare, headroom=HEADROOM_BYTES)
