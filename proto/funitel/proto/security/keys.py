"""API keys at rest: the file of them, read and written. Knows no HTTP, no limits at work and no clock.

A line is a JSON object, which has the SHA-256 of a key and what it is for, or a bare key, which is for everything. A
key made here is 256 random bits: nobody guesses one, so its hash needs neither salt nor the slowness that passwords
need, and a check costs a microsecond.
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
SETTING_NAME = "api-key"  # of the key that is a setting and has no line in a file
PREFIX = "funitel-"  # lets scanners for leaked secrets tell what they have found
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
    """One key: `digest` is its SHA-256, the rest what it may do; `()` and None are no bound.

    Attributes:
        name: what people, logs and metrics call it.
        routes: paths as the table of routes writes them; one that ends in `*` stands for all that begin so.
        models: names of models, in the same way.
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


def covers(patterns: Sequence[str], name: str) -> bool:
    """Whether one of the patterns stands for `name`; none at all stand for everything."""
    return not patterns or any(
        name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern for pattern in patterns
    )


def new_key() -> str:
    """Draw a key."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest_of(key: bytes) -> bytes:
    """What a file and a router know of a key."""
    return hashlib.sha256(key).digest()


# Reading


def keys_of(key: str | None, path: str | None) -> list[Key]:
    """The keys of a router: the one that is a setting, and those of a file; raises as `read_keys`."""
    setting = [] if key is None else [Key(name=SETTING_NAME, digest=digest_of(key.encode()))]
    return setting + ([] if path is None else read_keys(path))


def read_keys(path: str) -> list[Key]:
    """Return the keys of a file, revoked ones too, in the order of its lines.

    Raises:
        SettingsError: it cannot be read, holds no key, or a line is wrong; names file, line and field.
    """
    keys = parse(read_lines(path), path)
    if not keys:
        raise SettingsError(f"{FLAG} {path} must hold a key, one a line; it is empty")
    return keys


def read_lines(path: str) -> list[str]:
    """The lines of a file; raises SettingsError when it cannot be read, or is too large to be a file of keys."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise SettingsError(f"{FLAG} {path} must have at most {MAX_FILE_BYTES} bytes; it has more")
        return content.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{FLAG} {path}: {getattr(error, 'strerror', None) or error}") from error


def parse(lines: Sequence[str], path: str) -> list[Key]:
    """Make keys of lines; raises SettingsError, which names `path` as the place, for a line that is wrong."""
    keys: list[Key] = []
    names: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        if not text.startswith("{"):
            keys.append(Key(name=f"line-{number}", digest=digest_of(text.encode())))
            continue
        try:
            key = _parse_record(text)
        except ValueError as error:
            raise SettingsError(f"{FLAG} {path} line {number}: {error}") from error
        if key.revoked is None and names.setdefault(key.name, number) != number:
            raise SettingsError(f"{FLAG} {path} line {number}: the key of line {names[key.name]} has this name too")
        keys.append(key)
    return keys


def _parse_record(text: str) -> Key:
    """Make a key of a JSON object; raises ValueError, which names the field, for anything else."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("a line that begins with { must be a JSON object") from None
    fields = dict(record)
    name, digest = _text(fields, "name", _NAME), _text(fields, "sha256", _DIGEST)
    known: dict[str, Any] = {field: _instant(fields, field) for field in TIMES}
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
    """Read a date, or a date and time, of UTC where it names no zone; raises ValueError, which names `field`."""
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


def check_pattern(pattern: object, field: str) -> None:
    """Raise ValueError unless this can stand for routes or models."""
    is_text = isinstance(pattern, str) and 0 < len(pattern) <= 256 and "*" not in pattern[:-1]
    if not is_text or (field == "routes" and not str(pattern).startswith(("/", "*"))):
        what = "paths such as /v1/completions or /v1/*" if field == "routes" else "names such as my-model or mine/*"
        raise ValueError(f"`{field}` must be {what}. Given: {pattern!r}")


def _limit(fields: dict[str, Any], field: str) -> int | None:
    value = fields.pop(field, None)
    return None if value is None else check_limit(value, field)


def check_limit(value: object, field: str) -> int:
    """Return what can be a limit; raises ValueError for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_LIMIT:
        raise ValueError(f"`{field}` must be an integer within 1..{MAX_LIMIT}. Given: {value!r}")
    return value


# Writing


def line_of(key: Key) -> str:
    """Write a key as a line of its file."""
    times = {field: getattr(key, field) for field in TIMES}
    record: dict[str, Any] = {"name": key.name, "sha256": key.digest.hex()}
    record |= {field: shown(instant) for field, instant in times.items() if instant is not None}
    record |= {field: list(getattr(key, field)) for field in SCOPES if getattr(key, field)}
    record |= {field: getattr(key, field) for field in LIMITS if getattr(key, field) is not None}
    return json.dumps(record)


def shown(instant: datetime) -> str:
    """A date and time of UTC, to the second."""
    return instant.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@contextmanager
def editing(path: str) -> Iterator[list[str]]:
    """Give the lines of a file, none where there is no file; what they have become is written as a whole at the end.

    Whoever reads the file meanwhile sees all of the old or all of the new; whoever edits it waits for this to end.

    Raises:
        SettingsError: it cannot be read or written.
    """
    target = Path(path).resolve()  # what a link names is replaced, not the link
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
        raise SettingsError(f"{FLAG} {target}: cannot write beside it: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
            _take_after(target, file.fileno())
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except OSError as error:
        with suppress(OSError):
            os.unlink(name)
        raise SettingsError(f"{FLAG} {target}: {error.strerror}") from error


def _take_after(target: Path, descriptor: int) -> None:
    """Give the new file the mode and, where we may, the owner of the old one."""
    try:
        old = target.stat()
    except FileNotFoundError:
        os.fchmod(descriptor, NEW_FILE_MODE)
        return
    os.fchmod(descriptor, old.st_mode & 0o777)
    with suppress(PermissionError):
        os.fchown(descriptor, old.st_uid, old.st_gid)
