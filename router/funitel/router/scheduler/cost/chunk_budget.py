"""The chunk budget of a step: how many prompt tokens fit the token budget and the predicted seconds. Pure.

The budget comes from `step_cost`, which has learnt what prompt tokens cost; `prefill` spends it, one sequence after
another.
"""

from dataclasses import dataclass
from math import inf, sqrt

MIN_CHUNK_TOKENS = 4  # prompts always advance, however little time the target leaves


@dataclass(slots=True)
class StepLoad:
    """What the time of a step depends on. Contexts are tokens attended to, summed over sequences."""

    num_decodes: int = 0
    decode_context: int = 0
    num_prompt_tokens: int = 0
    num_attended: int = 0  # tokens that prompt tokens attend to, summed over prompt tokens
    chunk_context: int = 0  # tokens before each chunk, which are read once however long the chunk
    num_drafts: int = 0  # draft tokens beside the tokens of decoding sequences

    def add_chunk(self, context: int, count: int) -> None:
        """Add `count` prompt tokens that come behind `context` others of their sequence."""
        self.num_prompt_tokens += count
        self.num_attended += attended(context, count)
        self.chunk_context += context


def attended(context: int, count: int) -> int:
    """Tokens that `count` tokens behind `context` others attend to, each to itself too."""
    return count * context + count * (count + 1) // 2


@dataclass(frozen=True, slots=True)
class PromptCosts:
    """Seconds that chunks add to a step: for each of their tokens, for what those attend to, for what is read once."""

    per_token: float = 0.0
    per_attended: float = 0.0
    per_context: float = 0.0

    def seconds(self, context: int, count: int) -> float:
        """Return what a chunk of `count` tokens behind `context` others costs."""
        return self.per_token * count + self.per_attended * attended(context, count) + self.per_context * context

    def tokens_within(self, seconds: float, context: int, count: int) -> int:
        """Return how many of `count` tokens behind `context` others take no longer than `seconds`."""
        if self.seconds(context, count) <= seconds:
            return count
        left = seconds - self.per_context * context
        if left <= 0.0:
            return 0
        # n tokens take a * n + b * n^2 / 2; this form of the root loses no digits where b is small.
        a, b = self.per_token + self.per_attended * (context + 0.5), self.per_attended
        return min(count, int(2 * left / (a + sqrt(a * a + 2 * b * left))))


@dataclass(frozen=True, slots=True)
class Allowance:
    """So many prompt tokens, within so many seconds."""

    tokens: int
    seconds: float = inf


class ChunkBudget:
    """What prompt tokens one step may still compute. Notes the load they make.

    Args:
        allowance: for all of them together.
        costs: what they take.
        load: of the step without them.
        urgent: in place of `allowance`, for those that are urgent; what these take is taken from the others.
    """

    def __init__(
        self,
        allowance: Allowance,
        costs: PromptCosts | None = None,
        load: StepLoad | None = None,
        urgent: Allowance | None = None,
    ) -> None:
        self.load = load or StepLoad()
        self._allowance = allowance
        self._urgent = urgent or allowance
        self._costs = costs or PromptCosts()
        self._tokens = 0  # spent
        self._seconds = 0.0

    @property
    def is_spent(self) -> bool:
        """Whether not even the cheapest token may be added, except an urgent one."""
        return self.fit(0, 1) == 0

    def fit(self, context: int, wanted: int, *, is_urgent: bool = False) -> int:
        """How many of `wanted` tokens behind `context` others may be computed; the step's first chunk has a floor."""
        allowed = self._urgent if is_urgent else self._allowance
        most = max(0, min(wanted, allowed.tokens - self._tokens))
        floor = MIN_CHUNK_TOKENS if self.has_no_chunk else 0
        return min(most, max(floor, self._costs.tokens_within(allowed.seconds - self._seconds, context, most)))

    @property
    def has_no_chunk(self) -> bool:
        """Whether the step has no prompt tokens yet: its first chunk may be larger than what fits."""
        return self.load.num_prompt_tokens == 0

    def take(self, context: int, wanted: int, *, is_urgent: bool = False) -> int:
        """Spend the budget on what `fit` says of the same arguments; returns how many tokens that is."""
        count = self.fit(context, wanted, is_urgent=is_urgent)
        self.spend(context, count)
        return count

    def spend(self, context: int, count: int) -> None:
        """Note that the step computes `count` tokens behind `context` others."""
        if count:
            self._tokens += count
            self._seconds += self._costs.seconds(context, count)
            self.load.add_chunk(context, count)
