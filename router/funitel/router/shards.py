"""One replica as the router sees it: a step goes to every rank at once, one answer comes back.

The only module of the router that knows gRPC; foreign statuses become funitel errors here. It tracks which batches the
shards keep, so that callers think in sequences.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from funitel.proto import generate_pb2 as pb
from funitel.proto import wire
from funitel.proto.errors import FunitelError, InvalidRequest, ShardFailed, StartupError, StepFailed
from funitel.proto.step import (
    CachedBatch,
    Capability,
    SequenceStart,
    ShardInfo,
    StepResult,
    WarmupLimits,
    WarmupResult,
)
from funitel.router.scheduler import StepPlan

logger = logging.getLogger(__name__)

SERVICE = "/generate.v3.TextGenerationService/"
HEALTH_TIMEOUT_SECONDS = 5.0
# No step takes this long; a shard that does not answer by then hangs.
STEP_TIMEOUT_SECONDS = 300.0
# Ranks answer together: once one has failed, the others have this long before they are given up.
STRAGGLER_SECONDS = 5.0
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

T = TypeVar("T")
Message = Any  # protobuf messages share no useful base


def target_of(url: str) -> str:
    """Address gRPC understands: "unix:///path" and "tcp://host:port" are what shards announce."""
    if url.startswith("unix://"):
        return "unix:" + url.removeprefix("unix://")
    return url.removeprefix("tcp://")


class ShardClient:
    """Calls to one rank. Requests are bytes, so that all ranks get one encoding."""

    def __init__(self, rank: int, url: str) -> None:
        self.rank = rank
        self.url = url
        self._channel = grpc.aio.insecure_channel(target_of(url), options=OPTIONS)

    def call(self, method: str, payload: bytes, response: type[T], timeout: float | None = None) -> Any:
        """Send now and return the awaitable call."""
        function: Any = self._channel.unary_unary(
            SERVICE + method,
            request_serializer=None,
            response_deserializer=response.FromString,  # type: ignore[attr-defined]
        )
        return function(payload, timeout=timeout)

    def translate(self, error: grpc.aio.AioRpcError) -> FunitelError:
        """Say what a gRPC status of this rank means to us."""
        details = error.details() or error.code().name
        match error.code():
            case grpc.StatusCode.FAILED_PRECONDITION:
                return StartupError(details)
            case grpc.StatusCode.INVALID_ARGUMENT:
                return InvalidRequest(details)
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.CANCELLED:
                return ShardFailed(f"shard rank {self.rank} does not answer: {details}")
            case _:
                return StepFailed(f"shard rank {self.rank}: {details}")

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """All ranks' results of one step, in rank order, and their combination."""

    combined: StepResult
    by_rank: tuple[StepResult, ...]


class Replica:
    """The shards of one model copy and the batches they keep. One call that changes state at a time."""

    def __init__(self, shards: Sequence[ShardClient], infos: Sequence[ShardInfo]) -> None:
        self.shards = tuple(shards)
        self.infos = tuple(infos)
        self.capabilities = frozenset.intersection(*(info.capabilities for info in infos))
        self._batches: list[CachedBatch] = []
        self._next_batch_id = 0
        self._step_seq = 0

    @classmethod
    async def connect(cls, master_url: str) -> "Replica":
        """Find all ranks through rank 0, drop what an earlier router left, and ask for their facts."""
        master = ShardClient(0, master_url)
        try:
            found: pb.ServiceDiscoveryResponse = await master.call("ServiceDiscovery", b"", pb.ServiceDiscoveryResponse)
        except grpc.aio.AioRpcError as error:
            raise StartupError(f"no shard answers at {master_url}: {error.details()}") from error
        finally:
            await master.close()
        shards = [ShardClient(rank, url) for rank, url in enumerate(found.urls)]
        bare = cls(shards, [ShardInfo()])
        await bare.clear()
        infos = await bare._fan_out("Info", pb.InfoRequest(), pb.InfoResponse)
        return cls(shards, [wire.decode_info(info) for info in infos])

    @property
    def info(self) -> ShardInfo:
        """Facts all ranks share; those of the last rank, as TGI takes them."""
        return self.infos[-1]

    @property
    def held_ids(self) -> frozenset[int]:
        """Sequences the shards hold rows of."""
        return frozenset(request_id for batch in self._batches for request_id in batch.request_ids)

    @property
    def num_batches(self) -> int:
        """Batches the shards keep."""
        return len(self._batches)

    async def warmup(self, sequences: Sequence[SequenceStart], limits: WarmupLimits) -> list[WarmupResult]:
        """Size the pool; every rank's result, in rank order."""
        batch = wire.encode_batch(0, sequences, self.info.block_size)
        request = wire.encode_warmup(batch, limits)
        responses = await self._fan_out("Warmup", request, pb.WarmupResponse)
        return [wire.decode_warmup_result(response) for response in responses]

    async def health(self) -> None:
        """Raise ShardFailed unless every rank answers."""
        await self._fan_out("Health", pb.HealthRequest(), pb.HealthResponse, timeout=HEALTH_TIMEOUT_SECONDS)

    async def clear(self) -> None:
        """Drop every cached batch on every rank; numbering starts again."""
        self._batches = []
        self._step_seq = 0
        await self._fan_out("ClearCache", pb.ClearCacheRequest(), pb.ClearCacheResponse, STEP_TIMEOUT_SECONDS)

    async def retain(self, keep: frozenset[int]) -> None:
        """Drop the rows of all sequences but `keep`."""
        for batch in tuple(self._batches):
            kept = [request_id for request_id in batch.request_ids if request_id in keep]
            if len(kept) == len(batch.request_ids):
                continue
            self._batches.remove(batch)
            if kept:
                filtering = pb.FilterBatchRequest(batch_id=batch.id, request_ids=kept, step_seq=self._number())
                responses = await self._fan_out("FilterBatch", filtering, pb.FilterBatchResponse, STEP_TIMEOUT_SECONDS)
                self._batches.append(wire.decode_cached(responses[-1].batch))
            else:
                clearing = pb.ClearCacheRequest(id=batch.id, step_seq=self._number())
                await self._fan_out("ClearCache", clearing, pb.ClearCacheResponse, STEP_TIMEOUT_SECONDS)

    async def step(self, plan: StepPlan) -> StepAnswer:
        """Send one step at once, wait for every rank, combine the answers as TGI's client does.

        Raises:
            InvalidRequest: every rank refused the call before changing anything.
            StepFailed: the call failed and the shards are sound.
            ShardFailed: a rank does not answer, or ranks disagree.
            After any of them what the shards hold is unknown here: `clear`.
        """
        calls = self._send_step(plan)
        responses = await self._answers(calls)
        results = tuple(wire.decode_result(response) for response in responses)
        if len({result.batch and result.batch.request_ids for result in results}) > 1:
            raise ShardFailed("the shards disagree about which sequences are running")
        if results[-1].batch is not None:
            self._batches.append(results[-1].batch)
        slowest = max(results, key=lambda result: result.total_ns)
        combined = StepResult(
            generations=tuple(g for result in reversed(results) for g in result.generations),
            batch=results[-1].batch,
            forward_ns=slowest.forward_ns,
            decode_ns=slowest.decode_ns,
            total_ns=slowest.total_ns,
            concat_ns=slowest.concat_ns,
        )
        return StepAnswer(combined, results)

    def _send_step(self, plan: StepPlan) -> list[Any]:
        """Encode and send without yielding to the event loop: what was planned is what is sent."""
        if not plan.starts:
            decode = wire.encode_decode(self._batches, plan.rows, self._number())
            self._batches = []
            return self._send("Decode", decode, pb.DecodeResponse, STEP_TIMEOUT_SECONDS)
        batch = wire.encode_batch(self._next_batch_id, plan.starts, self.info.block_size)
        self._next_batch_id += 1
        cached = None
        if self._batches and not plan.is_alone:
            assert len(self._batches) == 1, "batches are joined by the first decode"
            cached = self._batches.pop()
        prefill = wire.encode_prefill(batch, cached, plan.rows, self._number())
        return self._send("Prefill", prefill, pb.PrefillResponse, STEP_TIMEOUT_SECONDS)

    def _number(self) -> int | None:
        if Capability.STEP_SEQ not in self.capabilities:
            return None
        self._step_seq += 1
        return self._step_seq

    def _send(self, method: str, request: Message, response: type[T], timeout: float | None = None) -> list[Any]:
        payload = request.SerializeToString()
        return [shard.call(method, payload, response, timeout) for shard in self.shards]

    async def _fan_out(self, method: str, request: Message, response: type[T], timeout: float | None = None) -> list[T]:
        answers: list[T] = await self._answers(self._send(method, request, response, timeout))
        return answers

    async def _answers(self, calls: Sequence[Any]) -> list[Any]:
        """Wait for every rank; the lowest rank's failure is raised, a dead shard before a failed step."""
        tasks = [asyncio.ensure_future(_await(call)) for call in calls]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if any(not task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=STRAGGLER_SECONDS)
        failures: list[FunitelError] = []
        for shard, task in zip(self.shards, tasks, strict=True):
            if not task.done():
                task.cancel()
                failures.append(ShardFailed(f"shard rank {shard.rank} does not answer"))
            elif isinstance(error := task.exception(), grpc.aio.AioRpcError):
                failures.append(shard.translate(error))
        if failures:
            raise next((f for f in failures if isinstance(f, ShardFailed)), failures[0])
        return [task.result() for task in tasks]

    async def close(self) -> None:
        """Close all channels."""
        for shard in self.shards:
            await shard.close()


async def _await(call: Any) -> Any:
    return await call
