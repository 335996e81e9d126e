"""A shard that computes nothing and answers at once, as a process: what is left is what the router costs.

    python -m funitel_testing.instant_shard /tmp/shard-0 100 [20000 [0.005]]

Every running row gets one token a step, with a text of a space and the microsecond it was made in, so that a client can
tell how long it was on its way. All rows end together, so many tokens after the newest of them joined: however long it
takes to let many requests in, they then run side by side. Steps come over a step socket, as with a real shard of this
machine, and answers are in columns: routers that do not take them so get no tokens. With further
arguments, the answer to a step comes when a model would have it that computes so many tokens a second, and takes so
many seconds for a step at least.
"""

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from funitel.proto import generate_pb2 as pb
from funitel.proto import wire
from funitel.proto.step import Capability, ShardInfo
from funitel.proto.step_socket import OK, SUFFIX, Frame, FrameProtocol
from funitel.proto.step_socket import Method as Step

SERVICE = "generate.v3.TextGenerationService"
BLOCK_SIZE = 16
POOL_TOKENS = 1 << 21
MAX_TOTAL_TOKENS = 1 << 14
STAMP_DIGITS = 12

Method = Callable[[Any], Awaitable[bytes]]


def stamp() -> str:
    """The text of a token that is made now: the microsecond, on the clock all processes of a machine share."""
    return f" {time.monotonic_ns() // 1000 % 10**STAMP_DIGITS:0{STAMP_DIGITS}d}"


@dataclass(slots=True)
class Row:
    """One sequence: what it has yet to compute, and what it has generated.

    Each has a token of its own, that no two complete the same block.
    """

    request_id: int
    pending: int
    token_id: int
    texts: list[str] = field(default_factory=list)


def row_of(request: pb.Request) -> Row:
    """The row a request begins with, or goes on with."""
    pending = len(request.input_ids) + len(request.output_ids) - request.cache_len
    return Row(request.id, pending, request.id % 1000)


class InstantShard:
    """The one rank of a deployment: batches of rows, and how their steps are answered."""

    def __init__(
        self, path: str, num_tokens: int, tokens_per_second: float = math.inf, least_step_seconds: float = 0.0
    ) -> None:
        """Rows end `num_tokens` steps after the newest was let in."""
        self._path = path
        self._tokens_per_second = tokens_per_second
        self._least_step_seconds = least_step_seconds
        self._busy_until = 0.0  # on the monotonic clock
        self._num_tokens = num_tokens
        self._num_left = 0
        self._num_executed = 0  # numbered calls
        self._changed = asyncio.Condition()
        self._batches: dict[int, list[Row]] = {}

    def handler(self) -> grpc.GenericRpcHandler:
        """What a gRPC server calls."""
        methods: dict[str, tuple[Method, Any]] = {
            "Info": (self._info, pb.InfoRequest),
            "ServiceDiscovery": (self._discover, pb.ServiceDiscoveryRequest),
            "Health": (self._empty, pb.HealthRequest),
            "CompileGrammar": (self._empty, pb.CompileGrammarRequest),
            "Warmup": (self._warmup, pb.WarmupRequest),
        } | {Step(code).rpc: step for code, step in self.steps.items()}
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                name: grpc.unary_unary_rpc_method_handler(_as_servicer(method), request.FromString)
                for name, (method, request) in methods.items()
            },
        )

    @property
    def steps(self) -> dict[int, tuple[Method, Any]]:
        """What a step socket takes, by the code of the call."""
        return {
            Step.PREFILL: (self._prefill, pb.PrefillRequest),
            Step.DECODE: (self._decode, pb.DecodeRequest),
            Step.FILTER_BATCH: (self._filter, pb.FilterBatchRequest),
            Step.CLEAR_CACHE: (self._clear, pb.ClearCacheRequest),
        }

    async def _info(self, request: pb.InfoRequest) -> bytes:
        info = ShardInfo(
            device_type="instant",
            block_size=BLOCK_SIZE,
            use_prefix_caching=True,
            step_socket=self._path + SUFFIX,
            capabilities=frozenset(Capability) - {Capability.STATE_SLOTS, Capability.OUTPUTS, Capability.TAKE_OVER},
        )
        return wire.encode_info(info).SerializeToString()

    async def _discover(self, request: pb.ServiceDiscoveryRequest) -> bytes:
        return pb.ServiceDiscoveryResponse(urls=[f"unix://{self._path}"]).SerializeToString()

    async def _empty(self, request: Any) -> bytes:
        return b""

    async def _warmup(self, request: pb.WarmupRequest) -> bytes:
        return pb.WarmupResponse(
            max_supported_total_tokens=POOL_TOKENS,
            max_input_tokens=MAX_TOTAL_TOKENS - 1,
            max_total_tokens=MAX_TOTAL_TOKENS,
        ).SerializeToString()

    async def _clear(self, request: pb.ClearCacheRequest) -> bytes:
        if request.HasField("id"):
            await self._turn(request)
            self._batches.pop(request.id, None)
        else:
            self._batches.clear()
            self._num_executed = 0
        return b""

    async def _filter(self, request: pb.FilterBatchRequest) -> bytes:
        await self._turn(request)
        keep = set(request.request_ids)
        rows = [row for row in self._batches.pop(request.batch_id, []) if row.request_id in keep]
        if rows:
            self._batches[request.batch_id] = rows
        return pb.FilterBatchResponse(batch=_cached(request.batch_id, rows)).SerializeToString()

    async def _prefill(self, request: pb.PrefillRequest) -> bytes:
        await self._turn(request)
        batch_id = request.batch.id
        rows = [row_of(each) for each in request.batch.requests]
        chunks = {each.id: each.chunk_len for each in request.batch.requests}
        if request.HasField("cached_batch"):  # the new rows join it
            batch_id = request.cached_batch.id
            rows = self._batches.pop(batch_id, []) + rows
        return await self._computed(self._step(batch_id, rows, chunks, request.rows))

    async def _decode(self, request: pb.DecodeRequest) -> bytes:
        await self._turn(request)
        rows = [row for batch in request.batches for row in self._batches.pop(batch.id, [])]
        return await self._computed(self._step(request.batches[0].id, rows, {}, request.rows))

    async def _turn(self, request: Any) -> None:
        """Wait until the calls numbered before this one have been executed; they hardly ever come in another order."""
        async with self._changed:
            await self._changed.wait_for(lambda: request.step_seq <= self._num_executed + 1)
            self._num_executed = request.step_seq
            self._changed.notify_all()

    async def _computed(self, answer: bytes) -> bytes:
        """Hold an answer back until the model would have it."""
        if (seconds := self._busy_until - time.monotonic()) > 0:
            await asyncio.sleep(seconds)
        return answer

    def _step(self, batch_id: int, rows: list[Row], chunks: dict[int, int], updates: Iterable[pb.RowUpdate]) -> bytes:
        chunks |= {update.request_id: update.chunk_len for update in updates if update.HasField("chunk_len")}
        num_computed = 0
        for row in rows:
            computed = min(chunks.get(row.request_id, row.pending), row.pending)
            row.pending -= computed
            num_computed += computed
        seconds = max(num_computed / self._tokens_per_second, self._least_step_seconds)
        self._busy_until = max(self._busy_until, time.monotonic()) + seconds
        self._num_left -= 1
        if any(row.pending or not row.texts for row in rows):  # someone has no token yet
            self._num_left = self._num_tokens - 1
        answer = pb.DecodeResponse(num_forwards=1, num_forward_rows=len(rows), total_ns=1)
        is_last = not self._num_left
        left = [row for row in rows if row.pending] if is_last else rows
        _generate(rows, answer, is_last=is_last)
        if left:
            self._batches[batch_id] = left
            answer.batch.CopyFrom(_cached(batch_id, left))
        return answer.SerializeToString()


class StepSocket(FrameProtocol):
    """The router's connection for steps."""

    def __init__(self, shard: InstantShard) -> None:
        super().__init__()
        self._steps = shard.steps
        self._in_flight: set[asyncio.Task[None]] = set()

    def take(self, frame: Frame) -> None:
        """Answer a call."""
        task = asyncio.create_task(self._answer(frame))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)

    async def _answer(self, frame: Frame) -> None:
        method, request = self._steps[frame.code]
        self.send(Frame(frame.call_id, OK, await method(request.FromString(frame.payload))))


def _as_servicer(method: Method) -> Callable[[Any, Any], Awaitable[bytes]]:
    async def called(request: Any, context: Any) -> bytes:
        return await method(request)

    return called


def _cached(batch_id: int, rows: Sequence[Row]) -> pb.CachedBatch:
    return pb.CachedBatch(id=batch_id, request_ids=[row.request_id for row in rows], size=len(rows))


def _generate(rows: Iterable[Row], answer: pb.DecodeResponse, *, is_last: bool) -> None:
    """Give every row with a computed prompt a token, in columns but for the last ones."""
    text = stamp()
    complete = [row for row in rows if not row.pending]
    for row in complete:
        row.pending = 1
        row.texts.append(text)
    if is_last:
        answer.generations.extend(_last(row) for row in complete)
        return
    columns, count = answer.columns, len(complete)
    columns.request_ids.extend([row.request_id for row in complete])
    columns.ids.extend([row.token_id for row in complete])
    columns.logprobs.extend([-0.5] * count)
    columns.texts.extend([text] * count)
    columns.is_special.extend([False] * count)


def _last(row: Row) -> pb.Generation:
    finished = pb.GeneratedText(
        text="".join(row.texts), generated_tokens=len(row.texts), finish_reason="FINISH_REASON_EOS_TOKEN"
    )
    tokens = pb.Tokens(ids=[row.token_id], logprobs=[-0.5], texts=row.texts[-1:], is_special=[False])
    return pb.Generation(request_id=row.request_id, tokens=tokens, generated_text=finished)


async def serve(path: str, num_tokens: int, *model: float) -> None:
    """Answer on a Unix socket until the process is ended; the arguments are those of `InstantShard`."""
    shard = InstantShard(path, num_tokens, *model)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)])
    server.add_generic_rpc_handlers((shard.handler(),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    await asyncio.get_running_loop().create_unix_server(lambda: StepSocket(shard), path + SUFFIX)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:])))
