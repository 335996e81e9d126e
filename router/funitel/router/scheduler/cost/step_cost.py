"""Step cost model: learns how long steps take, and gives the budget of the next one. Pure.

A step without prompt tokens costs by the number and the contexts of its sequences. Prompt tokens add to that, the later
ones of a long prompt more, for they attend to all before them. From both follows the budget of the next step: while
streams run, what keeps the gap between their tokens within the target; else what keeps the server responsive.
"""

from math import ceil, log2

from funitel.router.scheduler.cost.chunk_budget import MIN_CHUNK_TOKENS, Allowance, ChunkBudget, PromptCosts, StepLoad
from funitel.router.scheduler.cost.least_squares import LeastSquares

# Without a target, a step that carries prompt tokens may take so many plain decode steps: gaps stay under 3 times the
# usual, and prompts, given the larger part of the machine, take under 3 times what they take alone.
GAP_FACTOR = 2.5
# The same where a prompt has media: encoding them took far longer than the rest of the prompt does, so smaller chunks
# cost its first token little, and the streams that the encoder has slowed already keep gaps under twice the usual.
MEDIA_GAP_FACTOR = 1.7
# Each prompt that waits behind another adds so many plain decode steps, up to `URGENT_FACTOR` in all: the last of many
# waits for all the steps of those before it, which one prompt alone does not.
FACTOR_PER_QUEUED = 1.0
# A shorter gap is not kept at the cost of prompts: 25 tokens a second are faster than reading. A fast device, with
# plain steps of a few milliseconds, would else spend two fifths of its time on few streams, or more on what a step
# with prompts costs at any number of tokens.
LEAST_GAP_SECONDS = 0.04
# An urgent prompt, of a key that was given less than those with streams, may make it so many: it is given four
# fifths of the machine, and there are few such steps, for it is short.
URGENT_FACTOR = 5.0
# With no stream running a step may take this long: new requests and cancellations wait for at most one step. Where
# several keys are known one of them may come at any time: what it would wait for is less, but for an urgent prompt.
IDLE_STEP_SECONDS = 0.5
IDLE_STEP_SECONDS_OF_SEVERAL = 0.1
FIRST_SHARED_TOKENS = 8  # in a first step beside a stream
FIRST_ALONE_TOKENS = 64  # in a first step with no stream to keep flowing
# A step computes at most so many times the tokens of those before it: beyond them nothing was measured.
SHARED_GROWTH = 2
URGENT_GROWTH = 4
ALONE_GROWTH = 4
REACH_MEMORY = 0.95
# Of 100 steps 99 are to be in time, so the plan is for less than the target by the ratio that 99 stay under.
TAIL = 0.99
TAIL_STEP = 0.03
SETTLED = 20  # steps before which what they were predicted to take says nothing
MAX_TAIL = 1.5  # noise beyond this is not paid for by smaller chunks

# What plain steps take is measured anew after so many steps with prompts, or once so many times more or fewer sequences
# are decoding: a busy server has no plain steps of its own, and 16 sequences are not known by one.
PROBE_STEPS = 50
PROBE_RATIO = 1.5

# Plain steps are alike: what they cost is worked out for every fourth, for that takes longer than all else of a plan.
SOLVE_PLAIN_EVERY = 4

# Features near 1 are learnt best; a usual value of each.
_DECODES, _DECODE_CONTEXT = 8, 8192
_TOKENS, _ATTENDED, _CONTEXT = 32, 32768, 1024


class StepCostModel:
    """Learns from every step, and sizes the next. `target_gap_seconds`: maximum between a running stream's tokens.

    Steps shared with running streams are learnt apart from steps of prompts alone: these are large, and a token costs
    less in a large chunk than in a small one. So chunks beside streams grow from the smallest up, never from above.
    """

    def __init__(self, target_gap_seconds: float | None = None) -> None:
        self.target_gap_seconds = target_gap_seconds
        self.longest_plain_seconds: float | None = None  # of a plain step that took longer than the target by itself
        self._plain = LeastSquares(3, SOLVE_PLAIN_EVERY)
        self._plain_tail = _Tail()
        self._last_plain_decodes = 0  # sequences of the last plain step
        self._steps_since_plain = 0
        self._shared = _PromptSteps(FIRST_SHARED_TOKENS / SHARED_GROWTH)
        self._shared_tail = _Tail()
        self._alone = _PromptSteps(FIRST_ALONE_TOKENS / ALONE_GROWTH)

    def plain_seconds(self, load: StepLoad) -> float:
        """Predict a step of the decoding sequences of `load` alone; 0 before any was measured."""
        return self._plain.predict(_decode_features(load))

    def token_share(self, load: StepLoad) -> float:
        """Return the share of a plain step's time that grows with its tokens; 0 before any was measured."""
        features, costs = _decode_features(load), self._plain.costs
        total = self._plain.predict(features)
        return costs[1] * features[1] / total if total > 0.0 else 0.0

    def seconds(self, load: StepLoad) -> float:
        """Predict any step; 0 before one like it was measured."""
        if load.num_decodes == 0:
            return self._alone.predict(load)
        return self.plain_seconds(load) + (self._shared.predict(load) if load.num_prompt_tokens else 0.0)

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Take one measured step into account."""
        if load.num_decodes == 0:
            self._alone.observe(load, seconds)
            return
        plain = self.plain_seconds(load)
        if load.num_prompt_tokens == 0:
            if self._plain.num_observed >= SETTLED:
                self._plain_tail.observe(seconds / max(plain, 1e-9))
            self._plain.observe(_decode_features(load), seconds)
            self._last_plain_decodes, self._steps_since_plain = load.num_decodes, 0
            return
        self._steps_since_plain += 1
        if self._shared.num_observed >= SETTLED:
            self._shared_tail.observe(seconds / max(plain + self._shared.predict(load), 1e-9))
        self._shared.observe(load, max(0.0, seconds - plain), plain)

    def budget(
        self,
        max_tokens: int,
        load: StepLoad,
        *,
        num_prompts: int = 1,
        has_several_keys: bool = False,
        has_media: bool = False,
        most_seconds: float | None = None,
    ) -> ChunkBudget:
        """At most `max_tokens` prompt tokens for the next step beside the decoding sequences of `load`.

        None at all in the few steps that measure what decoding alone takes. Prompts of batches have `most_seconds`, for
        the whole step. Where one `has_media` none of them is urgent. Of `num_prompts` all but one wait for another;
        where several keys are known that makes no difference, for streams and prompts may be of different ones.
        """
        if load.num_decodes == 0:
            most = min(max_tokens, self._alone.max_tokens(ALONE_GROWTH))
            fixed = self._alone.fixed_seconds
            seconds = IDLE_STEP_SECONDS_OF_SEVERAL if has_several_keys else IDLE_STEP_SECONDS
            seconds = min(seconds, most_seconds or seconds)
            urgent = Allowance(most, IDLE_STEP_SECONDS - fixed)
            return ChunkBudget(Allowance(most, seconds - fixed), self._alone.costs, load, urgent)
        if self.target_gap_seconds is None and self._must_probe(load.num_decodes):
            return ChunkBudget(Allowance(0), load=load)
        factor = gap_factor(1 if has_several_keys else num_prompts)
        usual = self._allowance(max_tokens, load, MEDIA_GAP_FACTOR if has_media else factor, SHARED_GROWTH)
        if most_seconds is not None:
            left = most_seconds - self.plain_seconds(load) - self._shared.fixed_seconds
            usual = Allowance(usual.tokens, min(usual.seconds, left))
        urgent = usual
        if self.target_gap_seconds is None and not has_media:
            urgent = self._allowance(max_tokens, load, URGENT_FACTOR, URGENT_GROWTH)
        return ChunkBudget(usual, self._shared.costs, load, urgent)

    def prompt_costs(self, *, has_streams: bool) -> PromptCosts | None:
        """What prompts cost, beside streams or by themselves as far as either was measured; None before any was."""
        either = (self._shared, self._alone) if has_streams else (self._alone, self._shared)
        return next((steps.costs for steps in either if steps.num_observed), None)

    def prompts_seconds(self, load: StepLoad, seconds: float, num_prompts: int = 1) -> float:
        """Predict when prompts are computed that cost so many seconds, beside the decoding sequences of `load`.

        They take as many steps as that fills, each with what it takes without them, and wait for the one in flight.
        `load` has the `num_prompts` as streams, which they become one by one: half of them, all the time.
        """
        if not load.num_decodes:
            return seconds + self._alone.fixed_seconds * ceil(seconds / IDLE_STEP_SECONDS)
        plain, shared = self.plain_seconds(load), self._shared
        per_token, max_tokens = shared.costs.per_token, shared.max_tokens(SHARED_GROWTH)
        factor = gap_factor((num_prompts + 1) // 2)
        most = _longest_gap(plain, factor) if self.target_gap_seconds is None else self.target_gap_seconds
        for_prompts = max(most - plain - shared.fixed_seconds, MIN_CHUNK_TOKENS * per_token)
        num_steps = max(1, ceil(seconds / for_prompts)) if for_prompts > 0.0 else 1
        if num_steps > 1 and for_prompts > max_tokens * per_token > 0.0:  # chunks have yet to grow as large
            num_steps += ceil(log2(for_prompts / (max_tokens * per_token)))
        return seconds + num_steps * shared.fixed_seconds + (num_steps + 1) * plain

    def _must_probe(self, num_decodes: int) -> bool:
        few, many = sorted((num_decodes, self._last_plain_decodes))
        return not self._plain.num_observed or self._steps_since_plain >= PROBE_STEPS or many > PROBE_RATIO * few + 1

    def _allowance(self, max_tokens: int, load: StepLoad, factor: float, growth: int) -> Allowance:
        most = min(max_tokens, self._shared.max_tokens(growth))
        return Allowance(most, self._seconds_left(load, factor) - self._shared.fixed_seconds)

    def _seconds_left(self, load: StepLoad, factor: float) -> float:
        """Seconds that prompt tokens may add to a plain step, so that 99 of 100 such steps are within the target.

        Without one, within `factor` plain steps, or a gap that is short anyway.
        """
        plain = self.plain_seconds(load)
        target = self.target_gap_seconds
        if target is None:  # noise that plain steps have too does not count against the others
            return _longest_gap(plain, factor) * min(1.0, self._plain_tail.ratio / self._shared_tail.ratio) - plain
        if plain > target:
            self.longest_plain_seconds = max(plain, self.longest_plain_seconds or 0.0)
        return target / self._shared_tail.ratio - plain


class _PromptSteps:
    """Steps that carry prompt tokens: what those cost, and how many of them a step may try.

    `reach` is how many tokens a step is taken to have had before there was any.
    """

    def __init__(self, reach: float) -> None:
        self._fit = LeastSquares(4)  # the last feature is the step itself
        self._reach = reach

    @property
    def num_observed(self) -> int:
        """Steps learnt from."""
        return self._fit.num_observed

    def max_tokens(self, growth: int) -> int:
        """Tokens of a step that is not far larger than those before: at most so many times."""
        return max(MIN_CHUNK_TOKENS, int(growth * self._reach))

    @property
    def costs(self) -> PromptCosts:
        """Seconds by what they are spent on."""
        token, one, context, _ = self._fit.costs
        return PromptCosts(token / _TOKENS, one / _ATTENDED, context / _CONTEXT)

    @property
    def fixed_seconds(self) -> float:
        """Seconds of such a step whatever its tokens."""
        return self._fit.costs[-1]

    def predict(self, load: StepLoad) -> float:
        """Seconds that the chunks of `load` add."""
        return self._fit.predict(self._features(load))

    def observe(self, load: StepLoad, seconds: float, plain: float = 0.0) -> None:
        """Take into account that the chunks of `load` added `seconds` to those of a plain step.

        What takes far longer than predicted is not known yet: no larger step is tried before it is.
        """
        is_known = self._fit.observe(self._features(load), seconds, plain)
        tokens = load.num_prompt_tokens if is_known else 0
        self._reach = max(tokens, REACH_MEMORY * self._reach)

    def _features(self, load: StepLoad) -> tuple[float, ...]:
        tokens, one, context = load.num_prompt_tokens, load.num_attended, load.chunk_context
        return tokens / _TOKENS, one / _ATTENDED, context / _CONTEXT, 1.0


def gap_factor(num_prompts: int) -> float:
    """Plain decode steps that a step with prompt tokens may take, beside streams and with so many prompts."""
    return min(GAP_FACTOR + FACTOR_PER_QUEUED * (num_prompts - 1), URGENT_FACTOR)


def _longest_gap(plain: float, factor: float) -> float:
    """Seconds that a step with prompt tokens may take without a target, where a plain step takes `plain`."""
    return max(factor * plain, LEAST_GAP_SECONDS)


def _decode_features(load: StepLoad) -> tuple[float, ...]:
    return 1.0, (load.num_decodes + load.num_drafts) / _DECODES, load.decode_context / _DECODE_CONTEXT


class _Tail:
    """The ratio of measured to predicted time that 99 of 100 steps stay under, between 1 and `MAX_TAIL`."""

    def __init__(self) -> None:
        self.ratio = 1.1

    def observe(self, ratio: float) -> None:
        """Move up far when it is exceeded, down a little when not: in balance once that happens 1 time in 100."""
        step = TAIL_STEP * (TAIL if ratio > self.ratio else TAIL - 1)
        self.ratio = min(MAX_TAIL, max(1.0, self.ratio + step))
