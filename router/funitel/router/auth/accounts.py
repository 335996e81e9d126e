"""Accounts of API keys: check their routes, models and rate limits, and charge the tokens of requests. Knows no HTTP.

A key is looked up by its SHA-256. The time of a look-up depends on that hash only, and a client cannot choose a hash
near that of an unknown key, so it leaks nothing; a key itself is never compared or stored.
"""

import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass
from typing import Protocol

from funitel.proto.errors import Forbidden, FunitelError, QuotaExceeded, SettingsError
from funitel.proto.security.keys import SETTING_NAME, Key, covers, digest_of, keys_of
from funitel.proto.security.roles import Role
from funitel.proto.security.sessions import Session
from funitel.router.auth.access import Access
from funitel.router.auth.meter import LimitReached, Meter, MinuteLimits
from funitel.router.auth.wrong_keys import WrongKeys
from funitel.router.core.file_watch import FileWatch
from funitel.router.core.journal import UNKEPT, RequestJournal
from funitel.router.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

_SALT = secrets.token_bytes(16)


def owner_of(token: bytes) -> bytes:
    """The owner of a request, for the scheduler and the store of responses: a hash salted anew at every start."""
    return hashlib.blake2b(token, key=_SALT, digest_size=16).digest()


class Account:
    """What requests with one key have used. Event loop only; instants are of the monotonic clock.

    A key of the same digest that is read again takes its place in `key`: its limits change, what was used stays.

    Attributes:
        key: with its scopes and limits.
        tenant: the user that it belongs to, and what the control plane writes of it; None for a key of a file.
        owner: of its requests, as a hash.
    """

    def __init__(self, key: Key, metrics: Metrics, tenant: "AccountTenant | None" = None) -> None:
        self.key = key
        self.tenant = tenant
        self._metrics = metrics
        self.owner = owner_of(key.digest)
        self._meter = Meter("API key", is_strict=tenant is not None)

    def is_valid(self, wall_clock: float) -> bool:
        """Whether the key is neither revoked nor expired."""
        key = self.key
        return key.revoked is None and (key.expires is None or wall_clock < key.expires.timestamp())

    @property
    def _is_setting(self) -> bool:
        """Whether the key is a setting, not of a file."""
        return self.key.is_bare and self.key.name == SETTING_NAME

    @property
    def _meters(self) -> list[tuple[Meter, MinuteLimits]]:
        """What counts its requests, and the limits: of the key, and of the user."""
        own: tuple[Meter, MinuteLimits] = (self._meter, self.key)
        return [own] if self.tenant is None else [own, (self.tenant.meter, self.tenant.limits)]

    def check_route(self, path: str, access: Access = Access.KEY) -> None:
        """Raise Forbidden unless the key is for a route, by the path in the table of routes.

        One for operators, admins or users themselves must be among the key's routes by its very path, save for the key
        that is a setting and for sessions; a user's role must include that of the route.
        """
        if access is Access.CONTINUED:
            return
        routes = self.key.routes
        role = access.role
        if self.tenant is not None and role is not None and not self.tenant.role.includes(role):
            raise self._refusal("route", Forbidden(f"this takes the role {role}; yours is {self.tenant.role}"))
        is_free = self._is_setting or (self.tenant is not None and self.tenant.is_session)
        if access.needs_very_path and not is_free and path not in routes:
            words = f"this API key is for no operator's route: its `routes` must list {path}, without a pattern"
            raise self._refusal("route", Forbidden(words))
        if not covers(routes, path):
            words = f"this API key is for the routes {', '.join(routes)}. Given: {path}"
            raise self._refusal("route", Forbidden(words))

    def check_model(self, name: str) -> None:
        """Raise Forbidden unless the key is for a model."""
        models = self.key.models
        if not covers(models, name):
            words = f"this API key is for the models {', '.join(models)}. Given: {name!r}"
            raise self._refusal("model", Forbidden(words))

    @contextmanager
    def entered(self, now: float, *, is_background: bool = False, was_admitted: bool = False) -> Iterator[None]:
        """Count a request, which lasts as long as the block; one of a batch is not counted as one that runs.

        One that another router has admitted is neither refused nor counted again.

        Raises:
            RateLimited: the key has too many requests at once, or had too many, or too many tokens, within a minute.
        """
        if not was_admitted:
            with self.counting_refusals():
                for meter, limits in self._meters:
                    if not is_background:
                        meter.check_concurrency(limits)
                    meter.check_requests(limits, now)
            self._metrics.count_key_request(self.key.name)
            for meter, _ in self._meters:
                meter.count_request(now)
            if self.tenant is not None:
                self.tenant.count_request()
        with nullcontext() if is_background else self.prolonged():
            yield

    @contextmanager
    def prolonged(self) -> Iterator[None]:
        """Count a request that goes on after it was answered, as long as the block lasts."""
        with ExitStack() as running:
            for meter, _ in self._meters:
                running.enter_context(meter.running())
            yield

    def reserve(self, num_tokens: int, now: float, *, was_admitted: bool = False) -> None:
        """Reserve the maximum of tokens that a request may take, until it is settled.

        Raises:
            RateLimited: so many are not left of the minute; not for one that another router has admitted.
        """
        if not was_admitted:
            with self.counting_refusals():
                for meter, limits in self._meters:
                    meter.check_tokens(limits, num_tokens, now)
        for meter, _ in self._meters:
            meter.reserve(num_tokens)
        if self.tenant is not None:
            self.tenant.reserve(num_tokens)

    def settle(
        self, num_reserved: int, num_prompt: int, num_completion: int, now: float, *, was_counted: bool = False
    ) -> None:
        """End a reservation: what the request has taken is used.

        With `was_counted` there is none: what an earlier router has reserved counts as used.
        """
        if not was_counted:
            for meter, _ in self._meters:
                meter.settle(num_reserved, num_prompt + num_completion, now)
            if self.tenant is not None:
                self.tenant.settle(num_reserved, num_prompt + num_completion)
        self._metrics.count_key_tokens(self.key.name, num_prompt, num_completion)

    def restore(self, num_requests: int, num_tokens: int, now: float) -> None:
        """Count with the key alone what was used through a router before this one."""
        self._meter.restore(num_requests, num_tokens, now)

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count a limit of a minute or a month that the block finds reached."""
        try:
            yield
        except LimitReached as error:
            self._metrics.count_key_refused(self.key.name, error.reason)
            raise
        except QuotaExceeded as error:
            self._metrics.count_key_refused(self.key.name, error.limit)
            raise

    def _refusal(self, reason: str, error: FunitelError) -> FunitelError:
        """Count a refusal."""
        self._metrics.count_key_refused(self.key.name, reason)
        return error


class Accounts:
    """The accounts of all keys; where none was given, none is asked for.

    Raises SettingsError when the file of keys cannot be read, or is none.
    """

    def __init__(
        self,
        key: str | None,
        path: str | None,
        metrics: Metrics,
        max_wrong_keys: int = 0,
        ban_seconds: float = 300.0,
        tenants: "TenantAccounts | None" = None,
    ) -> None:
        self.wrong_keys = WrongKeys(max_wrong_keys, ban_seconds)
        self.is_asked_for = key is not None or path is not None or tenants is not None
        self.tenants = tenants
        self._key = key
        self._path = path
        self._metrics = metrics
        self._watch = FileWatch(*([] if path is None else [path]))
        self._by_digest: dict[bytes, Account] = {}
        self._by_owner: dict[str, list[Account]] = {}  # a revoked key may have the name of its successor
        self._read()

    def __len__(self) -> int:
        return len(self._by_digest)

    def _read(self) -> None:
        accounts = {}
        for key in keys_of(self._key, self._path):  # of one digest that is there twice the last line counts
            account = accounts[key.digest] = self._by_digest.get(key.digest) or Account(key, self._metrics)
            account.key = key
        by_owner: dict[str, list[Account]] = {}
        for account in accounts.values():
            by_owner.setdefault(account.key.owner, []).append(account)
        self._by_digest, self._by_owner = accounts, by_owner

    def refresh(self) -> None:
        """Read the file again if it has changed; one that is wrong changes nothing but the log. Any thread."""
        if not self._watch.has_changed():
            return
        try:
            self._read()
        except SettingsError as error:
            logger.error("the API keys stay as they were: %s", error.message)
        else:
            logger.info("API keys read again: %d", len(self))

    async def known(self) -> None:
        """Wait for a while until the keys of users are known."""
        if self.tenants is not None:
            await self.tenants.known()

    def find(self, tokens: tuple[bytes, ...]) -> Account | None:
        """The account of the first of `tokens` that is a valid key.

        Raises:
            Forbidden: the key is banned.
            NotReady: the keys of users are not known yet, and it is none of the others.
        """
        now = time.time()
        digests = [digest_of(token) for token in tokens if token]
        for digest in digests:
            account = self._by_digest.get(digest)
            if account is not None and account.is_valid(now):
                return account
        if self.tenants is None:
            return None
        self.tenants.check_known()
        return next((found for digest in digests if (found := self.tenants.find(digest, now)) is not None), None)

    def find_owner(self, owner: str) -> Account | None:
        """The account of the valid key that things of an owner belong to (`Key.owner`)."""
        now = time.time()
        for account in self._by_owner.get(owner, ()):
            if account.is_valid(now):
                return account
        return None if self.tenants is None else self.tenants.of_owner(owner, now)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of a request: a prompt that several sequences share counts once."""

    prompt: int = 0
    completion: int = 0

    @property
    def total(self) -> int:
        """Of both."""
        return self.prompt + self.completion


class TenantAccounts(Protocol):
    """The accounts of users' keys and sessions."""

    def check_known(self) -> None:
        """Raise NotReady until they are known."""

    async def known(self) -> None:
        """Wait for a while until they are known."""

    def find(self, digest: bytes, now: float) -> Account | None:
        """The account of a key that is valid; raises Forbidden for one that is banned."""

    def session(self, cookie: str) -> tuple[Session, Account] | None:
        """The session of a cookie and its account, where it is valid."""

    def is_token_of(self, session: Session, token: str) -> bool:
        """Whether a token is that which pages of a session send with changes."""

    def of_owner(self, owner: str, now: float) -> Account | None:
        """The account of the valid key that things of an owner belong to."""


@dataclass(frozen=True, slots=True)
class Charge:
    """What is charged for some sequences of a request.

    Attributes:
        id: unique for ever.
        at: when they were to begin, in Unix seconds.
        was_counted: an earlier router has reserved their tokens, which count as used within this minute.
    """

    id: str
    at: float
    was_counted: bool


class AccountTenant(Protocol):
    """The user that an account belongs to."""

    meter: Meter
    is_session: bool

    @property
    def name(self) -> str:
        """The name of the user."""

    @property
    def role(self) -> Role:
        """The role of the user."""

    @property
    def limits(self) -> MinuteLimits:
        """The limits of the user."""

    def accounts(self) -> Sequence[Account]:
        """The accounts of all keys and sessions of the user."""

    def count_request(self) -> None:
        """Keep for the next router that a request began."""

    def reserve(self, num_tokens: int) -> None:
        """Keep for the next router that tokens were reserved."""

    def settle(self, num_reserved: int, num_used: int) -> None:
        """Keep for the next router that a reservation has ended."""

    def charge(self, journal: RequestJournal) -> Charge:
        """What is to be charged next for the request of a journal; of one that is replayed the same as before."""

    def paying(
        self, charge: Charge, model: str, most: TokenCounts, used: Callable[[], TokenCounts], journal: RequestJournal
    ) -> AbstractAsyncContextManager[None]:
        """Write what a request reserves, and by its end what it has used; raises QuotaExceeded, NotReady."""


@asynccontextmanager
async def charged(
    account: Account | None,
    model: str,
    most: Callable[[], TokenCounts],
    used: Callable[[], TokenCounts],
    journal: RequestJournal = UNKEPT,
) -> AsyncIterator[None]:
    """Let the block run if the account has `most` tokens left, and charge what was `used` by its end.

    However it ends: a client that leaves pays for what was computed. A request that is replayed, by its `journal`, is
    not refused, and what an earlier router has charged is not charged again.

    Raises:
        RateLimited: the tokens are not left of the minute.
        QuotaExceeded: they are not left of the month.
        NotReady: what is left of the month cannot be known.
    """
    if account is None:
        yield
        return
    reserved = most()
    tenant = account.tenant
    charge = None if tenant is None else tenant.charge(journal)
    was_counted = charge is not None and charge.was_counted
    if not was_counted:
        account.reserve(reserved.total, time.monotonic(), was_admitted=journal.is_replayed)
    try:
        async with AsyncExitStack() as stack:
            if tenant is not None and charge is not None:
                with account.counting_refusals():
                    await stack.enter_async_context(tenant.paying(charge, model, reserved, used, journal))
            yield
    finally:
        tokens = used()
        account.settle(reserved.total, tokens.prompt, tokens.completion, time.monotonic(), was_counted=was_counted)
