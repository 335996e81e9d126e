"""Read and write the file of API keys.

A line is a JSON object with the SHA-256 of a key, its scopes and limits, or a bare key without restrictions. A key made
here has 256 random bits, so its hash needs neither a salt nor a slow hash function, and a check costs a microsecond.
"""

import fcntl
import hashlib
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from funitel.proto.errors import SettingsError

FLAG = "--api-key-file"
SETTING_NAME = "api-key"  # of the key given as a setting, not in a file
PREFIX = "funitel-"  # for scanners of leaked secrets
KEY_BYTES = 32
MAX_FILE_BYTES = 8 << 20
MAX_LIMIT = 10**9
TIMES = ("created", "expires", "revoked")
SCOPES = ("routes", "models")
LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests")
NEW_FILE_MODE = 0o600

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key: `digest` is its SHA-256, the rest are scopes and limits; `()` and None mean no restriction.

    Attributes:
        name: in messages, logs and metrics.
        routes: paths as in the table of routes; a final `*` matches every continuation.
        models: names of models, with the same patterns.
        group: keys of one group share cached prefixes.
        is_bare: it has no record, so that its name depends on its line.
        owner_id: what lasting things belong to, where that is neither the name nor the digest: it stays when the key is
            renamed or rotated.
    """

    name: str
    digest: bytes
    created: datetime | None = None
    expires: datetime | None = None
    revoked: datetime | None = None
    routes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    group: str | None = None
    is_bare: bool = False
    owner_id: str | None = None

    @property
    def owner(self) -> str:
        """What lasting things of the key belong to; a key of a file that is replaced under its name keeps them."""
        if self.owner_id is not None:
            return self.owner_id
        return f"key {self.digest.hex()}" if self.is_bare else f"name {self.name}"

    @property
    def cache_owner(self) -> bytes:
        """The group or the key that cached prefixes belong to, as a SHA-256; a key replaced under its name keeps it."""
        owner = self.owner if self.group is None else f"group {self.group}"
        return hashlib.sha256(owner.encode()).digest()


def covers(patterns: Sequence[str], name: str) -> bool:
    """Whether one of the patterns matches `name`; no patterns match everything."""
    return not patterns or any(
        name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern for pattern in patterns
    )


def new_key() -> str:
    """Generate a random key."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest_of(key: bytes) -> bytes:
    """The SHA-256 of a key, as files and routers store it."""
    return hashlib.sha256(key).digest()


# Reading


def keys_of(key: str | None, path: str | None) -> list[Key]:
    """The keys of a router: the one given as a setting, and those of a file; raises as `read_keys`."""
    setting = [] if key is None else [Key(name=SETTING_NAME, digest=digest_of(key.encode()), is_bare=True)]
    return setting + ([] if path is None else read_keys(path))


def read_keys(path: str) -> list[Key]:
    """Return the keys of a file, revoked ones too, in the order of its lines.

    Raises:
        SettingsError: it cannot be read, has no key, or a line is invalid; names file, line and field.
    """
    keys = parse(read_lines(path), path)
    if not keys:
        raise SettingsError(f"{FLAG} {path} must contain keys, one a line; it is empty")
    return keys


def read_lines(path: str) -> list[str]:
    """The lines of a file; raises SettingsError when it cannot be read or is too large."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise SettingsError(f"{FLAG} {path} must have at most {MAX_FILE_BYTES} bytes; it has more")
        return content.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{FLAG} {path}: {getattr(error, 'strerror', None) or error}") from error


def parse(lines: Sequence[str], path: str) -> list[Key]:
    """Parse lines to keys; raises SettingsError, which names `path`, for an invalid line."""
    keys: list[Key] = []
    names: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        if not text.startswith("{"):
            keys.append(Key(name=f"line-{number}", digest=digest_of(text.encode()), is_bare=True))
            continue
        try:
            key = _parse_record(text)
        except ValueError as error:
            raise SettingsError(f"{FLAG} {path} line {number}: {error}") from error
        if key.revoked is None and names.setdefault(key.name, number) != number:
            raise SettingsError(f"{FLAG} {path} line {number}: the key of line {names[key.name]} has the same name")
        keys.append(key)
    return keys


def _parse_record(text: str) -> Key:
    """Parse a key from a JSON object; raises ValueError, which names the field."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("a line that begins with { must be a JSON object") from None
    fields = dict(record)
    name, digest = check_name(fields.pop("name", None), "name"), _text(fields, "sha256", _DIGEST)
    group = fields.pop("group", None)
    known: dict[str, Any] = {"group": None if group is None else check_name(group, "group")}
    known |= {field: _instant(fields, field) for field in TIMES}
    known |= {field: _names(fields, field) for field in SCOPES}
    known |= {field: _limit(fields, field) for field in LIMITS}
    if fields:
        raise ValueError(f"unknown field {next(iter(fields))!r}")
    return Key(name=name, digest=bytes.fromhex(digest), **known)


def _text(fields: dict[str, Any], field: str, pattern: re.Pattern[str]) -> str:
    value = fields.pop(field, None)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"`{field}` must match {pattern.pattern}. Given: {value!r}")
    return value


def _instant(fields: dict[str, Any], field: str) -> datetime | None:
    value = fields.pop(field, None)
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(f"`{field}` must be a date and time. Given: {value!r}")
    return parse_instant(value, field)


def parse_instant(text: str, field: str) -> datetime:
    """Parse a date, or a date and time, in UTC unless it names a zone; raises ValueError, which names `field`."""
    try:
        instant = datetime.fromisoformat(text)
        return (instant.replace(tzinfo=UTC) if instant.tzinfo is None else instant).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError(f"`{field}` must be like 2027-01-31 or 2027-01-31T12:00:00Z. Given: {text!r}") from None


def _names(fields: dict[str, Any], field: str) -> tuple[str, ...]:
    value = fields.pop(field, [])
    if not isinstance(value, list):
        raise ValueError(f"`{field}` must be an array of strings. Given: {value!r}")
    for item in value:
        check_pattern(item, field)
    return tuple(value)


def check_name(value: object, field: str) -> str:
    """Return a valid name of a key or a group; raises ValueError for anything else."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"`{field}` must match {_NAME.pattern}. Given: {value!r}")
    return value


def is_valid_name(value: str) -> bool:
    """Whether this may be the name of a key, a group or a user."""
    return _NAME.fullmatch(value) is not None


def check_pattern(pattern: object, field: str) -> None:
    """Raise ValueError unless this is a pattern of routes or models."""
    is_text = isinstance(pattern, str) and 0 < len(pattern) <= 256 and pattern.isprintable() and "*" not in pattern[:-1]
    if not is_text or (field == "routes" and not str(pattern).startswith(("/", "*"))):
        what = "paths such as /v1/completions or /v1/*" if field == "routes" else "names such as my-model or mine/*"
        raise ValueError(f"`{field}` must be {what}. Given: {pattern!r}")


def _limit(fields: dict[str, Any], field: str) -> int | None:
    value = fields.pop(field, None)
    return None if value is None else check_limit(value, field)


def check_limit(value: object, field: str) -> int:
    """Return a valid limit; raises ValueError for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_LIMIT:
        raise ValueError(f"`{field}` must be an integer within 1..{MAX_LIMIT}. Given: {value!r}")
    return value


# Writing


def line_of(key: Key) -> str:
    """Format a key as a line of its file."""
    times = {field: getattr(key, field) for field in TIMES}
    record: dict[str, Any] = {"name": key.name, "sha256": key.digest.hex()}
    record |= {} if key.group is None else {"group": key.group}
    record |= {field: shown(instant) for field, instant in times.items() if instant is not None}
    record |= {field: list(getattr(key, field)) for field in SCOPES if getattr(key, field)}
    record |= {field: getattr(key, field) for field in LIMITS if getattr(key, field) is not None}
    return json.dumps(record)


def shown(instant: datetime) -> str:
    """A date and time of UTC, to the second."""
    return instant.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@contextmanager
def editing(path: str) -> Iterator[list[str]]:
    """Yield the lines of a file, none if it is missing, and replace the file atomically by the changed lines.

    Readers see either the old or the new content; other editors wait for this one.

    Raises:
        SettingsError: it cannot be read or written.
    """
    target = Path(path).resolve()  # the target of a link is replaced, not the link
    with _locked(target.parent):
        lines = read_lines(str(target)) if target.exists() else []
        yield lines
        _replace(target, "".join(f"{line}\n" for line in lines))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SettingsError(f"{FLAG}: cannot open the folder {folder}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(target: Path, content: str) -> None:
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    except OSError as error:
        raise SettingsError(f"{FLAG} {target}: cannot write to its folder: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
            _copy_mode(target, file.fileno())
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except OSError as error:
        with suppress(OSError):
            os.unlink(name)
        raise SettingsError(f"{FLAG} {target}: {error.strerror}") from error


def _copy_mode(target: Path, descriptor: int) -> None:
    """Give the new file the mode and, if permitted, the owner of the old one."""
    try:
        old = target.stat()
    except FileNotFoundError:
        os.fchmod(descriptor, NEW_FILE_MODE)
        return
    os.fchmod(descriptor, old.st_mode & 0o777)
    with suppress(PermissionError):
        os.fchown(descriptor, old.st_uid, old.st_gid)
