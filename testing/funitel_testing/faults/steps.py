"""Faults of steps: a shard that raises, has no memory, computes no numbers, or answers what is no answer."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from funitel_testing.faults.asks import Ask
from funitel_testing.faults.scenes import ALIKE, Launched, launching
from funitel_testing.faults.table import Cost, Fault
from funitel_testing.faulty_shard import Fault as Step
from funitel_testing.faulty_shard import Faults as Steps
from funitel_testing.servers import FAULTY_LAUNCHER, wait_until

CULPRIT = 7  # number of the request that causes what it causes
POISON = f", {CULPRIT} bottles"  # in its prompt, and no other
FIRED_SECONDS = 30.0
LIES = {
    "garbage": "that is no message",
    "truncated": "that is cut short",
    "missing": "without a token",
    "twice": "with a token given twice",
    "stranger": "with a token for a request that does not exist",
    "vocabulary": "with a token beyond the vocabulary",
}
MANY_ROWS = 9  # beyond the half of all clients
FEW_SECONDS = 3.0


class Faulty:
    """A deployment of one shard with the faulty steps of `steps`."""

    def __init__(self, deployment: Launched, steps: Steps) -> None:
        self.deployment, self.steps = deployment, steps
        self.url = deployment.url

    def until_whole(self) -> None:
        """See `Scene`."""
        self.steps.set()
        self.deployment.until_whole()


@contextmanager
def _faulty(model: Path, folder: Path) -> Iterator[Faulty]:
    steps = Steps(folder / "steps.json")
    with launching(folder, model, *ALIKE, program=FAULTY_LAUNCHER, **steps.environ) as deployment:
        yield Faulty(deployment, steps)


def _going_wrong(fault: Step) -> Callable[[Faulty], Coroutine[Any, Any, None]]:
    """Have steps go wrong, for a while where nothing says how often; at least one of them does."""

    async def strike(scene: Faulty) -> None:
        scene.steps.forget()
        scene.steps.set(fault)
        await asyncio.to_thread(wait_until, lambda: bool(scene.steps.fired()), FIRED_SECONDS, fault.kind)
        if fault.times is None:
            await asyncio.sleep(FEW_SECONDS)
            scene.steps.set()

    return strike


def _is_culprit(ask: Ask) -> bool:
    return ask.number == CULPRIT


FAULTS = (
    Fault(
        name="a step of several sequences that raises, once",
        cost=Cost.NOTHING,
        why="its sequences are tried again; a single one would be taken for the cause",
        scene=_faulty,
        strike=_going_wrong(Step(kind="raise", min_rows=2, times=1)),
    ),
    Fault(
        name="steps that raise as long as one request is in them",
        cost=Cost.CAUSE,
        why="the batch is halved until it is found",
        scene=_faulty,
        strike=_going_wrong(Step(kind="raise", text=POISON)),
        causes=_is_culprit,
    ),
    Fault(
        name=f"no memory for steps of more than {MANY_ROWS - 1} sequences",
        cost=Cost.NOTHING,
        why="steps become smaller",
        scene=_faulty,
        strike=_going_wrong(Step(kind="no_memory", min_rows=MANY_ROWS)),
    ),
    Fault(
        name="scores of one request that are not numbers",
        cost=Cost.CAUSE,
        why="it gets an error that says so",
        scene=_faulty,
        strike=_going_wrong(Step(kind="nan", text=POISON)),
        causes=_is_culprit,
        is_brief=False,
    ),
    *(
        Fault(
            name=f"a reply {lie}",
            cost=Cost.NOTHING,
            why="its shard is killed and started again: its state is unknown",
            scene=_faulty,
            strike=_going_wrong(Step(kind=kind, min_rows=2, times=1)),
            is_wearing=True,
            is_brief=kind in ("garbage", "missing"),
        )
        for kind, lie in LIES.items()
    ),
)
