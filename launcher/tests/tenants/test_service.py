"""Users, sessions and keys: what each role may do, what is refused, and what the router hears."""

import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from funitel.launcher.control_plane.store import StateStore, StateThread
from funitel.launcher.tenants import service
from funitel.launcher.tenants.login_tries import MAX_FAILURES, LoginTries
from funitel.launcher.tenants.oidc import Identity
from funitel.launcher.tenants.passwords import check_password
from funitel.launcher.tenants.records import TenantKey, User
from funitel.launcher.tenants.service import Actor, Tenants
from funitel.proto.errors import Conflict, Forbidden, InvalidRequest, NotFound, RateLimited, Unauthorized
from funitel.proto.security.keys import digest_of
from funitel.proto.security.quota import QuotaReservation, Settlement, TenantLimits
from funitel.proto.security.roles import Role

PASSWORD = "correct horse battery"


def actor(name: str, role: Role) -> Actor:
    return Actor(name=name, role=role, address="10.0.0.7", action="test", user=name)


SOCKET = Actor(name="socket", role=Role.ADMIN, address="", action="test")
ANN = actor("ann", Role.USER)


@pytest.fixture
async def tenants() -> AsyncIterator[Tenants]:
    state = StateThread(StateStore(None))
    tenants = Tenants(state)
    await tenants.start()
    await tenants.add_user(SOCKET, User(name="root", role=Role.ADMIN), PASSWORD)
    await tenants.add_user(SOCKET, User(name="ann"), PASSWORD)
    yield tenants
    tenants.close()
    await state.close()


async def test_a_login_needs_the_right_password(tenants: Tenants) -> None:
    user, cookie = await tenants.log_in("ann", PASSWORD, "10.0.0.7")
    assert tenants.user_of(tenants.signer.session(cookie)) == user
    for name, password in (("ann", "wrong"), ("nobody", PASSWORD), ("ann", "")):
        with pytest.raises(Unauthorized, match="wrong name or password"):
            await tenants.log_in(name, password, "10.0.0.8")
    assert tenants.signer.session(cookie + "x") is None
    rows = [row for _, row in await tenants.audit(SOCKET, limit=10)]
    assert [(row.actor, row.status) for row in rows if row.action == "log in"] == [
        ("ann", 401),
        ("nobody", 401),
        ("ann", 401),
        ("ann", 200),
    ]


async def test_a_session_of_a_deleted_user_is_none_of_a_new_one(tenants: Tenants) -> None:
    _, cookie = await tenants.log_in("ann", PASSWORD, "")
    await tenants.delete_user(SOCKET, "ann")
    await tenants.add_user(SOCKET, User(name="ann", role=Role.ADMIN), PASSWORD)
    assert tenants.user_of(tenants.signer.session(cookie)) is None


async def test_sessions_end(tenants: Tenants) -> None:
    _, cookie = await tenants.log_in("ann", PASSWORD, "")
    _, other = await tenants.log_in("ann", PASSWORD, "")
    session, second = tenants.signer.session(cookie), tenants.signer.session(other)
    assert session is not None
    await tenants.end_session(ANN, session)
    assert tenants.user_of(session) is None
    assert tenants.user_of(second) is not None
    await tenants.set_password(ANN, "ann", "another password", PASSWORD)
    assert tenants.user_of(second) is None
    await tenants.change_user(SOCKET, "ann", {"is_disabled": True})
    with pytest.raises(Unauthorized):
        await tenants.log_in("ann", "another password", "")


async def test_the_last_admin_stays(tenants: Tenants) -> None:
    for change in ({"role": Role.USER}, {"is_disabled": True}):
        with pytest.raises(Conflict, match="root is the last admin"):
            await tenants.change_user(SOCKET, "root", change)
    with pytest.raises(Conflict):
        await tenants.delete_user(SOCKET, "root")
    await tenants.change_user(SOCKET, "ann", {"role": Role.ADMIN})
    await tenants.delete_user(SOCKET, "root")
    with pytest.raises(NotFound):
        tenants.user(SOCKET, "root")


async def test_a_user_changes_its_own_alone(tenants: Tenants) -> None:
    root = actor("root", Role.ADMIN)
    key, text = await tenants.add_key(root, TenantKey(name="k", user="root"))
    assert key.digest == digest_of(text.encode()).hex()
    for refused in (
        tenants.add_user(ANN, User(name="x"), None),
        tenants.change_user(ANN, "ann", {"role": Role.ADMIN}),
        tenants.delete_user(ANN, "ann"),
        tenants.add_key(ANN, TenantKey(name="k", user="root")),
        tenants.set_password(ANN, "root", "another password", None),
        tenants.audit(ANN, limit=1),
    ):
        with pytest.raises(Forbidden):
            await refused
    for hidden in (tenants.revoke_key(ANN, key.id), tenants.rotate_key(ANN, key.id)):
        with pytest.raises(NotFound):
            await hidden
    own, _ = await tenants.add_key(ANN, TenantKey(name="k", user="ann"))
    assert tenants.keys(ANN, "root") == [own]
    with pytest.raises(Conflict, match="has a key 'k'"):
        await tenants.add_key(ANN, TenantKey(name="k", user="ann"))
    with pytest.raises(Forbidden):
        await tenants.change_key(ANN, own.id, {"is_banned": True})
    await tenants.revoke_key(ANN, own.id)
    with pytest.raises(Conflict, match="is revoked"):
        await tenants.rotate_key(ANN, own.id)
    await tenants.add_key(ANN, TenantKey(name="k", user="ann"))


async def test_an_api_key_makes_and_changes_no_keys_but_for_an_admin(tenants: Tenants) -> None:
    """Its scopes may be narrower than what its user could give a new one."""
    own, _ = await tenants.add_key(ANN, TenantKey(name="k", user="ann", routes=("/v1/keys",)))
    by_key, by_session = replace(ANN, via="ann/k"), replace(ANN, via="ann/~session")
    for refused in (
        tenants.add_key(by_key, TenantKey(name="wider", user="ann")),
        tenants.change_key(by_key, own.id, {"routes": ()}),
    ):
        with pytest.raises(Forbidden, match="an API key makes and changes no keys"):
            await refused
    await tenants.rotate_key(by_key, own.id)
    await tenants.change_key(by_session, own.id, {"routes": ()})
    root = replace(actor("root", Role.ADMIN), via="root/k")
    await tenants.add_key(root, TenantKey(name="second", user="ann"))


async def test_the_bounds_that_an_admin_has_set_are_an_admins_to_change(tenants: Tenants) -> None:
    root, limits = actor("root", Role.ADMIN), TenantLimits(requests_per_month=2)
    given, _ = await tenants.add_key(root, TenantKey(name="given", user="ann", limits=limits))
    own, _ = await tenants.add_key(ANN, TenantKey(name="own", user="ann", limits=limits))
    assert (given.is_managed, own.is_managed) == (True, False)
    with pytest.raises(Forbidden, match="an admin has set the bounds of the key 'given'"):
        await tenants.change_key(ANN, given.id, {"limits": TenantLimits()})
    renamed = await tenants.change_key(ANN, given.id, {"name": "mine", "limits": limits})
    assert (renamed.name, renamed.is_managed) == ("mine", True)
    await tenants.change_key(ANN, own.id, {"limits": TenantLimits(requests_per_month=3)})
    assert (await tenants.change_key(root, own.id, {"models": ("m",)})).is_managed
    with pytest.raises(Forbidden):
        await tenants.change_key(ANN, own.id, {"models": ()})
    assert (await tenants.change_key(root, own.id, {"limits": TenantLimits()})).limits == TenantLimits()


async def test_a_user_has_so_many_keys_at_most(tenants: Tenants, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_KEYS", 3)
    keys = [(await tenants.add_key(ANN, TenantKey(name=f"k{place}", user="ann")))[0] for place in range(3)]
    with pytest.raises(Conflict, match="at most 3 keys, 'ann' has 3"):
        await tenants.add_key(ANN, TenantKey(name="more", user="ann"))
    with pytest.raises(Conflict, match="at most 3 keys"):
        await tenants.import_keys(SOCKET, [TenantKey(name="more", user="ann", digest="0" * 64)])
    await tenants.revoke_key(ANN, keys[0].id)
    await tenants.add_key(ANN, TenantKey(name="more", user="ann"))


async def test_a_user_that_is_added_again_has_nothing_of_the_deleted_one(tenants: Tenants) -> None:
    key, _ = await tenants.add_key(ANN, TenantKey(name="k", user="ann"))
    used = {"user": "ann", "key": key.id, "model": "m", "requests": 1, "prompt_tokens": 5, "completion_tokens": 6}
    now = time.time()
    await tenants.charge("router", 1, [], [Settlement(id="a", at=now, cost=0.5, **used)])
    reserved = QuotaReservation(id="b", at=now, user="ann", key=key.id, model="m", tokens=100, cost=1.0)
    await tenants.charge("router", 2, [reserved], [])
    await tenants.delete_user(SOCKET, "ann")
    (row,) = [row for _, row in await tenants.audit(SOCKET, limit=10, object="key ann/k") if row.before is not None]
    assert row.before is not None
    assert row.after is not None
    assert (row.actor, row.before["revoked"], row.after["revoked"] is not None) == ("socket", None, True)
    await tenants.add_user(SOCKET, User(name="ann"), PASSWORD)
    days = {"first": "2020-01-01", "last": "2099-01-01"}
    assert tenants.keys(ANN) == []
    assert await tenants.usage(ANN, **days, user=None) == []
    with pytest.raises(NotFound):
        tenants.key(ANN, key.id)
    (found,) = await tenants.usage(SOCKET, **days, user=None)
    assert (found["user"][:4], found["requests"], found["unsettled_tokens"]) == ("ann~", 2, 100)
    await tenants.add_key(ANN, TenantKey(name="k", user="ann"))


async def test_a_login_with_the_password_of_before_is_refused(
    tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was being checked when the password was changed."""
    check = tenants._passwords.is_right

    async def slow(hashed: str | None, password: str) -> bool:
        is_right = await check(hashed, password)
        if password == PASSWORD:
            monkeypatch.undo()
            await tenants.set_password(SOCKET, "ann", "another password", None)
        return is_right

    monkeypatch.setattr(tenants._passwords, "is_right", slow)
    with pytest.raises(Unauthorized):
        await tenants.log_in("ann", PASSWORD, "10.0.0.7")
    assert await tenants.log_in("ann", "another password", "10.0.0.8")


@pytest.mark.parametrize("name", ["x" * 1_000_000, "no name", "", "-a"])
async def test_a_name_that_can_be_none_is_not_kept(tenants: Tenants, name: str) -> None:
    with pytest.raises(Unauthorized):
        await tenants.log_in(name, PASSWORD, "10.0.0.7")
    (_, row), *_ = await tenants.audit(SOCKET, limit=1)
    assert (row.actor, row.object, row.status) == ("anonymous", "session", 401)


async def test_refused_logins_at_the_provider_do_not_fill_the_audit(tenants: Tenants) -> None:
    for _ in range(service.MAX_REFUSED + 5):
        await tenants.note_refused("10.0.0.7", 401)
    rows = await tenants.audit(SOCKET, limit=1000, actor=service.PROVIDER)
    assert len(rows) == service.MAX_REFUSED


async def test_a_renamed_key_is_in_the_audit_under_the_name_it_had(tenants: Tenants) -> None:
    key, _ = await tenants.add_key(ANN, TenantKey(name="k", user="ann"))
    await tenants.change_key(ANN, key.id, {"name": "desk"})
    rows = [row for _, row in await tenants.audit(SOCKET, limit=10, object="key ann/k")]
    assert rows[0].after is not None
    assert rows[0].after["name"] == "desk"


async def test_a_person_of_a_provider_sets_no_first_password(tenants: Tenants) -> None:
    user = await tenants.user_of_identity(Identity(subject="https://idp 7", name="zoe", role=None))
    with pytest.raises(Forbidden):
        await tenants.set_password(actor(user.name, Role.USER), user.name, PASSWORD, None)
    await tenants.set_password(SOCKET, user.name, PASSWORD, None)


async def test_a_person_of_a_provider_becomes_a_user(tenants: Tenants) -> None:
    identity = Identity(subject="https://idp 7", name="Zoë Müller", role=None)
    user = await tenants.user_of_identity(identity)
    assert (user.name, user.role) == ("Zo--M-ller", Role.USER)
    promoted = await tenants.user_of_identity(replace(identity, role=Role.OPERATOR))
    assert (promoted.name, promoted.role) == (user.name, Role.OPERATOR)
    with pytest.raises(Conflict, match="an admin must decide"):
        await tenants.user_of_identity(Identity(subject="https://idp 8", name="ann", role=Role.ADMIN))
    await tenants.change_user(SOCKET, user.name, {"is_disabled": True})
    with pytest.raises(Unauthorized):
        await tenants.user_of_identity(identity)


async def test_the_router_hears_of_each_change(tenants: Tenants) -> None:
    states = tenants.broadcast.watch()
    assert [user["name"] for user in (await anext(states))["users"]] == ["ann", "root"]
    await tenants.add_key(ANN, TenantKey(name="k", user="ann"))
    state = await anext(states)
    assert [(key["name"], len(key["digest"])) for key in state["keys"]] == [("k", 64)]
    await tenants.delete_user(SOCKET, "ann")
    state = await anext(states)
    assert [user["name"] for user in state["users"]] == ["root"]
    assert state["keys"] == []
    assert "password_hash" not in str(state)


def test_tries_are_slowed_down_and_forgotten() -> None:
    tries = LoginTries()
    for number in range(MAX_FAILURES):
        tries.check(["a"], float(number))
        tries.count(["a", "b"], float(number))
    with pytest.raises(RateLimited):
        tries.check(["a"], 4.5)
    tries.check(["c"], 4.5)
    tries.check(["a"], 5.1)
    tries.count(["a"], 5.1)
    with pytest.raises(RateLimited) as caught:
        tries.check(["a"], 5.2)
    assert caught.value.wait_seconds == pytest.approx(1.9)
    tries.succeed(["a"])
    tries.check(["a"], 5.2)


@pytest.mark.parametrize(("password", "name"), [("short", "ann"), ("x" * 1025, "ann"), ("my-name-is-Ann", "ann")])
def test_weak_passwords_are_refused(password: str, name: str) -> None:
    with pytest.raises(InvalidRequest, match="`password`"):
        check_password(password, name)
