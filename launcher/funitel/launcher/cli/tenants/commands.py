"""`funitel user`, `funitel key import`, `funitel usage` and `funitel audit`: ask a running server."""

import getpass
import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

from funitel.launcher.cli.fleet.requests import api_of, list_of, object_of, print_table, stdout
from funitel.launcher.cli.tenants.settings import (
    AuditSettings,
    ChangeUserSettings,
    DeleteUserSettings,
    ImportKeysSettings,
    ListUsersSettings,
    NewUserKeySettings,
    NewUserSettings,
    PasswordSettings,
    RevokeUserKeySettings,
    RotateUserKeySettings,
    UsageSettings,
    UserKeysSettings,
)
from funitel.launcher.terminal_ui.terminal import one_line
from funitel.proto.errors import SettingsError
from funitel.proto.security.keys import FLAG, parse, read_lines
from funitel.proto.settings.fields import as_command, require

USERS, KEYS = "/v1/users", "/v1/keys"

# Users


def add(settings: NewUserSettings) -> None:
    """Add a user."""
    require(not (settings.password_stdin and settings.no_password), "give --password-stdin or --no-password, not both")
    body: dict[str, Any] = {"name": settings.name, "limits": settings.limits}
    body |= {} if settings.role is None else {"role": settings.role}
    if not settings.no_password:
        body["password"] = _password(is_from_stdin=settings.password_stdin)
    api = api_of(settings)
    user = object_of(api.send("POST", USERS, body), api)
    print(json.dumps(user) if settings.json else f"{one_line(str(user.get('name')))} is a user: {user.get('role')}")


def list_all(settings: ListUsersSettings) -> None:
    """Print users."""
    api = api_of(settings)
    users = list_of(api.send("GET", USERS), "users", api)
    if settings.json:
        print(json.dumps(users))
    elif not users:
        print("no user: funitel user new NAME --role admin adds the first one")
    else:
        rows = [[str(user.get("name")), str(user.get("role")), _state(user), _limits(user)] for user in users]
        print_table(stdout(), ["NAME", "ROLE", "STATE", "LIMITS"], rows)


def _state(user: Mapping[str, Any]) -> str:
    if user.get("is_disabled"):
        return "disabled"
    if user.get("subject"):
        return "OpenID Connect"
    return "password" if user.get("has_password") else "keys only"


def _limits(record: Mapping[str, Any]) -> str:
    limits = record.get("limits")
    found = limits.items() if isinstance(limits, dict) else ()
    return " ".join(f"{name}={value}" for name, value in found if value is not None) or "-"


def change(settings: ChangeUserSettings) -> None:
    """Change a user."""
    require(not (settings.disable and settings.enable), "give --disable or --enable, not both")
    body: dict[str, Any] = {"limits": settings.limits} if settings.limits else {}
    body |= {} if settings.role is None else {"role": settings.role}
    body |= {"is_disabled": settings.disable} if settings.disable or settings.enable else {}
    require(bool(body), "nothing is to be changed: give --role, a limit, --disable or --enable")
    api = api_of(settings)
    user = object_of(api.send("PATCH", _path(USERS, settings.name), body), api)
    print(json.dumps(user) if settings.json else f"{one_line(settings.name)} is changed")


def set_password(settings: PasswordSettings) -> None:
    """Set a password."""
    body = {"password": _password(is_from_stdin=settings.password_stdin)}
    api_of(settings).send("POST", f"{_path(USERS, settings.name)}/password", body)
    print(f"the password of {one_line(settings.name)} is set")


def delete(settings: DeleteUserSettings) -> None:
    """Delete a user."""
    api_of(settings).send("DELETE", _path(USERS, settings.name))
    print(f"{one_line(settings.name)} is deleted")


def _password(*, is_from_stdin: bool) -> str:
    """A password from stdin, or twice from the terminal; raises SettingsError."""
    if is_from_stdin:
        return sys.stdin.readline().rstrip("\r\n")
    if not sys.stdin.isatty():
        raise SettingsError("a password is read from the terminal: run it there, or give --password-stdin")
    password = getpass.getpass("Password: ")
    require(getpass.getpass("Again: ") == password, "the two passwords differ")
    return password


# Keys


def new_key(settings: NewUserKeySettings) -> None:
    """Make a key, and print its text."""
    body: dict[str, Any] = {"name": settings.key_name, "user": settings.name, "limits": settings.limits}
    body |= {name: list(values) for name in ("routes", "models") if (values := getattr(settings, name))}
    body |= {name: value for name in ("expires", "group") if (value := getattr(settings, name)) is not None}
    api = api_of(settings)
    key = object_of(api.send("POST", KEYS, body), api)
    print(json.dumps(key) if settings.json else str(key.get("key")))


def list_keys(settings: UserKeysSettings) -> None:
    """Print the keys of a user."""
    api = api_of(settings)
    keys = list_of(api.send("GET", f"{KEYS}?{urlencode({'user': settings.name})}"), "keys", api)
    if settings.json:
        print(json.dumps(keys))
        return
    rows = [
        [str(key.get("id")), str(key.get("name")), f"...{key.get('hint')}", _key(key), _limits(key)] for key in keys
    ]
    print_table(stdout(), ["ID", "NAME", "KEY", "STATE", "LIMITS"], rows)


def _key(key: Mapping[str, Any]) -> str:
    if key.get("revoked"):
        return f"revoked {_instant(key['revoked'])}"
    if key.get("is_banned"):
        return "banned"
    if key.get("expires"):
        return f"{'expired' if key['expires'] < time.time() else 'expires'} {_instant(key['expires'])}"
    return "valid"


def revoke_key(settings: RevokeUserKeySettings) -> None:
    """Revoke a key."""
    api_of(settings).send("DELETE", f"{KEYS}/{settings.id}")
    print(f"the key {settings.id} is revoked")


def rotate_key(settings: RotateUserKeySettings) -> None:
    """Give a key another text, and print it."""
    api = api_of(settings)
    print(object_of(api.send("POST", f"{KEYS}/{settings.id}/rotate", {}), api).get("key"))


def import_keys(settings: ImportKeysSettings) -> None:
    """Take over the keys of a file."""
    path, user = settings.api_key_file, settings.user
    if path is None or user is None:
        raise SettingsError(f"{FLAG} and --user must be given")
    lines = read_lines(path)
    parse(lines, path)  # raises with the line of the file
    api = api_of(settings)
    body = {"user": user, "lines": [line if line.strip() else " " for line in lines]}
    added = list_of(api.send("POST", f"{KEYS}/import", body), "keys", api)
    count = "1 key belongs" if len(added) == 1 else f"{len(added)} keys belong"
    print(f"{count} to {one_line(user)} now: start the server without {FLAG}")


# Usage and audit


def usage(settings: UsageSettings) -> None:
    """Print usage."""
    names = ("first", "last", "user")
    query = {name: value for name in names if (value := getattr(settings, name)) is not None}
    api = api_of(settings)
    rows = list_of(api.send("GET", f"/v1/usage?{urlencode(query)}"), "usage", api)
    if settings.json:
        print(json.dumps(rows))
        return
    columns = ["DAY", "USER", "KEY", "MODEL", "REQUESTS", "PROMPT", "COMPLETION", "UNSETTLED", "COST"]
    fields = ("day", "user", "key_name", "model", "requests", "prompt_tokens", "completion_tokens", "unsettled_tokens")
    cells = [[*(str(row.get(name) or "-") for name in fields), f"{row.get('cost') or 0:.6g}"] for row in rows]
    print_table(stdout(), columns, cells)


def audit(settings: AuditSettings) -> None:
    """Print rows of the audit."""
    query: dict[str, Any] = {"limit": settings.limit}
    query |= {name: value for name in ("actor", "object") if (value := getattr(settings, name)) is not None}
    api = api_of(settings)
    rows = list_of(api.send("GET", f"/v1/audit?{urlencode(query)}"), "audit", api)
    if settings.json:
        print(json.dumps(rows))
        return
    cells = [
        [
            _instant(row["at"]),
            *(str(row.get(name) or "-") for name in ("actor", "action", "object", "status", "address")),
        ]
        for row in rows
    ]
    print_table(stdout(), ["AT", "ACTOR", "ACTION", "OBJECT", "STATUS", "ADDRESS"], cells)


def _path(base: str, name: str) -> str:
    return f"{base}/{quote(name, safe='')}"


def _instant(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


_NAME = {"name": "Name of the user."}
_ID = {"id": "Number of the key, as `funitel user keys` lists it."}
USER_COMMANDS: Mapping[str, Callable[..., None]] = {
    "new": as_command(NewUserSettings, add, _NAME),
    "list": as_command(ListUsersSettings, list_all),
    "change": as_command(ChangeUserSettings, change, _NAME),
    "password": as_command(PasswordSettings, set_password, _NAME),
    "delete": as_command(DeleteUserSettings, delete, _NAME),
    "keys": as_command(UserKeysSettings, list_keys, _NAME),
    "new-key": as_command(NewUserKeySettings, new_key, _NAME),
    "revoke-key": as_command(RevokeUserKeySettings, revoke_key, _ID),
    "rotate-key": as_command(RotateUserKeySettings, rotate_key, _ID),
}
