"""`/debug/scheduler`: what it shows, to whom, and that it stays small."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_shards import FakeShard, fake_shards
from fakes import FakeEngine, Serve, eventually

from funitel.proto.errors import SettingsError
from funitel.router.connect import connect
from funitel.router.engine.snapshot import MAX_SHOWN, MAX_STEPS
from funitel.router.settings import RouterSettings

SECRET = "xyzzy"
PATH = "/debug/scheduler"
LOCAL = {"debug_routes": True, "hostname": "127.0.0.1"}


@asynccontextmanager
async def debugged(serve: Serve, tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, FakeShard]]:
    """The application over a fake shard, with the route."""
    async with fake_shards(tmp_path, pool_tokens=4000) as (shard,):
        flags = {"master_shard_uds_path": f"{tmp_path}/shard-0", "max_batch_prefill_tokens": 64} | LOCAL | settings
        async with serve(FakeEngine(), connect=connect, **flags) as client:
            yield client, shard


async def state_of(client: httpx.AsyncClient) -> dict[str, Any]:
    """What the only replica shows."""
    answer = await client.get(PATH)
    assert answer.status_code == 200
    assert SECRET not in answer.text
    (replica,) = answer.json()["replicas"]
    return dict(replica)


async def test_who_runs_and_who_waits_is_shown(serve: Serve, tmp_path: Path) -> None:
    async with debugged(serve, tmp_path, max_batch_size=2) as (client, shard):
        shard.delay = lambda: 0.005
        body = {"inputs": SECRET, "parameters": {"max_new_tokens": 150}}
        asks = [
            asyncio.create_task(client.post("/generate", json=body, headers={"x-request-id": f"r-{n}"}))
            for n in range(4)
        ]

        async def both() -> bool:
            state = await state_of(client)
            return state["num_running"] == 2 and state["num_waiting"] == 2 and len(state["steps"]) > 3

        await eventually(both, "two run and two wait")
        state = await state_of(client)
        running, waiting = state["running"], state["waiting"]
        assert {row["request_id"] for row in running + waiting} == {f"r-{n}" for n in range(4)}
        assert [row["position"] for row in waiting] == [1, 2]
        assert 0 < waiting[0]["estimated_wait_seconds"] < waiting[1]["estimated_wait_seconds"]
        assert all(row["prompt_tokens"] == len(SECRET) + 1 for row in running + waiting)
        assert all(row["age_seconds"] >= row["gap_seconds"] >= 0 for row in running)
        assert all(row["blocks"] > 0 and row["tokens"] >= 0 and row["max_new_tokens"] == 150 for row in running)
        pool = state["pool"]
        assert pool["used"] + pool["free"] == pool["blocks"]
        assert state["steps"][-1]["kind"] in ("decode", "mixed", "prefill")
        assert state["steps"][-1]["rows"] == 2
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)


async def test_an_idle_server_shows_its_last_steps(serve: Serve, tmp_path: Path) -> None:
    async with debugged(serve, tmp_path) as (client, shard):
        shard.total_ns = 7_000_000
        await client.post("/generate", json={"inputs": SECRET, "parameters": {"max_new_tokens": 100}})
        state = await state_of(client)
    assert (state["num_running"], state["num_waiting"], state["running"], state["waiting"]) == (0, 0, [], [])
    assert len(state["steps"]) == MAX_STEPS
    assert {step["seconds"] for step in state["steps"]} == {0.007}, "what the ranks measured"
    assert all(step["tokens"] == 1 and step["kind"] == "decode" for step in state["steps"])


async def test_of_a_long_queue_the_first_are_shown(serve: Serve, tmp_path: Path) -> None:
    async with debugged(serve, tmp_path, max_batch_size=1, max_concurrent_requests=500) as (client, shard):
        shard.pause.clear()
        asks = [asyncio.create_task(client.post("/generate", json={"inputs": SECRET})) for _ in range(300)]

        async def all_are_there() -> bool:
            return (await state_of(client))["num_waiting"] == 299

        await eventually(all_are_there, "299 wait")
        answer = await client.get(PATH)
        assert len(answer.json()["replicas"][0]["waiting"]) == MAX_SHOWN
        assert len(answer.content) < 50_000
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
        shard.pause.set()


async def test_it_is_off_by_default(client: httpx.AsyncClient) -> None:
    assert (await client.get(PATH)).status_code == 404
    assert PATH not in (await client.get("/openapi.json")).json()["paths"]


async def test_it_is_documented_where_it_is_on(serve: Serve) -> None:
    async with serve(FakeEngine(), **LOCAL) as client:
        assert PATH in (await client.get("/openapi.json")).json()["paths"]


async def test_it_is_behind_the_key(serve: Serve) -> None:
    async with serve(FakeEngine(), debug_routes=True, api_key="k") as client:
        assert (await client.get(PATH)).status_code == 401
        answer = await client.get(PATH, headers={"authorization": "Bearer k"})
    assert answer.status_code == 200
    assert json.loads(answer.text)["replicas"] == []


@pytest.mark.parametrize("hostname", ["0.0.0.0", "::", "10.0.0.1", "myhost"])
def test_without_a_key_it_is_for_this_machine(hostname: str) -> None:
    with pytest.raises(
        SettingsError, match="--debug-routes needs --api-key or --api-key-file, or --hostname 127.0.0.1"
    ):
        RouterSettings(debug_routes=True, hostname=hostname)
    RouterSettings(debug_routes=True, hostname=hostname, api_key="k")


@pytest.mark.parametrize("hostname", ["localhost", "127.0.0.1", "::1"])
def test_on_loopback_it_needs_no_key(hostname: str) -> None:
    RouterSettings(debug_routes=True, hostname=hostname)


async def test_shards_know_a_request_by_its_id(serve: Serve, tmp_path: Path) -> None:
    async with debugged(serve, tmp_path) as (client, shard):
        body = {"inputs": SECRET, "parameters": {"max_new_tokens": 2}}
        await client.post("/generate", json=body, headers={"x-request-id": "r-1"})
    assert shard.names == ["r-1"]


async def test_the_console_shows_the_same_beside_its_numbers(serve: Serve, tmp_path: Path) -> None:
    async with debugged(serve, tmp_path, debug_routes=False) as (client, _):
        await client.post("/generate", json={"inputs": SECRET, "parameters": {"max_new_tokens": 3}})
        plain = (await client.get("/v1/console/live?since=1e18")).json()
        answer = await client.get("/v1/console/live?since=1e18&scheduler=true")
        assert SECRET not in answer.text
        (model,) = answer.json()["models"]
        assert plain["models"][0] | {"scheduler": model["scheduler"]} == model
        assert plain["models"][0]["scheduler"] is None
        (replica,) = model["scheduler"]
        assert (replica["index"], replica["running"], len(replica["steps"]) > 0) == (0, [], True)


async def test_the_console_lists_the_sequences_of_the_key_that_asks(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    lines = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **scope}
        for name, scope in (("one", {}), ("two", {}), ("all", {"routes": ["/v1/requests*", "/v1/console/live"]}))
    ]
    keys.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    async with debugged(serve, tmp_path, api_key_file=str(keys), max_batch_size=1) as (client, shard):
        shard.delay = lambda: 0.005

        def bearer(name: str) -> dict[str, str]:
            return {"authorization": f"Bearer {name}"}

        body = {"inputs": SECRET, "parameters": {"max_new_tokens": 190}}
        asks = [
            asyncio.create_task(client.post("/generate", json=body, headers=bearer(name) | {"x-request-id": "same"}))
            for name in ("one", "two")
        ]

        async def seen(name: str) -> tuple[dict[str, Any], list[str]]:
            answer = await client.get("/v1/console/live?scheduler=true", headers=bearer(name))
            (replica,) = answer.json()["models"][0]["scheduler"]
            return replica, sorted(row["key"] for row in replica["running"] + replica["waiting"])

        async def both() -> bool:
            return (await seen("all"))[1] == ["one", "two"]

        await eventually(both, "both are listed")
        for name in ("one", "two"):
            replica, listed = await seen(name)
            assert listed == [name]
            assert (replica["num_running"], replica["num_waiting"]) == (1, 1)
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
