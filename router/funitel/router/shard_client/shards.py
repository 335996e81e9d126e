"""The shards of one model copy: a call goes to every rank at once, one answer comes back from each (`rank`)."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, TypeVar

from funitel.proto import encoder_wire, wire
from funitel.proto import generate_pb2 as pb
from funitel.proto.errors import FunitelError, ShardFailed, ShardUnsound, StartupError
from funitel.proto.security.tls import MutualTls
from funitel.proto.step import (
    BlockCopy,
    CachedBatch,
    Capability,
    EncoderInput,
    EncoderResult,
    EncoderTask,
    GrammarType,
    MediaInput,
    RowUpdate,
    SequenceStart,
    ShardInfo,
    ShardMemory,
    StepResult,
    WarmupLimits,
    WarmupResult,
)
from funitel.proto.step_socket import Method
from funitel.proto.takeover.state import SequenceOutputs
from funitel.router.shard_client import takeover
from funitel.router.shard_client.fencing import fence
from funitel.router.shard_client.rank import STEP_TIMEOUT_SECONDS, Parse, ShardClient

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_SECONDS = 5.0
GRAMMAR_TIMEOUT_SECONDS = 30.0
ADAPTER_TIMEOUT_SECONDS = 300.0  # files of some gigabytes on a slow disk
MEDIA_TIMEOUT_SECONDS = 300.0  # a large image between the steps of a busy CPU
DISMISS_SECONDS = 2.0  # for a rank to answer
# Ranks answer together: once one has failed, the others have so much time.
STRAGGLER_SECONDS = 5.0
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.1, 1.0  # between two attempts to reach shards that are still loading
LOOK_SECONDS = 0.01  # between two looks whether a shard has begun to listen meanwhile
LOG_SECONDS = 10.0  # between two log lines while the router waits for them
T = TypeVar("T")
Message = Any  # protobuf messages share no useful base
Results = tuple[StepResult, ...]  # of the ranks asked, in their order


def _media_payload(media: MediaInput) -> bytes:
    return encoder_wire.encode_media(media).SerializeToString()


def _ignore(task: "asyncio.Future[Any]") -> None:
    """Retrieve the exception of a task that is not awaited any more."""
    if not task.cancelled():
        task.exception()


def _worst(failures: Sequence[BaseException]) -> BaseException:
    """The failure of the lowest rank; a dead shard's before one of a call."""
    return next((failure for failure in failures if isinstance(failure, ShardFailed)), failures[0])


def _socket_file(url: str) -> tuple[int, int] | None:
    """Which file the Unix socket of a URL is, by inode and time; None where there is none, or for another URL."""
    if not url.startswith("unix:"):
        return None
    try:
        found = os.stat(url.removeprefix("unix:").removeprefix("//"))
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


class Shards:
    """Every rank of one model copy, in rank order: the `Ranks` of a `Replica`."""

    def __init__(self, clients: Sequence[ShardClient], infos: Sequence[ShardInfo]) -> None:
        self.clients = tuple(clients)
        self.infos = tuple(infos)

    @classmethod
    async def connect(
        cls, master_url: str, timeout_seconds: float = 0.0, tls: MutualTls | None = None, *, keeps: bool = False
    ) -> "Shards":
        """Find all ranks through rank 0, drop the batches of an earlier router, and ask for their facts.

        It waits for shards that are still loading, with a log line every ten seconds. If it `keeps` the batches,
        `take_over`, `settle` or `clear` must be the next call.

        Raises:
            StartupError: they do not answer within `timeout_seconds`, or they do not speak this protocol.
        """
        began = logged = time.monotonic()
        while True:
            tried = _socket_file(master_url)
            try:
                return await cls._find(master_url, tls, keeps=keeps)
            except ShardFailed as error:
                waited = time.monotonic() - began
                if waited >= timeout_seconds:
                    after = f" after {timeout_seconds:g} s" if timeout_seconds else ""
                    raise StartupError(f"no shard answers at {master_url}{after}: {error.message}") from error
            if logged == began or time.monotonic() - logged >= LOG_SECONDS:
                logged = time.monotonic()
                logger.info("waiting for the shards at %s since %.0f s", master_url, waited)
            again = time.monotonic() + min(max(MIN_POLL_SECONDS, waited / 20), MAX_POLL_SECONDS)
            while time.monotonic() < again and _socket_file(master_url) == tried:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(LOOK_SECONDS)

    @classmethod
    async def _find(cls, master_url: str, tls: MutualTls | None, *, keeps: bool) -> "Shards":
        """One attempt; ShardFailed when a rank does not answer."""
        # New channels for each attempt: a channel backs off after it has failed to connect.
        master = ShardClient(0, master_url, tls)
        try:
            found: pb.ServiceDiscoveryResponse = await master.call(
                "ServiceDiscovery", b"", pb.ServiceDiscoveryResponse.FromString, HEALTH_TIMEOUT_SECONDS
            )
        except ShardFailed:
            raise
        except FunitelError as error:
            raise StartupError(f"what answers at {master_url} is no shard: {error.message}") from error
        finally:
            await master.close()
        bare = cls([ShardClient(rank, url, tls) for rank, url in enumerate(found.urls)], [])
        async with AsyncExitStack() as undo:
            undo.push_async_callback(bare.close)
            if not keeps:
                await bare.clear()
            infos = await bare._fan_out("Info", pb.InfoRequest(), pb.InfoResponse.FromString)
            shards = cls(bare.clients, [wire.decode_info(info) for info in infos])
            for client, info in zip(shards.clients, shards.infos, strict=True):
                await client.open_steps(info.step_socket)
            undo.pop_all()
        return shards

    async def warmup(self, sequences: Sequence[SequenceStart], limits: WarmupLimits) -> list[WarmupResult]:
        """Size the pool; return every rank's result."""
        request = self._warmup_request(sequences, limits)
        responses = await self._fan_out("Warmup", request, pb.WarmupResponse.FromString)
        # A disk tier may have a million blocks of an earlier run: streams of other replicas go on meanwhile.
        return [await asyncio.to_thread(wire.decode_warmup_result, response) for response in responses]

    def _warmup_request(self, sequences: Sequence[SequenceStart], limits: WarmupLimits) -> pb.WarmupRequest:
        return wire.encode_warmup(wire.encode_batch(0, sequences, self._block_size), limits)

    async def take_over(self, sequences: Sequence[SequenceStart], limits: WarmupLimits) -> "takeover.TakenOver | None":
        """Take over what ranks hold of an earlier router that has warmed up in the same way.

        None if that cannot be: `clear` must come next, then `warmup`. No rank waits for another one then, whatever the
        earlier router has sent to one of them alone.
        """
        if not takeover.can_be_asked(self.infos):
            return None
        left = await takeover.take_over(self.clients, self._warmup_request(sequences, limits))
        return left if takeover.takes_over(self.infos) else None

    async def settle(self) -> None:
        """Drop the batches of an earlier router, also where it has sent a step to some of the ranks alone.

        `clear` by itself would wait for such a step, which is never finished.
        """
        if takeover.can_be_asked(self.infos):
            await takeover.take_over(self.clients, pb.WarmupRequest())
        await self.clear()

    @property
    def keeps_outputs(self) -> bool:
        """Whether all ranks keep the outputs of sequences with a key."""
        return all(Capability.OUTPUTS in info.capabilities for info in self.infos)

    async def outputs(self) -> list[SequenceOutputs]:
        """All outputs that are kept: what each rank has described."""
        return await takeover.outputs_of(self.clients, self.infos[0].vocab_size) if self.keeps_outputs else []

    async def release_outputs(self, keys: Sequence[str]) -> None:
        """Let all ranks forget outputs, beside the steps."""
        if self.keeps_outputs:
            await takeover.release_outputs(self.clients, keys)

    async def health(self) -> list[ShardMemory]:
        """Return the memory that each rank holds; raise ShardFailed unless every rank answers."""
        parse = pb.HealthResponse.FromString
        responses = await self._fan_out("Health", pb.HealthRequest(), parse, timeout=HEALTH_TIMEOUT_SECONDS)
        return [wire.decode_memory(response) for response in responses]

    async def dismiss(self, reason: str) -> None:
        """Ask ranks of other machines to end; those of this machine are killed by fencing."""
        payload = pb.DismissRequest(reason=reason).SerializeToString()
        remote = [client for client in self.clients if client.url.startswith("tcp://")]
        calls = (client.call("Dismiss", payload, pb.DismissResponse.FromString, DISMISS_SECONDS) for client in remote)
        await asyncio.gather(*calls, return_exceptions=True)

    async def disconnected(self) -> None:
        """Return once the connection to any rank has ended."""
        tasks = [asyncio.create_task(client.disconnected()) for client in self.clients]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    def fence(self) -> None:
        """Kill shards of a lost replica that have not ended; where one has, its launcher ends the others."""
        if all(client.is_connected for client in self.clients):
            for client in self.clients:
                fence(client.url)

    def prefill(
        self,
        batch_id: int,
        starts: Sequence[SequenceStart],
        cached: CachedBatch | None,
        rows: Sequence[RowUpdate],
        copies: Sequence[BlockCopy],
        step_seq: int | None,
    ) -> Awaitable[tuple[StepResult, ...]]:
        """Send a step that adds new sequences."""
        batch = wire.encode_batch(batch_id, starts, self._block_size)
        request = wire.encode_prefill(batch, cached, rows, step_seq, copies)
        return self._results(self._send(Method.PREFILL, request, self._parsing(pb.PrefillResponse.FromString)))

    def decode(
        self,
        batches: Sequence[CachedBatch],
        rows: Sequence[RowUpdate],
        copies: Sequence[BlockCopy],
        step_seq: int | None,
    ) -> Awaitable[tuple[StepResult, ...]]:
        """Send a step of cached batches."""
        request = wire.encode_decode(batches, rows, step_seq, copies)
        return self._results(self._send(Method.DECODE, request, self._parsing(pb.DecodeResponse.FromString)))

    def _parsing(self, parse: Parse[wire.StepResponse]) -> Parse[Results]:
        return partial(wire.decode_results, parse, self.infos[0].vocab_size)

    def filter(self, batch_id: int, request_ids: Sequence[int], step_seq: int | None) -> Awaitable[CachedBatch]:
        """Send that only some rows of a cached batch are kept."""
        request = pb.FilterBatchRequest(batch_id=batch_id, request_ids=request_ids, step_seq=step_seq)
        return self._kept(self._send(Method.FILTER_BATCH, request, pb.FilterBatchResponse.FromString))

    async def _kept(self, calls: Sequence[Awaitable[pb.FilterBatchResponse]]) -> CachedBatch:
        responses = await self._answers(calls)
        return wire.decode_cached(responses[-1].batch)

    async def compile_grammar(self, kind: GrammarType, text: str) -> None:
        """Compile a grammar on every rank, beside the steps."""
        request = wire.encode_grammar(kind, text)
        await self._fan_out("CompileGrammar", request, pb.CompileGrammarResponse.FromString, GRAMMAR_TIMEOUT_SECONDS)

    async def load_adapter(self, adapter_id: str, path: str) -> int:
        """Load an adapter on every rank, or on none, beside the steps; return the bytes that it takes on all."""
        payload = pb.LoadAdapterRequest(id=adapter_id, path=path).SerializeToString()
        loaded = await self._each("LoadAdapter", payload, pb.LoadAdapterResponse.FromString, ADAPTER_TIMEOUT_SECONDS)
        failures = [answer for answer in loaded if isinstance(answer, BaseException)]
        if failures:
            with suppress(FunitelError):
                await self.unload_adapter(adapter_id)
            raise _worst(failures)
        return sum(answer.bytes for answer in loaded if isinstance(answer, pb.LoadAdapterResponse))

    async def unload_adapter(self, adapter_id: str) -> None:
        """Drop an adapter on every rank."""
        payload = pb.UnloadAdapterRequest(id=adapter_id).SerializeToString()
        parse = pb.UnloadAdapterResponse.FromString
        answers = await self._each("UnloadAdapter", payload, parse, ADAPTER_TIMEOUT_SECONDS)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures:
            raise _worst(failures)

    async def encode_media(self, media: MediaInput) -> int:
        """Encode a media item on every rank, or on none, beside the steps; return the most bytes that a rank keeps."""
        payload = await asyncio.to_thread(_media_payload, media)  # some megabytes
        encoded = await self._each("EncodeMedia", payload, pb.EncodeMediaResponse.FromString, MEDIA_TIMEOUT_SECONDS)
        failures = [answer for answer in encoded if isinstance(answer, BaseException)]
        if failures:
            with suppress(FunitelError):
                await self.drop_media([media.key])
            raise _worst(failures)
        return max(answer.bytes for answer in encoded if isinstance(answer, pb.EncodeMediaResponse))

    async def drop_media(self, keys: Sequence[bytes]) -> None:
        """Drop features of media items on every rank."""
        payload = pb.DropMediaRequest(keys=keys).SerializeToString()
        answers = await self._each("DropMedia", payload, pb.DropMediaResponse.FromString, MEDIA_TIMEOUT_SECONDS)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures:
            raise _worst(failures)

    async def _each(self, method: str, payload: bytes, parse: Parse[T], timeout: float) -> list[T | BaseException]:
        """Call every rank and wait for all of them: a failure of one says nothing of the others."""
        calls = (client.call(method, payload, parse, timeout) for client in self.clients)
        return await asyncio.gather(*calls, return_exceptions=True)

    async def encode(self, task: EncoderTask, inputs: Sequence[EncoderInput]) -> EncoderResult:
        """Encode texts by an encoder, which is one rank."""
        request = encoder_wire.encode_inputs(task, inputs)
        [response] = await self._fan_out("Encode", request, pb.EncodeResponse.FromString, STEP_TIMEOUT_SECONDS)
        return encoder_wire.decode_rows(response)

    def clear(self, batch_id: int | None = None, step_seq: int | None = None) -> Awaitable[None]:
        """Send that one cached batch is dropped, or all are."""
        request = pb.ClearCacheRequest(id=batch_id, step_seq=step_seq)
        return self._done(self._send(Method.CLEAR_CACHE, request, pb.ClearCacheResponse.FromString))

    async def _done(self, calls: Sequence[Awaitable[pb.ClearCacheResponse]]) -> None:
        await self._answers(calls)

    @property
    def _block_size(self) -> int:
        return self.infos[-1].block_size

    def _results(self, calls: Sequence[Awaitable[Results]]) -> Awaitable[Results]:
        return calls[0] if len(calls) == 1 else self._joined(calls)  # one rank: no task per step

    async def _joined(self, calls: Sequence[Awaitable[Results]]) -> Results:
        return tuple(result for results in await self._answers(calls) for result in results)

    def _send(self, method: Method, request: Message, parse: Parse[T]) -> list[Awaitable[T]]:
        """Encode once and send without yielding to the event loop."""
        payload = request.SerializeToString()
        return [client.step(method, payload, parse) for client in self.clients]

    async def _fan_out(self, method: str, request: Message, parse: Parse[T], timeout: float | None = None) -> list[T]:
        payload = request.SerializeToString()
        return await self._answers([client.call(method, payload, parse, timeout) for client in self.clients])

    async def _answers(self, calls: Sequence[Awaitable[T]]) -> list[T]:
        """Wait for every rank; the lowest rank's failure is raised, a dead shard before a failed step."""
        if len(calls) == 1:
            return [await calls[0]]
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if any(not task.done() for task in tasks):
                await asyncio.wait(tasks, timeout=STRAGGLER_SECONDS)
        except asyncio.CancelledError:
            for task in tasks:
                task.add_done_callback(_ignore)
                task.cancel()
            raise
        failures: list[FunitelError] = []
        for client, task in zip(self.clients, tasks, strict=True):
            if not task.done():
                task.cancel()
                failures.append(ShardUnsound(f"shard rank {client.rank} does not answer"))
            elif isinstance(error := task.exception(), FunitelError):
                failures.append(error)
        if failures:
            raise _worst(failures)
        return [task.result() for task in tasks]

    async def close(self) -> None:
        """Close all channels."""
        for client in self.clients:
            await client.close()
