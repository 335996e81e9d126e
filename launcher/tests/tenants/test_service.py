"""Users, sessions and keys: what each role may do, what is refused, and what the router hears."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from funitel.launcher.control_plane.store import StateStore, StateThread
from funitel.launcher.tenants.login_tries import MAX_FAILURES, LoginTries
from funitel.launcher.tenants.oidc import Identity
from funitel.launcher.tenants.passwords import check_password
from funitel.launcher.tenants.records import TenantKey, User
from funitel.launcher.tenants.service import Actor, Tenants
from funitel.proto.errors import Conflict, Forbidden, InvalidRequest, NotFound, RateLimited, Unauthorized
from funitel.proto.security.keys import digest_of
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
