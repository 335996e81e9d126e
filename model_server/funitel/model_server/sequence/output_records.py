"""Records of the outputs of sequences with an output key, kept for a router that takes over from another one.

A record outlives its sequence, its batch and the pool. Plain generations are kept in columns, the others whole.
"""

import logging
from array import array
from collections.abc import Iterable, Sequence
from threading import Lock

from funitel.proto.step import Generation, SequenceStart, Tokens
from funitel.proto.takeover.state import OutputStep, SequenceOutputs

logger = logging.getLogger(__name__)

MAX_BYTES = 256 << 20  # of all records of a rank
RECORD_BYTES = 1024  # of an empty record, with its key
GENERATION_BYTES = 88  # of a plain generation: 17 in arrays, 8 of a reference, and its text as an object
TOKEN_BYTES = 160  # of a token in a generation that is kept whole


class SequenceRecord:
    """The outputs of one row, from the token `num_before` of its completion on."""

    __slots__ = (
        "ids",
        "is_closed",
        "key",
        "logprobs",
        "mirostat_mu",
        "num_before",
        "request_id",
        "specials",
        "steps",
        "texts",
        "whole",
        "whole_bytes",
        "whole_tokens",
    )

    def __init__(self, key: str, request_id: int, num_before: int, mirostat_mu: float | None = None) -> None:
        self.key = key
        self.request_id = request_id
        self.num_before = num_before
        self.mirostat_mu = mirostat_mu  # behind the last token
        self.is_closed = False  # takes no more outputs
        self.steps = array("Q")  # one entry for each generation
        self.whole: dict[int, Generation] = {}  # by place in `steps`; the others are plain, and in the columns below
        self.whole_tokens = 0
        self.whole_bytes = 0
        self.ids = array("I")
        self.logprobs = array("f")  # as on the wire
        self.specials = bytearray()
        self.texts: list[str] = []

    @property
    def end(self) -> int:
        """Tokens of the completion up to and with the last one that is recorded."""
        return self.num_before + len(self.ids) + self.whole_tokens

    @property
    def num_bytes(self) -> int:
        """Estimate of the memory that it takes."""
        return RECORD_BYTES + GENERATION_BYTES * len(self.ids) + self.whole_bytes

    def outputs(self) -> SequenceOutputs:
        """The record as it is sent."""
        return SequenceOutputs(self.key, self.num_before, tuple(self._output_steps()), self.mirostat_mu)

    def _output_steps(self) -> Iterable[OutputStep]:
        plain = zip(self.ids, self.logprobs, self.texts, self.specials, strict=True)
        for place, step in enumerate(self.steps):
            generation = self.whole.get(place)
            if generation is None:
                token_id, logprob, text, is_special = next(plain)
                tokens = Tokens((token_id,), (logprob,), (text,), (bool(is_special),))
                generation = Generation(self.request_id, tokens)
            yield OutputStep(step, generation)

    def copy(self) -> "SequenceRecord":
        """A record of the same outputs, which does not change."""
        made = SequenceRecord(self.key, self.request_id, self.num_before, self.mirostat_mu)
        made.is_closed = True
        made.steps, made.whole = self.steps[:], dict(self.whole)
        made.whole_tokens, made.whole_bytes = self.whole_tokens, self.whole_bytes
        made.ids, made.logprobs = self.ids[:], self.logprobs[:]
        made.specials, made.texts = self.specials[:], self.texts[:]
        return made

    def within(self, known: Sequence[int]) -> "SequenceRecord | None":
        """A record of those outputs that are among the completion tokens `known`, which does not change.

        None if there is no such record: it begins behind them, its tokens differ, or the last of `known` is in the
        middle of a generation.
        """
        if self.num_before >= len(known):
            return None
        made = SequenceRecord(self.key, self.request_id, self.num_before)
        made.is_closed = True
        for each in self._output_steps():
            tokens = each.generation.tokens.ids
            if made.end == len(known):
                return made
            if tokens != tuple(known[made.end : made.end + len(tokens)]):
                return None
            made.add(each.step, each.generation)
        made.mirostat_mu = self.mirostat_mu
        return made

    def add(self, step: int, generation: Generation) -> int:
        """Append the generation of a step; returns the bytes that it takes."""
        if generation.is_plain:
            tokens = generation.tokens
            self.ids.append(tokens.ids[0])
            self.logprobs.append(tokens.logprobs[0])
            self.specials.append(tokens.is_special[0])
            self.texts.append(tokens.texts[0])
            num_bytes = GENERATION_BYTES
        else:
            num_bytes = _size(generation)
            self.whole[len(self.steps)] = generation
            self.whole_tokens += len(generation.tokens.ids)
            self.whole_bytes += num_bytes
        self.steps.append(step)
        return num_bytes


class OutputRecords:
    """The records of a rank. Sequences begin on one thread, outputs are added on another, both are read on a third.

    Once they take more than `max_bytes`, sequences are forgotten: those that ended first, then those that began first.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._records: dict[str, list[SequenceRecord]] = {}  # parts of each sequence, in order
        self._finished: dict[str, None] = {}  # keys, in the order in which their sequences ended
        self._has_told = False

    def __len__(self) -> int:
        return len(self._records)

    def begin(self, start: SequenceStart, *, is_own: bool) -> SequenceRecord | None:
        """Make the record of a sequence that enters; None without a key, or if another rank describes it.

        What is recorded of the key beyond `start.output_ids`, or differs from them, is dropped: it comes once more.
        """
        key, known = start.output_key, start.output_ids
        if not key:
            return None
        with self._lock:
            before = self._drop(key) if key in self._records else []
            parts = [left for part in before if (left := part.within(known)) is not None]
            record = SequenceRecord(key, start.request_id, len(known), start.mirostat_mu) if is_own else None
            if record is not None:
                parts.append(record)
            if parts:
                self._records[key] = parts
                self.num_bytes += sum(part.num_bytes for part in parts)
                self._make_room()
            return record

    def add(
        self,
        step: int,
        added: Iterable[tuple[SequenceRecord, Generation]],
        memories: Iterable[tuple[int, float]] = (),
    ) -> None:
        """Append the generations of a step. `memories` are request ids, each with the `mirostat_mu` after the step."""
        mus, num_bytes = dict(memories), 0
        with self._lock:
            for record, generation in added:
                if record.is_closed:
                    continue
                num_bytes += record.add(step, generation)
                if mus and generation.request_id in mus:
                    record.mirostat_mu = mus[generation.request_id]
                if generation.finished is not None:
                    self._finished[record.key] = None
            self.num_bytes += num_bytes
            self._make_room()

    def outputs(self) -> list[SequenceOutputs]:
        """All that is recorded."""
        with self._lock:
            copies = [part.copy() for parts in self._records.values() for part in parts]
        return [part.outputs() for part in copies]

    def release(self, keys: Iterable[str]) -> None:
        """Forget sequences; an unknown key is no error."""
        with self._lock:
            for key in keys:
                if key in self._records:
                    self._drop(key)

    def clear(self) -> None:
        """Forget all."""
        self.release(list(self._records))

    def _drop(self, key: str) -> list[SequenceRecord]:
        self._finished.pop(key, None)
        parts = self._records.pop(key)
        for part in parts:
            part.is_closed = True
            self.num_bytes -= part.num_bytes
        return parts

    def _make_room(self) -> None:
        if self.num_bytes <= self._max_bytes:
            return
        num_before = len(self._records)
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._finished), None) or next(iter(self._records)))
        if not self._has_told:
            message = "outputs of %d sequences are forgotten: those kept for another router took more than %d bytes"
            logger.warning(message, num_before - len(self._records), self._max_bytes)
        self._has_told = True


def _size(generation: Generation) -> int:
    groups = [generation.tokens, *generation.top_tokens]
    if generation.prefill_tokens is not None:
        groups.append(generation.prefill_tokens)
    num_tokens = sum([len(group.ids) for group in groups])
    if generation.prompt_top is not None:
        num_tokens += len(generation.prompt_top.ids)
    num_characters = 0 if generation.finished is None else len(generation.finished.text)
    return TOKEN_BYTES * (2 + num_tokens) + 4 * num_characters
