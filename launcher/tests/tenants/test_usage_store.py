"""Charges in the database: limits by month hold, a batch that is sent twice counts once, months begin anew."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from funitel.launcher.control_plane.store import StateStore
from funitel.launcher.tenants.usage_store import QuotaRefusal, charge, usage
from funitel.proto.security.quota import QuotaReservation, Settlement, TenantLimits

JANUARY = datetime(2027, 1, 31, 23, 59, 59, tzinfo=UTC).timestamp()
FEBRUARY = JANUARY + 2
NONE = TenantLimits()


@pytest.fixture
def store() -> StateStore:
    return StateStore(None)


def reservation(id: str, *, at: float = JANUARY, user: str = "ann", key: int = 1, tokens: int = 10) -> QuotaReservation:
    return QuotaReservation(id=id, at=at, user=user, key=key, model="m", tokens=tokens, cost=tokens / 10)


def settlement(id: str, *, at: float = JANUARY, prompt: int = 3, completion: int = 4, key: int = 1) -> Settlement:
    cost = (prompt + completion) / 10
    tokens = {"prompt_tokens": prompt, "completion_tokens": completion}
    return Settlement(id=id, at=at, user="ann", key=key, model="m", requests=1, cost=cost, **tokens)


def reserve(
    store: StateStore, new: QuotaReservation, of_key: TenantLimits = NONE, of_user: TenantLimits = NONE
) -> QuotaRefusal | None:
    """Reserve by a batch without settlements."""
    (refusal,) = charge(store, "r", 0, JANUARY, [(new, of_key, of_user)], [])
    return refusal


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        (TenantLimits(requests_per_month=3), 3),
        (TenantLimits(tokens_per_month=35), 3),
        (TenantLimits(budget_per_month=3.5), 3),
        (TenantLimits(tokens_per_minute=1), 9),
    ],
)
@pytest.mark.parametrize("is_of_user", [False, True])
def test_a_limit_of_a_month_refuses_what_does_not_fit(
    store: StateStore, limits: TenantLimits, most: int, *, is_of_user: bool
) -> None:
    pair = (NONE, limits) if is_of_user else (limits, NONE)
    refusals = [reserve(store, reservation(str(number)), *pair) for number in range(9)]
    assert [refusal is None for refusal in refusals] == [True] * most + [False] * (9 - most)
    assert reserve(store, reservation("feb", at=FEBRUARY), *pair) is None, "a month has begun"
    for refusal in refusals[most:]:
        assert refusal is not None
        assert ("user" if is_of_user else "API key") in refusal.message
        assert getattr(limits, refusal.limit) is not None


def test_what_is_settled_gives_back_what_was_not_used(store: StateStore) -> None:
    limits = TenantLimits(tokens_per_month=17)
    assert reserve(store, reservation("a"), limits) is None
    assert reserve(store, reservation("b"), limits) is not None
    charge(store, "r", 1, JANUARY, [], [settlement("a")])
    assert reserve(store, reservation("b"), limits) is None
    (row,) = usage(store, first="2027-01-01", last="2027-01-31")
    assert (row["requests"], row["prompt_tokens"], row["completion_tokens"], row["unsettled_tokens"]) == (2, 3, 4, 10)
    assert row["cost"] == pytest.approx(1.7)


def test_a_batch_that_is_sent_twice_counts_once(store: StateStore) -> None:
    for _ in range(2):
        charge(store, "r", 1, JANUARY, [(reservation("b"), NONE, NONE)], [settlement("a")])
    charge(store, "other router", 1, JANUARY, [], [settlement("c")])
    (row,) = usage(store, first="2027-01-01", last="2027-01-31")
    assert (row["requests"], row["prompt_tokens"], row["unsettled_tokens"]) == (3, 6, 10)


def test_what_was_not_used_leaves_no_row(store: StateStore) -> None:
    reserve(store, reservation("a"))
    unused = Settlement(
        id="a", at=JANUARY, user="ann", key=1, model="m", requests=0, prompt_tokens=0, completion_tokens=0, cost=0.0
    )
    charge(store, "r", 1, JANUARY, [], [unused])
    assert usage(store, first="2027-01-01", last="2027-01-31") == []


def test_usage_is_by_day_user_and_key(store: StateStore) -> None:
    charge(store, "r", 1, JANUARY, [], [settlement("a"), settlement("b", at=FEBRUARY), settlement("c", key=0)])
    reserve(store, reservation("d", user="bea", at=FEBRUARY))
    rows = usage(store, first="2027-01-31", last="2027-02-01")
    assert [(row["day"], row["user"], row["key"]) for row in rows] == [
        ("2027-01-31", "ann", 0),
        ("2027-01-31", "ann", 1),
        ("2027-02-01", "ann", 1),
        ("2027-02-01", "bea", 1),
    ]
    assert [row["user"] for row in usage(store, first="2027-01-01", last="2027-12-31", user="bea")] == ["bea"]
    assert usage(store, first="2027-02-02", last="2027-02-03") == []


def test_a_reservation_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    first = StateStore(path)
    assert reserve(first, reservation("a"), TenantLimits(tokens_per_month=15)) is None
    first.close()
    assert reserve(StateStore(path), reservation("b"), TenantLimits(tokens_per_month=15)) is not None
