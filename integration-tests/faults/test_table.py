"""Each fault under each load, as often as the form asks: what it costs is what was expected, and no text is wrong."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from funitel_testing.faults.asks import Kind
from funitel_testing.faults.catalogue import FAULTS, STARTS
from funitel_testing.faults.load import MIXED, STREAMS, Answers, Load, asks_of, undisturbed
from funitel_testing.faults.model import save_endless
from funitel_testing.faults.scenes import TWO_RANKS
from funitel_testing.faults.starts import StartFault, try_to_start
from funitel_testing.faults.table import START, Fault, Row, Scene, run

LOADS: dict[str, tuple[Kind, ...]] = {"mixed": MIXED, "streams": STREAMS}
CLIENTS = 24
REQUESTS = 40
TOKENS = 150
RUNS = 5
MAX_WORN = 3  # times that the shards of one deployment are started again
MIN_IN_FLIGHT = CLIENTS // 4  # else the load was too small to tell anything


class Stage:
    """The deployment that faults are done to: the last one, as long as it is of the kind wanted and whole."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self._folder = model, folder
        self._stack = ExitStack()
        self._scene: Any = None
        self._kind: object = None
        self._answers: defaultdict[bool, Answers] = defaultdict(dict)  # by whether there are two ranks
        self._num_worn = 0

    def scene(self, fault: Fault) -> Scene:
        """A deployment for a fault."""
        if self._kind is not fault.scene or self._num_worn == MAX_WORN:
            self.clear()
            self._scene = self._stack.enter_context(fault.scene(self.model, self._folder))
            self._kind = fault.scene
            self._num_worn = 0
        self._num_worn += fault.is_wearing
        found: Scene = self._scene
        return found

    async def answers(self, fault: Fault, scene: Scene, kinds: tuple[Kind, ...]) -> Answers:
        """What a deployment answers when nothing happens to it: the same as all others of as many ranks."""
        found = self._answers[fault.scene is TWO_RANKS]
        asks = asks_of(kinds, REQUESTS, TOKENS)
        if asks[0].undisturbed not in found or asks[-1].undisturbed not in found:
            found |= await undisturbed(scene.url, asks, CLIENTS)
        return found

    def clear(self) -> None:
        """End the deployment."""
        self._stack.close()
        self._kind = None


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("model")
    model = save_endless(folder)
    stage = Stage(model, tmp_path_factory.mktemp("logs"))
    yield stage
    stage.clear()


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
async def test_a_fault_costs_what_was_expected(
    fault: Fault, load: str, stage: Stage, rows: list[Row], *, is_full: bool
) -> None:
    if not is_full and not (fault.is_brief and load == "mixed"):
        pytest.skip("the long form: --full")
    row = Row(fault, load, obstacle=fault.obstacle())
    rows.append(row)
    if row.obstacle:
        pytest.skip(row.obstacle)
    for number in range(RUNS if is_full else 1):
        scene = stage.scene(fault)
        answers = await stage.answers(fault, scene, LOADS[load])
        asks = asks_of(LOADS[load], REQUESTS, TOKENS, salt=f"{fault.name} {number}")
        clients = Load(scene.url, asks, CLIENTS, may_be_away=fault.is_away, until_struck=True)
        try:
            row.runs.append(await run(fault, scene, clients, answers))
            scene.until_whole()
        except BaseException:
            stage.clear()
            raise
        found = row.runs[-1]
        assert found.num_in_flight >= MIN_IN_FLIGHT, "the load was too small to tell"
        assert not found.too_much, found.too_much
        assert not found.wrong, found.wrong


@pytest.mark.parametrize("fault", STARTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_start_says_what_hinders_it(
    fault: StartFault, stage: Stage, rows: list[Row], tmp_path_factory: pytest.TempPathFactory, *, is_full: bool
) -> None:
    row = Row(fault, START, obstacle=fault.obstacle())
    rows.append(row)
    if row.obstacle:
        pytest.skip(row.obstacle)
    stage.clear()
    for _ in range(RUNS if is_full else 1):
        row.runs.append(try_to_start(fault, stage.model, tmp_path_factory.mktemp("start")))
