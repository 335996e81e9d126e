"""The control socket: its paths, bodies and statuses, over a fleet without processes."""

import asyncio
import json
import os
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from funitel.launcher.control_plane.api import router_side
from funitel.launcher.control_plane.api.app import build_app
from funitel.launcher.control_plane.api.requests import MAX_BODY_BYTES
from funitel.launcher.control_plane.api.server import ControlServer
from funitel.launcher.control_plane.interface import Fleet
from funitel.launcher.control_plane.model_tools import ModelTools
from funitel.launcher.control_plane.records import Activity, LaunchRequest, ModelChange, Snapshot
from funitel.proto.errors import StartupError
from funitel.router.api.fleet.schema import RegistrationDefinition, RegistrationList, RegistrationRecord
from funitel_testing.fake_fleet import FakeFleet

ENVIRON = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@asynccontextmanager
async def serving(fleet: Fleet, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    server = ControlServer(build_app(fleet, ModelTools(ENVIRON)), folder / "control.sock")
    await server.start()
    transport = httpx.AsyncHTTPTransport(uds=str(server.path))
    async with httpx.AsyncClient(transport=transport, base_url="http://control", timeout=20) as client:
        yield client
    await server.stop()
    assert not server.path.exists()


@pytest.fixture
async def fleet() -> FakeFleet:
    return FakeFleet()


@pytest.fixture
async def client(fleet: FakeFleet, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(fleet, tmp_path) as client:
        yield client


def refused(response: httpx.Response, status: int, field: str | None = None) -> str:
    """The line of an error."""
    body = response.json()
    assert (response.status_code, body.get("field")) == (status, field), body
    assert set(body) == {"error", "error_type", "field"}
    line: str = body["error"]
    assert line
    assert "\n" not in line
    return line


# Models


async def test_x1_a_model_is_launched_listed_and_terminated(client: httpx.AsyncClient, fleet: FakeFleet) -> None:
    response = await client.post("/v1/models", json={"model": "smol", "replicas": 2, "pinned": True, "ttl": 60})
    body = response.json()
    assert response.status_code == 200
    assert (body["model_uid"], body["name"], body["state"], body["ttl"]) == ("smol", "smol", "ready", 60)
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [(each["name"], len(each["replicas"])) for each in listed["data"]] == [("smol", 2)]
    assert (await client.get("/v1/models/smol")).json()["state"] == "ready"
    instances = (await client.get("/v1/models/instances")).json()["instances"]
    assert [(each["model_name"], each["id"], each["pids"]) for each in instances] == [
        ("smol", 0, [100]),
        ("smol", 1, [101]),
    ]
    assert (await client.delete("/v1/models/smol")).json() == {"name": "smol"}
    assert (await client.get("/v1/models")).json()["data"] == []
    refused(await client.delete("/v1/models/smol"), 404, "model")


async def test_x2_a_launch_that_is_not_awaited_is_answered_at_once(client: httpx.AsyncClient, fleet: FakeFleet) -> None:
    fleet.gate.clear()
    response = await client.post("/v1/models?wait_ready=false", json={"model": "smol"})
    assert (response.status_code, response.json()["state"]) == (202, "queued")
    await asyncio.sleep(0.1)
    progress = (await client.get("/v1/models/smol/progress")).json()
    assert progress == {
        "progress": 0.25,
        "stage": "downloading",
        "bytes": 50_000_000,
        "total_bytes": 200_000_000,
        "error": None,
    }
    refused(await client.post("/v1/models", json={"model": "smol"}), 409)
    fleet.gate.set()
    seen = []
    while (progress := (await client.get("/v1/models/smol/progress")).json())["stage"] != "ready":
        seen.append(progress["progress"])
    assert seen == sorted(seen)
    assert progress["progress"] == 1.0
    events = (await client.get("/v1/models/smol/events")).json()["events"]
    assert [each["stage"] for each in events][:2] == ["queued", "downloading"]
    assert set(events[0]) == {"at", "stage", "message"}


async def test_x2_a_launch_that_is_cancelled_answers_499(client: httpx.AsyncClient, fleet: FakeFleet) -> None:
    fleet.gate.clear()
    waiting = asyncio.create_task(client.post("/v1/models", json={"model": "smol"}))
    while "smol" not in fleet.entries:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert (await client.post("/v1/models/smol/cancel")).json() == {"name": "smol"}
    refused(await waiting, 499)
    refused(await client.get("/v1/models/smol"), 404, "model")
    await client.post("/v1/models?wait_ready=false", json={"model": "other"})
    fleet.gate.set()
    while fleet.entries["other"].state != "ready":  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    refused(await client.post("/v1/models/other/cancel"), 409)


async def test_x2_a_client_that_leaves_does_not_cancel_its_launch(client: httpx.AsyncClient, fleet: FakeFleet) -> None:
    fleet.gate.clear()
    with pytest.raises(httpx.ReadTimeout):
        await client.post("/v1/models", json={"model": "smol"}, timeout=0.3)
    fleet.gate.set()
    while fleet.entries["smol"].state != "ready":  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_launch_that_fails_is_503_and_one_that_does_not_fit_507(client: httpx.AsyncClient) -> None:
    assert "the checkpoint is damaged" in refused(await client.post("/v1/models", json={"model": "broken"}), 503)
    assert "int8 would fit" in refused(await client.post("/v1/models", json={"model": "huge"}), 507)


async def test_every_field_of_a_launch_is_taken(client: httpx.AsyncClient, fleet: FakeFleet) -> None:
    body = {
        "model": "owner/repo",
        "name": "m",
        "replicas": 2,
        "num_shard": 4,
        "quantize": "int8",
        "dtype": "float16",
        "ttl": 1.5,
        "pinned": True,
        "engine": "native",
        "executor": "worker",
        "worker": "gpu-1",
        "partition": "tp=2,pp=2",
        "layers": [3, 5],
        "request_limit": 7,
        "weight": 0.5,
        "priority": -2,
        "retries": 3,
        "model_type": "LLM",
        "settings": {"max_batch_size": 4, "prefix_caching": "false", "lora_adapters": "a=/a"},
    }
    response = await client.post("/v1/models", json=body)
    assert response.status_code == 200, response.text
    assert fleet.requests["m"] == LaunchRequest.from_json(body | {"layers": "3,5"})


@pytest.mark.parametrize("name", ["owner/repo", "a b", "ü", "50%", "x/load", "a?b#c"])
async def test_a_name_is_encoded_in_the_path(client: httpx.AsyncClient, fleet: FakeFleet, name: str) -> None:
    from urllib.parse import quote

    await client.post("/v1/models", json={"model": "smol", "name": name})
    path = f"/v1/models/{quote(name, safe='')}"
    assert (await client.get(path)).json()["name"] == name
    assert (await client.get(f"{path}/progress")).json()["stage"] == "ready"
    assert (await client.post(f"{path}/load")).json()["name"] == name
    assert (await client.delete(path)).status_code == 200
    assert fleet.entries == {}


async def test_a_name_with_a_slash_may_be_sent_as_it_is(client: httpx.AsyncClient) -> None:
    await client.post("/v1/models", json={"model": "owner/repo"})
    assert (await client.get("/v1/models/owner/repo/progress")).json()["stage"] == "ready"


async def test_a_model_is_unloaded_loaded_put_to_sleep_and_woken(client: httpx.AsyncClient, fleet: FakeFleet) -> None:
    await client.post("/v1/models", json={"model": "smol"})
    answers = [
        await client.post("/v1/models/smol/unload"),
        await client.post("/v1/models/smol/load?wait_ready=false"),
        await client.post("/v1/models/smol/sleep"),
        await client.post("/v1/models/smol/wake"),
    ]
    assert [(each.status_code, each.json()["state"]) for each in answers] == [
        (200, "registered"),
        (202, "ready"),
        (200, "sleeping"),
        (200, "ready"),
    ]
    assert fleet.said == [
        ("unload", "smol"),
        ("load", "smol", False),
        ("sleep", "smol"),
        ("wake", "smol", True),
    ]
    for action in ("load", "unload", "sleep", "wake", "cancel"):
        refused(await client.post(f"/v1/models/none/{action}"), 404, "model")


async def test_a_model_is_changed(client: httpx.AsyncClient, fleet: FakeFleet) -> None:
    await client.post("/v1/models", json={"model": "smol"})
    body = {"weights": {"0": 0.9, "1": 0}, "ttl": 5, "pinned": True, "priority": 3, "is_default": False}
    assert (await client.patch("/v1/models/smol", json=body)).json()["name"] == "smol"
    await client.patch("/v1/models/smol", json={"ttl": None})
    assert fleet.changed == [
        ("smol", ModelChange(weights={0: 0.9, 1: 0.0}, ttl=5.0, pinned=True, priority=3, is_default=False)),
        ("smol", ModelChange(removes_ttl=True)),
    ]
    for wrong, field in (
        ({"weights": {"a": 1}}, "weights.a"),
        ({"weights": {"0": -1}}, "weights.0"),
        ({"weights": []}, "weights"),
        ({"ttl": 0}, "ttl"),
        ({"pinned": "yes"}, "pinned"),
        ({"colour": 1}, "colour"),
        ({}, None),
    ):
        refused(await client.patch("/v1/models/smol", json=wrong), 400, field)
    assert len(fleet.changed) == 2


async def test_x6_replicas_are_listed_added_and_removed(client: httpx.AsyncClient) -> None:
    await client.post("/v1/models", json={"model": "smol"})
    added = await client.post("/v1/models/smol/replicas", json={"count": 2, "weight": 0.5})
    assert added.status_code == 202
    assert [(each["id"], each["weight"], each["state"]) for each in added.json()["replicas"]] == [
        (1, 0.5, "starting"),
        (2, 0.5, "starting"),
    ]
    assert len((await client.post("/v1/models/smol/replicas")).json()["replicas"]) == 1  # without a body
    assert (await client.delete("/v1/models/smol/replicas/2")).json() == {"name": "smol", "replica": 2}
    replicas = (await client.get("/v1/models/smol/replicas")).json()["replicas"]
    assert [each["id"] for each in replicas] == [0, 1, 3]
    refused(await client.delete("/v1/models/smol/replicas/9"), 404)
    refused(await client.delete("/v1/models/smol/replicas/first"), 404)
    refused(await client.delete(f"/v1/models/smol/replicas/{'9' * 5000}"), 404)
    for replica in (0, 1):
        await client.delete(f"/v1/models/smol/replicas/{replica}")
    refused(await client.delete("/v1/models/smol/replicas/3"), 409)
    refused(await client.post("/v1/models/smol/replicas", json={"count": 0}), 400, "count")
    refused(await client.post("/v1/models/smol/replicas", json={"weights": 1}), 400, "weights")


# Bodies and paths


async def test_a_body_that_is_none_is_refused(client: httpx.AsyncClient) -> None:
    refused(await client.post("/v1/models", content=b"{"), 400)
    refused(await client.post("/v1/models", content=b""), 400)
    refused(await client.post("/v1/models", content=b"\xff"), 400)
    refused(await client.post("/v1/models", content=b"[" * 100_000), 400)
    refused(await client.post("/v1/models", json=[]), 400)
    refused(await client.post("/v1/models", content=b" " * (MAX_BODY_BYTES + 1)), 413)
    refused(await client.post("/v1/models?wait_ready=perhaps", json={"model": "x"}), 400, "wait_ready")


async def test_paths_and_methods_that_are_unknown(client: httpx.AsyncClient) -> None:
    refused(await client.get("/v1/nothing"), 404)
    refused(await client.put("/v1/models"), 405)
    refused(await client.get("/v1/models/"), 404)
    refused(await client.get("/v1/models/none"), 404, "model")


async def test_an_unexpected_error_is_one_line(
    client: httpx.AsyncClient, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("no\nway")

    monkeypatch.setattr(fleet, "models", fail)
    assert refused(await client.get("/v1/models"), 500) == "RuntimeError: no way"


# Registrations


async def test_registrations_are_answered_as_documented(client: httpx.AsyncClient, tmp_path: Path) -> None:
    body = {"model": {"name": "ours", "model": str(tmp_path)}}
    made = await client.post("/v1/model_registrations/LLM", json=body)
    RegistrationRecord.model_validate_json(made.content, strict=True)
    RegistrationList.model_validate_json((await client.get("/v1/model_registrations/LLM")).content, strict=True)
    one = await client.get("/v1/model_registrations/LLM/ours")
    assert RegistrationDefinition.model_validate_json(one.content, strict=True).model_name == "ours"


async def test_x3_a_model_is_registered_listed_and_unregistered(
    client: httpx.AsyncClient, fleet: FakeFleet, tmp_path: Path
) -> None:
    definition = {"model_name": "tiny", "model": str(tmp_path), "settings": {"max_batch_size": 2}}
    body = {"model": json.dumps(definition), "persist": False}
    assert (await client.post("/v1/model_registrations/LLM", json=body)).json()["model_name"] == "tiny"
    (registration,) = fleet.registered.values()
    assert (registration.model, registration.persist) == (str(tmp_path), False)
    listed = (await client.get("/v1/model_registrations/LLM")).json()
    assert [(each["model_name"], each["is_builtin"], each["persist"]) for each in listed] == [("tiny", False, False)]
    assert (await client.get("/v1/model_registrations/embedding")).json() == []
    assert (await client.get("/v1/model_registrations/LLM/tiny")).json() == definition | {
        "model_type": "LLM",
        "is_builtin": False,
    }
    refused(await client.post("/v1/model_registrations/LLM", json=body), 409)
    assert (await client.delete("/v1/model_registrations/LLM/tiny")).json() == {"model_name": "tiny"}
    refused(await client.delete("/v1/model_registrations/LLM/tiny"), 404)
    refused(await client.get("/v1/model_registrations/LLM/tiny"), 404)
    refused(await client.get("/v1/model_registrations/image"), 400, "model_type")
    refused(await client.get("/v1/model_registrations/LLM/line%0Abreak%0A"), 404)


async def test_x3_a_spec_is_checked_when_it_is_registered(
    client: httpx.AsyncClient, fleet: FakeFleet, tmp_path: Path
) -> None:
    definition = {"name": "tiny", "model": str(tmp_path), "spec": {"num_layers": "two"}}
    line = refused(await client.post("/v1/model_registrations/LLM", json={"model": definition}), 400, "spec")
    assert line.startswith("`spec`: ")
    assert "tmp" not in line
    assert fleet.registered == {}


# Engines, cache, workers, metrics


async def test_x4_engines_are_asked_with_or_without_a_type(client: httpx.AsyncClient) -> None:
    for path in ("smol", "LLM/smol", "owner%2Frepo", "owner/repo", "LLM/owner/repo"):
        model = path.replace("%2F", "/").removeprefix("LLM/")
        assert (await client.get(f"/v1/engines/{path}")).json()["model"] == model


async def test_x18_what_is_cached_is_listed_and_removed(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/cache/models")).json()["list"]
    assert [(each["model_name"], each["in_use"]) for each in listed] == [
        ("smollm2-135m-instruct", True),
        ("owner/tiny", False),
    ]
    only = (await client.get("/v1/cache/models?model_name=owner/tiny")).json()["list"]
    assert only == [{"model_name": "owner/tiny", "path": "/hub/models--owner--tiny", "bytes": 5000, "in_use": False}]
    checked = await client.delete("/v1/cache/models?model_name=owner/tiny&check=true")
    assert checked.json() == {"list": only, "deleted": False}
    assert (await client.delete("/v1/cache/models?model_name=owner/tiny")).json() == {"list": only, "deleted": True}
    refused(await client.delete("/v1/cache/models?model_name=owner/tiny"), 404)
    refused(await client.delete("/v1/cache/models?model_name=smollm2-135m-instruct"), 409)
    refused(await client.delete("/v1/cache/models"), 400, "model_name")


async def test_workers_are_listed_in_our_shape_and_in_xinferences(client: httpx.AsyncClient) -> None:
    workers = (await client.get("/v1/workers")).json()["workers"]
    assert [(each["name"], each["cores"], each["is_alive"]) for each in workers] == [
        ("local", 2, True),
        ("gpu-1", 64, False),
    ]
    nodes = (await client.get("/v1/cluster/info")).json()
    assert [(each["node_type"], each["gpu_count"]) for each in nodes] == [
        ("Supervisor", 0),
        ("Worker", 0),
        ("Worker", 1),
    ]
    assert (nodes[1]["mem_total"], nodes[1]["mem_used"]) == (8_000_000_000, 5_000_000_000)


async def test_metrics_are_text(client: httpx.AsyncClient) -> None:
    response = await client.get("/metrics")
    assert response.text == "funitel_model_loads_total 3.0\n"
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")


# The router


async def test_the_router_watches_snapshots(client: httpx.AsyncClient, fleet: FakeFleet) -> None:
    fleet.gate.clear()
    async with client.stream("GET", "/v1/fleet/watch") as response:
        lines = response.aiter_lines()
        first = Snapshot.from_json(json.loads(await anext(lines)))
        assert first == Snapshot(default=None, wait=True, models=())
        await client.post("/v1/models?wait_ready=false", json={"model": "smol"})
        seen: list[str] = []
        while not seen or seen[-1] != "downloading":
            seen.append(Snapshot.from_json(json.loads(await anext(lines))).models[0].state)
        fleet.gate.set()
        while seen[-1] != "ready":
            snapshot = Snapshot.from_json(json.loads(await anext(lines)))
            seen.append(snapshot.models[0].state)
        assert snapshot.default == "smol"
        assert snapshot.models[0].replicas[0].address == "unix:///run/0"


async def test_a_watch_without_changes_has_blank_lines(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_side, "BLANK_LINE_SECONDS", 0.05)
    async with client.stream("GET", "/v1/fleet/watch") as response:
        lines = response.aiter_lines()
        assert json.loads(await anext(lines))["models"] == []
        assert [await anext(lines), await anext(lines)] == ["", ""]


async def test_a_watch_ends_with_the_server_and_leaves_no_task(fleet: FakeFleet, tmp_path: Path) -> None:
    server = ControlServer(build_app(fleet, ModelTools(ENVIRON)), tmp_path / "control.sock")
    await server.start()
    transport = httpx.AsyncHTTPTransport(uds=str(server.path))
    before = asyncio.all_tasks()
    async with httpx.AsyncClient(transport=transport, base_url="http://control") as client:
        async with client.stream("GET", "/v1/fleet/watch") as response:
            lines = response.aiter_lines()
            await anext(lines)
            async with asyncio.timeout(1.5):  # less than requests in flight have
                await server.stop()
            assert [line async for line in lines] == []
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before


async def test_what_the_router_says_reaches_the_fleet(client: httpx.AsyncClient, fleet: FakeFleet) -> None:
    await client.post("/v1/models", json={"model": "smol"})
    said = {"models": {"smol": {"running": 2, "waiting": 1, "idle_s": 0.5, "requests": 17}}}
    assert (await client.post("/v1/fleet/activity", json=said)).status_code == 200
    await client.post("/v1/fleet/released", json={"model": "smol", "replica": 3})
    await client.post("/v1/fleet/attached", json={"model": "smol", "replica": 0, "seconds": 1.2})
    await client.post("/v1/fleet/attached", json={"model": "smol", "replica": 0, "error": "no\nanswer"})
    assert (await client.post("/v1/fleet/load", json={"model": "smol"})).status_code == 202
    assert fleet.said == [
        ("activity", {"smol": Activity(running=2, waiting=1, idle_s=0.5, requests=17)}),
        ("released", "smol", 3),
        ("attached", "smol", 0, 1.2, None),
        ("attached", "smol", 0, None, "no answer"),
        ("load_on_demand", "smol"),
    ]
    refused(await client.post("/v1/fleet/load", json={"model": "none"}), 404, "model")
    refused(await client.post("/v1/fleet/released", json={"model": "smol"}), 400, "replica")
    refused(await client.post("/v1/fleet/released", json={"replica": 1}), 400, "model")
    wrong: dict[str, Any] = {"models": {"smol": {"running": -1}}}
    refused(await client.post("/v1/fleet/activity", json=wrong), 400, "models.smol.running")


# The socket


async def test_the_socket_is_private_and_replaces_one_that_was_left(fleet: FakeFleet, tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    path.touch()
    async with serving(fleet, tmp_path) as client:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert (await client.get("/v1/models")).status_code == 200


async def test_a_socket_that_cannot_be_made_is_one_line(fleet: FakeFleet, tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120) / "control.sock"
    path.parent.mkdir()
    with pytest.raises(StartupError, match="cannot be made: AF_UNIX path too long"):
        await ControlServer(build_app(fleet, ModelTools(ENVIRON)), path).start()


async def test_the_signals_of_the_launcher_stay_its_own(fleet: FakeFleet, tmp_path: Path) -> None:
    import signal

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    async with serving(fleet, tmp_path):
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
