"""The records of tenants, with their JSON: users, API keys, prices and rows of the audit.

Instants are Unix seconds. Money is in the unit of the prices, whatever currency that is.
"""

import secrets
from dataclasses import dataclass, field, replace
from typing import Any, Self

from funitel.launcher.control_plane.records import JSONObject
from funitel.proto.record import Record
from funitel.proto.security.quota import TenantLimits
from funitel.proto.security.roles import Role

_MAX_FIRST_GENERATION = 2**30  # the column has 32 bits, and each logout of all sessions adds one


def _first_generation() -> int:
    return secrets.randbelow(_MAX_FIRST_GENERATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class User(Record):
    """A user.

    Attributes:
        role: what the user may do.
        limits: of all keys and sessions of the user together.
        created: the instant.
        is_disabled: neither sessions nor keys of the user are valid.
        subject: issuer and subject of OpenID Connect, for a user that logs in there.
        password_hash: of argon2; None for one without a password; no part of the JSON.
        generation: of sessions: those of another one are not valid; no part of the JSON. The first is random,
            so that a user that is added again takes over no session of the one that was deleted.
    """

    name: str
    role: Role = Role.USER
    limits: TenantLimits = field(default_factory=TenantLimits)
    created: float = 0.0
    is_disabled: bool = False
    subject: str | None = None
    password_hash: str | None = None
    generation: int = field(default_factory=_first_generation)

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the user, without secrets."""
        return {
            "name": self.name,
            "role": str(self.role),
            "limits": self.limits.to_json(),
            "created": self.created,
            "is_disabled": self.is_disabled,
            "subject": self.subject,
            "has_password": self.password_hash is not None,
        }

    def has_same_login(self, other: "User") -> bool:
        """Whether password and sessions are still those of another state of the user."""
        return (self.password_hash, self.generation) == (other.password_hash, other.generation)

    def logged_out(self) -> Self:
        """The user with no session that is valid."""
        return replace(self, generation=self.generation + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantKey(Record):
    """An API key of a user.

    Attributes:
        id: of the key for ever, also after a rotation.
        name: unique among the keys of the user that are not revoked.
        user: name of the user.
        digest: SHA-256 of the key as hexadecimal digits; no part of the JSON.
        hint: the last characters of the key, by which a person recognises it.
        routes: patterns of paths that it may use; all where there are none.
        models: patterns of models that it may use; all where there are none.
        limits: of this key; those of the user hold too.
        group: keys of one group share cached prefixes.
        expires: None for never.
        revoked: when it was revoked, for ever.
        is_banned: whether it is refused until an admin lifts the ban.
        is_managed: whether an admin has made or changed it for the user: the bounds are an admin's to change then.
    """

    id: int = 0
    name: str
    user: str
    digest: str = ""
    hint: str = ""
    routes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    limits: TenantLimits = field(default_factory=TenantLimits)
    group: str | None = None
    created: float = 0.0
    expires: float | None = None
    revoked: float | None = None
    is_banned: bool = False
    is_managed: bool = False

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the key, without its digest."""
        return {
            "id": self.id,
            "name": self.name,
            "user": self.user,
            "hint": self.hint,
            "routes": list(self.routes),
            "models": list(self.models),
            "limits": self.limits.to_json(),
            "group": self.group,
            "created": self.created,
            "expires": self.expires,
            "revoked": self.revoked,
            "is_banned": self.is_banned,
            "is_managed": self.is_managed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Price(Record):
    """The price of a model's tokens, per million."""

    model: str
    prompt: float = 0.0
    completion: float = 0.0

    def cost(self, num_prompt: int, num_completion: int) -> float:
        """What tokens cost."""
        return (num_prompt * self.prompt + num_completion * self.completion) / 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow(Record):
    """A change of state, or the try of one.

    Attributes:
        actor: name of the user, of a key of a file, `socket` for a program on the control socket, or `anonymous`.
        role: of the actor; "" where there is none.
        via: name of the key or the session by which the actor came.
        address: of the client.
        action: method and path.
        object: what was changed, such as `model tiny` or `key ann/laptop`.
        before: the JSON of the object before the change; None where it was not there.
        after: its JSON after the change; None where it is gone.
        status: of the answer; None where the change began and its end is not known.
    """

    at: float
    actor: str
    role: str = ""
    via: str = ""
    address: str = ""
    action: str
    object: str
    before: JSONObject | None = None
    after: JSONObject | None = None
    status: int | None = None
