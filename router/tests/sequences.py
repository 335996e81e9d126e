"""Sequences to schedule, and a shard that computes what is planned."""

from dataclasses import dataclass, field
from typing import Any

from funitel.proto.step import (
    FinishReason,
    GeneratedText,
    Generation,
    SamplingParams,
    SequenceStart,
    StepResult,
    StoppingParams,
    Tokens,
)
from funitel.router.core.request import Request, Sequence
from funitel.router.scheduler.plan import StepPlan

BLOCK = 4


def make_sequence(sequence_id: int, prompt_len: int, max_new_tokens: int, **fields: Any) -> Sequence:
    """Prompts are 0, 1, 2, ...: the shorter are beginnings of the longer."""
    stopping = StoppingParams(max_new_tokens=max_new_tokens)
    request = Request(input_ids=tuple(range(prompt_len)), sampling=SamplingParams(), stopping=stopping, **fields)
    return Sequence(sequence_id, request)


@dataclass
class FakeShard:
    """Keeps rows as a shard does, and refuses what a shard would refuse. Rows that have finished compute nothing."""

    rows: dict[int, SequenceStart] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    blocks: dict[int, list[int]] = field(default_factory=dict)
    memory: dict[int, dict[int, int]] = field(default_factory=dict)  # block -> offset -> token
    num_computed: int = 0
    num_forward_tokens: list[int] = field(default_factory=list)
    forces_spans: bool = False
    ends: frozenset[int] = frozenset()  # tokens that end a sequence
    finished: set[int] = field(default_factory=set)
    num_opening: int = 0  # tokens behind every prompt

    def retain(self, keep: set[int]) -> None:
        for sequence_id in set(self.rows) - keep:
            for table in (self.rows, self.tokens, self.cached, self.blocks):
                del table[sequence_id]

    def step(self, plan: StepPlan) -> StepResult:
        before = set(self.rows)
        for start in plan.starts:
            assert start.request_id not in self.rows
            self.rows[start.request_id] = start
            self.tokens[start.request_id] = [*start.input_ids, *[0] * self.num_opening, *start.output_ids]
            self.cached[start.request_id] = start.cache_len
            self.blocks[start.request_id] = list(start.blocks)
        chunks = {start.request_id: start.chunk_len for start in plan.starts}
        for update in plan.rows:
            assert update.request_id in before
            self.blocks[update.request_id] += update.blocks
            chunks[update.request_id] = update.chunk_len
        self._check_owners()
        taking_part = {s.request_id for s in plan.starts} if plan.is_alone else set(self.rows)
        generations = [g for i in sorted(taking_part) if (g := self._compute(i, chunks.get(i))) is not None]
        return StepResult(tuple(generations), None)

    def _slot(self, sequence_id: int, position: int) -> dict[int, int]:
        return self.memory.setdefault(self.blocks[sequence_id][position // BLOCK], {})

    def _check_owners(self) -> None:
        """A block that is not full of computed tokens has one owner."""
        owned = [(block, i) for i, blocks in self.blocks.items() for block in blocks[self.cached[i] // BLOCK :]]
        everywhere = [block for blocks in self.blocks.values() for block in blocks]
        for block, i in owned:
            assert everywhere.count(block) == 1, f"block {block} of sequence {i} has two owners"

    def _compute(self, sequence_id: int, chunk: int | None) -> Generation | None:
        tokens = self.tokens[sequence_id]
        pending = 0 if sequence_id in self.finished else len(tokens) - self.cached[sequence_id]
        count = min(1 if chunk is None else chunk, pending)
        prompt_pending = len(self.rows[sequence_id].input_ids) - self.cached[sequence_id]
        assert chunk is not None or prompt_pending <= 1, "a prefilling row must be told its chunk"
        first, end = self.cached[sequence_id], self.cached[sequence_id] + count
        assert end <= len(self.blocks[sequence_id]) * BLOCK, "a token has no slot"
        for position in range(first, end):
            self._slot(sequence_id, position)[position % BLOCK] = tokens[position]
        for position in range(end):
            assert self._slot(sequence_id, position)[position % BLOCK] == tokens[position], "another's content"
        self.cached[sequence_id] = end
        self.num_computed += count
        if count < pending or count == 0:
            return None
        start = self.rows[sequence_id]
        new: list[int] = []
        done = None
        while done is None:
            new.append(next_token(tokens))
            tokens.append(new[-1])
            generated = len(tokens) - len(start.input_ids) - self.num_opening
            if generated >= start.stopping.max_new_tokens:
                done = GeneratedText("", generated, FinishReason.LENGTH)
            elif new[-1] in self.ends:
                done = GeneratedText("", generated, FinishReason.EOS_TOKEN)
            if not self.forces_spans or new[-1] % 3 == 0:  # what follows any other token is forced
                break
        if done is not None:
            self.finished.add(sequence_id)
        many = len(new)
        return Generation(sequence_id, Tokens(tuple(new), (0.0,) * many, ("",) * many, (False,) * many), finished=done)


def next_token(tokens: list[int]) -> int:
    return sum(tokens) * 31 % 97
