"""Charges of requests in the database of the control plane: reservations, and the usage by day, key and model.

A reservation counts as used, in the month in which it was made, until its request is settled; so it does for ever when
the router that made it was killed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, delete, func, insert, literal_column, select, update

from funitel.launcher.control_plane.schema import CHARGE_BATCHES, RESERVATIONS, USAGE
from funitel.launcher.control_plane.store import StateStore
from funitel.proto.security.quota import QuotaReservation, Settlement, TenantLimits


@dataclass(frozen=True, slots=True)
class Used:
    """What was used or is reserved within a month."""

    requests: int = 0
    tokens: int = 0
    cost: float = 0.0


@dataclass(frozen=True, slots=True)
class QuotaRefusal:
    """Why a reservation was refused.

    Attributes:
        limit: name of the limit.
        message: with the limit, what is used, and what the request may take.
    """

    limit: str
    message: str


def charge(
    store: StateStore,
    router: str,
    number: int,
    now: float,
    reservations: Sequence[tuple[QuotaReservation, TenantLimits, TenantLimits]],
    settlements: Sequence[Settlement],
) -> list[QuotaRefusal | None]:
    """Settle requests, then reserve for others, in order.

    Args:
        store: the state.
        router: a name of the process of the router, unique for ever.
        number: of the batch of charges, which counts up; settlements of one that came before are left out.
        now: Unix seconds.
        reservations: each with the limits of its key and those of its user.
        settlements: of requests that have ended.

    Returns:
        For each reservation None, or why it was refused.
    """
    with store.transaction() as db:
        last = db.execute(select(CHARGE_BATCHES.c.number).where(CHARGE_BATCHES.c.router == router)).scalar()
        if last is None:
            db.execute(insert(CHARGE_BATCHES).values(router=router, number=number, at=now))
        else:
            written = {"number": max(number, last), "at": now}
            db.execute(update(CHARGE_BATCHES).where(CHARGE_BATCHES.c.router == router).values(**written))
        if last is None or number > last:
            for each in settlements:
                _settle(db, each)
        return [_reserve(db, *each) for each in reservations]


def _settle(db: Connection, each: Settlement) -> None:
    db.execute(delete(RESERVATIONS).where(RESERVATIONS.c.id == each.id))
    if not each.requests and not each.prompt_tokens and not each.completion_tokens:
        return
    place = {"day": day_of(each.at), "user": each.user, "key": each.key, "model": each.model}
    amounts = ("requests", "prompt_tokens", "completion_tokens", "cost")
    added = {name: USAGE.c[name] + getattr(each, name) for name in amounts}
    if not db.execute(update(USAGE).filter_by(**place).values(**added)).rowcount:
        db.execute(insert(USAGE).values(**place, **{name: getattr(each, name) for name in amounts}))


def _reserve(db: Connection, new: QuotaReservation, of_key: TenantLimits, of_user: TenantLimits) -> QuotaRefusal | None:
    if db.execute(select(RESERVATIONS.c.id).where(RESERVATIONS.c.id == new.id)).first() is not None:
        return None  # the answer to it was lost
    for owner, limits, key in (("API key", of_key, new.key), ("user", of_user, None)):
        if limits.is_monthly and (refusal := _refusal(limits, used_in_month(db, new.at, new.user, key), new, owner)):
            return refusal
    values = {name: getattr(new, name) for name in ("id", "at", "user", "key", "model", "tokens", "cost")}
    db.execute(insert(RESERVATIONS).values(**values))
    return None


def _refusal(limits: TenantLimits, used: Used, new: QuotaReservation, owner: str) -> QuotaRefusal | None:
    """Why a reservation does not fit; None where it does."""
    words = f"a month with this {owner}"
    if (most := limits.requests_per_month) is not None and used.requests + 1 > most:
        return QuotaRefusal("requests_per_month", f"at most {most} requests {words}: {used.requests} are used")
    if (most := limits.tokens_per_month) is not None and used.tokens + new.tokens > most:
        rest = f"{used.tokens} are used or reserved, this request may take {new.tokens}"
        return QuotaRefusal("tokens_per_month", f"at most {most} tokens {words}: {rest}")
    budget = limits.budget_per_month
    if budget is not None and used.cost + new.cost > budget:
        rest = f"{used.cost:g} is used or reserved, this request may cost {new.cost:g}"
        return QuotaRefusal("budget_per_month", f"a budget of {budget:g} {words}: {rest}")
    return None


def used_in_month(db: Connection, at: float, user: str, key: int | None) -> Used:
    """What a key, or without one a user, has used or reserved in the month of an instant."""
    month = day_of(at)[:7]
    begin, end = _month(at)
    of_usage = [USAGE.c.day >= f"{month}-01", USAGE.c.day <= f"{month}-31", USAGE.c.user == user]
    reserved = [RESERVATIONS.c.at >= begin, RESERVATIONS.c.at < end, RESERVATIONS.c.user == user]
    if key is not None:
        of_usage.append(USAGE.c.key == key)
        reserved.append(RESERVATIONS.c.key == key)
    tokens = USAGE.c.prompt_tokens + USAGE.c.completion_tokens
    sums = _sums(db, (func.sum(USAGE.c.requests), func.sum(tokens), func.sum(USAGE.c.cost)), of_usage)
    one = func.count(literal_column("1"))
    held = _sums(db, (one, func.sum(RESERVATIONS.c.tokens), func.sum(RESERVATIONS.c.cost)), reserved)
    return Used(int(sums[0] + held[0]), int(sums[1] + held[1]), float(sums[2] + held[2]))


def _sums(db: Connection, columns: Iterable[Any], among: Sequence[Any]) -> list[float]:
    row = db.execute(select(*columns).where(*among)).one()
    return [value or 0 for value in row]


def usage(store: StateStore, *, first: str, last: str, user: str | None = None) -> list[dict[str, Any]]:
    """What was used on the days from `first` to `last`, by day, user, key id and model, with what is reserved."""
    with store.transaction() as db:
        of_usage = select(USAGE).where(USAGE.c.day >= first, USAGE.c.day <= last)
        reserved = select(RESERVATIONS)
        if user is not None:
            of_usage, reserved = of_usage.where(USAGE.c.user == user), reserved.where(RESERVATIONS.c.user == user)
        rows = [{**row, "unsettled_tokens": 0} for row in db.execute(of_usage).mappings()]
        held = db.execute(reserved).mappings().all()
    places = {_place(row): row for row in rows}
    for each in held:
        row = {name: each[name] for name in ("user", "key", "model")} | {"day": day_of(each["at"])}
        if first <= row["day"] <= last:
            empty = {"requests": 0, "prompt_tokens": 0, "completion_tokens": 0, "unsettled_tokens": 0, "cost": 0.0}
            found = places.setdefault(_place(row), row | empty)
            found["requests"] += 1
            found["unsettled_tokens"] += each["tokens"]
            found["cost"] += each["cost"]
    return [places[place] for place in sorted(places)]


def _place(row: Any) -> tuple[str, str, int, str]:
    return row["day"], row["user"], row["key"], row["model"]


def day_of(at: float) -> str:
    """The day of UTC of an instant."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")


def _month(at: float) -> tuple[float, float]:
    """The instants at which the month of an instant begins and ends."""
    begin = datetime.fromtimestamp(at, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    year, month = (begin.year + 1, 1) if begin.month == 12 else (begin.year, begin.month + 1)
    return begin.timestamp(), begin.replace(year=year, month=month).timestamp()
