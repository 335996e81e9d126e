"""How many prompt tokens a step may compute: the most whose predicted time keeps running streams flowing. Pure."""

# A step that carries prompt tokens may take this many times a plain decode step, so the gap between the tokens of a
# running stream stays under it; what is left of the 5x promised is for prediction errors and noise.
GAP_FACTOR = 2.5
# With no stream running a step may take this long: new requests and cancellations wait for at most one step.
IDLE_STEP_SECONDS = 0.5
MIN_CHUNK_TOKENS = 8  # prompts always advance
FIRST_CHUNK_TOKENS = 64  # before anything was measured and with no stream to keep flowing
DECAY = 0.8  # weight of a past step against the next: contexts grow, so old steps predict badly


class StepTimeModel:
    """Predicts seconds = decode step + per_token * prompt tokens; recent steps weigh more.

    Steps shared with running streams are learnt apart from steps of prompts alone: these are large, and a token costs
    less in a large chunk than in a small one. So chunks beside streams grow from the smallest up, never from above.
    """

    def __init__(self) -> None:
        self.decode_seconds: float | None = None  # typical step without prompt tokens
        self._shared = _Slope()
        self._alone = _Slope()

    def observe(self, num_prompt_tokens: int, seconds: float, *, has_running: bool) -> None:
        """Take one measured step into account; `has_running` if decoding sequences shared it."""
        if num_prompt_tokens == 0:
            previous = seconds if self.decode_seconds is None else self.decode_seconds
            self.decode_seconds = DECAY * previous + (1 - DECAY) * seconds
        else:
            slope = self._shared if has_running else self._alone
            slope.observe(num_prompt_tokens, max(0.0, seconds - (self.decode_seconds or 0.0)))

    def chunk_budget(self, most: int, *, has_running: bool) -> int:
        """Prompt tokens for the next step, at most `most`; `has_running` if decoding sequences share it."""
        decode = self.decode_seconds or 0.0
        if not has_running:
            tokens = self._alone.tokens_within(IDLE_STEP_SECONDS - decode)
            return min(most, FIRST_CHUNK_TOKENS if tokens is None else max(MIN_CHUNK_TOKENS, tokens))
        tokens = self._shared.tokens_within((GAP_FACTOR - 1) * decode)
        return min(most, MIN_CHUNK_TOKENS if tokens is None else max(MIN_CHUNK_TOKENS, tokens))


class _Slope:
    """Least-squares seconds per token of a line through the origin, older points decaying."""

    def __init__(self) -> None:
        self._products = 0.0  # decayed sum of tokens * seconds
        self._squares = 0.0  # decayed sum of tokens squared

    def observe(self, tokens: int, seconds: float) -> None:
        self._products = DECAY * self._products + tokens * seconds
        self._squares = DECAY * self._squares + tokens**2

    def tokens_within(self, seconds: float) -> int | None:
        """Tokens that take so long; None before anything was measured."""
        if self._products <= 0.0:
            return None
        return int(max(0.0, seconds) * self._squares / self._products)
