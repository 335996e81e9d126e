"""Users, their keys and sessions on a real server: scopes, quotas under load, roles by route, the audit, kill -9."""

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from funitel.proto.security.roles import Role
from funitel.router.api.routes import OPERATIONS
from funitel.router.auth.access import Access
from funitel_testing.servers import PLAIN, wait_until
from funitel_testing.tenants import CSRF, PASSWORD, Plane, users_fleet
from funitel_testing.tiny import VOCAB_SIZE, save_tiny

MODEL = "tiny"
SECONDS = 60.0
NUM_STREAMS = 32


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """A server with users and a tiny model that never ends an answer by itself."""
    folder = tmp_path_factory.mktemp("users")
    model = save_tiny("llama", folder / "tiny", max_position_embeddings=4096, eos_token_id=VOCAB_SIZE)
    with users_fleet(folder, model, MODEL, "--batch-dir", str(folder / "batches")) as running:
        yield running


def completion(max_tokens: int = 4, prompt: str = "Hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, **fields}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def ask(plane: Plane, key: str, **fields: Any) -> httpx.Response:
    """One completion with a key."""
    url = f"{plane.url}/v1/completions"
    return httpx.post(url, json=completion(**fields), headers=bearer(key), verify=PLAIN, timeout=SECONDS)


def test_without_a_key_or_a_session_nothing_is_answered(plane: Plane) -> None:
    assert httpx.post(f"{plane.url}/v1/completions", json=completion(), verify=PLAIN).status_code == 401
    assert httpx.get(f"{plane.url}/v1/users", verify=PLAIN).status_code == 401
    assert httpx.get(f"{plane.url}/v1/auth/session", verify=PLAIN).json()["user"] is None
    assert httpx.get(f"{plane.url}/ui/", verify=PLAIN).status_code == 200


def test_a_key_is_made_used_changed_rotated_and_revoked(plane: Plane) -> None:
    plane.user("ann")
    with plane.session("ann") as ann:
        made = ann.post("/v1/keys", json={"name": "laptop", "models": [MODEL]}).json()
        client = openai.OpenAI(base_url=f"{plane.url}/v1", api_key=made["key"], max_retries=0)
        assert client.completions.create(model=MODEL, prompt="Hi", max_tokens=3).usage.completion_tokens == 3  # type: ignore[union-attr]
        assert ann.get("/v1/keys").json()["keys"][0]["hint"] == made["key"][-4:]
        rotated = ann.post(f"/v1/keys/{made['id']}/rotate").json()
        _until(lambda: ask(plane, made["key"]).status_code == 401)
        assert ask(plane, rotated["key"]).status_code == 200
        assert ann.patch(f"/v1/keys/{made['id']}", json={"limits": {"requests_per_month": 2}}).status_code == 200
        _until(lambda: ask(plane, rotated["key"]).status_code == 429)
        refused = ask(plane, rotated["key"])
        assert "at most 2 requests a month with this API key" in refused.json()["error"]["message"]
        assert ann.delete(f"/v1/keys/{made['id']}").json()["revoked"]
        _until(lambda: ask(plane, rotated["key"]).status_code == 401)
        assert ann.post(f"/v1/keys/{made['id']}/rotate").status_code == 409


def _until(holds: Any) -> None:
    wait_until(holds, 5)


def test_a_session_needs_its_token_for_changes_and_ends(plane: Plane) -> None:
    plane.user("bea")
    with plane.session("bea") as bea:
        token = bea.headers.pop(CSRF)
        assert bea.get("/v1/keys").status_code == 200
        assert bea.post("/v1/keys", json={"name": "x"}).status_code == 403
        assert bea.post("/v1/keys", json={"name": "x"}, headers={CSRF: "0" * 64}).status_code == 403
        bea.headers[CSRF] = token
        cookies = dict(bea.cookies)
        assert bea.post("/v1/auth/logout").status_code == 204
        bea.cookies.update(cookies)
        _until(lambda: bea.get("/v1/keys").status_code == 401)
    with plane.session("bea") as bea, plane.session("bea") as other:
        assert dict(bea.cookies) != dict(other.cookies)
        body = {"password": "another long one", "current_password": "wrong"}
        assert bea.post("/v1/users/bea/password", json=body).status_code == 401
        assert bea.post("/v1/users/bea/password", json=body | {"current_password": PASSWORD}).status_code == 204
        _until(lambda: other.get("/v1/keys").status_code == 401)


def test_a_cookie_that_was_there_before_is_no_session(plane: Plane) -> None:
    """Session fixation: whatever cookie a browser brings, a login gives it another."""
    plane.user("cid")
    with plane.session("cid") as cid:
        fixed = dict(cid.cookies)
    with httpx.Client(base_url=plane.url, verify=PLAIN, cookies=fixed) as other:
        answer = other.post("/v1/auth/login", json={"name": "cid", "password": PASSWORD})
        assert answer.cookies.get("funitel_session") not in (None, fixed["funitel_session"])
        flags = answer.headers["set-cookie"].lower()
        assert all(flag in flags for flag in ("httponly", "samesite=strict", "path=/"))


def test_wrong_passwords_are_slowed_down(plane: Plane) -> None:
    plane.user("dan")
    body = {"name": "dan", "password": "wrong password"}
    statuses = [httpx.post(f"{plane.url}/v1/auth/login", json=body, verify=PLAIN).status_code for _ in range(8)]
    assert statuses[:5] == [401] * 5
    assert int(httpx.post(f"{plane.url}/v1/auth/login", json=body, verify=PLAIN).headers["retry-after"]) >= 1
    assert 429 in statuses[5:]


async def _stream(client: httpx.AsyncClient, key: str, max_tokens: int) -> int | None:
    """The tokens of one stream; None where it was refused."""
    body = completion(max_tokens, stream=True, stream_options={"include_usage": True})
    num_tokens = 0
    async with client.stream("POST", "/v1/completions", json=body, headers=bearer(key)) as answer:
        if answer.status_code == 429:
            return None
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if '"usage":{' in line:
                num_tokens = int(line.split('"total_tokens":')[1].split(",")[0].rstrip("}"))
    return num_tokens


@pytest.mark.parametrize(
    "limits", [{"tokens_per_month": 1000}, {"tokens_per_minute": 1000}, {"requests_per_month": 40}]
)
async def test_a_quota_holds_exactly_under_many_streams(plane: Plane, limits: dict[str, int]) -> None:
    name = f"quota-{next(iter(limits)).replace('_', '-')}"
    plane.user(name)
    _, key = plane.key(name, limits=limits)
    async with httpx.AsyncClient(base_url=plane.url, verify=PLAIN, timeout=SECONDS) as client:
        used: list[int | None] = []
        for _ in range(3):
            used += await asyncio.gather(*(_stream(client, key, 20) for _ in range(NUM_STREAMS)))
    taken = [tokens for tokens in used if tokens is not None]
    most = next(iter(limits.values()))
    total = len(taken) if "requests_per_month" in limits else sum(taken)
    assert total <= most
    assert most - total < (1 if "requests_per_month" in limits else max(taken)), "it is used up"
    await asyncio.to_thread(_until, lambda: _total(plane, name) == sum(taken))


def _total(plane: Plane, user: str) -> int:
    """The tokens that a user has used."""
    rows = plane.ask("GET", f"/v1/usage?user={user}")["usage"]
    return sum(row["prompt_tokens"] + row["completion_tokens"] + row["unsettled_tokens"] for row in rows)


async def test_what_is_reserved_when_the_router_is_killed_counts_as_used(plane: Plane) -> None:
    plane.user("eve")
    _, key = plane.key("eve", limits={"tokens_per_month": 4000})
    async with httpx.AsyncClient(base_url=plane.url, verify=PLAIN, timeout=SECONDS) as client:
        streams = [asyncio.create_task(_stream(client, key, 1500)) for _ in range(2)]
        await asyncio.to_thread(_until, lambda: _total(plane, "eve") > 3000)
        router = plane.fleet.router_pid()
        os.kill(router, signal.SIGKILL)
        await asyncio.gather(*streams, return_exceptions=True)
    await asyncio.to_thread(wait_until, lambda: _is_up(plane, router), 30)
    assert _total(plane, "eve") > 3000
    assert ask(plane, key, max_tokens=1500).status_code == 429
    assert ask(plane, key, max_tokens=100).status_code == 200


@pytest.mark.parametrize("limits", [{"tokens_per_minute": 1000}, {"requests_per_minute": 10}])
async def test_a_minute_goes_on_when_the_router_is_killed(plane: Plane, limits: dict[str, int]) -> None:
    """Streams run when it is killed: what they have reserved is not given twice."""
    user = f"minute-{next(iter(limits)).split('_', maxsplit=1)[0]}"
    plane.user(user)
    _, key = plane.key(user, limits=limits)
    async with httpx.AsyncClient(base_url=plane.url, verify=PLAIN, timeout=SECONDS) as client:
        for _ in range(4):
            assert (await _stream(client, key, 50)) is not None
        streams = [asyncio.create_task(_begun_stream(client, key, 300)) for _ in range(2)]
        begun = await asyncio.gather(*streams)
        router = plane.fleet.router_pid()
        os.kill(router, signal.SIGKILL)
        for answer, _ in begun:
            await answer.aclose()
    await asyncio.to_thread(wait_until, lambda: _is_up(plane, router), 30)
    statuses = [ask(plane, key, max_tokens=20).status_code for _ in range(10)]
    if "requests_per_minute" in limits:
        assert statuses == [200] * 4 + [429] * 6
    else:
        assert statuses[:6] == [200] * 6
        assert statuses[8:] == [429] * 2, "1,000 less 4 x 50 and 2 x 300 has no room for 9 x 20"


async def _begun_stream(client: httpx.AsyncClient, key: str, max_tokens: int) -> tuple[httpx.Response, Any]:
    """An answer of which the first piece has come, and its other pieces."""
    body = completion(max_tokens, stream=True)
    answer = await client.send(
        client.build_request("POST", "/v1/completions", json=body, headers=bearer(key)), stream=True
    )
    assert answer.status_code == 200
    pieces = answer.aiter_raw()
    await anext(pieces)
    return answer, pieces


def _is_up(plane: Plane, router: int) -> bool:
    try:
        return plane.fleet.router_pid() != router and httpx.get(f"{plane.url}/health", verify=PLAIN).status_code == 200
    except (httpx.TransportError, AssertionError):
        return False


# Roles by route -------------------------------------------------------------------------------------------------

LEAST = {Access.OPERATOR: Role.OPERATOR, Access.ADMIN: Role.ADMIN}


@pytest.fixture(scope="module")
def actors(plane: Plane) -> Iterator[dict[str, httpx.Client]]:
    """A session of each role, and a key of each role that is for every route by a pattern."""
    found = {}
    with ExitStack() as stack:
        for role in Role:
            plane.user(f"matrix-{role}", str(role))
            found[f"session {role}"] = stack.enter_context(plane.session(f"matrix-{role}"))
            _, key = plane.key(f"matrix-{role}")
            client = httpx.Client(base_url=plane.url, verify=PLAIN, headers=bearer(key), timeout=SECONDS)
            found[f"key {role}"] = stack.enter_context(client)
        yield found


PROTECTED = [each for each in OPERATIONS if each.is_protected and each.path != "/v1/auth/logout"]


@pytest.mark.parametrize("operation", PROTECTED, ids=[f"{each.method} {each.path}" for each in PROTECTED])
def test_no_role_gets_more_than_is_its_own(actors: dict[str, httpx.Client], operation: Any) -> None:
    """The path names nothing that is there, and the body is no JSON: what is let in changes nothing."""
    path = operation.documented_path
    for part in ("name", "user", "id", "model", "type", "request_id", "response_id", "batch_id", "file_id", "replica"):
        path = path.replace(f"{{{part}}}", "987654321")
    for name, client in actors.items():
        kind, _, role = name.partition(" ")
        body = {} if operation.method == "GET" else {"content": b"{", "headers": {"content-type": "application/json"}}
        status = client.request(operation.method, path, **body).status_code
        least = LEAST.get(operation.access)
        is_allowed = least is None or Role(role).includes(least)
        if kind == "key" and operation.access.needs_very_path:
            is_allowed = False
        assert (status not in (401, 403)) == is_allowed, (name, status)


def test_a_user_sees_and_changes_its_own_alone(plane: Plane) -> None:
    plane.user("fay")
    plane.user("gus")
    number, _ = plane.key("gus")
    with plane.session("fay") as fay:
        assert [user["name"] for user in fay.get("/v1/users").json()["users"]] == ["fay"]
        assert fay.get("/v1/users/gus").status_code == 404
        assert fay.get(f"/v1/keys/{number}").status_code == 404
        assert fay.delete(f"/v1/keys/{number}").status_code == 404
        assert fay.post("/v1/keys", json={"name": "x", "user": "gus"}).status_code == 403
        assert fay.post("/v1/users/gus/password", json={"password": "a long password"}).status_code == 403
        assert {row["user"] for row in fay.get("/v1/usage?user=gus").json()["usage"]} <= {"fay"}
        number = fay.post("/v1/keys", json={"name": "mine"}).json()["id"]
        assert fay.patch(f"/v1/keys/{number}", json={"is_banned": True}).status_code == 403


async def test_requests_of_others_are_an_operators_to_see_and_end(plane: Plane) -> None:
    """A user chooses the scopes of its keys, so that a scope alone must not open what others do."""
    routes = ["/v1/*", "/v1/requests*", "/v1/requests", "/v1/requests/{request_id}", "/v1/console/*"]
    for name, role in (("jan", "user"), ("kim", "user"), ("lea", "operator")):
        plane.user(name, role)
    keys = {name: plane.key(name, routes=routes)[1] for name in ("jan", "kim", "lea")}
    _, own = plane.key("lea", "narrow")
    async with AsyncExitStack() as stack:
        sessions = {name: stack.enter_context(plane.session(name)) for name in keys}
        client = httpx.AsyncClient(base_url=plane.url, verify=PLAIN, timeout=SECONDS)
        await stack.enter_async_context(client)
        answer, _ = await _begun_stream(client, keys["jan"], 4000)

        async def seen(headers: dict[str, str]) -> tuple[int, int]:
            listed = (await client.get("/v1/requests", headers=headers)).json()["data"]
            live = (await client.get("/v1/console/live?scheduler=true&requests=true", headers=headers)).json()
            assert len(live["requests"]) == len(listed)
            (replica,) = live["models"][0]["scheduler"]
            return len(listed), len(replica["running"])

        assert await seen(bearer(keys["jan"])) == (1, 1)
        assert await seen(bearer(keys["kim"])) == (0, 0)
        assert await seen(bearer(keys["lea"])) == (1, 1)
        assert await seen(bearer(own)) == (0, 0)
        for name, count in (("jan", 1), ("kim", 0), ("lea", 1)):
            assert len(sessions[name].get("/v1/requests").json()["data"]) == count
        request_id = (await client.get("/v1/requests", headers=bearer(keys["jan"]))).json()["data"][0]["id"]
        ended = await client.delete(f"/v1/requests/{request_id}", headers=bearer(keys["kim"]))
        assert ended.status_code == 404
        ended = await client.delete(f"/v1/requests/{request_id}", headers=bearer(keys["lea"]))
        assert ended.status_code == 200
        await answer.aclose()
        recent = (await client.get("/v1/console/requests", headers=bearer(keys["kim"]))).json()["requests"]
        assert {each["key"] for each in recent} <= {"kim/k"}


def test_a_text_that_is_no_unicode_is_refused_and_stops_no_change(plane: Plane) -> None:
    """Half of a surrogate pair, which JSON can spell, in one key must not keep the keys of all as they are."""
    plane.user("mia")
    number, key = plane.key("mia", "kept")
    with plane.session("mia") as mia:
        for field in ("models", "routes"):
            body = f'{{"name": "bad", "{field}": ["/\\ud800"]}}'
            refused = mia.post("/v1/keys", content=body, headers={"content-type": "application/json"})
            assert refused.status_code == 400, refused.text
        assert ask(plane, key).status_code == 200
    plane.ask("DELETE", f"/v1/keys/{number}")
    assert ask(plane, key).status_code == 401
    assert [each["name"] for each in plane.ask("GET", "/v1/keys?user=mia")["keys"]] == ["kept"]


def test_a_narrow_key_does_not_widen_itself(plane: Plane) -> None:
    plane.user("nia")
    number, key = plane.key("nia", routes=["/v1/keys", "/v1/keys/{id}"], limits={"requests_per_month": 3})
    with httpx.Client(base_url=plane.url, verify=PLAIN, headers=bearer(key), timeout=SECONDS) as client:
        assert client.get("/v1/keys").status_code == 200
        assert client.post("/v1/keys", json={"name": "wider"}).status_code == 403
        assert client.patch(f"/v1/keys/{number}", json={"routes": []}).status_code == 403
    with plane.session("nia") as nia:
        lifted = nia.patch(f"/v1/keys/{number}", json={"limits": {"requests_per_month": None}})
        assert (lifted.status_code, "an admin has set" in lifted.text) == (403, True)


def test_a_user_that_is_added_again_finds_nothing_of_the_deleted_one(plane: Plane) -> None:
    plane.user("ola")
    with plane.session("ola") as ola:
        made = ola.post("/v1/responses", json={"model": MODEL, "input": "Hi", "max_output_tokens": 3}).json()
        file = ola.post("/v1/files", files={"file": ("a.jsonl", b"{}\n")}, data={"purpose": "batch"}).json()
        assert ola.get(f"/v1/files/{file['id']}").status_code == 200
        assert ola.get(f"/v1/responses/{made['id']}").status_code == 200
    plane.ask("DELETE", "/v1/users/ola")
    plane.user("ola")
    with plane.session("ola") as ola:
        assert ola.get("/v1/files").json()["data"] == []
        assert ola.get(f"/v1/files/{file['id']}/content").status_code == 404
        assert ola.get(f"/v1/responses/{made['id']}").status_code == 404
        assert ola.get("/v1/console/requests").json()["requests"] == []


def test_a_response_in_the_background_is_refused_at_once_without_a_quota(plane: Plane) -> None:
    plane.user("pia")
    _, key = plane.key("pia", limits={"tokens_per_month": 50})
    body = {"model": MODEL, "input": "Hi", "background": True, "store": True}
    refused = httpx.post(
        f"{plane.url}/v1/responses", json=body | {"max_output_tokens": 500}, headers=bearer(key), verify=PLAIN
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    begun = httpx.post(
        f"{plane.url}/v1/responses", json=body | {"max_output_tokens": 3}, headers=bearer(key), verify=PLAIN
    )
    assert (begun.status_code, begun.json()["status"]) == (200, "queued")


def test_a_control_plane_that_hangs_refuses_what_has_a_limit_of_a_month(plane: Plane) -> None:
    plane.user("quy")
    _, limited = plane.key("quy", limits={"tokens_per_month": 10_000})
    _, free = plane.key("quy", "free")
    os.kill(plane.fleet.process.pid, signal.SIGSTOP)
    try:
        assert ask(plane, limited).status_code == 503
        assert ask(plane, free).status_code == 200
    finally:
        os.kill(plane.fleet.process.pid, signal.SIGCONT)
    assert ask(plane, limited).status_code == 200


def test_a_password_is_not_repeated(plane: Plane) -> None:
    body = {"name": "rik", "password": "hunter2\tsecret-word"}
    for path in ("/v1/auth/login", "/v1/users"):
        with plane.session("root") as root:
            refused = root.post(path, json=body)
        assert (refused.status_code, "hunter2" in refused.text) == (400, False)


# Commands -------------------------------------------------------------------------------------------------------


def test_commands_manage_users_and_keys_and_take_over_a_file(plane: Plane, tmp_path: Path) -> None:
    def run(*words: str, text: str = "", code: int = 0) -> str:
        command = [sys.executable, "-m", "funitel", *words, "--url", f"unix://{plane.socket}"]
        ended = subprocess.run(command, input=text, capture_output=True, text=True, timeout=SECONDS)
        assert ended.returncode == code, ended.stderr
        return ended.stdout if code == 0 else ended.stderr.splitlines()[-1]

    assert run("user", "new", "ian", "--password-stdin", text=f"{PASSWORD}\n") == "ian is a user: user\n"
    assert "there is a user 'ian'" in run("user", "new", "ian", "--no-password", code=1)
    run("user", "change", "ian", "--role", "operator", "--tokens-per-month", "100000")
    assert "operator" in run("user", "list")
    key = run("user", "new-key", "ian", "--key-name", "laptop").split()[-1]
    assert ask(plane, key).status_code == 200
    number = run("user", "keys", "ian").splitlines()[1].split()[0]
    rotated = run("user", "rotate-key", number).split()[-1]
    assert (ask(plane, key).status_code, ask(plane, rotated).status_code) == (401, 200)
    run("user", "revoke-key", number)
    assert ask(plane, rotated).status_code == 401
    path = tmp_path / "keys"
    made = [sys.executable, "-m", "funitel", "key", "new", "--name", "old", "--api-key-file", str(path)]
    old = subprocess.run(
        [*made, "--requests-per-minute", "2"], capture_output=True, text=True, timeout=SECONDS
    ).stdout.split()[-1]
    assert ask(plane, old).status_code == 401
    imported = run("key", "import", "--api-key-file", str(path), "--user", "ian")
    assert imported == "1 key belongs to ian now: start the server without --api-key-file\n"
    assert [ask(plane, old).status_code for _ in range(3)] == [200, 200, 429]
    assert "has a key 'old'" in run("key", "import", "--api-key-file", str(path), "--user", "ian", code=1)
    _until(lambda: "old" in run("usage", "--user", "ian"))
    rows = json.loads(run("audit", "--object", "key ian/old", "--json"))
    assert [(row["actor"], row["action"]) for row in rows] == [("socket", "POST /v1/keys/import")]
    run("user", "delete", "ian")
    assert ask(plane, old).status_code == 401


# The audit ------------------------------------------------------------------------------------------------------


def test_the_audit_names_actor_object_before_and_after(plane: Plane) -> None:
    with plane.session("root") as root:
        root.post("/v1/users", json={"name": "hal"})
        root.patch("/v1/users/hal", json={"role": "operator"})
        root.delete("/v1/users/hal")
        root.patch(f"/v1/models/{MODEL}", json={"pinned": True})
        root.post("/v1/load_lora_adapter", json={"lora_name": "nowhere", "lora_path": "/nowhere"})
        rows = root.get("/v1/audit?object=user hal").json()["audit"]
        models = root.get(f"/v1/audit?object=model {MODEL}&actor=root").json()["audit"]
    assert [(row["actor"], row["via"]) for row in rows] == [("root", "root/~session")] * 3
    deleted, changed, added = rows
    assert added["before"] is None
    assert added["after"]["role"] == "user"
    assert (changed["before"]["role"], changed["after"]["role"]) == ("user", "operator")
    assert deleted["after"] is None
    assert deleted["before"]["role"] == "operator"
    done, begun = models[:2]
    assert begun["status"] is None
    assert (done["before"]["pinned"], done["after"]["pinned"], done["status"]) == (False, True, 200)
    refused = plane.ask("GET", "/v1/audit?object=adapter nowhere")["audit"]
    assert [(row["actor"], row["action"], row["status"]) for row in refused] == [
        ("root", "POST /v1/load_lora_adapter", 400),
        ("root", "POST /v1/load_lora_adapter", None),
    ]
    database = sqlite3.connect(plane.fleet.state / "fleet.db")
    for statement in ("DELETE FROM audit", "UPDATE audit SET actor = 'x'"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            database.execute(statement)
    database.close()


# kill -9 of the control plane -----------------------------------------------------------------------------------


class _Load:
    """Streams of one key, and users that an admin adds, until the key's quota is used up.

    Attributes:
        used: tokens of each stream that ran.
        unready: refusals because the limits could not be checked.
        made: users for which the answer said that they are there.
    """

    def __init__(self, plane: Plane, key: str) -> None:
        self.used: list[int] = []
        self.unready = 0
        self.made: list[str] = []
        self.may_end = False
        self._plane = plane
        self._key = key

    async def stream(self, client: httpx.AsyncClient, max_tokens: int) -> None:
        """Begin one stream after another until the quota refuses one, which it may once the control plane is back."""
        while True:
            body = completion(max_tokens, stream=True, stream_options={"include_usage": True})
            async with client.stream("POST", "/v1/completions", json=body, headers=bearer(self._key)) as answer:
                if answer.status_code == 503:
                    self.unready += 1
                elif answer.status_code == 429 and self.may_end:
                    return
                elif answer.status_code == 200:
                    async for line in answer.aiter_lines():
                        if '"usage":{' in line:
                            self.used.append(int(line.split('"total_tokens":')[1].split(",")[0].rstrip("}")))
                else:
                    assert answer.status_code == 429, answer.status_code
            await asyncio.sleep(0.05)

    def add_user(self, root: httpx.Client) -> None:
        """Add a user, which fails while there is no control plane."""
        name = f"u{time.monotonic_ns()}"
        answer = root.post("/v1/users", json={"name": name})
        if answer.status_code == 503:
            time.sleep(0.02)
        else:
            assert answer.status_code < 300, answer.text
            self.made.append(name)


async def test_quotas_and_audit_hold_when_the_control_plane_is_killed_under_load(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "tiny", max_position_embeddings=4096, eos_token_id=VOCAB_SIZE)
    most, size = 20_000, 40
    with users_fleet(tmp_path, model, MODEL) as plane:
        plane.user("ann")
        _, key = plane.key("ann", limits={"tokens_per_month": most})
        load = _Load(plane, key)
        limits = httpx.Limits(max_connections=NUM_STREAMS)
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                httpx.AsyncClient(base_url=plane.url, verify=PLAIN, timeout=SECONDS, limits=limits)
            )
            root = stack.enter_context(plane.session("root"))
            streams = [asyncio.create_task(load.stream(client, size)) for _ in range(NUM_STREAMS)]
            for _ in range(2):
                for _ in range(5):
                    await asyncio.to_thread(load.add_user, root)
                adding = asyncio.create_task(asyncio.to_thread(load.add_user, root))
                plane.fleet.kill_control_plane()
                await adding
                await asyncio.sleep(0.3)
                plane.fleet.start_control_plane()
                known = len(load.made)
                async with asyncio.timeout(SECONDS):
                    while len(load.made) == known:
                        await asyncio.to_thread(load.add_user, root)
            load.may_end = True
            await asyncio.gather(*streams)
        assert load.unready > 0, "no request came while its limits could not be checked"
        await asyncio.to_thread(_until, lambda: _total(plane, "ann") == sum(load.used))
        assert most - max(load.used) < sum(load.used) <= most, "it is used up, and not more than that"
        rows = plane.ask("GET", "/v1/audit?actor=root&limit=1000")["audit"]
        added = {row["object"].removeprefix("user "): row for row in rows if row["object"].startswith("user u")}
        users = {user["name"] for user in plane.ask("GET", "/v1/users")["users"]}
        assert len(load.made) >= 12
        assert {*load.made} <= {*added}
        assert {name for name in users if name.startswith("u")} == {*added}, "what is there is in the audit"
        assert all((row["before"], row["after"]["name"]) == (None, name) for name, row in added.items())
