"""The launch of models: stages, cancels, failures, names; seen from the interface of the fleet."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from funitel.launcher.control_plane.records import LaunchRequest, ModelState
from funitel.proto.errors import Conflict, InvalidRequest, LaunchCancelled, LaunchFailed, ModelNotFound
from funitel_testing.lifecycles import Machine, eventually, is_alive


async def test_a_launch_goes_through_its_stages_and_serves(machine: Machine) -> None:
    running = await machine.start()
    entry = await running.launch(LaunchRequest(model=machine.model("tiny", converts=True)))
    assert (entry.name, entry.state, entry.progress) == ("tiny", ModelState.READY, 1.0)
    stages = running.stages("tiny")
    assert [*dict.fromkeys(stages)] == ["queued", "downloading", "converting", "loading", "warming_up", "ready"]
    assert entry.load_seconds
    assert entry.bytes
    assert entry.router["tokenizer_name"] == str(machine.folder / "models" / "tiny")
    assert running.pids("tiny") == machine.starts("tiny")
    await running.fleet.terminate("tiny")
    assert running.fleet.models() == []
    assert not any(map(is_alive, machine.starts("tiny")))


async def test_a_launch_is_asynchronous_and_its_progress_rises(machine: Machine) -> None:
    running = await machine.start()
    model = machine.model("tiny", download_seconds=1.5, load_seconds=1.0)
    entry = await running.launch(LaunchRequest(model=model), wait_ready=False)
    assert entry.state is ModelState.DOWNLOADING
    seen: list[float] = []
    while running.fleet.model("tiny").state is not ModelState.READY:
        progress = running.fleet.progress("tiny")
        seen.append(progress.progress)
        if progress.stage == "downloading" and progress.bytes:
            assert progress.total_bytes == 1000
        await asyncio.sleep(0.02)
    assert seen == sorted(seen)
    assert len({*seen}) > 5


@pytest.mark.parametrize(
    ("stage", "behaviour"),
    [("downloading", {"download_seconds": 60}), ("loading", {"load_seconds": 60}), ("warming_up", {})],
)
async def test_a_launch_is_cancelled_at_any_stage_and_leaves_nothing(
    machine: Machine, stage: str, behaviour: dict[str, float]
) -> None:
    running = await machine.start()
    if stage == "warming_up":
        await running.router.stop()
    waiting = asyncio.create_task(running.launch(LaunchRequest(model=machine.model("tiny", **behaviour))))
    await eventually(lambda: running.fleet.managed.get("tiny"), "the launch")
    await running.until("tiny", ModelState(stage))
    if stage != "downloading":
        await eventually(lambda: machine.starts("tiny"), "a shard")
    else:
        await eventually((machine.folder / "models/tiny/unfinished").exists, "an unfinished file")
    await running.fleet.cancel("tiny")
    with pytest.raises(LaunchCancelled):
        await waiting
    assert running.fleet.models() == []
    assert running.stages("tiny")[-1] == "cancelled"
    assert not any(map(is_alive, machine.starts("tiny")))
    assert not (machine.folder / "models/tiny/unfinished").exists()
    assert not list(machine.run_folder.iterdir()), "a socket is left"
    assert running.fleet.memory.free == running.fleet.memory.total
    with pytest.raises(ModelNotFound):
        await running.fleet.cancel("tiny")


async def test_a_model_that_is_ready_cannot_be_cancelled(machine: Machine) -> None:
    running = await machine.start()
    await running.launch(LaunchRequest(model=machine.model()))
    with pytest.raises(Conflict, match="tiny is ready"):
        await running.fleet.cancel("tiny")


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ({"download_error": "the hub is gone"}, "the hub is gone"),
        ({"load_error": "weights are short"}, "weights are short"),
    ],
)
async def test_a_launch_that_fails_keeps_the_error_line_of_its_process(
    machine: Machine, behaviour: dict[str, str], reason: str
) -> None:
    running = await machine.start()
    request = LaunchRequest(model=machine.model("tiny", **behaviour))
    with pytest.raises(LaunchFailed, match=reason):
        await running.launch(request)
    entry = running.fleet.model("tiny")
    assert entry.state is ModelState.FAILED
    assert reason in (entry.error or "")
    assert reason in running.fleet.events("tiny")[-1].message
    assert entry.replicas == ()
    machine.behave("tiny")
    assert (await running.launch(request)).state is ModelState.READY, "a launch that has failed can be tried again"


async def test_retries_are_made_with_a_pause(machine: Machine) -> None:
    running = await machine.start()
    model = machine.model("tiny", load_error="not yet", load_errors=1)
    entry = await running.launch(LaunchRequest(model=model, retries=1))
    assert entry.state is ModelState.READY
    assert len(machine.starts("tiny")) == 2
    assert any("attempt 2 of 2 follows in 1 s" in event.message for event in running.fleet.events("tiny"))


async def test_a_router_that_cannot_use_a_model_fails_its_launch(machine: Machine) -> None:
    running = await machine.start()
    running.router.refuses["tiny"] = "the tokenizer is missing"
    with pytest.raises(LaunchFailed, match="the tokenizer is missing"):
        await running.launch(LaunchRequest(model=machine.model()))
    assert not any(map(is_alive, machine.starts("tiny")))


async def test_a_name_is_launched_once(machine: Machine) -> None:
    running = await machine.start()
    model = machine.model("tiny", load_seconds=0.3)
    results = await asyncio.gather(
        *(running.launch(LaunchRequest(model=model)) for _ in range(3)), return_exceptions=True
    )
    assert sum(isinstance(each, Conflict) for each in results) == 2
    assert len(machine.starts("tiny")) == 1
    other = await running.launch(LaunchRequest(model=model, name="other"))
    assert other.name == "other"
    assert [entry.is_default for entry in running.fleet.models()] == [True, False]


async def test_a_wrong_field_leaves_no_entry(machine: Machine) -> None:
    running = await machine.start()
    for request in (
        LaunchRequest(model=machine.model(), dtype="float33"),
        LaunchRequest(model=machine.model(), executor="ray"),
        LaunchRequest(model=machine.model(), settings={"port": 80}),
    ):
        with pytest.raises(InvalidRequest):
            await running.launch(request)
    assert running.fleet.models() == []


async def test_a_model_of_another_type_than_the_client_says_is_refused(machine: Machine) -> None:
    running = await machine.start()
    with pytest.raises(LaunchFailed, match="a model of the task generate"):
        await running.launch(LaunchRequest(model=machine.model(), model_type="embedding"))


async def test_a_lost_replica_is_restarted_at_its_address_with_back_off(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    running = await machine.start()
    await running.launch(LaunchRequest(model=machine.model(), replicas=2))
    before = running.fleet.replicas("tiny")
    for _ in range(2):
        victim = running.fleet.replicas("tiny")[0].pids[0]
        os.kill(victim, signal.SIGKILL)
        await eventually(lambda: victim not in running.pids("tiny"), "the loss")  # noqa: B023
        assert running.fleet.model("tiny").state is ModelState.READY
        await eventually(lambda: all(each.state == "ready" for each in running.fleet.replicas("tiny")), "its return")
    after = running.fleet.replicas("tiny")
    assert [each.address for each in after] == [each.address for each in before]
    assert after[1].pids == before[1].pids
    assert "killed by SIGKILL" in caplog.text
    assert "restart 1 of 5 in 0 s" in caplog.text
    assert "restart 2 of 5 in 1 s" in caplog.text


async def test_a_replica_that_cannot_return_fails_its_model(machine: Machine) -> None:
    running = await machine.start(max_restarts=1)
    await running.launch(LaunchRequest(model=machine.model()))
    machine.behave("tiny", load_error="no more")
    os.kill(running.pids("tiny")[0], signal.SIGKILL)
    await running.until("tiny", ModelState.FAILED)
    assert "no more" in (running.fleet.model("tiny").error or "")
    assert running.fleet.replicas("tiny") == ()


async def test_replicas_come_and_go_while_it_serves(machine: Machine) -> None:
    running = await machine.start()
    await running.launch(LaunchRequest(model=machine.model()))
    added = await running.fleet.add_replica("tiny", count=1, weight=2.0)
    assert [each.id for each in added] == [1]
    await eventually(lambda: ("tiny", 1) in running.router.attached, "the second replica")
    running.router.holds.add("tiny")
    removing = asyncio.create_task(running.fleet.remove_replica("tiny", 0))
    await eventually(lambda: running.fleet.replicas("tiny")[0].state == "draining", "the drain")
    await asyncio.sleep(0.3)
    assert is_alive(machine.starts("tiny")[0]), "a request runs on it"
    running.router.holds.clear()
    running.fleet.released("tiny", 0)
    await removing
    assert not is_alive(machine.starts("tiny")[0])
    assert [each.id for each in running.fleet.replicas("tiny")] == [1]
    with pytest.raises(Conflict, match="the last one"):
        await running.fleet.remove_replica("tiny", 1)


async def test_a_model_sleeps_and_wakes_with_the_same_processes(machine: Machine) -> None:
    running = await machine.start()
    await running.launch(LaunchRequest(model=machine.model()))
    before = running.pids("tiny")
    full = running.fleet.model("tiny").bytes or 0
    assert (await running.fleet.sleep("tiny")).state is ModelState.SLEEPING
    assert ("tiny", 0) not in running.router.attached
    assert running.fleet.model("tiny").bytes == full - 100
    assert (await running.fleet.wake("tiny", wait_ready=True)).state is ModelState.READY
    assert running.pids("tiny") == before
    assert (Path(machine.folder) / "models/tiny/wakes").exists()
    machine.behave("tiny", sleepless=True)


async def test_a_model_that_cannot_sleep_serves_on(machine: Machine) -> None:
    running = await machine.start()
    await running.launch(LaunchRequest(model=machine.model("tiny", sleepless=True)))
    with pytest.raises(Conflict, match="a sequence is there"):
        await running.fleet.sleep("tiny")
    assert running.fleet.model("tiny").state is ModelState.READY
    assert ("tiny", 0) in running.router.attached
