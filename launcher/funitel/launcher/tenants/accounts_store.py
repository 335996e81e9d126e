"""Users, API keys, prices and sessions in the database of the control plane; each change with its row of the audit.

Functions of the store, for `StateThread`: each is one transaction, which is on the disk when the function returns.
"""

import json
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from funitel.launcher.control_plane.schema import (
    AUDIT,
    ENDED_SESSIONS,
    KEYS,
    PRICES,
    RESERVATIONS,
    SECRETS,
    USAGE,
    USERS,
)
from funitel.launcher.control_plane.store import StateStore
from funitel.launcher.tenants.records import AuditRow, Price, TenantKey, User
from funitel.proto.errors import Conflict, NotFound
from funitel.proto.security.quota import TenantLimits
from funitel.proto.security.roles import Role

SESSION_SECRET = "sessions"
SECRET_BYTES = 32

# Users


def users(store: StateStore) -> list[User]:
    """All users, by name."""
    with store.transaction() as db:
        return [_user(row) for row in db.execute(select(USERS).order_by(USERS.c.name))]


def add_user(store: StateStore, user: User, audit: AuditRow) -> None:
    """Write a new user.

    Raises:
        Conflict: there is one of that name, or of that subject.
    """
    try:
        with store.transaction() as db:
            if _row_of_user(db, user.name) is not None:
                raise Conflict(f"there is a user {user.name!r}")
            db.execute(insert(USERS).values(name=user.name, **_values(user)))
            add_audit(db, replace(audit, after=user.to_json()))
    except IntegrityError as error:
        raise Conflict(f"another user has the subject {user.subject!r}") from error


def change_user(store: StateStore, user: User, audit: AuditRow) -> None:
    """Write a user that is there; raises NotFound for one that is not."""
    with store.transaction() as db:
        before = _row_of_user(db, user.name)
        if before is None:
            raise NotFound(f"there is no user {user.name!r}")
        db.execute(update(USERS).where(USERS.c.name == user.name).values(**_values(user)))
        add_audit(db, replace(audit, before=_user(before).to_json(), after=user.to_json()))


def delete_user(store: StateStore, name: str, now: float, audit: AuditRow) -> list[TenantKey]:
    """Remove a user and revoke the keys; returns these.

    Keys, usage and reservations stay under a name that is valid for none: a user of the old name that is added later
    begins without them. Raises NotFound.
    """
    revoked = []
    with store.transaction() as db:
        before = _row_of_user(db, name)
        if before is None:
            raise NotFound(f"there is no user {name!r}")
        gone = f"{name}~{round(1000 * now):x}"
        for row in db.execute(select(KEYS).where(KEYS.c.user == name)).all():
            key = _key(row)
            after = replace(key, user=gone, revoked=now if key.revoked is None else key.revoked)
            _write_key(db, after)
            revoked.append(after)
            if key.revoked is None:
                of_key = replace(audit, object=f"key {name}/{key.name}")
                add_audit(db, replace(of_key, before=key.to_json(), after=after.to_json()))
        for table in (USAGE, RESERVATIONS):
            db.execute(update(table).where(table.c.user == name).values(user=gone))
        db.execute(delete(USERS).where(USERS.c.name == name))
        add_audit(db, replace(audit, before=_user(before).to_json()))
    return revoked


def _row_of_user(db: Connection, name: str) -> Row[Any] | None:
    return db.execute(select(USERS).where(USERS.c.name == name)).one_or_none()


def _values(user: User) -> dict[str, Any]:
    content = {name: value for name, value in user.to_json().items() if name not in ("name", "subject", "has_password")}
    return {
        "subject": user.subject,
        "password_hash": user.password_hash,
        "generation": user.generation,
        "content": json.dumps(content),
    }


def _user(row: Row[Any]) -> User:
    content = json.loads(row.content)
    return User(
        name=row.name,
        subject=row.subject,
        password_hash=row.password_hash,
        generation=row.generation,
        role=Role(content["role"]),
        limits=TenantLimits.from_json(content["limits"]),
        created=content["created"],
        is_disabled=content["is_disabled"],
    )


# Keys


def keys(store: StateStore) -> list[TenantKey]:
    """All keys, also revoked ones, in the order in which they were made."""
    with store.transaction() as db:
        return [_key(row) for row in db.execute(select(KEYS).order_by(KEYS.c.id))]


def add_keys(store: StateStore, new: Sequence[TenantKey], audits: Sequence[AuditRow]) -> list[TenantKey]:
    """Write new keys, all or none, each with its row of the audit; returns them with their ids.

    Raises:
        Conflict: the user has a valid key of that name, or the key is there already.
        NotFound: there is no such user.
    """
    added = []
    try:
        with store.transaction() as db:
            for key, audit in zip(new, audits, strict=True):
                if _row_of_user(db, key.user) is None:
                    raise NotFound(f"there is no user {key.user!r}")
                _check_free(db, key)
                content = json.dumps(key.to_json())
                made = db.execute(insert(KEYS).values(user=key.user, digest=key.digest, content=content))
                (number,) = made.inserted_primary_key or (0,)
                key = replace(key, id=number)
                _write_key(db, key)
                add_audit(db, replace(audit, after=key.to_json()))
                added.append(key)
    except IntegrityError as error:
        raise Conflict("one of the keys is there already, maybe under another name") from error
    return added


def change_key(store: StateStore, key: TenantKey, audit: AuditRow) -> None:
    """Write a key that is there, also with another digest; raises NotFound, or Conflict for a name that is taken."""
    with store.transaction() as db:
        row = db.execute(select(KEYS).where(KEYS.c.id == key.id)).one_or_none()
        if row is None:
            raise NotFound(f"there is no key {key.id}")
        if key.revoked is None:
            _check_free(db, key)
        _write_key(db, key)
        add_audit(db, replace(audit, before=_key(row).to_json(), after=key.to_json()))


def _check_free(db: Connection, key: TenantKey) -> None:
    for row in db.execute(select(KEYS).where(KEYS.c.user == key.user, KEYS.c.id != key.id)):
        other = _key(row)
        if other.name == key.name and other.revoked is None:
            raise Conflict(f"the user {key.user!r} has a key {key.name!r}")


def _write_key(db: Connection, key: TenantKey) -> None:
    content = json.dumps(key.to_json())
    db.execute(update(KEYS).where(KEYS.c.id == key.id).values(user=key.user, digest=key.digest, content=content))


def _key(row: Row[Any]) -> TenantKey:
    content = json.loads(row.content)
    content |= {"id": row.id, "digest": row.digest, "limits": TenantLimits.from_json(content["limits"])}
    return TenantKey.from_json(content | {name: tuple(content[name]) for name in ("routes", "models")})


# Prices


def prices(store: StateStore) -> list[Price]:
    """The prices of models, by name."""
    with store.transaction() as db:
        rows = db.execute(select(PRICES).order_by(PRICES.c.model)).mappings()
        return [Price.from_json(dict(row)) for row in rows]


def set_price(store: StateStore, price: Price, audit: AuditRow) -> None:
    """Write the price of a model; requests that have begun keep theirs."""
    with store.transaction() as db:
        before = db.execute(select(PRICES).where(PRICES.c.model == price.model)).mappings().one_or_none()
        db.execute(delete(PRICES).where(PRICES.c.model == price.model))
        db.execute(insert(PRICES).values(**price.to_json()))
        add_audit(db, replace(audit, before=None if before is None else dict(before), after=price.to_json()))


# Sessions


def session_secret(store: StateStore) -> str:
    """The secret by which sessions are signed, made when it is first needed."""
    with store.transaction() as db:
        found: str | None = db.execute(select(SECRETS.c.value).where(SECRETS.c.name == SESSION_SECRET)).scalar()
        if found is None:
            found = secrets.token_urlsafe(SECRET_BYTES)
            db.execute(insert(SECRETS).values(name=SESSION_SECRET, value=found))
        return found


def end_session(store: StateStore, session: str, until: float, now: float, audit: AuditRow) -> None:
    """Have a session end before it expires, and forget those that would have expired by now."""
    with store.transaction() as db:
        db.execute(delete(ENDED_SESSIONS).where((ENDED_SESSIONS.c.until < now) | (ENDED_SESSIONS.c.id == session)))
        db.execute(insert(ENDED_SESSIONS).values(id=session, until=until))
        add_audit(db, audit)


def ended_sessions(store: StateStore, now: float) -> list[tuple[str, float]]:
    """The ids of sessions that were ended and have not expired yet, with the instants at which they do."""
    with store.transaction() as db:
        columns = ENDED_SESSIONS.c.id, ENDED_SESSIONS.c.until
        query = select(*columns).where(ENDED_SESSIONS.c.until >= now).order_by(ENDED_SESSIONS.c.id)
        return [(id, until) for id, until in db.execute(query)]


# The audit


def add_audit(db: Connection, row: AuditRow) -> None:
    """Append a row in a transaction."""
    content = json.dumps(row.to_json())
    db.execute(insert(AUDIT).values(at=row.at, actor=row.actor, object=row.object, content=content))


def note(store: StateStore, row: AuditRow) -> None:
    """Append a row."""
    with store.transaction() as db:
        add_audit(db, row)


def audit(
    store: StateStore, *, limit: int, before: int | None = None, actor: str | None = None, object: str | None = None
) -> list[tuple[int, AuditRow]]:
    """The newest rows with their places, newest first: those below the place `before`, of an actor, of an object."""
    query = select(AUDIT).order_by(AUDIT.c.place.desc()).limit(limit)
    for column, value in ((AUDIT.c.actor, actor), (AUDIT.c.object, object)):
        query = query if value is None else query.where(column == value)
    query = query if before is None else query.where(AUDIT.c.place < before)
    with store.transaction() as db:
        return [(row.place, AuditRow.from_json(json.loads(row.content))) for row in db.execute(query)]
