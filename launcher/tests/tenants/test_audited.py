"""The audit of operators: who was to change what, and what came of it, with the object before and after."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from funitel.launcher.control_plane.api.server import ControlServer
from funitel.launcher.control_plane.model_tools import ModelTools
from funitel.launcher.control_plane.store import StateStore, StateThread
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.tenants import accounts_store
from funitel.launcher.tenants.api.app import app_of
from funitel.launcher.tenants.records import AuditRow
from funitel.launcher.tenants.service import Tenants
from funitel_testing.fake_fleet import FakeFleet

ASKER = {"x-funitel-actor": "ann/laptop", "x-funitel-user": "ann", "x-funitel-role": "operator"}


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[httpx.AsyncClient, StateThread]]:
    state, fleet = StateThread(StateStore(None)), FakeFleet()
    tenants = Tenants(state)
    await tenants.start()
    server = ControlServer(app_of(LauncherSettings(), fleet, ModelTools({}), tenants), folder / "control.sock")
    await server.start()
    transport = httpx.AsyncHTTPTransport(uds=str(server.path))
    async with httpx.AsyncClient(transport=transport, base_url="http://control", timeout=20) as client:
        yield client, state
    await server.stop()
    tenants.close()
    await state.close()


async def rows(state: StateThread) -> list[AuditRow]:
    """All rows, oldest first."""
    return [row for _, row in reversed(await state(accounts_store.audit, limit=1000))]


async def test_x16_each_action_of_an_operator_is_a_row(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, state):
        headers = ASKER | {"x-funitel-client": "10.0.0.7"}
        launched = await client.post("/v1/models", json={"model": "smol", "name": "x"}, headers=headers)
        assert launched.status_code == 200
        await client.patch("/v1/models/x", json={"pinned": True}, headers=headers)
        await client.delete("/v1/models/x", headers=headers)
        await client.get("/v1/models")
        await client.post("/v1/fleet/activity", json={})
        found = await rows(state)
    assert {(row.actor, row.via, row.role, row.address, row.object) for row in found} == {
        ("ann", "ann/laptop", "operator", "10.0.0.7", "model x")
    }
    assert [row.action for row in found[::2]] == ["POST /v1/models", "PATCH /v1/models/x", "DELETE /v1/models/x"]
    assert [row.status for row in found] == [None, 200, None, 200, None, 200]
    launch, change, end = found[1::2]
    assert launch.before is None
    assert launch.after is not None
    assert change.before is not None
    assert change.after is not None
    assert (change.before["pinned"], change.after["pinned"]) == (False, True)
    assert end.before is not None
    assert end.after is None


async def test_what_is_refused_is_noted_too(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, state):
        assert (await client.post("/v1/models", content=b"{")).status_code == 400
        assert (await client.delete("/v1/models/owner%2Fnone")).status_code == 404
        found = await rows(state)
    assert [(row.actor, row.object, row.status) for row in found[1::2]] == [
        ("socket", "model ", 400),
        ("socket", "model owner/none", 404),
    ]


async def test_a_body_that_is_too_long_is_refused_as_before(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        answer = await client.post("/v1/models", content=b" " * (17 << 20))
    assert answer.status_code == 413
