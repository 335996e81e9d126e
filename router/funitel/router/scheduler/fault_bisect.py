"""Fault bisection: halves the sequences of a failed step, and tries the halves, until one sequence fails alone. Pure.

A step fails because of one sequence in it, or of several, or because it is too large for the memory there is, which is
no sequence's fault. So its sequences are tried apart from all others: first one half; once that has computed what it
was to, the other half; and the half that fails is halved again. Of n sequences one that fails every step it is in is
found after log2(n) + 1 steps that fail, each of several the same way. Where both halves compute by themselves none is
the culprit, and steps stay so small for a while. The step loop reports what came of steps, the scheduler asks which
sequences may be in the next.
"""

from collections.abc import Mapping

from funitel.router.scheduler.cost.chunk_budget import MIN_CHUNK_TOKENS

RECOVERY_STEPS = 256  # that succeed before steps may be as large again as those that failed


class FaultBisector:
    """Which sequences may be in a step, and how large it may be; without a failure all, and any size.

    `max_sequences` bounds what runs, `max_tokens` the prompt tokens of a step; None is no bound. `may_shrink` says
    whether a prompt can be computed in smaller steps.
    """

    def __init__(self, *, may_shrink: bool) -> None:
        self.max_sequences: int | None = None
        self.max_tokens: int | None = None
        self.has_succeeded_since = True  # the failure that is bisected: not every step fails
        self._may_shrink = may_shrink
        self.on_trial: dict[int, int] = {}  # by id the tokens each is to have computed; no others may be in a step
        self.is_recovering = False  # from a failure: the step loop says which steps succeed
        self._others: dict[int, int] = {}  # the other half, tried next
        self._largest = 0  # half that has passed, in sequences
        self._tokens_before: int | None = None  # bound on tokens before the failure that is bisected
        self._is_shrinking = False  # the one on trial computes in smaller steps
        self._lacks_memory = False
        self._was_none = False  # a step failed lately, and none of its sequences alone
        self._num_good_steps = 0

    @property
    def has_other_half(self) -> bool:
        """Whether another half is to be tried after the one on trial."""
        return bool(self._others)

    def fail(self, goals: Mapping[int, int], num_tokens: int, *, lacks_memory: bool = False) -> int | None:
        """Take a failed step into account; return the id of the culprit, once that is known.

        Args:
            goals: by the ids of its sequences, the tokens that each would have computed by then.
            num_tokens: that the step was to compute.
            lacks_memory: whether there was no memory for it, so that a smaller one may succeed.
        """
        if not self.on_trial:
            self.has_succeeded_since, self._largest, self._lacks_memory = False, 0, False
            self._tokens_before = self.max_tokens
        self._num_good_steps, self.is_recovering = 0, True
        self._lacks_memory |= lacks_memory
        ids = sorted(goals)
        self._is_shrinking = len(ids) == 1 and self._shrink(num_tokens, lacks_memory=lacks_memory)
        if len(ids) == 1 and not self._is_shrinking:
            self.on_trial, self._others, self.max_tokens = {}, {}, self._tokens_before
            return ids[0]
        middle = -(-len(ids) // 2)
        self.on_trial = {i: goals[i] for i in ids[:middle]}
        self._others = {i: goals[i] for i in ids[middle:]}
        return None

    def _shrink(self, num_tokens: int, *, lacks_memory: bool) -> bool:
        """Let steps have half the prompt tokens of one that failed, if that may help; whether it may."""
        if not lacks_memory or not self._may_shrink or num_tokens <= MIN_CHUNK_TOKENS:
            return False
        self.max_tokens = max(MIN_CHUNK_TOKENS, num_tokens // 2)
        return True

    def has_passed(self, computed: Mapping[int, int]) -> bool:
        """Whether every sequence on trial has computed what it was to, or has left.

        Args:
            computed: by id, the tokens computed of each sequence that has not ended.
        """
        return all(computed.get(i, goal) >= goal for i, goal in self.on_trial.items())

    def try_other_half(self) -> None:
        """Try the other half, or let all sequences enter, now that the half on trial has passed."""
        self._largest = max(self._largest, len(self.on_trial))
        self.on_trial, self._others = self._others, {}
        if self.on_trial:
            return
        if not self._is_shrinking and (self._was_none or self._lacks_memory):  # else it may have been a single accident
            self.max_sequences = self._largest
        self._was_none = True

    def succeed(self) -> None:
        """Take a step into account that did what it was to."""
        self.has_succeeded_since = True
        self._num_good_steps += 1
        if self._num_good_steps == RECOVERY_STEPS:
            self.max_sequences = self.max_tokens = None
            self._was_none = self.is_recovering = False
