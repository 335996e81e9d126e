"""States of tenants for routers: a change returns once each router has taken it."""

import asyncio
from typing import Any

import pytest

from funitel.launcher.tenants import broadcast as module
from funitel.launcher.tenants.broadcast import TenantBroadcast


@pytest.fixture
def broadcast() -> TenantBroadcast:
    return TenantBroadcast(lambda: {"users": []})


async def test_without_a_router_a_change_waits_for_nothing(broadcast: TenantBroadcast) -> None:
    async with asyncio.timeout(1):
        await broadcast.publish()


async def test_a_change_returns_once_all_routers_have_taken_it(broadcast: TenantBroadcast) -> None:
    watchers = [broadcast.watch() for _ in range(2)]
    for each in watchers:
        await _take(broadcast, await anext(each))
    publishing = asyncio.create_task(broadcast.publish())
    states = [await anext(each) for each in watchers]
    await _take(broadcast, states[0])
    await asyncio.sleep(0.05)
    assert not publishing.done()
    await _take(broadcast, states[1])
    async with asyncio.timeout(1):
        await publishing


async def test_an_older_version_is_not_this_change(broadcast: TenantBroadcast) -> None:
    watcher = broadcast.watch()
    before = await anext(watcher)
    publishing = asyncio.create_task(broadcast.publish())
    await anext(watcher)
    await _take(broadcast, before)
    await broadcast.taken(before["watcher"] + 1, 99)  # none that watches
    await asyncio.sleep(0.05)
    assert not publishing.done()
    publishing.cancel()


async def test_a_router_that_ends_is_not_waited_for(broadcast: TenantBroadcast) -> None:
    watcher = broadcast.watch()
    await anext(watcher)
    publishing = asyncio.create_task(broadcast.publish())
    await anext(watcher)
    await watcher.aclose()  # type: ignore[attr-defined]
    async with asyncio.timeout(1):
        await publishing


async def test_a_router_that_hangs_holds_up_no_change_for_long(
    broadcast: TenantBroadcast, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "TAKEN_SECONDS", 0.05)
    watcher = broadcast.watch()
    await anext(watcher)
    async with asyncio.timeout(1):
        await broadcast.publish()
    assert "has not taken" in caplog.text


async def _take(broadcast: TenantBroadcast, state: dict[str, Any]) -> None:
    await broadcast.taken(state["watcher"], state["version"])
