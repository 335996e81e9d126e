"""`funitel key`: create, list, group and revoke the API keys of a file; a running router reloads it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from funitel.launcher.cli.tenants.commands import import_keys
from funitel.launcher.cli.tenants.settings import ImportKeysSettings
from funitel.proto.errors import SettingsError
from funitel.proto.security.keys import (
    FLAG,
    LIMITS,
    SCOPES,
    Key,
    check_limit,
    check_name,
    check_pattern,
    digest_of,
    editing,
    line_of,
    new_key,
    parse,
    parse_instant,
    read_keys,
    shown,
)
from funitel.proto.settings.fields import as_command, require, setting

_UNITS = {"d": "days", "h": "hours", "m": "minutes"}
MAX_DAYS, MAX_DIGITS = 100 * 365, 8


def _flag(default: Any, help: str) -> Any:
    """A flag without an environment variable."""
    return setting(default, help, env=None)


@dataclass(frozen=True, kw_only=True)
class KeyFileSettings:
    """The file of keys."""

    api_key_file: str | None = setting(None, "File of keys: the one that --api-key-file of the server names.")

    @property
    def path(self) -> str:
        """The file; raises SettingsError if none is given."""
        if self.api_key_file is None:
            raise SettingsError(f"{FLAG} must name the file of keys")
        return self.api_key_file


@dataclass(frozen=True, kw_only=True)
class ListKeysSettings(KeyFileSettings):
    """List the keys of a file by name, with their scopes and limits; keys themselves are stored nowhere."""


@dataclass(frozen=True, kw_only=True)
class RevokeKeySettings(KeyFileSettings):
    """Revoke a key within a second; running requests finish."""

    name: str


@dataclass(frozen=True, kw_only=True)
class GroupKeySettings(KeyFileSettings):
    """Put a key into a group, or take it out of its group; keys of one group share cached prefixes."""

    name: str
    group: str | None = _flag(None, "Name of the group; no group when not given.")


@dataclass(frozen=True, kw_only=True)
class NewKeySettings(KeyFileSettings):
    """Create a key: print it once, and add its hash to the file."""

    name: str | None = _flag(None, "Name of the key in logs and metrics.")
    group: str | None = _flag(None, "Group of the key: keys of one group share cached prefixes, all others do not.")
    expires: str | None = _flag(
        None, "Expiry: a time from now such as 90d, 12h or 30m, or a UTC date or time; never when not given."
    )
    routes: tuple[str, ...] = _flag(
        (), "Path that the key may use, such as /v1/chat/completions or /v1/*, repeatable; every route when not given."
    )
    models: tuple[str, ...] = _flag((), "Model that the key may use, repeatable; every model when not given.")
    requests_per_minute: int | None = _flag(None, "Maximum of requests in a minute.")
    tokens_per_minute: int | None = _flag(None, "Maximum of tokens, prompt and completion, in a minute.")
    max_concurrent_requests: int | None = _flag(None, "Maximum of requests in flight.")


# Commands


def make(settings: NewKeySettings) -> None:
    """Add a key to the file, which is created if missing."""
    text = new_key()
    key = _described(settings, digest_of(text.encode()), datetime.now(UTC))
    with editing(settings.path) as lines:
        lines.append(line_of(key))
        parse(lines, settings.path)  # raises if the name is taken or the file is invalid
    print(text)


def list_all(settings: ListKeysSettings) -> None:
    """Print a line for each key."""
    now = datetime.now(UTC)
    for key in read_keys(settings.path):
        print(f"{key.name}  {_state(key, now)}  {_bounds(key)}")


def revoke(settings: RevokeKeySettings) -> None:
    """Mark a key as revoked; its line stays in the file."""
    _change(settings.path, settings.name, "revoke; delete the line of a bare key", revoked=datetime.now(UTC))


def regroup(settings: GroupKeySettings) -> None:
    """Change the group of a key."""
    try:
        group = None if settings.group is None else check_name(settings.group, "group")
    except ValueError as error:
        raise SettingsError(str(error)) from error
    _change(settings.path, settings.name, "put into a group; a bare key has none", group=group)


def _change(path: str, name: str, purpose: str, **fields: Any) -> None:
    """Replace fields of the valid key of a name; raises SettingsError, with the purpose, if there is none."""
    with editing(path) as lines:
        parse(lines, path)
        for index, line in enumerate(lines):
            key = next(iter(parse([line], path)), None)
            if key is not None and not key.is_bare and key.name == name and not key.revoked:
                lines[index] = line_of(replace(key, **fields))
                return
        raise SettingsError(f"{FLAG} {path} has no key named {name!r} to {purpose}")


# Parsing and formatting


def _described(settings: NewKeySettings, digest: bytes, now: datetime) -> Key:
    """The key that the flags describe; raises SettingsError, which names the flag at fault."""
    require(settings.name is not None, "--name must be given")
    bounds: dict[str, Any] = {field: _split(getattr(settings, field)) for field in SCOPES}
    bounds |= {field: getattr(settings, field) for field in LIMITS}
    try:
        for field in SCOPES:
            for pattern in bounds[field]:
                check_pattern(pattern, field)
        for field in LIMITS:
            if bounds[field] is not None:
                check_limit(bounds[field], field)
        if settings.group is not None:
            check_name(settings.group, "group")
        expires = None if settings.expires is None else _instant(settings.expires, now)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    require(expires is None or expires > now, f"--expires must be in the future, given {settings.expires}")
    return Key(name=settings.name or "", digest=digest, created=now, expires=expires, group=settings.group, **bounds)


def _split(values: tuple[str, ...]) -> tuple[str, ...]:
    """Values of a flag that is given several times or with commas."""
    return tuple(part.strip() for value in values for part in value.split(","))


def _instant(text: str, now: datetime) -> datetime:
    count, unit = text[:-1], _UNITS.get(text[-1:])
    if unit is None or not (count.isascii() and count.isdigit()):
        return parse_instant(text, "expires")
    span = timedelta(**{unit: int(count)}) if len(count) <= MAX_DIGITS else timedelta.max
    if span > timedelta(days=MAX_DAYS):
        raise ValueError(f"`expires` must be at most {MAX_DAYS} days from now. Given: {text!r}")
    return now + span


def _state(key: Key, now: datetime) -> str:
    if key.revoked is not None:
        return f"revoked {shown(key.revoked)}"
    if key.expires is None:
        return "valid"
    return f"{'valid until' if key.expires > now else 'expired'} {shown(key.expires)}"


def _bounds(key: Key) -> str:
    scopes = {"routes": " ".join(key.routes) or "all", "models": " ".join(key.models) or "all"}
    limits = {field: getattr(key, field) for field in ("group", *LIMITS) if getattr(key, field) is not None}
    return "  ".join(f"{field}={value}" for field, value in (scopes | limits).items())


KEY_COMMANDS: Mapping[str, Callable[..., None]] = {
    "new": as_command(NewKeySettings, make),
    "list": as_command(ListKeysSettings, list_all),
    "group": as_command(GroupKeySettings, regroup, {"name": "Name of the key."}),
    "import": as_command(ImportKeysSettings, import_keys),
    "revoke": as_command(RevokeKeySettings, revoke, {"name": "Name of the key."}),
}
