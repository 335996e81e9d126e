"""Shards that answer at once with made-up tokens, over real Unix sockets: the wire without a model.

Numbered calls are executed in order, and one after the other, as a real shard does; they come by gRPC, and by a step
socket where the shards have one.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from kept_rows import KeptRows, Part

from funitel.proto import generate_pb2 as pb
from funitel.proto import generate_pb2_grpc, wire
from funitel.proto.step import Capability, MediaFacts, ShardInfo
from funitel.proto.step_socket import OK, Frame, FrameProtocol, Method, decode_context
from funitel.router.engine.engine import Engine
from funitel.router.engine.warmup import start
from funitel.router.settings import RouterSettings
from funitel.router.shard_client.shards import Shards
from funitel.router.telemetry.metrics import Metrics

BLOCK_SIZE = 4
MOST_STEPS = 3  # in flight
VOCAB_SIZE = 97
REQUESTS: dict[Method, Any] = {
    Method.PREFILL: pb.PrefillRequest,
    Method.DECODE: pb.DecodeRequest,
    Method.FILTER_BATCH: pb.FilterBatchRequest,
    Method.CLEAR_CACHE: pb.ClearCacheRequest,
}


@dataclass
class Row:
    """One sequence on a fake shard."""

    request: pb.Request
    tokens: list[int]
    prompt_len: int
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    is_finished: bool = False
    part: Part | None = None  # where its outputs are kept

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len


def next_token(tokens: list[int], adapter_id: str = "", media: bytes = b"") -> int:
    """What the made-up model says; an adapter of another name says something else, and so does another image."""
    return (sum(tokens) * 31 + sum(map(ord, adapter_id.partition("@")[0])) + sum(media)) % VOCAB_SIZE


class FakeShard(KeptRows, generate_pb2_grpc.TextGenerationServiceServicer):
    """One rank. `calls` are the methods called; `failures` are statuses to answer the next steps with."""

    def __init__(
        self,
        rank: int,
        urls: list[str],
        *,
        is_plain: bool = False,
        is_chunked: bool = True,
        has_prefix_cache: bool = True,
        pool_tokens: int = 400,
        state_slots: int = 0,
        max_lora_rank: int = 64,
        media: MediaFacts | None = None,
        device_type: str = "fake",
    ) -> None:
        super().__init__()
        self.device_type = device_type
        self.rank, self.urls, self.is_plain, self.is_chunked = rank, urls, is_plain, is_chunked
        self.has_prefix_cache = has_prefix_cache
        self.num_computed = 0  # tokens
        self.calls: list[str] = []
        self.dismissals: list[str] = []  # what was wrong, by the router
        self.step_seqs: list[int] = []
        self.steps: list[list[int]] = []  # request ids that took part, step by step
        self.batches: dict[int, list[Row]] = {}
        self.ended: deque[int | None] = deque(maxlen=MOST_STEPS - 1)  # the batch that ended in each of the last steps
        self.turns = asyncio.Condition()
        self.is_busy = False
        self.num_here = self.most_here = 0  # step calls that are not answered yet, and the most there were
        self.failures: list[grpc.StatusCode] = []
        self.metadata: list[dict[str, str]] = []  # of each step
        self.stride = 1  # tokens of a generation; all but the first are forced
        self.grammars: list[str] = []
        self.fails_after = 0  # steps that succeed before the first of `failures`
        self.delay: Callable[[], float] = lambda: 0.0  # seconds a step takes
        self.pause = asyncio.Event()
        self.pause.set()
        self.resident_bytes = 0  # that it says it holds
        self.total_ns = 0  # that it says a step takes
        self.names: list[str] = []  # of the requests it was given
        self.is_well = asyncio.Event()  # Health is answered
        self.is_well.set()
        self.pool_tokens = pool_tokens
        self.state_slots = state_slots
        self.server: Any = None
        self.step_socket = ""
        self.step_server: asyncio.Server | None = None
        self.step_ends: list[FakeStepEnd] = []  # of the connections to it
        self.is_deaf = False  # calls do not arrive there
        self.garbled: list[bytes] = []  # what the next steps are answered with in place of what they found
        self.refuses_prompts_from = 1 << 32  # token ids the fake model does not know
        self.adapters: dict[str, str] = {}  # paths by id
        self.most_adapters = 0  # that were loaded at once
        self.adapter_loads: list[str] = []  # ids, in order
        self.refused_adapters: set[str] = set()  # names
        self.loading = asyncio.Event()  # cleared: adapters wait
        self.loading.set()
        self.max_lora_rank = max_lora_rank
        self.media_facts = media
        self.media: dict[bytes, int] = {}  # bytes of features, by key
        self.media_encodes: list[bytes] = []  # keys, in order
        self.most_media_bytes = 0  # that there were at once
        self.refused_media: set[bytes] = set()  # keys
        self.encoding = asyncio.Event()  # cleared: media wait
        self.encoding.set()
        self.num_encoding = 0  # calls under way
        self.has_no_scores_from = 1 << 32  # first tokens of prompts it has no scores but NaN for
        self.chokes_from = 1 << 32  # first tokens of prompts that a step with such a row fails for
        self.most_rows = 1 << 32  # that there is memory for

    def encode(self, answer: Any) -> bytes:
        """An answer as it is sent."""
        is_garbled = self.garbled and isinstance(answer, pb.PrefillResponse | pb.DecodeResponse)
        return self.garbled.pop(0) if is_garbled else answer.SerializeToString()

    async def open_step_socket(self, path: str) -> None:
        """Take steps by a socket too."""
        self.step_socket = path
        self.step_server = await asyncio.get_running_loop().create_unix_server(partial(FakeStepEnd, self), path)

    def hang_up(self) -> None:
        """End the step socket and its connections."""
        if self.step_server is not None:
            self.step_server.close()
        for end in self.step_ends:
            end.close()

    async def die(self) -> None:
        """End at once: every call under way fails, and none is answered any more."""
        self.hang_up()
        await self.server.stop(None)

    async def Info(self, request: pb.InfoRequest, context: Any) -> pb.InfoResponse:
        without = {Capability.STATE_SLOTS} if self.media_facts else {Capability.STATE_SLOTS, Capability.MEDIA}
        capabilities = frozenset() if self.is_plain else frozenset(Capability) - without
        info = ShardInfo(
            rank=self.rank,
            world_size=len(self.urls),
            block_size=BLOCK_SIZE,
            capabilities=capabilities,
            support_chunking=self.is_chunked,
            use_prefix_caching=self.has_prefix_cache,
            device_type=self.device_type,
            vocab_size=0 if self.is_plain else VOCAB_SIZE,
            step_socket=self.step_socket,
            max_lora_rank=0 if self.is_plain else self.max_lora_rank,
            media=self.media_facts,
        )
        return wire.encode_info(info)

    async def ServiceDiscovery(self, request: Any, context: Any) -> pb.ServiceDiscoveryResponse:
        return pb.ServiceDiscoveryResponse(urls=self.urls)

    async def Health(self, request: Any, context: Any) -> pb.HealthResponse:
        await self.is_well.wait()
        return pb.HealthResponse(resident_bytes=self.resident_bytes, peak_bytes=2 * self.resident_bytes)

    async def Dismiss(self, request: pb.DismissRequest, context: Any) -> pb.DismissResponse:
        self.dismissals.append(request.reason)
        return pb.DismissResponse()

    async def Warmup(self, request: pb.WarmupRequest, context: Any) -> pb.WarmupResponse:
        self.calls.append("Warmup")
        return pb.WarmupResponse(
            max_supported_total_tokens=self.pool_tokens,
            max_input_tokens=199,
            max_total_tokens=200,
            state_slots=self.state_slots,
        )

    async def warmed(self) -> pb.WarmupResponse:
        self.calls.append("TakeOver")
        return pb.WarmupResponse(
            max_supported_total_tokens=self.pool_tokens, max_input_tokens=199, max_total_tokens=200
        )

    async def idle(self) -> None:
        async with self.turns:
            await self.turns.wait_for(lambda: not self.is_busy)

    async def CompileGrammar(self, request: pb.CompileGrammarRequest, context: Any) -> pb.CompileGrammarResponse:
        await self.pause.wait()
        self.grammars.append(request.grammar)
        if request.grammar == "bad":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "grammar is not valid: bad")
        return pb.CompileGrammarResponse()

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Any) -> pb.LoadAdapterResponse:
        await self.loading.wait()
        assert request.id not in self.adapters, "it is loaded"
        if request.id.partition("@")[0] in self.refused_adapters:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "of another base")
        self.adapters[request.id] = request.path
        self.adapter_loads.append(request.id)
        self.most_adapters = max(self.most_adapters, len(self.adapters))
        return pb.LoadAdapterResponse(bytes=1000, max_rank=8)

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Any) -> pb.UnloadAdapterResponse:
        used = {row.request.adapter_id for rows in self.batches.values() for row in rows if not row.is_finished}
        assert request.id not in used, "a row uses it"
        if self.adapters.pop(request.id, None) is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "there is no such adapter")
        return pb.UnloadAdapterResponse()

    async def EncodeMedia(self, request: pb.EncodeMediaRequest, context: Any) -> pb.EncodeMediaResponse:
        assert self.media_facts is not None
        self.num_encoding += 1
        await self.encoding.wait()
        self.num_encoding -= 1
        assert request.key not in self.media, "it is encoded"
        self.media_encodes.append(request.key)
        if request.key in self.refused_media:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "of another shape")
        self.media[request.key] = request.num_features * self.media_facts.feature_bytes
        self.most_media_bytes = max(self.most_media_bytes, sum(self.media.values()))
        return pb.EncodeMediaResponse(bytes=self.media[request.key])

    async def DropMedia(self, request: pb.DropMediaRequest, context: Any) -> pb.DropMediaResponse:
        rows = [row for rows in self.batches.values() for row in rows if not row.is_finished]
        used = {span.key for row in rows for span in row.request.media}
        assert used.isdisjoint(request.keys), "a row may need it"
        for key in request.keys:
            self.media.pop(key, None)
        return pb.DropMediaResponse()

    async def ClearCache(self, request: pb.ClearCacheRequest, context: Any) -> pb.ClearCacheResponse:
        self.calls.append("ClearCache")
        if request.HasField("id"):
            async with self._turn(request):
                self.batches.pop(request.id, None)  # it may have ended in the step before
        else:
            async with self.turns:
                self.renumber()
                self.turns.notify_all()
            if self.pause.is_set():
                await self.idle()
            self.batches.clear()
            self.step_seqs.clear()
        return pb.ClearCacheResponse()

    async def FilterBatch(self, request: pb.FilterBatchRequest, context: Any) -> pb.FilterBatchResponse:
        self.calls.append("FilterBatch")
        async with self._turn(request):
            if request.batch_id in self.ended and request.batch_id not in self.batches:
                return pb.FilterBatchResponse(batch=pb.CachedBatch(id=request.batch_id))
            rows = [row for row in self.batches[request.batch_id] if row.request.id in request.request_ids]
            assert {row.request.id for row in rows} == set(request.request_ids)
            self.batches[request.batch_id] = rows
            return pb.FilterBatchResponse(batch=self._cached(request.batch_id))

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.PrefillResponse:
        self.calls.append("Prefill")
        self.metadata.append(dict(context.invocation_metadata()))
        async with self._turn(request):
            if any(max(start.input_ids, default=0) >= self.refuses_prompts_from for start in request.batch.requests):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "refused")
            rows = self._take(request.cached_batch.id) if request.HasField("cached_batch") else []
            for start in request.batch.requests:
                self.names.append(start.name)
                if start.HasField("adapter_id"):
                    assert start.adapter_id in self.adapters, "the adapter is not loaded"
                assert all(span.key in self.media for span in start.media), "its media are not encoded"
                tokens = list(start.input_ids) or [ord(c) for c in start.inputs]
                known = [*tokens, *start.output_ids]
                part = self.record_start(start, start.id % len(self.urls) == self.rank)
                rows.append(Row(start, known, len(tokens), start.cache_len, blocks=list(start.blocks), part=part))
            target = request.cached_batch.id if request.HasField("cached_batch") else request.batch.id
            response = pb.PrefillResponse()
            await self._step(target, rows, request, response, context)
            return response

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> pb.DecodeResponse:
        self.calls.append("Decode")
        self.metadata.append(dict(context.invocation_metadata()))
        async with self._turn(request):
            rows = [row for batch in request.batches for row in self._take(batch.id)]
            response = pb.DecodeResponse()
            await self._step(request.batches[0].id, rows, request, response, context)
            return response

    def _take(self, batch_id: int) -> list[Row]:
        return self.batches.pop(batch_id, []) if batch_id in self.ended else self.batches.pop(batch_id)

    @asynccontextmanager
    async def _turn(self, request: Any) -> AsyncIterator[None]:
        """Wait for the turn of a numbered call."""
        is_step = isinstance(request, pb.PrefillRequest | pb.DecodeRequest)
        self.num_here += is_step
        self.most_here = max(self.most_here, self.num_here)
        number = request.step_seq if request.HasField("step_seq") else None
        method = type(request).__name__.removesuffix("Request")
        async with self.turns:
            has_turn = await self.turn(number, request, method, lambda: not self.is_busy)
            self.is_busy = self.is_busy or has_turn
        if not has_turn:
            self.num_here -= is_step
            raise Aborted(grpc.StatusCode.INVALID_ARGUMENT, "the numbering was given up")
        try:
            yield
        finally:
            async with self.turns:
                self.is_busy = False
                self.num_here -= is_step
                if number is not None:
                    self.step_seqs.append(number)
                self.turns.notify_all()

    async def _step(self, batch_id: int, rows: list[Row], request: Any, response: Any, context: Any) -> None:
        self.steps.append([row.request.id for row in rows])
        self.num_steps += 1
        await self.pause.wait()
        await asyncio.sleep(self.delay())
        self.fails_after -= 1
        if self.failures and self.fails_after < 0:
            await context.abort(self.failures.pop(0), "told to fail")
        if any(row.tokens[0] >= self.chokes_from for row in rows if not row.is_finished):
            await context.abort(grpc.StatusCode.ABORTED, "choked")
        if len(rows) > self.most_rows:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many")
        chunks = {r.id: r.chunk_len for r in getattr(request, "batch", pb.Batch()).requests if r.HasField("chunk_len")}
        for update in request.rows:
            row = next((row for row in rows if row.request.id == update.request_id), None)
            if row is None:
                assert any(batch is not None for batch in self.ended), "an update of no row"
                continue
            row.blocks += update.blocks
            if update.HasField("chunk_len"):
                chunks[update.request_id] = update.chunk_len
        usual = 1 if request.HasField("step_seq") else None
        for row in rows:
            self._compute(row, chunks.get(row.request.id, usual), response)
        has_ended = all(row.is_finished for row in rows)
        self.ended.append(batch_id if has_ended else None)
        if not has_ended:
            self.batches[batch_id] = rows
            response.batch.CopyFrom(self._cached(batch_id))
        response.num_forwards, response.num_forward_rows = 1, len(rows)
        response.total_ns = self.total_ns

    def _compute(self, row: Row, chunk: int | None, response: Any) -> None:
        pending = 0 if row.is_finished else len(row.tokens) - row.cached
        count = pending if chunk is None else min(chunk, pending)
        if self.media_facts is not None and self.media_facts.has_whole_spans:
            end = row.cached + count
            inside = [s for s in row.request.media if s.position < end < s.position + s.length and count]
            assert not inside, "a chunk ends within an item"
        row.cached += count
        self.num_computed += count
        assert row.cached <= len(row.blocks) * BLOCK_SIZE, "a token has no slot"
        if count == 0 or count < pending:
            return
        new: list[int] = []
        while len(new) < self.stride and not row.is_finished:
            media = b"".join(span.key for span in row.request.media)
            new.append(next_token(row.tokens, row.request.adapter_id, media))
            row.tokens.append(new[-1])
            row.is_finished = row.num_generated >= row.request.stopping_parameters.max_new_tokens
        if row.request.id % len(self.urls) != self.rank:
            return
        generation = response.generations.add(request_id=row.request.id)
        many, texts = len(new), [f"<{token}>" for token in new]
        logprob = math.nan if row.tokens[0] >= self.has_no_scores_from else -1.0
        generation.tokens.CopyFrom(
            pb.Tokens(ids=new, logprobs=[logprob] * many, texts=texts, is_special=[False] * many)
        )
        if row.is_finished:
            generation.generated_text.text = "done"
            generation.generated_text.generated_tokens = row.num_generated
        self.record(row.part, generation)

    def _cached(self, batch_id: int) -> pb.CachedBatch:
        ids = [row.request.id for row in self.batches[batch_id]]
        return pb.CachedBatch(id=batch_id, request_ids=ids, size=len(ids))


class FakeStepEnd(FrameProtocol):
    """A connection to a step socket: steps are answered by a fake shard, as its gRPC methods would."""

    def __init__(self, fake: FakeShard) -> None:
        super().__init__()
        self.fake = fake
        self.contexts: list[dict[str, str]] = []
        self.tasks: set[asyncio.Task[None]] = set()
        fake.step_ends.append(self)

    def take(self, frame: Frame) -> None:
        if self.fake.is_deaf:
            return
        self.tasks.add(asyncio.create_task(self._answer(frame)))

    def invocation_metadata(self) -> dict[str, str]:
        return self.contexts[-1]

    async def abort(self, status: grpc.StatusCode, details: str) -> None:
        raise Aborted(status, details)

    async def _answer(self, frame: Frame) -> None:
        self.contexts.append(decode_context(frame.context))
        method = Method(frame.code)
        try:
            answer = await getattr(self.fake, method.rpc)(REQUESTS[method].FromString(frame.payload), self)
        except Aborted as aborted:
            self.send(Frame(frame.call_id, aborted.status.value[0], aborted.details.encode()))
        else:
            self.send(Frame(frame.call_id, OK, self.fake.encode(answer)))


class Aborted(Exception):
    def __init__(self, status: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.status = status
        self.details = details


class Encoded(grpc.aio.ServerInterceptor):
    """Lets a fake shard encode what gRPC sends."""

    def __init__(self, fake: FakeShard) -> None:
        self.fake = fake

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(
            handler.unary_unary,
            request_deserializer=handler.request_deserializer,
            response_serializer=self.fake.encode,
        )


@asynccontextmanager
async def fake_shards(
    folder: Path, count: int = 1, *, has_step_sockets: bool = False, **settings: Any
) -> AsyncIterator[list[FakeShard]]:
    """Serve `count` ranks under folder/shard-RANK, with the step sockets shard-RANK.steps if so asked."""
    urls = [f"unix://{folder}/shard-{rank}" for rank in range(count)]
    shards = [FakeShard(rank, urls, **settings) for rank in range(count)]
    servers = []
    for rank, shard in enumerate(shards):
        server = shard.server = grpc.aio.server(interceptors=[Encoded(shard)])
        generate_pb2_grpc.add_TextGenerationServiceServicer_to_server(shard, server)  # type: ignore[no-untyped-call]
        server.add_insecure_port(f"unix:{folder}/shard-{rank}")
        await server.start()
        servers.append(server)
    try:
        for shard in shards if has_step_sockets else ():
            await shard.open_step_socket(f"{folder}/shard-{shard.rank}.steps")
        yield shards
    finally:
        for shard in shards:
            shard.hang_up()
        for server in servers:
            await server.stop(None)


async def engine_over(settings: RouterSettings, metrics: Metrics) -> Engine:
    """An engine over the shards of one replica, without a fleet around it."""
    shards = await Shards.connect(settings.master_url, settings.shard_connect_timeout)
    return await start(shards, settings, metrics, media_ranks=shards)
