"""Meters of keys and users: what they admit within a minute, what they reserve, and when to come back."""

import asyncio
import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from fakes import FakeEngine, Serve
from hypothesis import given
from hypothesis import strategies as st

from funitel.proto.errors import RateLimited
from funitel.proto.security.keys import Key, digest_of, line_of
from funitel.proto.security.quota import TenantLimits
from funitel.proto.security.roles import Role
from funitel.router.auth.access import Access
from funitel.router.auth.accounts import Account
from funitel.router.auth.meter import LimitReached, Meter
from funitel.router.telemetry.metrics import Metrics

NOW = 1000.0


def limits(requests: int | None = None, tokens: int | None = None, concurrent: int | None = None) -> TenantLimits:
    return TenantLimits(requests_per_minute=requests, tokens_per_minute=tokens, max_concurrent_requests=concurrent)


def ask(meter: Meter, bounds: TenantLimits, now: float) -> bool:
    """Count a request if it may begin."""
    try:
        meter.check_requests(bounds, now)
    except LimitReached:
        return False
    meter.count_request(now)
    return True


def reserve(meter: Meter, bounds: TenantLimits, tokens: int, now: float) -> bool:
    """Reserve tokens if there are so many left."""
    try:
        meter.check_tokens(bounds, tokens, now)
    except LimitReached:
        return False
    meter.reserve(tokens)
    return True


def refusal(meter: Meter, bounds: TenantLimits, now: float, tokens: int | None = None) -> LimitReached:
    """Why a request may not begin, or with `tokens` why it may not reserve them."""
    check = partial(meter.check_requests, bounds) if tokens is None else partial(meter.check_tokens, bounds, tokens)
    with pytest.raises(LimitReached) as caught:
        check(now)
    return caught.value


# Requests


def test_without_limits_anything_is_admitted() -> None:
    meter = Meter("user")
    for _ in range(1000):
        assert ask(meter, limits(), NOW)
        assert reserve(meter, limits(), 10**12, NOW)
        meter.check_concurrency(limits())


@pytest.mark.parametrize("most", [1, 2, 60])
def test_as_many_requests_begin_within_a_minute_as_may_and_not_one_more(most: int) -> None:
    meter, bounds = Meter("user"), limits(requests=most)
    assert [ask(meter, bounds, NOW) for _ in range(most + 3)] == [True] * most + [False] * 3


@pytest.mark.parametrize(
    ("begin", "now", "is_free"),
    [
        (1000.0, 1059.999, False),
        (1000.0, 1060.0, False),
        (1000.0, 1060.999, False),
        (1000.0, 1061.0, True),
        (1000.999, 1060.999, False),
        (1000.999, 1061.0, True),
        (0.0, 60.5, False),
        (0.0, 61.0, True),
    ],
)
def test_a_request_counts_until_all_of_its_second_is_a_minute_old(begin: float, now: float, *, is_free: bool) -> None:
    meter, bounds = Meter("user"), limits(requests=1)
    assert ask(meter, bounds, begin)
    assert ask(meter, bounds, now) == is_free


def test_requests_become_free_one_after_the_other_as_they_began() -> None:
    meter, bounds = Meter("user"), limits(requests=2)
    assert ask(meter, bounds, NOW)
    assert ask(meter, bounds, NOW + 30)
    assert not ask(meter, bounds, NOW + 60.9)
    assert ask(meter, bounds, NOW + 61)
    assert not ask(meter, bounds, NOW + 90.9)
    assert ask(meter, bounds, NOW + 91)


def test_a_refused_request_does_not_count() -> None:
    meter, bounds = Meter("user"), limits(requests=1)
    assert ask(meter, bounds, NOW)
    for second in range(1, 61):
        assert not ask(meter, bounds, NOW + second)
    assert ask(meter, bounds, NOW + 61)


def test_a_check_by_itself_uses_nothing() -> None:
    meter, bounds = Meter("user"), limits(requests=1, tokens=1, concurrent=1)
    for _ in range(5):
        meter.check_concurrency(bounds)
        meter.check_requests(bounds, NOW)
        meter.check_tokens(bounds, 1, NOW)


@pytest.mark.parametrize("owner", ["API key", "user"])
def test_a_refusal_names_limit_owner_and_reason(owner: str) -> None:
    meter = Meter(owner)
    meter.count_request(NOW)
    meter.settle(0, 7, NOW)
    meter.reserve(2)
    error = refusal(meter, limits(requests=1), NOW)
    assert (error.reason, error.message) == ("requests", f"at most 1 requests a minute with this {owner}")
    error = refusal(meter, limits(tokens=10), NOW, 5)
    words = f"at most 10 tokens a minute with this {owner}: 7 are used, requests that run may take 2, this one 5"
    assert (error.reason, error.message) == ("tokens", words)
    with meter.running(), pytest.raises(LimitReached) as caught:
        meter.check_concurrency(limits(concurrent=1))
    assert caught.value.reason == "concurrency"
    assert caught.value.message == f"at most 1 requests of this {owner} run at once"
    assert caught.value.wait_seconds is None
    assert isinstance(caught.value, RateLimited)
    assert caught.value.http_status == 429


def test_a_lower_limit_holds_for_what_was_used_before() -> None:
    meter = Meter("user")
    for number in range(5):
        assert ask(meter, limits(requests=5), NOW + number)
    assert refusal(meter, limits(requests=2), NOW + 5).wait_seconds == 59.0  # until 4 of 5 are forgotten, at 1064
    assert not ask(meter, limits(requests=2), NOW + 63.9)
    assert ask(meter, limits(requests=2), NOW + 64)
    assert ask(meter, limits(requests=6), NOW + 64)


# Tokens


def test_tokens_are_reserved_up_to_the_limit_and_not_one_more() -> None:
    meter, bounds = Meter("user"), limits(tokens=100)
    assert reserve(meter, bounds, 60, NOW)
    assert not reserve(meter, bounds, 41, NOW)
    assert reserve(meter, bounds, 40, NOW)
    assert not reserve(meter, bounds, 1, NOW)


def test_a_reservation_lasts_longer_than_a_minute() -> None:
    meter, bounds = Meter("user"), limits(tokens=100)
    assert reserve(meter, bounds, 100, NOW)
    assert not reserve(meter, bounds, 1, NOW + 3600)
    meter.settle(100, 0, NOW + 3600)
    assert reserve(meter, bounds, 100, NOW + 3600)


@pytest.mark.parametrize("used", [0, 1, 99, 100])
def test_what_a_request_has_not_used_is_free_at_its_end_and_the_rest_a_minute_later(used: int) -> None:
    meter, bounds = Meter("user"), limits(tokens=100)
    assert reserve(meter, bounds, 100, NOW)
    meter.settle(100, used, NOW + 30)
    assert not reserve(meter, bounds, 101 - used, NOW + 30) or used == 0  # more than a minute's is let in alone
    meter, bounds = Meter("user"), limits(tokens=100)
    assert reserve(meter, bounds, 100, NOW)
    meter.settle(100, used, NOW + 30)
    if used < 100:
        assert reserve(meter, bounds, 100 - used, NOW + 30)
        meter.settle(100 - used, 0, NOW + 30)
    if used:
        assert not reserve(meter, bounds, 100, NOW + 90.9)
    assert reserve(meter, bounds, 100, NOW + 91)


def test_a_strict_meter_lets_no_more_in_than_a_whole_minute() -> None:
    meter, bounds = Meter("user", is_strict=True), limits(tokens=100)
    meter.check_tokens(bounds, 100, NOW)
    with pytest.raises(LimitReached, match="this request may take 101; ask for fewer new tokens"):
        meter.check_tokens(bounds, 101, NOW)


def test_more_than_a_whole_minute_is_let_in_alone() -> None:
    bounds = limits(tokens=100)
    for busy in ("reserved", "used"):
        meter = Meter("user")
        if busy == "reserved":
            assert reserve(meter, bounds, 1, NOW)
        else:
            meter.settle(0, 1, NOW)
        assert not reserve(meter, bounds, 101, NOW)
        assert not reserve(meter, bounds, 10**9, NOW)
    meter = Meter("user")
    assert reserve(meter, bounds, 10**9, NOW)
    assert not reserve(meter, bounds, 1, NOW)
    meter.settle(10**9, 500, NOW)
    assert not ask(meter, bounds, NOW + 60.9)
    assert ask(meter, bounds, NOW + 61)


def test_a_request_begins_while_one_token_is_left() -> None:
    meter, bounds = Meter("user"), limits(tokens=10)
    meter.settle(0, 9, NOW)
    assert ask(meter, bounds, NOW)
    meter.settle(0, 1, NOW)
    assert refusal(meter, bounds, NOW).reason == "tokens"


def test_requests_are_refused_before_tokens() -> None:
    meter = Meter("user")
    meter.count_request(NOW)
    meter.settle(0, 10, NOW)
    assert refusal(meter, limits(requests=1, tokens=10), NOW).reason == "requests"


# When to come back


@pytest.mark.parametrize(
    ("now", "wait"), [(1000.0, 61.0), (1000.5, 60.5), (1030.25, 30.75), (1060.0, 1.0), (1060.75, 0.25)]
)
def test_the_wait_is_until_the_instant_at_which_a_request_may_begin(now: float, wait: float) -> None:
    meter, bounds = Meter("user"), limits(requests=1)
    assert ask(meter, bounds, NOW)
    assert refusal(meter, bounds, now).wait_seconds == wait
    assert not ask(meter, bounds, now + wait - 0.001)
    assert ask(meter, bounds, now + wait)


def test_the_wait_for_tokens_is_until_so_many_are_forgotten() -> None:
    meter, bounds = Meter("user"), limits(tokens=100)
    meter.settle(0, 30, NOW)
    meter.settle(0, 70, NOW + 10)
    assert refusal(meter, bounds, NOW + 20, 30).wait_seconds == 41.0
    assert refusal(meter, bounds, NOW + 20, 31).wait_seconds == 51.0
    assert refusal(meter, bounds, NOW + 20, 10**6).wait_seconds == 51.0


def test_there_is_no_wait_to_tell_where_all_tokens_are_of_requests_that_run() -> None:
    """They may end at any time."""
    meter, bounds = Meter("user"), limits(tokens=100)
    assert reserve(meter, bounds, 100, NOW)
    assert refusal(meter, bounds, NOW, 1).wait_seconds == 0.0


def hold(path: Path, **bounds: int) -> str:
    """Write a file of one key; what the setting takes."""
    path.write_text(line_of(Key(name="a", digest=digest_of(b"sesame"), **bounds)) + "\n")  # type: ignore[arg-type]
    return str(path)


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute", "max_concurrent_requests"])
async def test_retry_after_is_whole_seconds_that_are_enough(
    serve: Serve, tmp_path: Path, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hold(tmp_path / "keys", **{limit: 1})
    clock = Clock(NOW + 0.4)
    monkeypatch.setattr("funitel.router.middleware.route_gate.time", clock)
    monkeypatch.setattr("funitel.router.auth.accounts.time", clock)
    async with serve(FakeEngine(pause=0.05), api_key_file=path) as client:
        headers, body = {"x-api-key": "sesame"}, {"inputs": "hi", "parameters": {"max_new_tokens": 4}}
        both = [client.post("/generate", json=body, headers=headers) for _ in range(2)]
        first, answer = await asyncio.gather(*both)
        assert {first.status_code, answer.status_code} == {200, 429}
        refused = first if first.status_code == 429 else answer
        expected = {"requests_per_minute": "61", "tokens_per_minute": "1", "max_concurrent_requests": "1"}
        assert refused.headers["retry-after"] == expected[limit]
        if limit == "max_concurrent_requests":
            return
        clock.now += 20
        again = await client.post("/generate", json=body, headers=headers)
        assert (again.status_code, again.headers["retry-after"]) == (429, "41")  # 40.6 seconds
        clock.now += 40.5
        assert (await client.post("/generate", json=body, headers=headers)).headers["retry-after"] == "1"
        clock.now += 0.1
        assert (await client.post("/generate", json=body, headers=headers)).status_code == 200


@dataclass
class Clock:
    """Stands in for the module `time`."""

    now: float

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1_800_000_000.0


# Requests in flight


def test_a_request_counts_as_long_as_it_runs_however_it_ends() -> None:
    meter, bounds = Meter("user"), limits(concurrent=2)
    with meter.running():
        with meter.running():
            with pytest.raises(LimitReached):
                meter.check_concurrency(bounds)
        meter.check_concurrency(bounds)
        with pytest.raises(KeyError), meter.running():
            raise KeyError
        meter.check_concurrency(bounds)


# Many at once


@dataclass
class FakeTenant:
    """A user of several accounts."""

    limits: TenantLimits
    meter: Meter = field(default_factory=lambda: Meter("user"))
    is_session: bool = False
    name: str = "ann"
    role: Role = Role.USER

    def paying(self, *_: object) -> object:
        raise NotImplementedError

    def accounts(self) -> list[Account]:
        raise NotImplementedError

    def count_request(self) -> None: ...

    def reserve(self, num_tokens: int) -> None: ...

    def settle(self, num_reserved: int, num_used: int) -> None: ...


def accounts(of_key: TenantLimits, of_user: TenantLimits, count: int) -> list[Account]:
    tenant, metrics = FakeTenant(of_user), Metrics()
    fields = {name: getattr(of_key, name) for name in ("requests_per_minute", "tokens_per_minute")}
    fields["max_concurrent_requests"] = of_key.max_concurrent_requests
    keys = [Key(name=f"k{number}", digest=digest_of(b"%d" % number), **fields) for number in range(count)]
    return [Account(key, metrics, tenant) for key in keys]  # type: ignore[arg-type]


@dataclass
class Tally:
    """What tasks of one account have taken."""

    running: int = 0
    begun: int = 0
    held: int = 0  # tokens that are reserved or used


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("most_of_key", "most_of_user"), [(10_000, 10_000), (40, 10_000), (10_000, 120), (50, 130)])
async def test_many_tasks_at_once_never_exceed_a_limit_of_key_or_user(
    most_of_key: int, most_of_user: int, seed: int
) -> None:
    several = accounts(limits(30, most_of_key, 5), limits(70, most_of_user, 12), 4)
    tallies, seeded, reasons = [Tally() for _ in several], random.Random(seed), set()

    async def request(place: int) -> None:
        account, tally, tokens = several[place], tallies[place], seeded.randrange(1, 20)
        with account.entered(NOW):
            tally.begun += 1
            tally.running += 1
            try:
                assert tally.running <= 5
                assert sum(each.running for each in tallies) <= 12
                await asyncio.sleep(0)
                account.reserve(tokens, NOW)
                tally.held += tokens
                assert tally.held <= most_of_key
                assert sum(each.held for each in tallies) <= most_of_user
                await asyncio.sleep(seeded.random() / 200)
                used = seeded.randrange(tokens + 1)
                account.settle(tokens, used, 0, NOW)
                tally.held -= tokens - used
            finally:
                tally.running -= 1

    async def client(place: int) -> None:
        for _ in range(12):
            await asyncio.sleep(seeded.random() / 100)
            try:
                await request(place)
            except LimitReached as error:
                reasons.add(error.reason)

    await asyncio.gather(*(client(number % 4) for number in range(80)))
    assert all(tally.begun <= 30 for tally in tallies)
    assert sum(tally.begun for tally in tallies) <= 70
    if min(most_of_key, most_of_user) == 10_000:
        assert reasons == {"concurrency", "requests"}
        assert sum(tally.begun for tally in tallies) == 70, "as many as may, where so many ask"
    else:
        assert "tokens" in reasons
    later = NOW + 61
    for account in several:  # nothing is left over
        account.reserve(min(most_of_key, most_of_user), later)
        account.settle(min(most_of_key, most_of_user), 0, 0, later)
        with account.entered(later):
            pass


async def test_cancelled_tasks_leave_nothing_in_flight() -> None:
    [account] = accounts(limits(concurrent=3), limits(concurrent=3), 1)

    async def request() -> None:
        with account.entered(NOW):
            await asyncio.sleep(60)

    for _ in range(10):
        tasks = [asyncio.create_task(request()) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(RateLimited):
            with account.entered(NOW):
                pass
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    with account.entered(NOW), account.prolonged(), account.prolonged():
        pass


def test_a_request_of_a_batch_is_not_in_flight_and_counts_within_the_minute() -> None:
    [account] = accounts(limits(requests=3, concurrent=1), limits(concurrent=1), 1)
    with account.entered(NOW), account.entered(NOW, is_background=True), account.entered(NOW, is_background=True):
        with pytest.raises(RateLimited, match="at most 3 requests a minute"):
            with account.entered(NOW, is_background=True):
                pass


# A plain oracle


class Oracle:
    """All that was ever used, by instant; a second is forgotten once all of it is a minute old."""

    def __init__(self) -> None:
        self.requests: list[float] = []
        self.tokens: list[tuple[float, int]] = []
        self.reserved: list[int] = []

    def num_requests(self, now: float) -> int:
        return sum(now < int(at) + 61 for at in self.requests)

    def num_tokens(self, now: float) -> int:
        return sum(amount for at, amount in self.tokens if now < int(at) + 61)

    def may_begin(self, most: int, most_tokens: int, now: float) -> bool:
        return self.num_requests(now) < most and self.may_take(1, most_tokens, now)

    def may_take(self, tokens: int, most: int, now: float) -> bool:
        return self.num_tokens(now) + sum(self.reserved) + min(tokens, most) <= most


STEPS = st.lists(
    st.tuples(
        st.one_of(st.just(0.0), st.floats(0, 5), st.integers(0, 70).map(float), st.floats(0, 130)),
        st.sampled_from(["request", "reserve", "settle", "use"]),
        st.integers(0, 40),
        st.integers(0, 40),
    ),
    max_size=80,
)


@given(STEPS, st.integers(1, 8), st.integers(1, 60), st.sampled_from([0.0, 17.25, 1e6 + 0.5]))
def test_a_meter_answers_as_a_list_of_all_that_was_used(
    steps: list[tuple[float, str, int, int]], most: int, most_tokens: int, now: float
) -> None:
    meter, oracle, bounds = Meter("user"), Oracle(), limits(most, most_tokens)
    for pause, what, first, second in steps:
        now += pause
        match what:
            case "request":
                may = oracle.may_begin(most, most_tokens, now)
                assert ask(meter, bounds, now) == may
                if may:
                    oracle.requests.append(now)
                else:
                    _check_wait(meter, bounds, oracle, most, most_tokens, now)
            case "reserve":
                may = oracle.may_take(first, most_tokens, now)
                assert reserve(meter, bounds, first, now) == may
                if may:
                    oracle.reserved.append(first)
            case "settle" if oracle.reserved:
                reserved = oracle.reserved.pop(second % len(oracle.reserved))
                used = min(first, reserved)
                meter.settle(reserved, used, now)
                oracle.tokens.append((now, used))
            case "use":  # a long text that was encoded, without a reservation
                meter.settle(0, first, now)
                oracle.tokens.append((now, first))


def _check_wait(meter: Meter, bounds: TenantLimits, oracle: Oracle, most: int, most_tokens: int, now: float) -> None:
    """The wait is the shortest after which the same request may begin, if those that run take no more tokens."""
    error = refusal(meter, bounds, now)
    assert error.wait_seconds is not None
    at = now + error.wait_seconds
    if error.reason == "requests":
        assert oracle.num_requests(at + 1e-6) < most
        assert error.wait_seconds == 0 or oracle.num_requests(at - 1e-3) >= most
    else:
        assert oracle.num_tokens(at + 1e-6) <= most_tokens - 1


@given(STEPS, st.integers(1, 8))
def test_no_interval_of_a_minute_has_more_requests_than_may_begin(
    steps: list[tuple[float, str, int, int]], most: int
) -> None:
    meter, bounds, now = Meter("user"), limits(most), 5.0
    begun = []
    for pause, *_ in steps:
        now += pause
        if ask(meter, bounds, now):
            begun.append(now)
    for begin in begun:
        assert sum(begin <= at < begin + 60 for at in begun) <= most


# Access


def test_each_access_has_words_of_its_own() -> None:
    assert len({access.value for access in Access}) == len(Access) == 9


def test_what_takes_a_role_needs_the_very_path() -> None:
    assert all(access.needs_very_path for access in Access if access.role is not None)
    assert Access.OWN.role is None
    assert Access.KEY.role is None
    assert (Access.OPERATOR.role, Access.ADMIN.role) == (Role.OPERATOR, Role.ADMIN)
    needs = {access for access in Access if access.needs_very_path}
    assert needs == {Access.OWN, Access.OPERATOR, Access.ADMIN}
