"""The accounts of tenants: of their keys, and of the sessions of users. Event loop only."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from funitel.proto.errors import Forbidden, FunitelError, NotReady
from funitel.proto.security.asker import SESSION_NAME
from funitel.proto.security.keys import Key
from funitel.proto.security.quota import QuotaReservation, TenantLimits
from funitel.proto.security.roles import Role
from funitel.proto.security.sessions import Session, SessionSigner
from funitel.router.auth.accounts import Account, Charge, TokenCounts
from funitel.router.auth.meter import Meter
from funitel.router.core.journal import RequestJournal
from funitel.router.telemetry.metrics import Metrics
from funitel.router.tenants.charges import Charges
from funitel.router.tenants.minute_log import MinuteLog
from funitel.router.tenants.snapshot import KeyRecord, PriceRecord, TenantSnapshot, UserRecord

SESSION_KEY = 0  # the id of what stands for the sessions of a user
MILLION = 1_000_000
KNOWN_SECONDS = 30.0  # that a request waits for the control plane which another router has admitted


class TenantUse:
    """What the accounts of one key or of one user's sessions write by the control plane.

    Attributes:
        user: as the control plane has it.
        meter: of all accounts of the user.
        is_session: whether it is of sessions.
    """

    def __init__(self, user: UserRecord, meter: Meter, key: int, directory: "TenantDirectory") -> None:
        self.user = user
        self.meter = meter
        self.is_session = key == SESSION_KEY
        self.key_limits = TenantLimits()
        self._key = key
        self._directory = directory

    @property
    def name(self) -> str:
        """The name of the user."""
        return self.user.name

    @property
    def role(self) -> Role:
        """The role of the user."""
        return self.user.role

    @property
    def limits(self) -> TenantLimits:
        """The limits of the user."""
        return self.user.limits

    def accounts(self) -> Sequence[Account]:
        """The accounts of all keys and sessions of the user."""
        return self._directory.accounts_of(self.name)

    def count_request(self) -> None:
        """Keep for the next router that a request began."""
        self._directory.minutes.count_request(self.name, self._key)

    def reserve(self, num_tokens: int) -> None:
        """Keep for the next router that tokens were reserved."""
        self._directory.minutes.reserve(self.name, self._key, num_tokens)

    def settle(self, num_reserved: int, num_used: int) -> None:
        """Keep for the next router that a reservation has ended."""
        self._directory.minutes.settle(self.name, self._key, num_reserved, num_used)

    def charge(self, journal: RequestJournal) -> Charge:
        """What is to be charged next for the request of a journal; of one that is replayed the same as before."""
        charges = self._directory.charges
        drawn: Sequence[Any] = journal.draw_next("charge", lambda: [charges.new_id(), time.time()])
        id, at = drawn
        journal.flush()  # before it is reserved
        return Charge(id, at, was_counted=not charges.has_made(id))

    @asynccontextmanager
    async def paying(
        self, charge: Charge, model: str, most: TokenCounts, used: Callable[[], TokenCounts], journal: RequestJournal
    ) -> AsyncIterator[None]:
        """Write what a request reserves where a month is limited, and by its end what it has used.

        Of a request that is replayed, what an earlier router has not written.

        Raises:
            QuotaExceeded: it is not left of the month.
            NotReady: the control plane does not answer.
        """
        charges, price = self._directory.charges, self._directory.prices.get(model)
        reservation = QuotaReservation(
            id=charge.id,
            at=charge.at,
            user=self.name,
            key=self._key,
            model=model,
            tokens=most.total,
            cost=_cost(price, most),
        )
        is_reserved = self.user.limits.is_monthly or self.key_limits.is_monthly
        if is_reserved and not journal.knows(f"reserved.{charge.id}"):
            await charges.reserve(reservation)  # if it was written and the answer was lost, the control plane knows it
            journal.draw(f"reserved.{charge.id}", lambda: True)
        is_refused = False
        try:
            yield
        except FunitelError:
            is_refused = True
            raise
        finally:
            tokens = used()
            settlement = reservation.settlement(
                requests=0 if is_refused and not tokens.total else 1,
                prompt_tokens=tokens.prompt,
                completion_tokens=tokens.completion,
                cost=_cost(price, tokens),
            )
            if not journal.knows(f"settled.{charge.id}"):
                journal.draw(f"settled.{charge.id}", lambda: True)
                journal.flush()  # before it is sent: a request is charged once at most
                charges.settle(settlement, is_reserved=is_reserved)


class TenantDirectory:
    """The accounts of all tenants, as the control plane last said.

    Attributes:
        charges: where their use is written.
        minutes: where what they use within a minute is kept.
        prices: by the name of the model.
    """

    def __init__(self, metrics: Metrics, charges: Charges, minutes: MinuteLog) -> None:
        self.charges = charges
        self.minutes = minutes
        self.prices: Mapping[str, PriceRecord] = {}
        self._is_known = asyncio.Event()
        self._metrics = metrics
        self._meters: dict[str, Meter] = {}
        self._keys: dict[int, Account] = {}
        self._records: dict[bytes, KeyRecord] = {}
        self._sessions: dict[str, Account] = {}
        self._users: dict[str, UserRecord] = {}
        self._ended: frozenset[str] = frozenset()
        self._signer: SessionSigner | None = None
        self._secret = ""

    def take(self, snapshot: TenantSnapshot) -> None:
        """Take note of what the control plane says; accounts that stay keep what they have used."""
        users = {user.name: user for user in snapshot.users}
        records = {bytes.fromhex(record.digest): record for record in snapshot.keys if record.user in users}
        if snapshot.secret != self._secret:
            self._secret, self._signer = snapshot.secret, SessionSigner(snapshot.secret)
        self.prices, self._ended = snapshot.prices_by_model(), snapshot.ended_sessions
        self._users = users
        self._meters = {name: self._meters.get(name) or Meter("user", is_strict=True) for name in self._users}
        sessions = {name: self._session_account(user) for name, user in self._users.items()}
        self._keys = {record.id: self._key_account(record) for record in records.values()}
        self._records = records
        self._sessions = sessions
        if not self._is_known.is_set():
            self._restore()
        self._is_known.set()

    def _restore(self) -> None:
        """Count what was used within the last minute through a router before this one."""
        now, wall_clock = time.monotonic(), time.time()
        for use in self.minutes.start():
            at = now - max(0.0, wall_clock - use.at)
            account = self._sessions.get(use.user) if use.key == SESSION_KEY else self._keys.get(use.key)
            if account is not None:
                account.restore(use.requests, use.tokens, at)
            if (meter := self._meters.get(use.user)) is not None:
                meter.restore(use.requests, use.tokens, at)

    def _session_account(self, user: UserRecord) -> Account:
        """The account of sessions; a user that is added again under the name of a deleted one has another."""
        digest = hashlib.sha256(f"sessions of {user.name} of {user.created}".encode()).digest()
        key = Key(name=f"{user.name}/{SESSION_NAME}", digest=digest, owner_id=f"user {digest.hex()}")
        known = self._sessions.get(user.name)
        if known is not None and known.key.digest != digest:
            known = None
        return self._account(known, key, user, SESSION_KEY, TenantLimits())

    def _key_account(self, record: KeyRecord) -> Account:
        limits = record.limits
        key = Key(
            name=f"{record.user}/{record.name}",
            digest=bytes.fromhex(record.digest),
            owner_id=f"number {record.id}",
            expires=None if record.expires is None else _instant(record.expires),
            routes=record.routes,
            models=record.models,
            requests_per_minute=limits.requests_per_minute,
            tokens_per_minute=limits.tokens_per_minute,
            max_concurrent_requests=limits.max_concurrent_requests,
            group=record.group and f"{record.user}/{record.group}",  # no user joins a group of another
        )
        return self._account(self._keys.get(record.id), key, self._users[record.user], record.id, limits)

    def _account(self, known: Account | None, key: Key, user: UserRecord, number: int, limits: TenantLimits) -> Account:
        tenant = known.tenant if known is not None else None
        if known is None or not isinstance(tenant, TenantUse):
            tenant = TenantUse(user, self._meters[user.name], number, self)
            known = Account(key, self._metrics, tenant)
        tenant.user, tenant.key_limits, known.key = user, limits, key
        return known

    def check_known(self) -> None:
        """Raise NotReady until the control plane has named the tenants."""
        if not self._is_known.is_set():
            raise NotReady("users and keys are not known yet: the control plane is starting")

    async def known(self) -> None:
        """Wait for a while until the control plane has named the tenants."""
        with suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_SECONDS):
                await self._is_known.wait()

    def find(self, digest: bytes, now: float) -> Account | None:
        """The account of a key that is valid.

        Raises:
            Forbidden: the key is banned.
        """
        record = self._records.get(digest)
        if record is None:
            return None
        account = self._keys[record.id]
        if not account.is_valid(now):
            return None
        if record.is_banned:
            raise Forbidden("this API key is banned: ask an admin of this server")
        return account

    def session(self, cookie: str) -> tuple[Session, Account] | None:
        """The session of a cookie and the account of its user, where both are valid."""
        session = None if self._signer is None else self._signer.session(cookie)
        if session is None or session.id in self._ended:
            return None
        user = self._users.get(session.user)
        if user is None or user.generation != session.generation:
            return None
        return session, self._sessions[user.name]

    def is_token_of(self, session: Session, token: str) -> bool:
        """Whether a token is that which pages of a session send with changes."""
        return self._signer is not None and self._signer.is_token_of(session, token)

    def of_owner(self, owner: str, now: float) -> Account | None:
        """The account of the valid key that things of an owner belong to (`Key.owner`)."""
        banned = {record.id for record in self._records.values() if record.is_banned}
        keys = (account for number, account in self._keys.items() if number not in banned)
        accounts = (*keys, *self._sessions.values())
        return next((each for each in accounts if each.key.owner == owner and each.is_valid(now)), None)

    def accounts_of(self, user: str) -> Sequence[Account]:
        """The accounts of a user: of the keys, and of the sessions."""
        accounts = (*self._keys.values(), *self._sessions.values())
        return [each for each in accounts if each.tenant is not None and each.tenant.name == user]


def _instant(seconds: float) -> datetime:
    """An instant of Unix seconds; the last that Python has for those after it."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return datetime.max.replace(tzinfo=UTC)


def _cost(price: PriceRecord | None, tokens: TokenCounts) -> float:
    """What tokens cost; nothing where the model has no price."""
    if price is None:
        return 0.0
    return (tokens.prompt * price.prompt + tokens.completion * price.completion) / MILLION
