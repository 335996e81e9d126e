"""The audit of operators: who was to change what, and what came of it."""

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from funitel.launcher.control_plane.api.audit import Audit
from funitel.launcher.control_plane.api.server import ControlServer
from funitel.launcher.control_plane.model_tools import ModelTools
from funitel_testing.fake_fleet import FakeFleet


@asynccontextmanager
async def serving(folder: Path, audit: Path) -> AsyncIterator[httpx.AsyncClient]:
    server = ControlServer(FakeFleet(), ModelTools({}), folder / "control.sock", Audit(audit, lambda: 0.0))
    await server.start()
    transport = httpx.AsyncHTTPTransport(uds=str(server.path))
    async with httpx.AsyncClient(transport=transport, base_url="http://control", timeout=20) as client:
        yield client
    await server.stop()


def rows(audit: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in audit.read_text().splitlines()]


async def test_x16_each_action_of_an_operator_is_a_line(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    async with serving(tmp_path, audit) as client:
        asker = {"x-funitel-actor": "team-a", "x-funitel-client": "10.0.0.7"}
        launched = await client.post("/v1/models", json={"model": "smol", "env": {"TOKEN": "s3cret"}}, headers=asker)
        broken = await client.post("/v1/models", content=b"{")
        ended = await client.delete("/v1/models/owner%2Fnone", headers=asker)
        await client.get("/v1/models")
        await client.post("/v1/fleet/activity", json={})
    assert audit.stat().st_mode & 0o777 == 0o600
    assert "s3cret" not in audit.read_text()
    at = "1970-01-01T00:00:00.000+00:00"
    first, second, third = rows(audit)
    who = {"at": at, "actor": "team-a", "address": "10.0.0.7"}
    what = {"method": "POST", "path": "/v1/models"}
    assert first == who | what | {"fields": ["env", "model"], "status": launched.status_code}
    assert second == {"at": at, "actor": "socket", "address": ""} | what | {
        "fields": [],
        "status": broken.status_code,
    }
    what = {"method": "DELETE", "path": "/v1/models/owner%2Fnone"}
    assert third == who | what | {"fields": [], "status": ended.status_code}


async def test_a_line_that_cannot_be_written_is_told_and_nothing_else_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, tmp_path / "absent" / "audit.jsonl") as client:
        with caplog.at_level(logging.ERROR):
            answer = await client.request("DELETE", "/v1/models/none")
    assert answer.status_code == 404
    assert "lacks a line: No such file or directory" in caplog.text
    assert "/v1/models/none" in caplog.text
