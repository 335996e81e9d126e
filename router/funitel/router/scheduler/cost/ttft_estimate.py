"""Estimates the time to first token of an incoming sequence, by what steps have taken before. Pure.

Ahead of it are the prompts of running sequences, as far as they are not computed, and of waiting ones that would enter
before it. All of them are streams by then, and steps are as long as theirs are.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from funitel.router.core.request import Sequence
from funitel.router.scheduler.cost.chunk_budget import PromptCosts, StepLoad
from funitel.router.scheduler.cost.step_cost import StepCostModel

FIRST_COSTS = PromptCosts(per_token=0.01)  # before anything was measured


@dataclass(frozen=True, slots=True)
class TtftEstimate:
    """What is ahead of an incoming sequence.

    `has_room`: all of it could enter at once. `prompt_seconds`: what their prompts cost, by `costs`. `num_queued`: so
    many prompts give the queue a larger share of steps.
    """

    has_room: bool
    costs: PromptCosts | None
    load: StepLoad
    prompt_seconds: float
    num_queued: int


class Prefill(Protocol):
    """What an estimate needs of the planner of prefills."""

    def all_fit(self, sequences: Collection[Sequence]) -> bool:
        """Whether so many waiting sequences, and one more, may all run beside those that do."""

    def may_share(self, sequence: Sequence) -> bool:
        """Whether a sequence may begin behind a cached prefix."""

    def cached_prefix_len(self, sequence: Sequence) -> int:
        """Return the tokens of the cached prefix of a sequence."""


class Shares(Protocol):
    """What an estimate needs of the shares of keys."""

    @property
    def has_several_keys(self) -> bool:
        """Whether prompts and streams may be of different keys, so that no queue has a larger share."""


class TtftEstimator:
    """Estimates for incoming sequences of one scheduler."""

    def __init__(
        self, step_time: StepCostModel, prefill: Prefill, shares: Shares, running: Mapping[int, Sequence]
    ) -> None:
        self._step_time = step_time
        self._prefill = prefill
        self._shares = shares
        self._running = running

    def behind(self, ahead: Collection[Sequence]) -> TtftEstimate:
        """Sum up running sequences, and those that would enter before the incoming one."""
        running = self._running.values()
        costs = self._step_time.prompt_costs(has_streams=bool(running))
        prompts = {self._prompt_of(each): each for each in (*running, *ahead) if each.num_pending > 1}
        seconds = sum(_seconds(each, costs or FIRST_COSTS) for each in prompts.values())
        load = StepLoad(len(running) + len(ahead), sum(each.num_known for each in (*running, *ahead)))
        num_queued = 0 if self._shares.has_several_keys else len(prompts)
        return TtftEstimate(self._prefill.all_fit(ahead), costs, load, seconds, num_queued)

    def _prompt_of(self, sequence: Sequence) -> int:
        """The same for siblings, of `n` and `best_of`, where they share a cached prompt."""
        return id(sequence.request.input_ids) if self._prefill.may_share(sequence) else id(sequence)

    def seconds(self, incoming: Sequence, estimate: TtftEstimate) -> float:
        """Estimate the time to first token of a sequence that fits; 0 where nothing was measured nor is ahead.

        Its cached prefix costs nothing, and is noted.
        """
        if estimate.costs is None and not estimate.load.num_decodes:
            return 0.0
        incoming.num_cached = self._prefill.cached_prefix_len(incoming)
        own = _seconds(incoming, estimate.costs or FIRST_COSTS)
        return self._step_time.prompts_seconds(estimate.load, estimate.prompt_seconds + own, estimate.num_queued + 1)


def _seconds(sequence: Sequence, costs: PromptCosts) -> float:
    context = max(sequence.num_computed, sequence.num_cached)
    return costs.seconds(context, sequence.num_known - context)
