"""Routes of models: forwarded to the control plane as they came, for operators only, and `/v1/models` from here."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_control import FakeControl, fake_fleet
from fakes import FakeEngine, Serve, eventually

from funitel.proto.security.keys import Key, digest_of, line_of
from funitel.router.api.fleet import ROUTES
from funitel.router.api.fleet.handlers import OPEN_TO_ALL
from funitel.router.auth.access import Access

JSON = {"content-type": "application/json"}
ASKED = [
    ("POST", "/v1/models?wait_ready=false", "/v1/models?wait_ready=false"),
    ("DELETE", "/v1/models/alpha", "/v1/models/alpha"),
    ("DELETE", "/v1/models/owner%2Fname", "/v1/models/owner%2Fname"),
    ("DELETE", "/v1/models/owner/name", "/v1/models/owner%2Fname"),
    ("PATCH", "/v1/models/owner/name", "/v1/models/owner%2Fname"),
    ("GET", "/v1/models/owner/name/progress", "/v1/models/owner%2Fname/progress"),
    ("GET", "/v1/models/alpha/events", "/v1/models/alpha/events"),
    ("POST", "/v1/models/alpha/cancel", "/v1/models/alpha/cancel"),
    ("POST", "/v1/models/alpha/load?wait_ready=true", "/v1/models/alpha/load?wait_ready=true"),
    ("POST", "/v1/models/alpha/unload", "/v1/models/alpha/unload"),
    ("POST", "/v1/models/alpha/sleep", "/v1/models/alpha/sleep"),
    ("POST", "/v1/models/alpha/wake", "/v1/models/alpha/wake"),
    ("GET", "/v1/models/alpha/replicas", "/v1/models/alpha/replicas"),
    ("POST", "/v1/models/alpha/replicas", "/v1/models/alpha/replicas"),
    ("DELETE", "/v1/models/owner%2Fname/replicas/3", "/v1/models/owner%2Fname/replicas/3"),
    ("GET", "/v1/models/instances", "/v1/models/instances"),
    ("POST", "/v1/model_registrations/LLM", "/v1/model_registrations/LLM"),
    ("GET", "/v1/model_registrations/LLM", "/v1/model_registrations/LLM"),
    ("GET", "/v1/model_registrations/LLM/mine", "/v1/model_registrations/LLM/mine"),
    ("GET", "/v1/model_registrations/LLM/line%0Abreak%0A", "/v1/model_registrations/LLM/line%0Abreak%0A"),
    ("DELETE", "/v1/model_registrations/LLM/mine", "/v1/model_registrations/LLM/mine"),
    ("GET", "/v1/engines/owner/name", "/v1/engines/owner%2Fname"),
    ("GET", "/v1/engines/LLM/name", "/v1/engines/LLM/name"),
    ("GET", "/v1/cache/models", "/v1/cache/models"),
    ("DELETE", "/v1/cache/models?model_name=a%2Fb&check=true", "/v1/cache/models?model_name=a%2Fb&check=true"),
    ("GET", "/v1/workers", "/v1/workers"),
    ("GET", "/v1/cluster/info", "/v1/cluster/info"),
]


@pytest.mark.parametrize(("method", "path", "target"), ASKED, ids=[f"{method} {path}" for method, path, _ in ASKED])
async def test_a_request_and_its_answer_are_forwarded_unchanged(
    tmp_path: Path, method: str, path: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("funitel.router.api.fleet.handlers.SEEN_SECONDS", 0.01)
    async with fake_fleet(tmp_path) as fleet:
        place = method, target.partition("?")[0]
        fleet.control.answers[place] = 409, b'{"error": "so it is",  "field": null}'
        body = b'{"model":  "x"}' if method in ("POST", "PATCH") else b""
        answer = await fleet.client.request(method, path, content=body, headers=JSON if body else {})
        assert (answer.status_code, answer.content) == (409, b'{"error": "so it is",  "field": null}')
        [asked] = [each for each in fleet.control.asked if "fleet" not in each.target]
        has_body = path.partition("?")[0] in ("/v1/models", "/v1/models/alpha/replicas", "/v1/model_registrations/LLM")
        expected = body if has_body or method == "PATCH" else b""
        assert (asked.method, asked.target, asked.body) == (method, target, expected)


def test_all_routes_are_for_operators() -> None:
    assert ROUTES
    assert {operation.access for operation in ROUTES} == {Access.OPERATOR}


async def test_a_key_must_list_the_path(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    lines = [
        Key(name="user", digest=digest_of(b"user")),
        Key(name="operator", digest=digest_of(b"operator"), routes=("/v1/models/{name}/unload",)),
    ]
    keys.write_text("".join(line_of(key) + "\n" for key in lines))
    async with fake_fleet(tmp_path, api_key_file=str(keys)) as fleet:
        for token, status in (("", 401), ("user", 403), ("operator", 200)):
            headers = {"authorization": f"Bearer {token}"} if token else {}
            answer = await fleet.client.post("/v1/models/alpha/unload", headers=headers)
            assert answer.status_code == status, answer.text
        answer = await fleet.client.delete("/v1/models/alpha", headers={"authorization": "Bearer operator"})
        assert answer.status_code == 403
        assert "/v1/models/{name}" in answer.text


async def test_without_a_control_plane_they_are_404_with_the_reason(serve: Serve) -> None:
    async with serve(FakeEngine()) as client:
        for method, path in (("POST", "/v1/models"), ("GET", "/v1/models/a/progress"), ("DELETE", "/v1/models/a")):
            answer = await client.request(method, path, headers=JSON)
            assert answer.status_code == 404
            assert "start it with `funitel up`" in answer.json()["error"]


async def test_a_control_plane_that_is_away_is_503(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path) as fleet:
        await fleet.control.stop()
        answer = await fleet.client.post("/v1/models/alpha/unload")
        assert answer.status_code == 503
        assert "the control plane does not answer" in answer.json()["error"]


async def test_a_body_over_the_limit_is_refused_here(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, payload_limit=1000) as fleet:
        answer = await fleet.client.post("/v1/models", json={"model": "x" * 2000})
        assert answer.status_code == 413
        assert not [each for each in fleet.control.asked if each.target == "/v1/models"]


async def test_a_launch_that_waits_ends_with_its_client_and_with_a_drain(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path) as fleet:
        fleet.control.slow.add("/v1/models")

        async def asked(count: int) -> None:
            async def is_asked() -> bool:
                return len([each for each in fleet.control.asked if each.target == "/v1/models"]) == count

            await eventually(is_asked, "asked")

        leaves = asyncio.create_task(fleet.client.post("/v1/models", json={"model": "x"}))
        await asked(1)
        leaves.cancel()
        stays = asyncio.create_task(fleet.client.post("/v1/models", json={"model": "x"}))
        await asked(2)
        fleet.app.state.models.drain.begin()
        answer = await stays
        assert answer.status_code == 503
        assert "shutting down" in answer.text

        async def is_idle() -> bool:
            return fleet.app.state.models.drain.num_running == 0

        await eventually(is_idle, "idle")


async def test_a_client_reads_what_it_wrote(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path) as fleet:
        posted = asyncio.create_task(fleet.client.post("/v1/models", json={"model": "x"}))
        await asyncio.sleep(0.05)
        fleet.control.add("x", state="queued")
        fleet.control.push()
        assert (await posted).status_code == 200
        assert (await fleet.client.get("/v1/models/x")).json()["state"] == "queued"


async def test_models_are_listed_with_their_state(tmp_path: Path) -> None:
    def prepare(control: FakeControl) -> None:
        control.add("alpha", replicas=1, is_default=True)
        control.add("cold", state="downloading", progress=0.25, router={"tokenizer_name": "/secret/folder"})

    async with fake_fleet(tmp_path, prepare=prepare) as fleet:
        listed = (await fleet.client.get("/v1/models")).json()
        assert listed["object"] == "list"
        alpha, cold = listed["data"]
        assert {field: alpha[field] for field in ("id", "object", "created", "owned_by", "max_model_len")} == {
            "id": "alpha",
            "object": "model",
            "created": 1000,
            "owned_by": "alpha",
            "max_model_len": 200,
        }
        assert alpha["replicas"] == [{"id": 0, "state": "ready", "weight": 1.0, "worker": "local", "pids": [7]}]
        assert (cold["name"], cold["state"], cold["stage"], cold["progress"]) == ("cold", *["downloading"] * 2, 0.25)
        assert "max_model_len" not in cold
        assert "secret" not in str(listed)
        assert (await fleet.client.get("/v1/models/cold")).json() == cold
        assert (await fleet.client.get("/v1/models/owner/cold")).json() == cold
        unknown = await fleet.client.get("/v1/models/gamma")
        assert unknown.status_code == 404
        assert "'alpha', 'cold'" in unknown.text


async def test_facts_and_metrics_are_of_all_models(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, "alpha", "beta") as fleet:
        fleet.control.answers["GET", "/metrics"] = 200, b"funitel_model_evictions_total 3.0\n"
        await fleet.generate("beta")
        assert (await fleet.client.get("/info")).json()["model_id"] == "alpha"
        assert (await fleet.client.get("/info?model=beta")).json()["model_id"] == "beta"
        assert (await fleet.client.get("/info?model=gamma")).status_code == 404
        page = (await fleet.client.get("/metrics")).text
        assert 'tgi_request_count{model="beta"} 1.0' in page
        assert 'tgi_request_count{model="alpha"} 0.0' in page
        assert 'funitel_model_state{model="alpha",state="ready"} 1.0' in page
        assert page.endswith("funitel_model_evictions_total 3.0\n")
        for path, status in (("alpha", 200), ("gamma", 404)):
            assert (await fleet.client.get(f"/v2/models/{path}/versions/1/ready")).status_code == status
            assert (await fleet.client.get(f"/v2/models/{path}/versions/1")).status_code == status


async def test_asking_whether_a_model_is_ready_loads_nothing(tmp_path: Path) -> None:
    def prepare(control: FakeControl) -> None:
        control.add("alpha", replicas=1)
        control.add("cold")

    async with fake_fleet(tmp_path, prepare=prepare) as fleet:
        for path in ("/v2/models/cold/versions/1/ready", "/info?model=cold"):
            answer = await fleet.client.get(path)
            assert answer.status_code == 503
            assert "the model 'cold' is registered" in answer.text
        assert not fleet.control.told("/v1/fleet/load")


async def test_requests_of_all_models_are_listed_and_aborted(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, "alpha", "beta", make=lambda _: FakeEngine(pause=0.2)) as fleet:
        asked = [
            asyncio.create_task(fleet.client.post("/generate", json=body, headers={"x-request-id": body["model"]}))
            for body in ({"model": name, "inputs": "Hi"} for name in ("alpha", "beta"))
        ]

        async def all_run() -> bool:
            return len((await fleet.client.get("/v1/requests")).json()["data"]) == 2

        await eventually(all_run, "all run")
        assert (await fleet.client.delete("/v1/requests/beta")).status_code == 200
        answers = await asyncio.gather(*asked)
        assert [answer.status_code for answer in answers] == [200, 200]


async def test_queries_of_the_step_api_belong_to_a_model(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, "alpha", "beta") as fleet:
        added = await fleet.client.post("/v1/steps/queries", json={"model": "beta", "inputs": "Hi"})
        assert added.status_code == 200, added.text
        ids = {"ids": [added.json()["id"]]}
        other = await fleet.client.post("/v1/steps/infer", json=ids)
        assert (other.status_code, "there is no query" in other.text) == (400, True)
        step = await fleet.client.post("/v1/steps/infer", json=ids | {"model": "beta"})
        assert step.json()["data"][0]["id"] == ids["ids"][0]
        assert (await fleet.client.delete(f"/v1/steps/queries/{ids['ids'][0]}")).status_code == 404
        assert (await fleet.client.delete(f"/v1/steps/queries/{ids['ids'][0]}?model=beta")).status_code == 200


async def test_the_log_and_the_answer_name_the_model_that_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with fake_fleet(tmp_path, "alpha", "beta") as fleet:
        caplog.clear()
        await fleet.generate("owner/beta")
    [record] = [each for each in caplog.records if each.name.endswith("access_log")]
    assert "model=beta" in record.getMessage() or getattr(record, "fields", {}).get("model") == "beta"


async def test_responses_of_one_model_are_continued_by_another(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, "alpha", "beta") as fleet:
        first = (await fleet.client.post("/v1/responses", json={"model": "alpha", "input": "Hi"})).json()
        body: dict[str, Any] = {"model": "beta", "input": "And?", "previous_response_id": first["id"]}
        second = await fleet.client.post("/v1/responses", json=body)
        assert second.status_code == 200, second.text
        assert second.json()["model"] == "beta"


async def test_a_static_model_is_listed_beside_others(tmp_path: Path) -> None:
    def prepare(control: FakeControl) -> None:
        control.add("own", is_static=True, is_default=True, state="ready")

    settings = {"no_model": False, "served_model_name": "own", "master_shard_uds_path": "/own-0"}
    async with fake_fleet(tmp_path, prepare=prepare, **settings) as fleet:

        async def is_ready() -> bool:
            return (await fleet.client.get("/health")).status_code == 200

        await eventually(is_ready, "ready")
        assert (await fleet.generate("anything")).status_code == 200
        [own] = (await fleet.client.get("/v1/models")).json()["data"]
        assert (own["id"], own["state"], own["is_static"]) == ("own", "ready", True)
        assert "tgi_request_count 1.0" in (await fleet.client.get("/metrics")).text
        fleet.control.add("alpha", replicas=1)
        fleet.control.push()
        await fleet.attached("alpha")
        assert (await fleet.generate("anything")).status_code == 404
        assert (await fleet.generate("alpha")).json()["model"] == "alpha"
        assert (await fleet.generate(None)).json()["model"] == "own"
        assert 'tgi_request_count{model="own"} 2.0' in (await fleet.client.get("/metrics")).text
        assert not fleet.control.told("/v1/fleet/released")


async def test_bytes_that_are_no_ascii_are_forwarded_percent_encoded(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path) as fleet:
        status = []

        async def receive() -> dict[str, Any]:
            return await asyncio.get_running_loop().create_future()  # the client stays

        async def send(message: Any) -> None:
            status.append(message.get("status"))

        scope = {"type": "http", "method": "GET", "path": "/v1/cache/models", "headers": [(b"host", b"localhost")]}
        rest = {"http_version": "1.1", "scheme": "http", "root_path": "", "server": ("localhost", 80), "client": None}
        await fleet.app(scope | rest | {"query_string": "a=é%20&b=c d".encode()}, receive, send)
        assert status[0] == 200
        [asked] = [each for each in fleet.control.asked if "fleet" not in each.target]
        assert asked.target == "/v1/cache/models?a=%C3%A9%20&b=c%20d"


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/models"), ("GET", "/v1/engines/owner/name")])
async def test_a_port_that_is_open_to_all_without_a_key_takes_no_orders(tmp_path: Path, method: str, path: str) -> None:
    async with fake_fleet(tmp_path, "alpha", is_local=False) as fleet:
        answer = await fleet.client.request(method, path, content=b"{}", headers=JSON)
        assert (answer.status_code, answer.json()["error"]) == (403, OPEN_TO_ALL)
        assert not [each for each in fleet.control.asked if "fleet" not in each.target]
        assert (await fleet.client.get("/v1/models")).status_code == 200
