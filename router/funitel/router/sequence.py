"""The router's nouns: what a client asked for, and the growing list of tokens that answers it. Pure."""

from dataclasses import dataclass, field

from funitel.proto.step import SamplingParams, StoppingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Most prompt tokens, and most prompt plus completion tokens, of one request; the pool, in tokens."""

    max_input_tokens: int
    max_total_tokens: int
    pool_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One validated request: a prompt as tokens, how to sample and when to stop."""

    input_ids: tuple[int, ...]
    sampling: SamplingParams
    stopping: StoppingParams
    prefill_logprobs: bool = False
    top_n_tokens: int = 0
    inputs: str = ""
    add_special_tokens: bool = True


@dataclass(slots=True, eq=False)
class Sequence:
    """One growing list of tokens: waiting, running or finished. KV is computed for its first `num_computed` tokens."""

    id: int
    request: Request
    output_ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0

    @property
    def num_known(self) -> int:
        """Prompt and completion tokens so far."""
        return len(self.request.input_ids) + len(self.output_ids)

    @property
    def num_pending(self) -> int:
        """Known tokens whose KV is still to be computed; one while decoding."""
        return self.num_known - self.num_computed
