"""Take over the keys of a file: each line becomes a key of a user."""

from collections.abc import Sequence
from datetime import datetime

from funitel.launcher.tenants.records import TenantKey
from funitel.proto.errors import InvalidRequest, SettingsError
from funitel.proto.security.keys import LIMITS, Key, parse
from funitel.proto.security.quota import TenantLimits


def keys_of_lines(lines: Sequence[str], user: str) -> list[TenantKey]:
    """The keys of the lines of a file, with their scopes and limits; revoked and expired ones, too.

    Raises:
        InvalidRequest: a line is wrong.
    """
    try:
        return [_key(each, user) for each in parse(lines, "lines")]
    except SettingsError as error:
        raise InvalidRequest(f"`lines` must be those of a file of keys: {error.message}", "lines") from error


def _key(key: Key, user: str) -> TenantKey:
    return TenantKey(
        name=key.name,
        user=user,
        digest=key.digest.hex(),
        routes=key.routes,
        models=key.models,
        limits=TenantLimits(**{name: getattr(key, name) for name in LIMITS}),
        group=key.group,
        created=_seconds(key.created) or 0.0,
        expires=_seconds(key.expires),
        revoked=_seconds(key.revoked),
    )


def _seconds(instant: datetime | None) -> float | None:
    return None if instant is None else instant.timestamp()
