"""The policy of scheduling, and the plan of a step. Pure."""

from collections.abc import Container
from dataclasses import dataclass

from funitel.proto.step import BlockCopy, RowUpdate, SequenceStart
from funitel.router.core.request import Sequence
from funitel.router.scheduler.cost.chunk_budget import StepLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPolicy:
    """Limits and rules of scheduling. `max_*` in tokens or sequences as named."""

    max_batch_prefill_tokens: int
    max_batch_size: int | None = None
    is_chunked: bool = True  # prompts may be split and share steps; else blocks for whole requests at admission
    has_prefix_cache: bool = False  # computed blocks are found again by their tokens
    is_plain: bool = False  # the peer speaks TGI v3 without funitel's additions; never chunked
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    num_micro_batches: int = 1  # that take turns, one for each pipeline stage of the shards
    max_steps_each: int = 2  # of a micro-batch in flight, where there are several
    preemption_victim: str = "newest"  # a name of `preemption.PREFERENCES`
    swaps: bool = False  # blocks of preempted sequences are saved to the lower tier, where there are slots
    has_whole_spans: bool = False  # a chunk ends within no media item
    target_gap_seconds: float | None = None  # maximum between a running stream's tokens; some plain steps if None


@dataclass(frozen=True, slots=True)
class BeamStep:
    """What searching sequences compute in a step: rows that begin and end with it, by sequence in order of its beams.

    `copies` are of blocks to blocks, behind those of the plan.
    """

    starts: tuple[SequenceStart, ...]
    copies: tuple[BlockCopy, ...]
    rows: tuple[tuple[Sequence, tuple[int, ...]], ...]

    def without_answer(self, given: Container[int]) -> int | None:
        """A row that is due the likeliest tokens and is not among the `given` ids."""
        return next((start.request_id for start in self.starts if start.request_id not in given), None)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: sequences that enter the shard, decisions about running rows, tokens computed per sequence.

    `is_alone`: running rows sit out; the new ones become a batch of their own.
    """

    starts: tuple[SequenceStart, ...]
    rows: tuple[RowUpdate, ...]
    computed: dict[int, int]
    load: StepLoad  # prompt tokens are all but one for each sequence that was already decoding
    is_alone: bool = False
    copies: tuple[BlockCopy, ...] = ()  # between the pool and the host tier, before anything is computed
    predicted_seconds: float = 0.0  # 0 where nothing was learnt yet
    beams: BeamStep | None = None
    micro_batch: int = 0  # of which the rows are

    @property
    def method(self) -> str:
        """The name of its call on the wire, in lower case."""
        return "prefill" if self.starts or self.beams is not None else "decode"

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return sum(self.computed.values())
