"""What the control plane says of tenants: users, their keys, prices, and sessions that were ended."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from funitel.proto.security.quota import TenantLimits
from funitel.proto.security.roles import Role


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class UserRecord(_Record):
    """A user that is not disabled."""

    name: str
    role: Role
    limits: TenantLimits
    generation: int


class KeyRecord(_Record):
    """A key that is not revoked."""

    id: int
    name: str
    user: str
    digest: str
    routes: tuple[str, ...]
    models: tuple[str, ...]
    limits: TenantLimits
    group: str | None
    expires: float | None
    is_banned: bool


class PriceRecord(_Record):
    """The price of a model's tokens, per million."""

    model: str
    prompt: float
    completion: float


class TenantSnapshot(_Record):
    """The state of all tenants.

    Attributes:
        watcher: that the control plane has given to this link.
        version: of the state.
    """

    watcher: int
    version: int
    secret: str
    users: tuple[UserRecord, ...]
    keys: tuple[KeyRecord, ...]
    prices: tuple[PriceRecord, ...]
    ended_sessions: frozenset[str]

    def prices_by_model(self) -> Mapping[str, PriceRecord]:
        """The prices by the name of the model."""
        return {price.model: price for price in self.prices}
