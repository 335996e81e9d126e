"""Keys, users and sessions as the control plane last said: which are found, what they may do, what they pay."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest
import tenant_states
from tenant_states import SECRET, user

from funitel.proto.errors import Forbidden, NotReady, Overloaded, QuotaExceeded, RateLimited
from funitel.proto.security.keys import digest_of
from funitel.proto.security.quota import QuotaReservation, Settlement, TenantLimits
from funitel.proto.security.roles import Role
from funitel.proto.security.sessions import SessionSigner
from funitel.router.auth.access import Access
from funitel.router.auth.accounts import Account, Accounts, TokenCounts, charged
from funitel.router.core.journal import KeptJournal
from funitel.router.telemetry.metrics import Metrics
from funitel.router.tenants import directory as module
from funitel.router.tenants.charges import Charges
from funitel.router.tenants.directory import TenantDirectory, TenantUse
from funitel.router.tenants.minute_log import MinuteLog
from funitel.router.tenants.snapshot import TenantSnapshot

NOW = 1000.0  # of the monotonic clock
WALL = 1_800_000_000.0


class FakeCharges:
    """Notes what is reserved and settled; raises `error` instead of a reservation."""

    def __init__(self, router: str = "id") -> None:
        self._router = router
        self.reserved: list[QuotaReservation] = []
        self.settled: list[tuple[Settlement, bool]] = []
        self.error: Exception | None = None
        self._number = 0

    def new_id(self) -> str:
        self._number += 1
        return f"{self._router}-{self._number}"

    def has_made(self, id: str) -> bool:
        return id.startswith(f"{self._router}-")

    async def reserve(self, reservation: QuotaReservation) -> None:
        if self.error is not None:
            raise self.error
        self.reserved.append(reservation)

    def settle(self, settled: Settlement, *, is_reserved: bool) -> None:
        self.settled.append((settled, is_reserved))


def key(number: int = 1, text: str = "sesame", **fields: Any) -> dict[str, Any]:
    return tenant_states.key(number, text, **({"name": "laptop"} | fields))


def state(*keys: dict[str, Any], **fields: Any) -> TenantSnapshot:
    return TenantSnapshot.model_validate_json(json.dumps(tenant_states.state(*keys, **fields)))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def charges() -> FakeCharges:
    return FakeCharges()


@pytest.fixture
def directory(metrics: Metrics, charges: FakeCharges, tmp_path: Path) -> TenantDirectory:
    return TenantDirectory(metrics, cast(Charges, charges), MinuteLog(tmp_path / "minutes"))


def find(directory: TenantDirectory, text: str = "sesame", now: float = WALL) -> Account | None:
    return directory.find(digest_of(text.encode()), now)


def found(directory: TenantDirectory, text: str = "sesame") -> Account:
    account = find(directory, text)
    assert account is not None
    return account


def session_account(directory: TenantDirectory, name: str = "ann", generation: int = 0) -> Account:
    seen = directory.session(SessionSigner(SECRET).new(name, generation))
    assert seen is not None
    return seen[1]


def enter(account: Account, now: float = NOW) -> None:
    with account.entered(now):
        pass


def refused(metrics: Metrics, name: str, reason: str) -> float:
    labels = {"key": name, "reason": reason}
    return metrics.registry.get_sample_value("funitel_key_refused_total", labels) or 0.0


# Before the first state


def test_nothing_is_found_before_the_control_plane_has_named_the_tenants(directory: TenantDirectory) -> None:
    with pytest.raises(NotReady, match="not known yet"):
        directory.check_known()
    assert find(directory) is None
    assert directory.session(SessionSigner(SECRET).new("ann", 0)) is None
    assert directory.session(SessionSigner("").new("ann", 0)) is None
    assert directory.of_owner("number 1", WALL) is None


def test_a_state_without_any_user_is_known(directory: TenantDirectory) -> None:
    directory.take(state(users=[]))
    directory.check_known()
    assert find(directory) is None


def test_keys_of_a_file_are_found_while_those_of_users_are_not_known(directory: TenantDirectory) -> None:
    accounts = Accounts("first", None, Metrics(), tenants=directory)
    assert accounts.find((b"first",)) is not None
    with pytest.raises(NotReady):
        accounts.find((b"sesame",))
    directory.take(state(key()))
    assert accounts.find((b"sesame",)) is found(directory)
    assert accounts.find((b"other", b"sesame")) is found(directory)
    assert accounts.find((b"other",)) is None


# Keys


def test_a_key_is_found_by_its_digest_and_nothing_else(directory: TenantDirectory) -> None:
    directory.take(state(key()))
    assert found(directory).key.name == "ann/laptop"
    for text in ("", "Sesame", "sesame ", digest_of(b"sesame").hex()):
        assert find(directory, text) is None
    assert directory.find(b"", WALL) is None


def test_each_of_many_keys_has_an_account_of_its_own(directory: TenantDirectory) -> None:
    keys = [key(number, f"text {number}", name=f"k{number}", user=f"u{number % 3}") for number in range(30)]
    directory.take(state(*keys, users=[user(f"u{number}") for number in range(3)]))
    accounts = [found(directory, f"text {number}") for number in range(30)]
    assert [account.key.name for account in accounts] == [f"u{number % 3}/k{number}" for number in range(30)]
    assert len({id(account) for account in accounts}) == len({account.owner for account in accounts}) == 30


def test_a_key_is_valid_until_the_instant_at_which_it_expires(directory: TenantDirectory) -> None:
    directory.take(state(key(expires=WALL)))
    assert [find(directory, now=now) is not None for now in (WALL - 1, WALL - 0.01, WALL, WALL + 1)] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("expires", [1e12, 1e18, 1e300])
def test_a_key_may_expire_after_the_last_date_that_python_has(directory: TenantDirectory, expires: float) -> None:
    """The control plane takes any finite number from any user; one key must not keep all later states away."""
    directory.take(state(key(expires=expires)))
    assert find(directory) is not None


def test_a_banned_key_is_refused_and_not_unknown(directory: TenantDirectory) -> None:
    directory.take(state(key(is_banned=True)))
    with pytest.raises(Forbidden, match="this API key is banned"):
        find(directory)
    directory.take(state(key()))
    assert find(directory) is not None


def test_a_banned_key_that_has_expired_is_unknown(directory: TenantDirectory) -> None:
    directory.take(state(key(is_banned=True, expires=WALL - 1)))
    assert find(directory) is None


def test_things_of_a_banned_key_have_no_account(directory: TenantDirectory) -> None:
    """A batch of the key goes on by this look-up, and what is banned is refused until the ban is lifted."""
    directory.take(state(key(is_banned=True)))
    assert directory.of_owner("number 1", WALL) is None


def test_a_revoked_key_is_gone_with_the_state_that_leaves_it_out(directory: TenantDirectory) -> None:
    directory.take(state(key(1), key(2, "other")))
    directory.take(state(key(2, "other")))
    assert find(directory) is None
    assert find(directory, "other") is not None
    assert directory.of_owner("number 1", WALL) is None


def test_a_key_of_a_user_that_is_disabled_is_gone(directory: TenantDirectory) -> None:
    directory.take(state(key(), key(2, "other", user="bea"), users=[user("bea")]))
    assert find(directory) is None
    assert find(directory, "other") is not None


def test_a_rotated_key_keeps_its_account_and_its_old_text_is_gone(directory: TenantDirectory) -> None:
    directory.take(state(key(limits={"requests_per_minute": 1})))
    before = found(directory)
    enter(before)
    directory.take(state(key(1, "new text", limits={"requests_per_minute": 1})))
    assert find(directory) is None
    after = found(directory, "new text")
    assert (after, after.owner) == (before, before.owner)
    with pytest.raises(RateLimited):
        enter(after)


def test_a_key_that_is_made_under_the_name_of_a_revoked_one_begins_anew(directory: TenantDirectory) -> None:
    directory.take(state(key(1, limits={"requests_per_minute": 1})))
    before = found(directory)
    enter(before)
    directory.take(state(key(2, "new", limits={"requests_per_minute": 1})))
    after = found(directory, "new")
    assert after is not before
    assert after.owner != before.owner
    enter(after)


def test_a_changed_key_is_checked_by_its_new_scopes_and_limits_at_once(directory: TenantDirectory) -> None:
    directory.take(state(key()))
    account = found(directory)
    account.check_route("/generate")
    account.check_model("m")
    enter(account)
    directory.take(state(key(name="desk", routes=["/v1/*"], models=["mine/*"], limits={"requests_per_minute": 1})))
    assert found(directory) is account
    assert account.key.name == "ann/desk"
    with pytest.raises(Forbidden):
        account.check_route("/generate")
    with pytest.raises(Forbidden):
        account.check_model("m")
    with pytest.raises(RateLimited):
        enter(account)


def test_the_group_of_a_key_is_the_owner_of_its_cached_prefixes(directory: TenantDirectory) -> None:
    directory.take(state(key(1, group="g"), key(2, "b", name="b", group="g"), key(3, "c", name="c"), key(4, "d")))
    owners = [found(directory, text).key.cache_owner for text in ("sesame", "b", "c", "d")]
    assert owners[0] == owners[1]
    assert len(set(owners)) == 3


def test_users_share_no_cached_prefixes_by_the_name_of_a_group(directory: TenantDirectory) -> None:
    """A user chooses the name freely, so one must not read the cache of another by it."""
    directory.take(state(key(1, group="g"), key(2, "b", user="bea", group="g"), users=[user("ann"), user("bea")]))
    assert found(directory).key.cache_owner != found(directory, "b").key.cache_owner


def test_the_minute_goes_on_through_the_next_router(metrics: Metrics, charges: FakeCharges, tmp_path: Path) -> None:
    """Of two keys and a session: requests, tokens that were used, and those of a request whose end is not known."""

    def next_router() -> TenantDirectory:
        directory = TenantDirectory(Metrics(), cast(Charges, charges), MinuteLog(tmp_path / "minutes"))
        limits = {"requests_per_minute": 2, "tokens_per_minute": 100}
        directory.take(state(key(1, limits=limits), key(2, "b"), users=[user(limits={"tokens_per_minute": 150})]))
        return directory

    first, now = next_router(), time.monotonic()
    one, two = found(first), found(first, "b")
    for account in (one, two, session_account(first)):
        enter(account, now)
    one.reserve(60, now)
    one.settle(60, 10, 20, now)
    one.reserve(50, now)  # has no end
    two.reserve(40, now)
    two.settle(40, 20, 20, now)
    for directory in (next_router(), next_router(), first):  # what the second one has counted again counts once
        now = time.monotonic()
        one, two = found(directory), found(directory, "b")
        one.reserve(20, now)
        one.settle(20, 0, 0, now)
        with pytest.raises(RateLimited, match="this API key"):
            one.reserve(21, now)
        two.reserve(30, now)
        two.settle(30, 0, 0, now)
        with pytest.raises(RateLimited, match="this user"):
            two.reserve(31, now)
    last = next_router()
    enter(found(last), now)
    with pytest.raises(RateLimited, match="2 requests a minute"):
        enter(found(last), now)


def test_things_of_an_owner_are_those_of_the_valid_key_of_that_number(directory: TenantDirectory) -> None:
    users = [user("ann"), user("bea")]
    directory.take(state(key(), key(2, "b", user="bea", expires=WALL), users=users))
    assert directory.of_owner("number 1", WALL) is found(directory)
    assert directory.of_owner("number 2", WALL) is None
    assert directory.of_owner("number 2", WALL - 1) is directory.find(digest_of(b"b"), WALL - 1)
    assert directory.of_owner(session_account(directory).key.owner, WALL) is session_account(directory)
    assert directory.of_owner("name cid/session", WALL) is None


def test_a_key_keeps_its_things_when_it_is_renamed_and_no_other_key_has_them(directory: TenantDirectory) -> None:
    directory.take(state(key(1)))
    before = found(directory).key
    directory.take(state(key(1, name="desk"), key(2, "b", name="laptop")))
    after, other = found(directory).key, found(directory, "b").key
    assert (before.owner, before.cache_owner) == (after.owner, after.cache_owner)
    assert other.owner != before.owner
    assert other.cache_owner != before.cache_owner
    assert directory.of_owner(before.owner, WALL) is found(directory)


def test_a_key_that_is_named_session_is_another_owner_than_the_sessions_of_its_user(
    directory: TenantDirectory,
) -> None:
    """What belongs to such a key must not go on with the rights of a session once the key is revoked."""
    directory.take(state(key(name="session", models=["m"])))
    assert found(directory).key.owner != session_account(directory).key.owner


# Scopes and roles


@pytest.mark.parametrize(
    ("routes", "path", "is_allowed"),
    [
        ([], "/v1/models", True),
        (["/v1/*"], "/v1/models", True),
        (["/v1/*"], "/generate", False),
        (["/v1/models"], "/v1/models", True),
        (["/v1/models"], "/v1/models/x", False),
        (["/v1/models"], "/v1", False),
        (["*"], "/anything", True),
        (["/a", "/b*"], "/bc", True),
    ],
)
def test_a_key_of_a_user_is_for_its_routes(
    directory: TenantDirectory, metrics: Metrics, routes: list[str], path: str, *, is_allowed: bool
) -> None:
    directory.take(state(key(routes=routes)))
    if is_allowed:
        found(directory).check_route(path)
    else:
        with pytest.raises(Forbidden, match="this API key is for the routes"):
            found(directory).check_route(path)
    assert refused(metrics, "ann/laptop", "route") == (not is_allowed)


@pytest.mark.parametrize(
    ("models", "name", "is_allowed"),
    [
        ([], "m", True),
        (["m"], "m", True),
        (["m"], "mm", False),
        (["mine/*"], "mine/a", True),
        (["mine/*"], "yours/a", False),
        (["mine/*"], "mine", False),
    ],
)
def test_a_key_of_a_user_is_for_its_models(
    directory: TenantDirectory, metrics: Metrics, models: list[str], name: str, *, is_allowed: bool
) -> None:
    directory.take(state(key(models=models)))
    if is_allowed:
        found(directory).check_model(name)
    else:
        with pytest.raises(Forbidden, match="this API key is for the models"):
            found(directory).check_model(name)
    assert refused(metrics, "ann/laptop", "model") == (not is_allowed)


ACCESS_OF_ROLES = {
    Role.USER: {Access.KEY, Access.OWN, Access.CLOSED_FACT},
    Role.OPERATOR: {Access.KEY, Access.OWN, Access.CLOSED_FACT, Access.OPERATOR},
    Role.ADMIN: {Access.KEY, Access.OWN, Access.CLOSED_FACT, Access.OPERATOR, Access.ADMIN},
}
CHECKED = (Access.KEY, Access.OWN, Access.CLOSED_FACT, Access.OPERATOR, Access.ADMIN)


@pytest.mark.parametrize("role", list(Role))
def test_a_session_and_a_key_with_the_very_path_may_do_what_the_role_of_the_user_may(
    directory: TenantDirectory, role: Role
) -> None:
    directory.take(state(key(routes=["/x"]), users=[user(role=str(role))]))
    for account in (session_account(directory), found(directory)):
        for access in CHECKED:
            if access in ACCESS_OF_ROLES[role]:
                account.check_route("/x", access)
            else:
                with pytest.raises(Forbidden, match=f"this takes the role {access.role}; yours is {role}"):
                    account.check_route("/x", access)


@pytest.mark.parametrize("routes", [[], ["*"], ["/x*"], ["/*"], ["/xy"]])
def test_a_key_of_an_admin_needs_the_very_path_where_a_session_does_not(
    directory: TenantDirectory, routes: list[str]
) -> None:
    directory.take(state(key(routes=routes), users=[user(role="admin")]))
    for access in (Access.OWN, Access.OPERATOR, Access.ADMIN):
        with pytest.raises(Forbidden, match="must list /x, without a pattern"):
            found(directory).check_route("/x", access)
        session_account(directory).check_route("/x", access)


def test_a_role_that_is_taken_back_holds_at_once(directory: TenantDirectory) -> None:
    directory.take(state(key(routes=["/x"]), users=[user(role="admin")]))
    accounts = (found(directory), session_account(directory))
    directory.take(state(key(routes=["/x"]), users=[user(role="user")]))
    for account in accounts:
        with pytest.raises(Forbidden):
            account.check_route("/x", Access.OPERATOR)


@pytest.mark.parametrize("access", list(Access))
def test_a_role_is_asked_for_by_the_routes_of_operators_and_admins_alone(access: Access) -> None:
    roles = {Access.OPERATOR: Role.OPERATOR, Access.ADMIN: Role.ADMIN}
    assert access.role == roles.get(access)
    assert access.needs_very_path == (access in (Access.OWN, Access.OPERATOR, Access.ADMIN))


# Sessions


def test_a_session_has_the_account_of_its_user(directory: TenantDirectory) -> None:
    directory.take(state(users=[user("ann"), user("bea", generation=7)]))
    seen = directory.session(SessionSigner(SECRET).new("bea", 7))
    assert seen is not None
    session, account = seen
    assert session.user == "bea"
    assert account.key.name.startswith("bea/")
    assert account.tenant is not None
    assert account.tenant.is_session
    assert account is session_account(directory, "bea", 7)
    assert account is not session_account(directory, "ann")


@pytest.mark.parametrize(("before", "after"), [(0, 1), (4, 5), (5, 4)])
def test_a_session_of_another_generation_is_not_valid(directory: TenantDirectory, before: int, after: int) -> None:
    cookie = SessionSigner(SECRET).new("ann", before)
    directory.take(state(users=[user(generation=before)]))
    assert directory.session(cookie) is not None
    directory.take(state(users=[user(generation=after)]))
    assert directory.session(cookie) is None


def test_a_session_that_was_ended_is_not_valid_and_others_are(directory: TenantDirectory) -> None:
    directory.take(state())
    signer = SessionSigner(SECRET)
    mine, other = signer.new("ann", 0), signer.new("ann", 0)
    session = signer.session(mine)
    assert session is not None
    directory.take(state(ended_sessions=[session.id, "another"]))
    assert directory.session(mine) is None
    assert directory.session(other) is not None


def test_a_session_of_a_user_that_is_gone_is_not_valid(directory: TenantDirectory) -> None:
    cookie = SessionSigner(SECRET).new("ann", 0)
    directory.take(state(users=[user("bea")]))
    assert directory.session(cookie) is None


def test_a_session_of_another_secret_is_not_valid(directory: TenantDirectory) -> None:
    cookie = SessionSigner(SECRET).new("ann", 0)
    directory.take(state())
    assert directory.session(cookie) is not None
    directory.take(state(secret="a new one"))
    assert directory.session(cookie) is None
    assert directory.session(SessionSigner("a new one").new("ann", 0)) is not None


def test_an_expired_session_is_not_valid(directory: TenantDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.take(state())
    cookie = SessionSigner(SECRET).new("ann", 0)
    later = time.time() + 12 * 3600 + 2
    monkeypatch.setattr(time, "time", lambda: later)
    assert directory.session(cookie) is None


@pytest.mark.parametrize("cookie", ["", "x", "a.b.c", ".", "é" * 10, "x" * 10**6])
def test_garbage_is_no_session(directory: TenantDirectory, cookie: str) -> None:
    directory.take(state())
    assert directory.session(cookie) is None


def test_a_token_is_that_of_its_session(directory: TenantDirectory) -> None:
    directory.take(state())
    signer = SessionSigner(SECRET)
    mine, other = (directory.session(signer.new("ann", 0)) for _ in range(2))
    assert mine is not None
    assert other is not None
    assert directory.is_token_of(mine[0], signer.csrf_token(mine[0]))
    for token in ("", signer.csrf_token(other[0]), SessionSigner("x").csrf_token(mine[0])):
        assert not directory.is_token_of(mine[0], token)


# Limits of users and keys


def test_the_limits_of_a_user_count_all_keys_and_sessions_together(directory: TenantDirectory) -> None:
    users = [user(limits={"requests_per_minute": 3}), user("bea", limits={"requests_per_minute": 3})]
    directory.take(state(key(1), key(2, "other", name="b"), key(3, "c", user="bea"), users=users))
    for account in (found(directory), found(directory, "other"), session_account(directory)):
        enter(account)
    for account in (found(directory), found(directory, "other"), session_account(directory)):
        with pytest.raises(RateLimited, match="at most 3 requests a minute with this user"):
            enter(account)
    enter(found(directory, "c"))


def test_the_limits_of_a_key_hold_beside_those_of_the_user(directory: TenantDirectory) -> None:
    directory.take(
        state(
            key(1, limits={"tokens_per_minute": 10}),
            key(2, "other", name="b"),
            users=[user(limits={"tokens_per_minute": 15})],
        )
    )
    one, two = found(directory), found(directory, "other")
    one.reserve(10, NOW)
    with pytest.raises(RateLimited, match="at most 10 tokens a minute with this API key"):
        one.reserve(1, NOW)
    with pytest.raises(RateLimited, match="at most 15 tokens a minute with this user"):
        two.reserve(6, NOW)
    two.reserve(5, NOW)
    one.settle(10, 1, 1, NOW)
    two.reserve(8, NOW)


def test_what_the_user_refuses_uses_nothing_of_the_key(directory: TenantDirectory) -> None:
    limits = {"requests_per_minute": 2, "tokens_per_minute": 10}
    directory.take(state(key(limits=limits), key(2, "b", name="b"), users=[user(limits={"tokens_per_minute": 6})]))
    one, two = found(directory), found(directory, "b")
    two.reserve(6, NOW)
    for _ in range(5):
        with pytest.raises(RateLimited, match="with this user"):
            enter(one)
        with pytest.raises(RateLimited, match="with this user"):
            one.reserve(1, NOW)
    two.settle(6, 0, 0, NOW)
    enter(one)
    one.reserve(6, NOW)
    with pytest.raises(RateLimited, match="with this user: 0 are used"):
        one.reserve(1, NOW)


def test_what_a_user_has_used_stays_when_keys_come_and_go(directory: TenantDirectory) -> None:
    limited = [user(limits={"requests_per_minute": 1})]
    directory.take(state(key(1), users=limited))
    enter(found(directory))
    directory.take(state(key(2, "new"), users=limited))
    with pytest.raises(RateLimited, match="with this user"):
        enter(found(directory, "new"))
    directory.take(state(key(2, "new"), users=[user(limits={"requests_per_minute": 2})]))
    enter(found(directory, "new"))


def test_the_same_state_again_changes_nothing(directory: TenantDirectory) -> None:
    same = state(key(limits={"max_concurrent_requests": 1}))
    directory.take(same)
    account = found(directory)
    with account.entered(NOW):
        for _ in range(3):
            directory.take(same)
        assert found(directory) is account
        with pytest.raises(RateLimited):
            enter(found(directory))
    enter(found(directory))


def test_a_request_that_runs_while_its_key_is_revoked_ends_as_any_other(directory: TenantDirectory) -> None:
    directory.take(state(key(), users=[user(limits={"max_concurrent_requests": 1})]))
    with found(directory).entered(NOW):
        directory.take(state(users=[user(limits={"max_concurrent_requests": 1})]))
        with pytest.raises(RateLimited):
            enter(session_account(directory))
    enter(session_account(directory))


# What is paid


PRICES = [{"model": "m", "prompt": 2.0, "completion": 10.0}]


async def pay(account: Account, most: TokenCounts, used: TokenCounts, model: str = "m") -> None:
    async with charged(account, model, lambda: most, lambda: used):
        pass


async def test_a_request_without_a_limit_of_a_month_is_settled_and_not_reserved(
    directory: TenantDirectory, charges: FakeCharges
) -> None:
    directory.take(state(key(5), prices=PRICES))
    before = time.time()
    await pay(found(directory), TokenCounts(100, 1000), TokenCounts(100, 30))
    assert not charges.reserved
    [(settled, is_reserved)] = charges.settled
    assert not is_reserved
    assert (settled.id, settled.user, settled.key, settled.model) == ("id-1", "ann", 5, "m")
    assert (settled.requests, settled.prompt_tokens, settled.completion_tokens) == (1, 100, 30)
    assert settled.cost == pytest.approx((100 * 2.0 + 30 * 10.0) / 10**6)
    assert before <= settled.at <= time.time()


MONTHLY = [{"requests_per_month": 9}, {"tokens_per_month": 9}, {"budget_per_month": 0.0}]


@pytest.mark.parametrize("limits", MONTHLY)
@pytest.mark.parametrize("is_of_user", [False, True])
async def test_a_limit_of_a_month_of_key_or_user_reserves_the_most_and_settles_what_was_used(
    directory: TenantDirectory, charges: FakeCharges, limits: dict[str, Any], *, is_of_user: bool
) -> None:
    users = [user(limits=limits if is_of_user else {})]
    directory.take(state(key(5, limits={} if is_of_user else limits), prices=PRICES, users=users))
    await pay(found(directory), TokenCounts(100, 1000), TokenCounts(100, 30))
    [reserved] = charges.reserved
    assert (reserved.user, reserved.key, reserved.model, reserved.tokens) == ("ann", 5, "m", 1100)
    assert reserved.cost == pytest.approx((100 * 2.0 + 1000 * 10.0) / 10**6)
    [(settled, is_reserved)] = charges.settled
    assert is_reserved
    assert (settled.id, settled.at) == (reserved.id, reserved.at)
    assert (settled.prompt_tokens, settled.completion_tokens) == (100, 30)


async def test_sessions_pay_as_the_key_zero_of_their_user(directory: TenantDirectory, charges: FakeCharges) -> None:
    directory.take(state(users=[user(limits={"requests_per_month": 9})]))
    await pay(session_account(directory), TokenCounts(1, 1), TokenCounts(1, 0))
    assert (charges.reserved[0].user, charges.reserved[0].key) == ("ann", 0)
    assert (charges.settled[0][0].user, charges.settled[0][0].key) == ("ann", 0)


async def test_a_model_without_a_price_costs_nothing(directory: TenantDirectory, charges: FakeCharges) -> None:
    directory.take(state(key(), prices=PRICES))
    await pay(found(directory), TokenCounts(1, 1), TokenCounts(1, 1), "other")
    assert charges.settled[0][0].cost == 0.0


async def test_a_request_is_paid_by_the_price_at_its_begin(directory: TenantDirectory, charges: FakeCharges) -> None:
    directory.take(state(key(), prices=PRICES))
    async with charged(found(directory), "m", lambda: TokenCounts(1, 1), lambda: TokenCounts(10**6, 0)):
        directory.take(state(key(), prices=[{"model": "m", "prompt": 50.0, "completion": 0.0}]))
    await pay(found(directory), TokenCounts(1, 1), TokenCounts(10**6, 0))
    assert [settled.cost for settled, _ in charges.settled] == [2.0, 50.0]


async def test_a_request_that_fails_or_is_cancelled_pays_for_what_it_used(
    directory: TenantDirectory, charges: FakeCharges
) -> None:
    directory.take(state(key(limits={"tokens_per_month": 99, "tokens_per_minute": 99})))
    with pytest.raises(KeyError):
        async with charged(found(directory), "m", lambda: TokenCounts(5, 50), lambda: TokenCounts(5, 2)):
            raise KeyError
    assert [(one.completion_tokens, reserved) for one, reserved in charges.settled] == [(2, True)]
    found(directory).reserve(92, time.monotonic())
    with pytest.raises(RateLimited):
        found(directory).reserve(1, time.monotonic())


@pytest.mark.parametrize(("used", "requests"), [(TokenCounts(), 0), (TokenCounts(5, 0), 1)])
async def test_a_request_that_never_ran_is_none_of_the_month(
    directory: TenantDirectory, charges: FakeCharges, used: TokenCounts, requests: int
) -> None:
    """The engine has no room for it, say: each try would use up one."""
    directory.take(state(key(limits={"requests_per_month": 9})))
    with pytest.raises(Overloaded):
        async with charged(found(directory), "m", lambda: TokenCounts(5, 10), lambda: used):
            raise Overloaded("full")
    assert [settled.requests for settled, _ in charges.settled] == [requests]


@pytest.mark.parametrize("error", [QuotaExceeded("no", "tokens_per_month"), NotReady("away")])
async def test_a_refused_reservation_runs_nothing_and_gives_back_the_tokens_of_the_minute(
    directory: TenantDirectory, charges: FakeCharges, metrics: Metrics, error: Exception
) -> None:
    directory.take(state(key(limits={"tokens_per_month": 9, "tokens_per_minute": 99})))
    charges.error = error
    with pytest.raises(type(error)):
        async with charged(found(directory), "m", lambda: TokenCounts(9, 90), lambda: TokenCounts()):
            raise AssertionError("it must not run")
    assert not charges.settled
    found(directory).reserve(99, time.monotonic())
    assert refused(metrics, "ann/laptop", "tokens_per_month") == isinstance(error, QuotaExceeded)
    assert refused(metrics, session_account(directory).key.name, "tokens_per_month") == 0


async def test_a_limit_of_a_month_that_comes_while_a_request_runs_does_not_change_how_it_is_settled(
    directory: TenantDirectory, charges: FakeCharges
) -> None:
    directory.take(state(key()))
    async with charged(found(directory), "m", lambda: TokenCounts(1, 1), lambda: TokenCounts(1, 1)):
        directory.take(state(key(limits={"tokens_per_month": 5})))
    assert [is_reserved for _, is_reserved in charges.settled] == [False]
    await pay(found(directory), TokenCounts(1, 1), TokenCounts(1, 1))
    assert [is_reserved for _, is_reserved in charges.settled] == [False, True]


# Requests that another router takes over


LIMITED = {"tokens_per_minute": 99, "requests_per_minute": 1, "max_concurrent_requests": 1}
MOST, USED = TokenCounts(5, 50), TokenCounts(5, 7)


class Killed:
    """A router that is killed while it answers a request, and the facts that a keeper has of that."""

    def __init__(self, folder: Path, limits: dict[str, Any]) -> None:
        self.charges = FakeCharges("killed")
        self.facts: dict[str, Any] = {}
        self._folder = folder
        self._state = state(key(limits=limits), prices=PRICES)
        self._directory = self.directory(self.charges)

    def directory(self, charges: FakeCharges) -> TenantDirectory:
        """That of one more router."""
        directory = TenantDirectory(Metrics(), cast(Charges, charges), MinuteLog(self._folder / "minutes"))
        directory.take(self._state)
        return directory

    def journal(self, *, is_replayed: bool) -> KeptJournal:
        return KeptJournal("a", json.loads(json.dumps(self.facts)), self.facts.update, is_replayed=is_replayed)

    @asynccontextmanager
    async def killed(self, *, was_reserved: bool = True, was_settled: bool = False) -> AsyncIterator[None]:
        """It lives no more within the block."""
        journal, account = self.journal(is_replayed=False), found(self._directory)
        if not was_reserved:
            self.charges.error = KeyError()
        async with AsyncExitStack() as alive:
            alive.enter_context(account.entered(NOW))
            try:
                running = AsyncExitStack()
                await running.enter_async_context(charged(account, "m", lambda: MOST, lambda: USED, journal=journal))
            except KeyError:
                account.reserve(MOST.total, NOW)  # it was killed before it had the answer
            else:
                journal.flush()
                if was_settled:
                    await running.aclose()
                else:
                    alive.push_async_exit(running)
            yield


@pytest.mark.parametrize("monthly", [{}, {"tokens_per_month": 9}])
async def test_a_request_that_is_taken_over_is_charged_once_and_not_refused(
    tmp_path: Path, monthly: dict[str, Any]
) -> None:
    router, charges = Killed(tmp_path, LIMITED | monthly), FakeCharges()
    async with router.killed():
        account = found(router.directory(charges))
        journal = router.journal(is_replayed=True)
        charges.error = QuotaExceeded("no", "tokens_per_month")  # is not asked
        with account.entered(time.monotonic(), was_admitted=True):
            async with charged(account, "m", lambda: MOST, lambda: USED, journal=journal):
                pass
        [(settled, is_reserved)] = charges.settled
        assert (settled.id, is_reserved) == ("killed-1", bool(monthly))
        assert (settled.requests, settled.prompt_tokens, settled.completion_tokens) == (1, 5, 7)
        assert [each.id for each in router.charges.reserved] == ["killed-1"] * bool(monthly)
        assert not router.charges.settled
        account.reserve(99 - MOST.total, time.monotonic())  # what the killed one had reserved counts, once
        with pytest.raises(RateLimited):
            account.reserve(1, time.monotonic())


async def test_a_reservation_that_was_not_answered_is_asked_for_again(tmp_path: Path) -> None:
    router, charges = Killed(tmp_path, {"tokens_per_month": 99}), FakeCharges()
    async with router.killed(was_reserved=False):
        account, journal = found(router.directory(charges)), router.journal(is_replayed=True)
        async with charged(account, "m", lambda: MOST, lambda: USED, journal=journal):
            pass
    assert [each.id for each in charges.reserved] == ["killed-1"]  # the control plane knows it if it was written
    assert [settled.id for settled, _ in charges.settled] == ["killed-1"]


async def test_a_request_that_was_charged_is_not_charged_again_while_its_answer_is_sent(tmp_path: Path) -> None:
    router, charges = Killed(tmp_path, LIMITED | {"tokens_per_month": 99}), FakeCharges()
    async with router.killed(was_settled=True):
        account, journal = found(router.directory(charges)), router.journal(is_replayed=True)
        async with charged(account, "m", lambda: MOST, lambda: USED, journal=journal):
            pass
        assert not charges.settled
        assert not charges.reserved
        assert [settled.id for settled, _ in router.charges.settled] == ["killed-1"]
        account.reserve(99 - USED.total, time.monotonic())
        with pytest.raises(RateLimited):
            account.reserve(1, time.monotonic())


async def test_a_request_that_an_earlier_router_has_not_begun_to_charge_is_charged_here(tmp_path: Path) -> None:
    router, charges = Killed(tmp_path, LIMITED), FakeCharges()
    account, journal = found(router.directory(charges)), router.journal(is_replayed=True)
    async with charged(account, "m", lambda: MOST, lambda: USED, journal=journal):
        pass
    assert [settled.id for settled, _ in charges.settled] == ["id-1"]
    account.reserve(99 - USED.total, time.monotonic())
    with pytest.raises(RateLimited):
        account.reserve(1, time.monotonic())


async def test_a_request_waits_until_the_tenants_are_known(directory: TenantDirectory) -> None:
    waiting = asyncio.ensure_future(Accounts(None, None, Metrics(), tenants=directory).known())
    await asyncio.sleep(0)
    assert not waiting.done()
    directory.take(state(key()))
    await asyncio.wait_for(waiting, 5)


async def test_a_request_does_not_wait_for_tenants_for_ever(
    directory: TenantDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KNOWN_SECONDS", 0.01)
    await directory.known()
    with pytest.raises(NotReady):
        directory.check_known()


# Records


@pytest.mark.parametrize("name", ["requests_per_month", "tokens_per_month", "budget_per_month"])
def test_a_limit_of_a_month_is_one_even_where_it_is_zero(name: str) -> None:
    assert TenantLimits(**{name: 0}).is_monthly
    assert not TenantLimits(requests_per_minute=1, tokens_per_minute=1, max_concurrent_requests=1).is_monthly


def test_a_state_may_have_fields_that_this_version_does_not_read(directory: TenantDirectory) -> None:
    directory.take(state(key(hint="same", created=1.0, more={"a": 1}), users=[user(subject=None)], version=2))
    assert find(directory) is not None


def test_the_tenant_of_an_account_is_the_user(directory: TenantDirectory) -> None:
    directory.take(state(key(expires=WALL + 5), users=[user(role="operator", limits={"requests_per_minute": 7})]))
    account = found(directory)
    tenant = account.tenant
    assert isinstance(tenant, TenantUse)
    assert (tenant.name, tenant.role, tenant.limits.requests_per_minute) == ("ann", Role.OPERATOR, 7)
    assert not tenant.is_session
    assert account.key.expires == datetime.fromtimestamp(WALL + 5, UTC)
