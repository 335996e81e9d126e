"""Settings of the commands about users, keys, usage and the audit of a running server."""

from dataclasses import dataclass
from typing import Any

from funitel.launcher.cli.fleet.settings import FleetClientSettings, given, json_switch, switch
from funitel.proto.security.keys import FLAG
from funitel.proto.security.roles import Role
from funitel.proto.settings.bounds import AT_LEAST_ONE, NOT_NEGATIVE
from funitel.proto.settings.fields import setting

LIMITS = (
    *("requests_per_minute", "tokens_per_minute", "max_concurrent_requests"),
    *("requests_per_month", "tokens_per_month", "budget_per_month"),
)


def _role() -> Any:
    return given("What the user may do.", choices=tuple(map(str, Role)))


@dataclass(frozen=True, kw_only=True)
class LimitSettings(FleetClientSettings):
    """Limits of a user or a key."""

    requests_per_minute: int | None = given("Maximum of requests in a minute.", bounds=AT_LEAST_ONE)
    tokens_per_minute: int | None = given("Maximum of tokens, prompt and completion, in a minute.", bounds=AT_LEAST_ONE)
    max_concurrent_requests: int | None = given("Maximum of requests in flight.", bounds=AT_LEAST_ONE)
    requests_per_month: int | None = given("Maximum of requests in a month.", bounds=AT_LEAST_ONE)
    tokens_per_month: int | None = given("Maximum of tokens, prompt and completion, in a month.", bounds=AT_LEAST_ONE)
    budget_per_month: float | None = given("Maximum of the cost of tokens in a month.", bounds=NOT_NEGATIVE)
    json: bool = json_switch()

    @property
    def limits(self) -> dict[str, Any]:
        """The limits that are given."""
        return {name: value for name in LIMITS if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, kw_only=True)
class NewUserSettings(LimitSettings):
    """Add a user; the password is read from the terminal, or from stdin with --password-stdin."""

    name: str
    role: str | None = _role()
    password_stdin: bool = switch("Read the password from stdin.")
    no_password: bool = switch("Add a user that has keys and cannot log in.")


@dataclass(frozen=True, kw_only=True)
class ListUsersSettings(FleetClientSettings):
    """List users."""

    json: bool = json_switch()


@dataclass(frozen=True, kw_only=True)
class ChangeUserSettings(LimitSettings):
    """Change role or limits of a user, or disable it."""

    name: str
    role: str | None = _role()
    disable: bool = switch("Refuse sessions and keys of the user.")
    enable: bool = switch("Accept them again.")


@dataclass(frozen=True, kw_only=True)
class PasswordSettings(FleetClientSettings):
    """Set the password of a user, which ends all sessions."""

    name: str
    password_stdin: bool = switch("Read the password from stdin.")


@dataclass(frozen=True, kw_only=True)
class DeleteUserSettings(FleetClientSettings):
    """Delete a user, and revoke the keys."""

    name: str


@dataclass(frozen=True, kw_only=True)
class NewUserKeySettings(LimitSettings):
    """Make a key for a user; its text is printed once."""

    name: str
    key_name: str = setting("default", "Name of the key in logs and metrics.", env=None)
    expires: str | None = given("Expiry: a date such as 2027-01-31, or a date and time of UTC.")
    routes: tuple[str, ...] = setting((), "Path that the key may use, repeatable; every route if none.", env=None)
    models: tuple[str, ...] = setting((), "Model that the key may use, repeatable; every model if none.", env=None)
    group: str | None = given("Group of the key: keys of one group share cached prefixes.")


@dataclass(frozen=True, kw_only=True)
class UserKeysSettings(FleetClientSettings):
    """List the keys of a user."""

    name: str
    json: bool = json_switch()


@dataclass(frozen=True, kw_only=True)
class RevokeUserKeySettings(FleetClientSettings):
    """Revoke a key for ever."""

    id: int


@dataclass(frozen=True, kw_only=True)
class RotateUserKeySettings(FleetClientSettings):
    """Give a key another text, which is printed once; the old one is not valid any more."""

    id: int


@dataclass(frozen=True, kw_only=True)
class ImportKeysSettings(FleetClientSettings):
    """Take over the keys of a file as keys of a user; the file stays as it is."""

    api_key_file: str | None = setting(None, f"File of keys: the one of {FLAG}.")
    user: str | None = given("User that the keys become those of.")


@dataclass(frozen=True, kw_only=True)
class UsageSettings(FleetClientSettings):
    """Show what was used, by day, user, key and model."""

    first: str | None = given("First day of UTC, such as 2027-01-01; 30 days before the last when not given.")
    last: str | None = given("Last day of UTC; today when not given.")
    user: str | None = given("User; all that one may see when not given.")
    json: bool = json_switch()


@dataclass(frozen=True, kw_only=True)
class AuditSettings(FleetClientSettings):
    """Show changes of state, newest first."""

    actor: str | None = given("Changes by this user.")
    object: str | None = given("Changes of this object, such as `user ann` or `model tiny`.")
    limit: int = setting(100, "Maximum of rows.", env=None, bounds=AT_LEAST_ONE)
    json: bool = json_switch()
