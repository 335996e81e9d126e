"""When a newcomer would have its first token, by what steps have taken before. Pure.

Ahead of it are the prompts of those that run, as far as they are not computed, and of those that wait and would enter
before it. All of them are streams by then, and steps are as long as theirs are.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from funitel.router.core.request import Sequence
from funitel.router.scheduler.chunk_budget import PromptCosts, StepLoad
from funitel.router.scheduler.cost.step_cost import StepCostModel
from funitel.router.scheduler.prefill import PrefillPlanner

FIRST_COSTS = PromptCosts(per_token=0.01)  # before anything was measured


@dataclass(frozen=True, slots=True)
class TtftEstimate:
    """What a newcomer would stand behind.

    `has_room`: those ahead could all enter at once. `prompt_seconds`: what their prompts cost, by `costs`.
    """

    has_room: bool
    costs: PromptCosts | None
    load: StepLoad
    prompt_seconds: float


class Forecaster:
    """Looks ahead for newcomers of one scheduler."""

    def __init__(self, step_time: StepCostModel, entrance: PrefillPlanner, running: Mapping[int, Sequence]) -> None:
        self._step_time = step_time
        self._entrance = entrance
        self._running = running

    def behind(self, ahead: Collection[Sequence]) -> TtftEstimate:
        """Look at those that run, and those that would enter before the newcomer."""
        running = self._running.values()
        costs = self._step_time.prompt_costs(has_streams=bool(running))
        prompts = {self._prompt_of(each): each for each in (*running, *ahead) if each.num_pending > 1}
        seconds = sum(_seconds(each, costs or FIRST_COSTS) for each in prompts.values())
        load = StepLoad(len(running) + len(ahead), sum(each.num_known for each in (*running, *ahead)))
        return TtftEstimate(self._entrance.has_room_for(ahead), costs, load, seconds)

    def _prompt_of(self, sequence: Sequence) -> int:
        """The same for siblings, of `n` and `best_of`, where they find each other's prompt."""
        return id(sequence.request.input_ids) if self._entrance.may_share(sequence) else id(sequence)

    def seconds(self, newcomer: Sequence, forecast: TtftEstimate) -> float:
        """Seconds until the first token of a newcomer that finds room; 0 where nothing was measured nor is ahead.

        What of its prompt is found computed costs nothing, and is noted.
        """
        if forecast.costs is None and not forecast.load.num_decodes:
            return 0.0
        newcomer.num_cached = len(self._entrance.prefix(newcomer)) * self._entrance.block_size
        own = _seconds(newcomer, forecast.costs or FIRST_COSTS)
        return self._step_time.prompts_seconds(forecast.load, forecast.prompt_seconds + own)


def _seconds(sequence: Sequence, costs: PromptCosts) -> float:
    context = max(sequence.num_computed, sequence.num_cached)
    return costs.seconds(context, sequence.num_known - context)
