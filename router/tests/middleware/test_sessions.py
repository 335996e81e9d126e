"""Sessions of the console over HTTP: which cookie counts, and the token that changes need."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tenant_states
from fake_control import FakeControl, fake_fleet
from fakes import eventually
from tenant_states import SECRET, key, user

from funitel.proto.security.sessions import COOKIE, CSRF_HEADER, SECURE_COOKIE, Session, SessionSigner
from funitel.router.api.routes import OPERATIONS
from funitel.router.auth.access import Access

SIGNER = SessionSigner(SECRET)
COMPLETION = {"model": "alpha", "prompt": "Hi", "max_tokens": 4}
KEY = {"authorization": "Bearer sesame"}


def state(**fields: Any) -> dict[str, Any]:
    users = [user("ann"), user("ops", role="operator"), user("root", role="admin")]
    return tenant_states.state(key(name="laptop"), **({"users": users} | fields))


class Served:
    """A router with users.

    Attributes:
        client: over plain HTTP.
        control: the control plane.
    """

    def __init__(self, client: httpx.AsyncClient, control: FakeControl, app: Any) -> None:
        self.client = client
        self.control = control
        self._app = app

    def secure(self) -> httpx.AsyncClient:
        """A client over TLS."""
        return httpx.AsyncClient(transport=httpx.ASGITransport(self._app), base_url="https://localhost")

    def say(self, **fields: Any) -> None:
        """Say another state of the tenants, which the router asks for at once."""
        self.control.answers["GET", "/v1/fleet/tenants"] = (200, json.dumps(state(**fields)).encode() + b"\n")

    async def get(self, cookie: str, path: str = "/v1/keys") -> int:
        return (await self.client.get(path, headers={"cookie": cookie})).status_code


@asynccontextmanager
async def served(tmp_path: Path, **settings: Any) -> AsyncIterator[Served]:
    def prepare(control: FakeControl) -> None:
        control.answers["GET", "/v1/fleet/tenants"] = (200, json.dumps(state()).encode() + b"\n")
        control.answers["GET", "/v1/keys"] = (200, {"keys": []})
        control.answers["POST", "/v1/fleet/charges"] = (200, {"refusals": []})

    async with fake_fleet(tmp_path, "alpha", users=True, prepare=prepare, **settings) as fleet:

        async def is_known() -> bool:
            return (await fleet.client.get("/v1/keys", headers=KEY)).status_code != 503

        await eventually(is_known, "known")
        yield Served(fleet.client, fleet.control, fleet.app)


def begin(name: str = "ann", generation: int = 0, signer: SessionSigner = SIGNER) -> tuple[str, dict[str, str]]:
    """The value of the cookie of a new session, and the header with its token."""
    value = signer.new(name, generation)
    session = signer.session(value)
    assert isinstance(session, Session)
    return value, {CSRF_HEADER: signer.csrf_token(session)}


# Cookies


async def test_a_session_is_asked_for_and_is_enough(tmp_path: Path) -> None:
    async with served(tmp_path) as router:
        assert (await router.client.get("/v1/keys")).status_code == 401
        cookie, token = begin()
        assert await router.get(f"{COOKIE}={cookie}") == 200
        headers = {"cookie": f"{COOKIE}={cookie}"} | token
        answer = await router.client.post("/v1/completions", json=COMPLETION, headers=headers)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"]


@pytest.mark.parametrize(
    "make",
    [
        lambda cookie: "",
        lambda cookie: cookie,
        lambda cookie: f"{COOKIE}=",
        lambda cookie: f"{COOKIE}={cookie[:-1]}",
        lambda cookie: f"{COOKIE}={cookie.swapcase()}",
        lambda cookie: f"{COOKIE}=x.{cookie}",
        lambda cookie: f"other={cookie}",
        lambda cookie: f"{COOKIE.upper()}={cookie}",
        lambda cookie: f"{SECURE_COOKIE}={cookie}",
        lambda cookie: f"{COOKIE}2={cookie}",
        lambda cookie: f"{COOKIE}={SessionSigner('another').new('ann', 0)}",
        lambda cookie: f"{COOKIE}={SIGNER.new('cid', 0)}",
        lambda cookie: f"{COOKIE}={SIGNER.new('ann', 1)}",
        lambda cookie: f"{COOKIE}={'x' * 5000}",
        lambda cookie: f"{COOKIE}=\x01\x02",
        lambda cookie: "@=;;;==;\\",
        lambda cookie: "[]=1",
        lambda cookie: "; ; ;",
        lambda cookie: "=",
    ],
)
async def test_any_other_cookie_is_no_session_and_no_failure(tmp_path: Path, make: Any) -> None:
    async with served(tmp_path) as router:
        assert await router.get(make(begin()[0])) == 401


async def test_bytes_that_are_no_ascii_are_no_session(tmp_path: Path) -> None:
    async with served(tmp_path) as router:
        for value in (b"\xff\xfe", "ü".encode(), b'"\\351\\000"'):
            headers = [(b"cookie", COOKIE.encode() + b"=" + value)]
            assert (await router.client.get("/v1/keys", headers=headers)).status_code == 401


@pytest.mark.parametrize(
    "others",
    [
        "a=1; b=2",
        "token=abc==; _ga=GA1.2.3",
        'quoted="a b"',
        'json={"a":"b c"}',
        "spaces=a b c",
        "name with spaces=1",
        "a[0]=1",
        "@app=1",
        "lone",
        "umlaut=ü",
        "list=a,b",
        "empty=",
        'half="',
        "path=/x",
        "expires=never",
    ],
)
async def test_cookies_of_other_programs_on_the_host_do_not_hide_the_session(tmp_path: Path, others: str) -> None:
    """A browser sends the cookies of all ports of a host, such as those of other programs on localhost."""
    async with served(tmp_path) as router:
        cookie, _ = begin()
        statuses = []
        for header in (f"{others}; {COOKIE}={cookie}", f"{COOKIE}={cookie}; {others}"):
            headers = [(b"cookie", header.encode())]
            statuses.append((await router.client.get("/v1/keys", headers=headers)).status_code)
        assert statuses == [200, 200]


async def test_over_tls_the_cookie_has_the_prefix_and_without_it_has_not(tmp_path: Path) -> None:
    async with served(tmp_path) as router, router.secure() as secure:
        value, _ = begin()
        plain, prefixed = {"cookie": f"{COOKIE}={value}"}, {"cookie": f"{SECURE_COOKIE}={value}"}
        assert (await router.client.get("/v1/keys", headers=plain)).status_code == 200
        assert (await router.client.get("/v1/keys", headers=prefixed)).status_code == 401
        assert (await secure.get("/v1/keys", headers=prefixed)).status_code == 200
        assert (await secure.get("/v1/keys", headers=plain)).status_code == 401


async def test_a_key_comes_before_a_session_and_a_wrong_key_is_not_made_good_by_one(tmp_path: Path) -> None:
    async with served(tmp_path) as router:
        cookie, token = begin("root")
        headers = {"cookie": f"{COOKIE}={cookie}"} | token
        assert (await router.client.get("/v1/keys", headers=headers | {"x-api-key": "wrong"})).status_code == 401
        answer = await router.client.get("/v1/keys", headers=headers | KEY)
        assert answer.status_code == 403, "the key does not list the path"
        assert "must list /v1/keys" in answer.text
        empty = headers | {"x-api-key": "", "authorization": "Bearer "}
        assert (await router.client.get("/v1/keys", headers=empty)).status_code == 200


async def test_wrong_cookies_are_no_wrong_keys(tmp_path: Path) -> None:
    async with served(tmp_path, max_wrong_keys=2) as router:
        for _ in range(5):
            assert await router.get(f"{COOKIE}=wrong") == 401
        assert await router.get(f"{COOKIE}={begin()[0]}") == 200


async def test_a_session_that_was_ended_or_is_of_an_earlier_generation_is_out(tmp_path: Path) -> None:
    async with served(tmp_path) as router:
        mine, other = begin()[0], begin()[0]
        session = SIGNER.session(mine)
        assert session is not None
        router.say(ended_sessions=[session.id])

        async def is_out() -> bool:
            return await router.get(f"{COOKIE}={mine}") == 401

        await eventually(is_out, "out")
        assert await router.get(f"{COOKIE}={other}") == 200
        router.say(users=[user("ann", generation=1)])

        async def are_all_out() -> bool:
            return await router.get(f"{COOKIE}={other}") == 401

        await eventually(are_all_out, "out")
        assert await router.get(f"{COOKIE}={begin('ann', 1)[0]}") == 200


# Tokens of changes


CHANGES = ("POST", "PUT", "PATCH", "DELETE")


@pytest.mark.parametrize("wrong", ["", "0" * 64, "of another session", "of another secret", "x" * 10_000, "ü" * 64])
async def test_a_change_needs_the_token_of_its_very_session(tmp_path: Path, wrong: str) -> None:
    async with served(tmp_path) as router:
        cookie, token = begin()
        other = {"of another session": begin()[1], "of another secret": begin(signer=SessionSigner("x"))[1]}
        given = other.get(wrong, {CSRF_HEADER: wrong})[CSRF_HEADER]
        base: list[tuple[bytes, bytes]] = [(b"cookie", f"{COOKIE}={cookie}".encode())]
        header = (CSRF_HEADER.encode(), given.encode())
        answer = await router.client.post("/v1/completions", json=COMPLETION, headers=[*base, header])
        assert answer.status_code == 403
        assert f"needs its token in the header {CSRF_HEADER}" in answer.text
        assert (await router.client.post("/v1/completions", json=COMPLETION, headers=base)).status_code == 403
        right = (CSRF_HEADER.encode(), token[CSRF_HEADER].encode())
        assert (await router.client.post("/v1/completions", json=COMPLETION, headers=[*base, right])).status_code == 200


async def test_the_cookie_is_no_token(tmp_path: Path) -> None:
    async with served(tmp_path) as router:
        cookie, token = begin()
        session = SIGNER.session(cookie)
        assert session is not None
        for wrong in (cookie, session.id):
            headers = {"cookie": f"{COOKIE}={cookie}", CSRF_HEADER: wrong}
            assert (await router.client.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 403
        in_cookie = {"cookie": f"{COOKIE}={cookie}; {CSRF_HEADER}={token[CSRF_HEADER]}"}
        assert (await router.client.post("/v1/completions", json=COMPLETION, headers=in_cookie)).status_code == 403


async def test_a_token_without_its_cookie_is_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as router:
        _, token = begin()
        assert (await router.client.get("/v1/keys", headers=token)).status_code == 401
        assert (await router.client.post("/v1/completions", json=COMPLETION, headers=token)).status_code == 401


async def test_every_route_that_changes_something_needs_the_token(tmp_path: Path) -> None:
    async with served(tmp_path) as router:
        cookie, _ = begin("root")
        headers = {"cookie": f"{COOKIE}={cookie}"}
        count = 0
        for operation in OPERATIONS:
            if operation.method not in CHANGES or operation.access in (Access.FACT, Access.LOGIN, Access.PROBE):
                continue
            path = operation.path.replace("{", "").replace("}", "")
            answer = await router.client.request(operation.method, path, content=b"{", headers=headers)
            assert answer.status_code == 403, (operation.method, path)
            count += 1
        assert count > 30
    changed = [asked for asked in router.control.asked if asked.method in CHANGES]
    assert {asked.target.partition("?")[0] for asked in changed} <= {
        "/v1/fleet/attached",
        "/v1/fleet/activity",
        "/v1/fleet/charges",
        "/v1/fleet/released",
        "/v1/fleet/tenants/taken",
    }


async def test_what_only_reads_needs_no_token(tmp_path: Path) -> None:
    async with served(tmp_path) as router:
        cookie, _ = begin()
        for method in ("GET", "HEAD"):
            answer = await router.client.request(method, "/v1/responses/r", headers={"cookie": f"{COOKIE}={cookie}"})
            assert answer.status_code == 404, "there is no such response"


async def test_a_request_with_a_key_needs_no_token(tmp_path: Path) -> None:
    async with served(tmp_path) as router:
        cookie, _ = begin()
        for headers in (KEY, KEY | {"cookie": f"{COOKIE}={cookie}"}):
            answer = await router.client.post("/v1/completions", json=COMPLETION, headers=headers)
            assert answer.status_code == 200


# Roles


@pytest.mark.parametrize(("name", "expected"), [("ann", 403), ("ops", 403), ("root", 200)])
async def test_a_route_of_admins_takes_their_sessions_alone(tmp_path: Path, name: str, expected: int) -> None:
    async with served(tmp_path) as router:
        router.control.answers["GET", "/v1/audit"] = (200, {"audit": []})
        answer = await router.client.get("/v1/audit", headers={"cookie": f"{COOKIE}={begin(name)[0]}"})
        assert answer.status_code == expected
        if expected == 403:
            assert "this takes the role admin" in answer.text


async def test_sessions_are_nothing_where_the_server_has_no_users(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, "alpha", api_key="sesame") as fleet:
        cookie, token = begin()
        headers = {"cookie": f"{COOKIE}={cookie}"} | token
        assert (await fleet.client.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 401
