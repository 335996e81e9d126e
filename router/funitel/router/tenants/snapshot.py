"""What the control plane says of tenants: users, their keys, prices, and sessions that were ended."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from funitel.proto.security.roles import Role


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class LimitsRecord(_Record):
    """Limits of a user or a key; None is no limit."""

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


class UserRecord(_Record):
    """A user that is not disabled."""

    name: str
    role: Role
    limits: LimitsRecord
    generation: int


class KeyRecord(_Record):
    """A key that is not revoked."""

    id: int
    name: str
    user: str
    digest: str
    routes: tuple[str, ...]
    models: tuple[str, ...]
    limits: LimitsRecord
    group: str | None
    expires: float | None
    is_banned: bool


class PriceRecord(_Record):
    """The price of a model's tokens, per million."""

    model: str
    prompt: float
    completion: float


class TenantSnapshot(_Record):
    """The state of all tenants."""

    secret: str
    users: tuple[UserRecord, ...]
    keys: tuple[KeyRecord, ...]
    prices: tuple[PriceRecord, ...]
    ended_sessions: frozenset[str]

    def prices_by_model(self) -> Mapping[str, PriceRecord]:
        """The prices by the name of the model."""
        return {price.model: price for price in self.prices}
