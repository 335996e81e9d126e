"""Types of a takeover that router and shards share; `takeover.wire` has their messages. Standard library only."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from funitel.proto.step import Generation, WarmupResult


@dataclass(frozen=True, slots=True)
class OutputStep:
    """The generation of one sequence in one step.

    `step` counts the steps of the shard, the same on all ranks. Generations of several sequences come into the order in
    which they were made by sorting by it.
    """

    step: int
    generation: Generation  # request_id: that of the row in this step


@dataclass(frozen=True, slots=True)
class SequenceOutputs:
    """The outputs that a rank has kept of a sequence, also after its end; see `join_outputs`.

    `num_before` tokens of its completion were known when it came to the shard, and are not among the outputs.
    `mirostat_mu` is that of the sampler behind the last of them; None without mirostat, or before the first token.
    """

    output_key: str
    num_before: int = 0
    steps: tuple[OutputStep, ...] = ()  # in order
    mirostat_mu: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens in all steps, without those before."""
        return sum([len(each.generation.tokens.ids) for each in self.steps])

    @property
    def is_finished(self) -> bool:
        """Whether the last step finished the sequence."""
        return bool(self.steps) and self.steps[-1].generation.finished is not None


@dataclass(frozen=True, slots=True)
class NumberedCall:
    """A call of the step protocol that has a `step_seq`: method of the service, and its request as bytes."""

    step_seq: int
    method: str  # for example Decode
    payload: bytes


@dataclass(frozen=True, slots=True)
class HeldRow:
    """A running row of a shard, after all calls that were begun are finished.

    `num_known` counts the tokens of prompt and completion, opening tokens of a decoder among them; the first
    `num_computed` of them have keys and values in `blocks`. `output_key` is empty where no outputs are kept.
    """

    request_id: int
    output_key: str
    blocks: tuple[int, ...]
    num_computed: int
    num_known: int
    state_slot: int = 0
    adapter_id: str | None = None


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """A cached batch of a shard, with its rows in their order."""

    id: int
    rows: tuple[HeldRow, ...]


@dataclass(frozen=True, slots=True)
class TakeOverState:
    """The answer to TakeOver. A call that only looks gets `last_step_seq` and `latest` alone.

    After one that only looks, the rank refuses numbered calls until TakeOver or ClearCache. `last_step_seq` of the
    others is the same on all ranks, and greater than that of any call that an earlier router may have sent.
    """

    last_step_seq: int  # only looks: of the newest call that was begun, 0 for none; else the one behind which to go on
    latest: tuple[NumberedCall, ...] = ()  # the newest calls that were begun, in order
    warmup: WarmupResult | None = None  # of the last Warmup
    batches: tuple[HeldBatch, ...] = ()


def join_outputs(found: Iterable[SequenceOutputs]) -> dict[str, SequenceOutputs]:
    """Join what all ranks have kept, by output key.

    A sequence that left a shard and came again has one part for each time, of one rank or of several: each part begins
    behind the tokens that were known when it came. Where a part is missing, only those behind it are returned.
    """
    parts: dict[str, list[SequenceOutputs]] = {}
    for each in found:
        parts.setdefault(each.output_key, []).append(each)
    return {
        key: _joined(sorted(some, key=lambda part: (part.num_before, part.num_tokens))) for key, some in parts.items()
    }


def _joined(parts: Sequence[SequenceOutputs]) -> SequenceOutputs:
    whole = parts[0]
    for part in parts[1:]:
        before = _first(whole.steps, part.num_before - whole.num_before)
        if before is None:
            whole = part
        else:
            mu = whole.mirostat_mu if part.mirostat_mu is None else part.mirostat_mu
            whole = replace(whole, steps=before + part.steps, mirostat_mu=mu)
    return whole


def _first(steps: tuple[OutputStep, ...], num_tokens: int) -> tuple[OutputStep, ...] | None:
    """The first steps, if they have so many tokens."""
    for place, each in enumerate(steps):
        if num_tokens <= 0:
            return steps[:place] if num_tokens == 0 else None
        num_tokens -= len(each.generation.tokens.ids)
    return steps if num_tokens == 0 else None
