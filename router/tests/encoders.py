"""Shards of an encoder that compute by a rule anyone can follow."""

import asyncio
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from funitel.proto.errors import FunitelError, StepFailed
from funitel.proto.step import EncoderFacts, EncoderInput, EncoderResult, EncoderTask, ShardInfo, ShardMemory

WIDTH = 4
EMBEDS = EncoderFacts(
    tasks=frozenset([EncoderTask.EMBED, EncoderTask.EMBED_ALL]),
    width=WIDTH,
    max_tokens=20,
    usual_tokens=12,
    pooling="mean",
    token_width=3,
)
RANKS = EncoderFacts(
    tasks=frozenset([EncoderTask.CLASSIFY]), width=WIDTH, max_tokens=20, usual_tokens=20, labels=("score",)
)
CLASSES = EncoderFacts(
    tasks=frozenset([EncoderTask.CLASSIFY]), width=WIDTH, max_tokens=20, usual_tokens=20, labels=("bad", "so", "good")
)
FILLS = EncoderFacts(
    tasks=frozenset([EncoderTask.EMBED, EncoderTask.FILL]), width=WIDTH, max_tokens=20, usual_tokens=20
)


@dataclass(eq=False)
class FakeEncoder:
    """A vector is the last word's id, the number of tokens, and zeros; scores count tokens."""

    facts: EncoderFacts = EMBEDS
    batches: list[list[EncoderInput]] = field(default_factory=list)
    errors: list[FunitelError] = field(default_factory=list)  # of the next calls
    poison: int | None = None  # a token that makes a batch fail
    has_units: bool = False  # whether vectors get length 1 when asked to
    broken: int | None = None  # a token that makes a row no number
    pause: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.infos = (ShardInfo(device_type="fake", dtype="torch.float32", encoder=self.facts),)
        self.pause.set()

    async def encode(self, task: EncoderTask, inputs: Sequence[EncoderInput]) -> EncoderResult:
        self.batches.append(list(inputs))
        await self.pause.wait()
        if self.errors:
            raise self.errors.pop(0)
        if any(self.poison in text.input_ids for text in inputs):
            raise StepFailed("a poisoned batch")
        broken = tuple(row for row, text in enumerate(inputs) if self.broken in text.input_ids)
        if task is EncoderTask.EMBED_ALL:
            rows = [[float(id), place + 0.5, 0.0] for text in inputs for place, id in enumerate(text.input_ids)]
        elif task is EncoderTask.FILL:
            width = max(text.top_n for text in inputs)
            rows = [[0.5**place for place in range(1, width + 1)] for _ in inputs]
            return EncoderResult(width, _bytes(rows), tuple(5 + i for _ in inputs for i in range(width)), broken)
        elif task is EncoderTask.CLASSIFY:
            rows = [[len(text.input_ids) - 6.0 + place for place in range(len(self.facts.labels))] for text in inputs]
        else:
            rows = [self._vector(text, self.has_units) for text in inputs]
        return EncoderResult(len(rows[0]), _bytes(rows), (), broken)

    @staticmethod
    def _vector(text: EncoderInput, is_unit: bool) -> list[float]:
        found = [float(text.input_ids[-2]), float(len(text.input_ids)), 0.0, 0.0]
        return [number / math.hypot(*found) for number in found] if is_unit and text.is_normalized else found

    async def health(self) -> list[ShardMemory]:
        return [ShardMemory()]

    def fence(self) -> None:
        pass

    async def disconnected(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


def _bytes(rows: list[list[float]]) -> bytes:
    return b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)
