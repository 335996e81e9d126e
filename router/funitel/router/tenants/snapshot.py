"""What the control plane says of tenants: users, their keys, prices, and sessions that were ended."""

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from funitel.proto.security.quota import TenantLimits
from funitel.proto.security.roles import Role

logger = logging.getLogger(__name__)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class UserRecord(_Record):
    """A user that is not disabled."""

    name: str
    role: Role
    limits: TenantLimits
    generation: int
    created: float


class KeyRecord(_Record):
    """A key that is not revoked."""

    id: int
    name: str
    user: str
    digest: str = Field(pattern="^[0-9a-f]{64}$")
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

    @field_validator("keys", mode="before")
    @classmethod
    def _valid_keys(cls, given: Any) -> Any:
        """The keys without those that are malformed: one must not keep the state of all others away."""
        if not isinstance(given, list):
            return given
        valid = []
        for each in given:
            try:
                valid.append(KeyRecord.model_validate(each))
            except ValidationError as error:
                logger.error("the control plane named a key that is none, with %d errors", error.error_count())
        return valid

    def prices_by_model(self) -> Mapping[str, PriceRecord]:
        """The prices by the name of the model."""
        return {price.model: price for price in self.prices}
