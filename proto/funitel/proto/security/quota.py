"""What the router and the control plane tell each other of quotas: limits, reservations and what was used.

Instants are Unix seconds. Money is in the unit of the prices, whatever currency that is.
"""

from dataclasses import dataclass

from funitel.proto.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits(Record):
    """What a user or a key may use; None is no limit.

    Attributes:
        requests_per_minute: begun within any minute.
        tokens_per_minute: of prompts and completions, within any minute.
        max_concurrent_requests: in flight.
        requests_per_month: begun within a calendar month of UTC.
        tokens_per_month: of prompts and completions, within a calendar month of UTC.
        budget_per_month: the cost of tokens by the prices of their models, within a calendar month of UTC.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    requests_per_month: int | None = None
    tokens_per_month: int | None = None
    budget_per_month: float | None = None

    @property
    def is_monthly(self) -> bool:
        """Whether the control plane is asked before a request runs."""
        return (self.requests_per_month, self.tokens_per_month, self.budget_per_month) != (None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaReservation:
    """The most that a request may take.

    Attributes:
        id: of the request, unique for ever.
        at: when the request began.
        user: name of the user.
        key: id of the key; 0 for sessions.
        model: that the request names.
        tokens: of the prompt, and the most of the completion.
        cost: of as many tokens.
    """

    id: str
    at: float
    user: str
    key: int
    model: str
    tokens: int
    cost: float

    def settlement(self, *, requests: int, prompt_tokens: int, completion_tokens: int, cost: float) -> "Settlement":
        """The settlement of the request by what it has used."""
        return Settlement(
            id=self.id,
            at=self.at,
            user=self.user,
            key=self.key,
            model=self.model,
            requests=requests,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cost=cost,
        )

    def unused(self) -> "Settlement":
        """The settlement of a request that did not run."""
        return self.settlement(requests=0, prompt_tokens=0, completion_tokens=0, cost=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """What a request has used; `id` is that of its reservation, if it has one."""

    id: str
    at: float
    user: str
    key: int
    model: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cost: float
