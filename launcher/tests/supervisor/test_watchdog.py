"""Shards that do not answer are killed, those that do or that end are not."""

import asyncio
import sys

import pytest

from funitel.launcher.supervisor.process import Child
from funitel.launcher.supervisor.watchdog import kill_when_unresponsive


async def sleeper() -> Child:
    child = Child("shard rank 0", [sys.executable, "-c", "import time; time.sleep(60)"], {}, lambda _: None)
    await child.start()
    return child


async def test_a_silent_shard_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    child = await sleeper()

    async def answers() -> bool:
        return False

    await asyncio.wait_for(kill_when_unresponsive(child, answers, 0.4), 5)
    assert await child.wait() == -9
    assert "shard rank 0 has not answered for" in caplog.text


async def test_one_that_answers_now_and_then_lives() -> None:
    child = await sleeper()
    count = 0

    async def answers() -> bool:
        nonlocal count
        count += 1
        return count % 2 == 0

    watching = asyncio.create_task(kill_when_unresponsive(child, answers, 0.8))
    await asyncio.sleep(2)
    assert not watching.done()
    child.kill()
    await asyncio.wait_for(watching, 5)
    assert count > 4
