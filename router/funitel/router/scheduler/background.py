"""How much of a step batches may have: little while other requests come, the machine once none has come for a while.

Another request waits for the step in flight; what batches add to that step is added to its time to first token. Pure.
"""

from collections.abc import Iterable

from funitel.router.core.request import Sequence, is_background
from funitel.router.scheduler.cost.chunk_budget import StepLoad
from funitel.router.scheduler.cost.step_cost import StepCostModel

QUIET_STEPS = 256  # of batches alone, after which no other request is expected soon
BESIDE_FACTOR = 1.25  # times the step of the others, or of one sequence where none runs
ALONE_SECONDS = 0.1  # of a step of batches alone


class BackgroundShare:
    """The rows and seconds of the next step that batches may have."""

    def __init__(self, step_time: StepCostModel) -> None:
        self._step_time = step_time
        self.num_quiet_steps = QUIET_STEPS  # planned since one that had other requests
        self.num_held = 0  # running sequences of batches that sat the last step out

    def most_seconds(self, others: StepLoad) -> float:
        """Return the seconds of a step with batches beside the decoding sequences of `others`; 0: not known yet."""
        if self.num_quiet_steps >= QUIET_STEPS:
            return ALONE_SECONDS
        return BESIDE_FACTOR * self._step_time.plain_seconds(others if others.num_decodes else StepLoad(1, 1))

    def max_rows(self, running: Iterable[Sequence]) -> tuple[int, float]:
        """Return the rows that sequences of batches may have in the next step, one at least, and the step's seconds."""
        others, behind = StepLoad(), StepLoad()
        for sequence in running:
            load = behind if is_background(sequence.request.key) else others
            load.num_decodes += sequence.num_rows
            load.decode_context += sequence.num_known * sequence.num_rows
        seconds = self.most_seconds(others)
        if not behind.num_decodes or not seconds:
            return max(1, behind.num_decodes), seconds
        both = StepLoad(others.num_decodes + behind.num_decodes, others.decode_context + behind.decode_context)
        alone = (
            self._step_time.plain_seconds(others) if others.num_decodes else self._step_time.plain_seconds(StepLoad())
        )
        of_a_row = (self._step_time.plain_seconds(both) - alone) / behind.num_decodes
        if of_a_row <= 0.0:
            return behind.num_decodes, seconds
        return max(1, min(behind.num_decodes, int((seconds - alone) / of_a_row))), seconds
