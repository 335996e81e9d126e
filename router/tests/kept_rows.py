"""What fake shards keep for another router: outputs by their keys, running rows, and the newest numbered calls."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from funitel.proto import generate_pb2 as pb

MAX_LATEST = 8


@dataclass
class Part:
    """Outputs of a sequence since it entered: steps with the generation of each."""

    num_before: int
    steps: list[tuple[int, pb.Generation]] = field(default_factory=list)
    is_closed: bool = False

    def within(self, known: list[int]) -> "Part | None":
        """The outputs among tokens that a router knows of; None if they are not."""
        kept, end = replace(self, steps=[], is_closed=True), self.num_before
        for step, generation in self.steps:
            ids = list(generation.tokens.ids)
            if known[end : end + len(ids)] != ids:
                break
            kept.steps.append((step, generation))
            end += len(ids)
        return kept if kept.steps else None


class KeptRows:
    """The part of a fake shard that outlives its router. `rows` of batches are those of `fake_shards`."""

    batches: dict[int, list[Any]]
    turns: asyncio.Condition
    calls: list[str]

    def __init__(self) -> None:
        self.parts: dict[str, list[Part]] = {}  # by output key
        self.num_steps = 0
        self.latest: list[tuple[int, str, Any]] = []  # numbered calls that were begun
        self.next_seq = 1
        self.epoch = 0  # of the numbering
        self.is_closed = False  # another router has looked
        self.refuses_takeover = False
        self.takeovers = 0

    async def turn(self, number: int | None, request: Any, method: str, is_free: Any) -> bool:
        """Wait for the turn of a call, which holds the condition; whether it has one."""
        epoch = self.epoch
        await self.turns.wait_for(
            lambda: self.epoch != epoch or (not self.is_closed and number in (None, self.next_seq) and is_free())
        )
        if self.epoch != epoch and number is not None:
            return False
        if number is not None:
            self.next_seq += 1
            self.latest = [*self.latest, (number, method, request)][-MAX_LATEST:]
        return True

    def renumber(self) -> None:
        """Begin the numbering anew; calls that wait are given up."""
        self.next_seq, self.latest, self.is_closed = 1, [], False
        self.epoch += 1

    def record_start(self, start: pb.Request, is_own: bool) -> Part | None:
        """Begin to keep the outputs of a sequence that enters."""
        if not start.output_key:
            return None
        known = list(start.output_ids)
        before = self.parts.pop(start.output_key, [])
        for part in before:
            part.is_closed = True
        parts = [kept for part in before if (kept := part.within(known)) is not None]
        fresh = Part(len(known)) if is_own else None
        if fresh is not None:
            parts.append(fresh)
        if parts:
            self.parts[start.output_key] = parts
        return fresh

    def record(self, part: Part | None, generation: pb.Generation) -> None:
        """Keep what a step has brought."""
        if part is not None and not part.is_closed:
            part.steps.append((self.num_steps, generation))

    async def Outputs(self, request: Any, context: Any) -> pb.OutputsResponse:
        return pb.OutputsResponse(
            sequences=[
                pb.SequenceOutputs(
                    output_key=key,
                    num_before=part.num_before,
                    steps=[pb.OutputStep(step=step, generation=generation) for step, generation in part.steps],
                )
                for key, parts in self.parts.items()
                for part in parts
            ]
        )

    async def ReleaseOutputs(self, request: pb.ReleaseOutputsRequest, context: Any) -> pb.ReleaseOutputsResponse:
        for key in request.output_keys:
            for part in self.parts.pop(key, []):
                part.is_closed = True
        return pb.ReleaseOutputsResponse()

    async def TakeOver(self, request: pb.TakeOverRequest, context: Any) -> pb.TakeOverResponse:
        if request.only_looks:
            self.is_closed = True
            calls = [
                pb.NumberedCall(step_seq=seq, method=method, payload=call.SerializeToString())
                for seq, method, call in self.latest
            ]
            return pb.TakeOverResponse(last_step_seq=self.latest[-1][0] if self.latest else 0, latest=calls)
        if self.refuses_takeover or "Warmup" not in self.calls:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "warmup: the last one here was another")
        self.is_closed = False
        self.epoch += 1
        async with self.turns:
            self.turns.notify_all()
        for call in request.missing:
            message = getattr(pb, f"{call.method}Request").FromString(call.payload)
            await getattr(self, call.method)(message, context)
        await self.idle()
        self.takeovers += 1
        self.next_seq += 100
        for batch_id, rows in list(self.batches.items()):  # a shard keeps none that has ended
            self.batches[batch_id] = [row for row in rows if not row.is_finished]
            if not self.batches[batch_id]:
                del self.batches[batch_id]
        return pb.TakeOverResponse(
            last_step_seq=self.next_seq - 1,
            warmup=await self.warmed(),
            batches=[self._held(batch_id, rows) for batch_id, rows in self.batches.items()],
        )

    async def idle(self) -> None:
        """Return once no call is executed."""
        raise NotImplementedError

    async def warmed(self) -> pb.WarmupResponse:
        """The answer to the last warm-up."""
        raise NotImplementedError

    def _held(self, batch_id: int, rows: Iterable[Any]) -> pb.HeldBatch:
        return pb.HeldBatch(
            id=batch_id,
            rows=[
                pb.HeldRow(
                    request_id=row.request.id,
                    output_key=row.request.output_key,
                    blocks=row.blocks,
                    num_computed=row.cached,
                    num_known=len(row.tokens),
                )
                for row in rows
            ],
        )
