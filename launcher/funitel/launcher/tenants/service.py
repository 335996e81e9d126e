"""Users, keys, sessions and charges: what each role may do, and what the router hears of it. Event loop only."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from itsdangerous import URLSafeTimedSerializer

from funitel.launcher.control_plane.store import StateThread
from funitel.launcher.tenants import accounts_store, usage_store
from funitel.launcher.tenants.broadcast import TenantBroadcast
from funitel.launcher.tenants.login_tries import LoginTries
from funitel.launcher.tenants.oidc import Identity
from funitel.launcher.tenants.passwords import Passwords, check_password
from funitel.launcher.tenants.records import AuditRow, Price, TenantKey, User
from funitel.launcher.tenants.usage_store import QuotaRefusal
from funitel.proto.errors import Conflict, Forbidden, NotFound, Unauthorized
from funitel.proto.security.asker import ANONYMOUS, SESSION_NAME
from funitel.proto.security.keys import digest_of, is_valid_name, new_key
from funitel.proto.security.quota import QuotaReservation, Settlement, TenantLimits
from funitel.proto.security.roles import Role
from funitel.proto.security.sessions import Session, SessionSigner

logger = logging.getLogger(__name__)

HINT_CHARACTERS = 4
MAX_NAME_CHARACTERS = 64
PROVIDER = "oidc"  # in the audit
MINUTE = 60.0
MAX_REFUSED = 60  # logins a minute that the audit has, of those that end at the provider: anyone can make them
MAX_KEYS = 100  # of a user, that are valid
WRONG_LOGIN = "wrong name or password"


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """The author of a change.

    Attributes:
        name: of the user, or of what stands for one.
        role: what the actor may do.
        address: of the client.
        action: method and path.
        user: the user, if the actor is one.
        via: name of the key or the session by which the actor came.
    """

    name: str
    role: Role
    address: str
    action: str
    user: str | None = None
    via: str = ""

    def require(self, role: Role) -> None:
        """Raise Forbidden where the actor's role is less."""
        if not self.role.includes(role):
            raise Forbidden(f"this takes the role {role}; {self.name} has the role {self.role}")

    @property
    def is_by_key(self) -> bool:
        """Whether the actor is a user that came by an API key, not by a session."""
        return self.user is not None and self.via != "" and not self.via.endswith(f"/{SESSION_NAME}")

    def require_session_or(self, role: Role) -> None:
        """Raise Forbidden for a user's key without a role: its scopes may be narrower than what the user may do."""
        if self.is_by_key and not self.role.includes(role):
            raise Forbidden("an API key makes and changes no keys: log in, or use a key of an admin")

    def require_self_or(self, user: str, role: Role = Role.ADMIN) -> None:
        """Raise Forbidden unless the actor is the user, or has a role."""
        if user != self.user:
            self.require(role)

    def row(self, object: str, status: int | None = 200) -> AuditRow:
        """The beginning of a row of the audit."""
        return AuditRow(
            at=time.time(),
            actor=self.name,
            role=str(self.role),
            via=self.via,
            address=self.address,
            action=self.action,
            object=object,
            status=status,
        )


class Tenants:
    """The users of a server and what is theirs.

    Attributes:
        broadcast: tells routers of each change.
    """

    def __init__(self, state: StateThread) -> None:
        self._state = state
        self._passwords = Passwords()
        self._tries = LoginTries()
        self._signer: SessionSigner | None = None
        self._secret = ""
        self._users: dict[str, User] = {}
        self._keys: dict[int, TenantKey] = {}
        self._prices: dict[str, Price] = {}
        self._ended: dict[str, float] = {}  # with the instants at which they would have expired
        self._refused: deque[float] = deque(maxlen=MAX_REFUSED)  # instants of logins that were noted
        self.broadcast = TenantBroadcast(self._snapshot)
        self._writing = asyncio.Lock()  # a change is read, checked and written before the next one

    async def start(self) -> None:
        """Read the state."""
        self._secret = await self._state(accounts_store.session_secret)
        self._signer = SessionSigner(self._secret)
        self._users = {each.name: each for each in await self._state(accounts_store.users)}
        self._keys = {each.id: each for each in await self._state(accounts_store.keys)}
        self._prices = {each.model: each for each in await self._state(accounts_store.prices)}
        self._ended = dict(await self._state(accounts_store.ended_sessions, time.time()))

    def close(self) -> None:
        """End the threads of passwords."""
        self._passwords.close()

    @property
    def signer(self) -> SessionSigner:
        """Signs sessions."""
        assert self._signer is not None, "start() reads the secret"
        return self._signer

    # Users

    @property
    def has_users(self) -> bool:
        """Whether there is any."""
        return bool(self._users)

    def users(self, actor: Actor) -> list[User]:
        """The users an actor may see: all for an admin, else only itself."""
        if actor.role is Role.ADMIN:
            return list(self._users.values())
        return [self._users[actor.user]] if actor.user in self._users else []

    def user(self, actor: Actor, name: str) -> User:
        """One user; raises NotFound, also for another one where the actor is no admin."""
        if name != actor.user and actor.role is not Role.ADMIN:
            raise NotFound(f"there is no user {name!r}")
        return self._found(name)

    def _found(self, name: str) -> User:
        if name not in self._users:
            raise NotFound(f"there is no user {name!r}")
        return self._users[name]

    async def add_user(self, actor: Actor, user: User, password: str | None) -> User:
        """Add a user; raises Conflict for a name that is taken."""
        actor.require(Role.ADMIN)
        if password is not None:
            user = replace(user, password_hash=await self._passwords.hash(check_password(password, user.name)))
        async with self._writing:
            user = replace(user, created=time.time())
            await self._state(accounts_store.add_user, user, actor.row(f"user {user.name}"))
            self._users[user.name] = user
        await self.broadcast.publish()
        return user

    async def change_user(self, actor: Actor, name: str, changes: Mapping[str, Any]) -> User:
        """Change role, limits or whether it is disabled; raises Conflict where no admin would be left."""
        actor.require(Role.ADMIN)
        async with self._writing:
            user = replace(self._found(name), **changes)
            self._check_admin_left(user)
            await self._write_user(actor, user)
        return user

    async def set_password(self, actor: Actor, name: str, password: str, current: str | None) -> None:
        """Set a password, which ends all sessions; a user that is no admin proves the current one."""
        actor.require_self_or(name)
        user = self._found(name)
        if user.subject is not None and user.password_hash is None:
            actor.require(Role.ADMIN)  # a session is not enough to log in without the provider from now on
        if user.name == actor.user and user.password_hash is not None:
            subjects = (f"user {name}", f"address {actor.address}")
            self._tries.check(subjects, time.monotonic())
            self._tries.count(subjects, time.monotonic())
            if not await self._passwords.is_right(user.password_hash, current or ""):
                raise Unauthorized("`current_password` is wrong")
            self._tries.succeed(subjects)
        hashed = await self._passwords.hash(check_password(password, name))
        async with self._writing:
            await self._write_user(actor, replace(self._found(name), password_hash=hashed).logged_out())

    async def delete_user(self, actor: Actor, name: str) -> None:
        """Delete a user and revoke the keys; raises Conflict where no admin would be left."""
        actor.require(Role.ADMIN)
        async with self._writing:
            self._check_admin_left(replace(self._found(name), is_disabled=True))
            keys = await self._state(accounts_store.delete_user, name, time.time(), actor.row(f"user {name}"))
            del self._users[name]
            self._keys |= {key.id: key for key in keys}
        await self.broadcast.publish()

    def _check_admin_left(self, changed: User) -> None:
        after = {**self._users, changed.name: changed}
        was = any(user.role is Role.ADMIN and not user.is_disabled for user in self._users.values())
        if was and not any(user.role is Role.ADMIN and not user.is_disabled for user in after.values()):
            raise Conflict(f"{changed.name} is the last admin: make another one first")

    async def _write_user(self, actor: Actor, user: User) -> None:
        await self._state(accounts_store.change_user, user, actor.row(f"user {user.name}"))
        self._users[user.name] = user
        await self.broadcast.publish()

    # Sessions

    async def log_in(self, name: str, password: str, address: str) -> tuple[User, str]:
        """Begin a session; returns the user and the cookie.

        Raises:
            Unauthorized: name or password are wrong, or the user is disabled.
            RateLimited: too many were wrong.
        """
        is_name = is_valid_name(name)  # what is none is neither counted by name nor kept
        subjects = (f"address {address}", *([f"user {name}"] if is_name else []))
        self._tries.check(subjects, time.monotonic())
        self._tries.count(subjects, time.monotonic())
        user = self._users.get(name)
        is_right = await self._passwords.is_right(None if user is None else user.password_hash, password)
        now = self._users.get(name)
        if not is_right or user is None or now is None or now.is_disabled or not user.has_same_login(now):
            actor = Actor(name=name if is_name else ANONYMOUS, role=Role.USER, address=address, action="log in")
            await self._state(accounts_store.note, actor.row(f"session of {name}" if is_name else "session", 401))
            raise Unauthorized(WRONG_LOGIN)
        self._tries.succeed(subjects)
        return user, await self.begin_session(user, address)

    async def begin_session(self, user: User, address: str) -> str:
        """Begin a session of a user that was recognised; returns the cookie."""
        actor = Actor(name=user.name, role=user.role, address=address, action="log in", user=user.name)
        await self._state(accounts_store.note, actor.row(f"session of {user.name}"))
        return self.signer.new(user.name, user.generation)

    async def note_refused(self, address: str, status: int) -> None:
        """Note in the audit that a login at the provider was refused; of many within a minute, the first ones."""
        now = time.monotonic()
        if len(self._refused) == MAX_REFUSED and now - self._refused[0] < MINUTE:
            return
        self._refused.append(now)
        actor = Actor(name=PROVIDER, role=Role.USER, address=address, action="log in")
        await self._state(accounts_store.note, actor.row("session", status))

    async def end_session(self, actor: Actor, session: Session) -> None:
        """End one session."""
        now, row = time.time(), replace(actor.row(f"session of {session.user}"), action="log out")
        await self._state(accounts_store.end_session, session.id, session.expires, now, row)
        self._ended = {id: until for id, until in self._ended.items() if until >= now} | {session.id: session.expires}
        await self.broadcast.publish()

    async def user_of_identity(self, identity: Identity) -> User:
        """The user that a provider's person is; one that is seen first becomes a user without a password.

        The last admin stays one, whatever role the provider names.

        Raises:
            Unauthorized: the user is disabled.
            Conflict: a user of that name logs in otherwise.
        """
        user = next((user for user in self._users.values() if user.subject == identity.subject), None)
        provider = Actor(name=PROVIDER, role=Role.ADMIN, address="", action="log in")
        if user is None:
            name = _as_name(identity.name)
            if name in self._users:
                raise Conflict(f"there is a user {name!r} that does not log in at this provider: an admin must decide")
            new = User(name=name, role=identity.role or Role.USER, subject=identity.subject)
            return await self.add_user(provider, new, None)
        if user.is_disabled:
            raise Unauthorized("this user is disabled")
        if identity.role is not None and identity.role is not user.role:
            try:
                user = await self.change_user(provider, user.name, {"role": identity.role})
            except Conflict as error:
                logger.warning("the provider names the role %s: %s", identity.role, error.message)
        return user

    def serializer(self, salt: str) -> URLSafeTimedSerializer:
        """Signs what a browser keeps for a purpose, which the salt names."""
        return URLSafeTimedSerializer(self._secret, salt=salt)

    def user_of(self, session: Session | None) -> User | None:
        """The user of a session that is valid."""
        if session is None or session.id in self._ended:
            return None
        user = self._users.get(session.user)
        is_valid = user is not None and not user.is_disabled and user.generation == session.generation
        return user if is_valid else None

    # Keys

    def keys(self, actor: Actor, user: str | None = None) -> list[TenantKey]:
        """The keys an actor may see: all for an admin, else its own."""
        if actor.role is not Role.ADMIN:
            user = actor.user
        return [key for key in self._keys.values() if user is None or key.user == user]

    def key(self, actor: Actor, number: int) -> TenantKey:
        """One key; raises NotFound, also for one of another user where the actor is no admin."""
        key = self._keys.get(number)
        if key is None or (key.user != actor.user and actor.role is not Role.ADMIN):
            raise NotFound(f"there is no key {number}")
        return key

    async def add_key(self, actor: Actor, key: TenantKey) -> tuple[TenantKey, str]:
        """Make a key for a user; returns it and its text, which is stored nowhere."""
        actor.require_self_or(key.user)
        actor.require_session_or(Role.ADMIN)
        self._found(key.user)
        text = new_key()
        is_managed = key.user != actor.user
        made = replace(key, created=time.time(), is_managed=is_managed, **_secret(text))
        row = actor.row(f"key {key.user}/{key.name}")
        async with self._writing:
            self._check_room(key.user, 1)
            (added,) = await self._state(accounts_store.add_keys, [made], [row])
            self._keys[added.id] = added
        await self.broadcast.publish()
        return added, text

    async def import_keys(self, actor: Actor, keys: Sequence[TenantKey]) -> list[TenantKey]:
        """Take over keys by their digests; all or none."""
        actor.require(Role.ADMIN)
        rows = [actor.row(f"key {key.user}/{key.name}") for key in keys]
        async with self._writing:
            for user in {key.user for key in keys}:
                self._check_room(user, sum(key.user == user and key.revoked is None for key in keys))
            added = await self._state(accounts_store.add_keys, keys, rows)
            self._keys |= {each.id: each for each in added}
        await self.broadcast.publish()
        return added

    def _check_room(self, user: str, count: int) -> None:
        """Raise Conflict where a user would have too many valid keys: the router hears of all at each change."""
        found = sum(key.user == user and key.revoked is None for key in self._keys.values())
        if found + count > MAX_KEYS:
            raise Conflict(f"a user has at most {MAX_KEYS} keys, {user!r} has {found}: revoke some first")

    async def change_key(self, actor: Actor, number: int, changes: Mapping[str, Any]) -> TenantKey:
        """Change name, scopes, limits, expiry or group of a key.

        An admin alone changes a ban, and all but the name of a key that an admin has made or changed for the user.
        """
        actor.require_session_or(Role.ADMIN)
        if "is_banned" in changes:
            actor.require(Role.ADMIN)
        key = self.key(actor, number)
        bounds = {name for name, value in changes.items() if name != "name" and value != getattr(key, name)}
        if key.is_managed and bounds and actor.role is not Role.ADMIN:
            raise Forbidden(f"an admin has set the bounds of the key {key.name!r}, and alone changes them")
        is_managed = key.is_managed or (key.user != actor.user and bool(bounds))
        return await self._write_key(actor, number, {**changes, "is_managed": is_managed})

    async def revoke_key(self, actor: Actor, number: int) -> TenantKey:
        """Revoke a key for ever; requests that run go on."""
        return await self._write_key(actor, number, {"revoked": time.time()})

    async def rotate_key(self, actor: Actor, number: int) -> tuple[TenantKey, str]:
        """Give a key another text, with which its limits and its usage go on; the old one is not valid any more."""
        text = new_key()
        return await self._write_key(actor, number, _secret(text)), text

    async def _write_key(self, actor: Actor, number: int, changes: Mapping[str, Any]) -> TenantKey:
        async with self._writing:
            key = self.key(actor, number)
            if key.revoked is not None:
                raise Conflict(f"the key {key.name!r} is revoked")
            row = actor.row(f"key {key.user}/{key.name}")
            key = replace(key, **changes)
            await self._state(accounts_store.change_key, key, row)
            self._keys[number] = key
        await self.broadcast.publish()
        return key

    # Prices, usage, audit

    def prices(self) -> list[Price]:
        """The prices of models."""
        return list(self._prices.values())

    async def set_price(self, actor: Actor, price: Price) -> None:
        """Set the price of a model."""
        actor.require(Role.ADMIN)
        await self._state(accounts_store.set_price, price, actor.row(f"price {price.model}"))
        self._prices[price.model] = price
        await self.broadcast.publish()

    async def usage(self, actor: Actor, *, first: str, last: str, user: str | None) -> list[dict[str, Any]]:
        """What was used, with the names of keys; of the actor alone where it is no admin."""
        if actor.role is not Role.ADMIN:
            user = actor.user or ""
        rows = await self._state(usage_store.usage, first=first, last=last, user=user)
        return [row | {"key_name": self._name_of(row["key"])} for row in rows]

    def _name_of(self, number: int) -> str:
        return self._keys[number].name if number in self._keys else ""

    async def audit(self, asker: Actor, **filters: Any) -> list[tuple[int, AuditRow]]:
        """Rows of the audit, newest first."""
        asker.require(Role.ADMIN)
        return await self._state(accounts_store.audit, **filters)

    async def note(self, row: AuditRow) -> None:
        """Append a row to the audit."""
        await self._state(accounts_store.note, row)

    # The router

    async def charge(
        self, router: str, number: int, reservations: Sequence[QuotaReservation], settlements: Sequence[Settlement]
    ) -> list[QuotaRefusal | None]:
        """Settle requests and reserve for others."""
        limited = [(each, self._limits_of_key(each.key), self._limits_of_user(each.user)) for each in reservations]
        return await self._state(usage_store.charge, router, number, time.time(), limited, settlements)

    def _limits_of_key(self, number: int) -> TenantLimits:
        return self._keys[number].limits if number in self._keys else TenantLimits()

    def _limits_of_user(self, name: str) -> TenantLimits:
        return self._users[name].limits if name in self._users else TenantLimits()

    def _snapshot(self) -> dict[str, Any]:
        users = sorted(self._users.values(), key=lambda user: user.name)
        return {
            "secret": self._secret,
            "users": [user.to_json() | {"generation": user.generation} for user in users if not user.is_disabled],
            "keys": [key.to_json() | {"digest": key.digest} for key in self._keys.values() if key.revoked is None],
            "prices": [price.to_json() for price in self._prices.values()],
            "ended_sessions": sorted(self._ended),
        }


def _as_name(text: str) -> str:
    """A name for a user, near what a provider calls the person."""
    name = "".join(each if each.isascii() and (each.isalnum() or each in "._@-") else "-" for each in text)
    return name.lstrip("._@-")[:MAX_NAME_CHARACTERS] or "user"


def _secret(text: str) -> dict[str, Any]:
    return {"digest": digest_of(text.encode()).hex(), "hint": text[-HINT_CHARACTERS:]}
