"""What plays the control plane on a node of a Ray cluster: `ray_plane.py STATE ADDRESS MODEL`.

It keeps replicas 0 and 1 of two ranks each, the first of which is whole on one node if there is room. What it knows is
in the file STATE, by which the next one adopts them; SIGTERM stops the replicas.
"""

import asyncio
import json
import logging
import signal
import sys
from pathlib import Path
from typing import Any

from funitel.launcher.executors.ray import RayExecutor
from funitel_testing.machines.deployment import Supervised, replica_job

NUM_REPLICAS = 2
WRITE_SECONDS = 0.3


def told(replica: Supervised, *, is_adopted: bool, answers: bool) -> dict[str, Any]:
    """What the state file has of a replica."""
    record = None if replica.running is None else replica.running.record
    return {"record": record, "reasons": replica.reasons, "is_adopted": is_adopted, "answers": answers}


def read(state: Path) -> list[dict[str, Any]]:
    """What an earlier one knew; nothing for the first."""
    found: list[dict[str, Any]] = json.loads(state.read_text()) if state.exists() else []
    return found


async def main(state: Path, address: str, model: Path) -> None:
    """Keep the replicas until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    executor = RayExecutor(address)
    known = read(state)
    replicas: list[Supervised] = []
    adopted: list[bool] = []
    for number in range(NUM_REPLICAS):
        record = known[number]["record"] if known else None
        found = None if record is None else await executor.adopt(record)
        replicas.append(Supervised(executor, replica_job(model, number, state.with_suffix(".log"), 2), found))
        adopted.append(found is not None)
        await replicas[-1].serves()
    while not stop.is_set():
        facts = [
            told(each, is_adopted=was, answers=each.running is not None and await each.running.answers())
            for each, was in zip(replicas, adopted, strict=True)
        ]
        scratch = state.with_suffix(".new")
        scratch.write_text(json.dumps(facts))
        scratch.replace(state)
        await asyncio.sleep(WRITE_SECONDS)
    await asyncio.gather(*(replica.close() for replica in replicas))
    await executor.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
