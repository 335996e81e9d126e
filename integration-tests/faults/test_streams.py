"""Many streams run while a shard is killed: all of them finish, with the text of an undisturbed run."""

import asyncio
import os
import signal
import time
from pathlib import Path

from funitel_testing.faults.load import STREAMS, Load, asks_of, undisturbed
from funitel_testing.faults.model import save_endless
from funitel_testing.faults.scenes import launching


async def test_every_stream_outlives_a_shard(
    demo_model: Path, tmp_path: Path, figures: dict[str, object], *, is_full: bool
) -> None:
    count = 100 if is_full else 24
    model = demo_model
    if not is_full:
        model = save_endless(tmp_path / "model")
    with launching(tmp_path, model, "--num-replicas", "2") as scene:
        asks = asks_of(STREAMS, count, 150)
        answers = await undisturbed(scene.url, asks, count)
        load = Load(scene.url, asks, count, until_struck=True)
        task = asyncio.create_task(load.run())
        await load.until_in_flight(share=1.0)
        in_flight = [outcome for outcome in load.outcomes if outcome.ended is None]
        load.struck = time.monotonic()
        os.kill(scene.server.shard_pids()[0], signal.SIGKILL)
        outcomes = await task
    figures[f"streams that ran when a shard was killed, of {count}; finished; with their text"] = (
        len(in_flight),
        sum(not outcome.loss for outcome in outcomes),
        sum(outcome.heard.begins(answers[outcome.ask]) for outcome in outcomes),
    )
    assert len(in_flight) == count, "some were over before it was killed"
    assert [outcome.loss for outcome in outcomes if outcome.loss] == []
    assert all(outcome.heard == answers[outcome.ask] for outcome in outcomes)
