"""What happens at the same time: cancels, terminations and evictions that meet; nothing is left of what they end."""

import asyncio
import os
import signal
import time

import pytest

from funitel.launcher.control_plane.records import LaunchRequest, ModelState, Registration
from funitel.proto.errors import Conflict, FunitelError, LaunchFailed
from funitel_testing.lifecycles import Machine, Running, eventually, is_alive

ROOM_FOR_ONE = 600_000_000


async def busy_state(running: Running, seconds: float = 1.0) -> "asyncio.Task[None]":
    """Have the database take a time for what is asked of it next."""
    task = asyncio.create_task(running.state(lambda _: time.sleep(seconds)))
    await asyncio.sleep(0.05)
    return task


async def test_a_second_cancel_waits_for_the_processes_too(machine: Machine) -> None:
    running = await machine.start()
    model = machine.model("tiny", load_seconds=60, stop_seconds=1.5)
    waiting = asyncio.create_task(running.launch(LaunchRequest(model=model)))
    await eventually(lambda: machine.starts("tiny"), "a shard")
    await asyncio.sleep(0.5)  # it handles signals
    first = asyncio.create_task(running.fleet.cancel("tiny"))
    await asyncio.sleep(0.3)
    await running.fleet.terminate("tiny")
    assert not any(map(is_alive, machine.starts("tiny")))
    await asyncio.gather(first, waiting, return_exceptions=True)
    assert running.fleet.models() == []


async def test_a_cancel_while_a_failed_launch_is_cleared_leaves_no_process(machine: Machine) -> None:
    running = await machine.start()
    running.router.refuses["tiny"] = "the tokenizer is missing"
    model = machine.model("tiny", stop_seconds=1.5)
    waiting = asyncio.create_task(running.launch(LaunchRequest(model=model)))
    await eventually(lambda: running.fleet.managed, "its entry")
    await eventually(lambda: any("cannot use" in each.message for each in running.fleet.events("tiny")), "a refusal")
    await asyncio.sleep(0.3)
    await running.fleet.cancel("tiny")
    assert not any(map(is_alive, machine.starts("tiny")))
    await asyncio.gather(waiting, return_exceptions=True)


async def test_an_eviction_goes_on_when_the_load_that_wanted_it_is_cancelled(machine: Machine) -> None:
    running = await machine.start(memory_bytes=ROOM_FOR_ONE)
    await running.launch(LaunchRequest(model=machine.model("a")))
    running.fleet.managed["a"].change(bytes=ROOM_FOR_ONE)
    running.fleet.memory.put("a", ROOM_FOR_ONE)
    running.router.holds.add("a")
    waiting = asyncio.create_task(running.launch(LaunchRequest(model=machine.model("c"))))
    await running.until("a", ModelState.DRAINING)
    await running.fleet.cancel("c")
    await asyncio.gather(waiting, return_exceptions=True)
    running.router.holds.clear()
    running.fleet.released("a", 0)
    await running.until("a", ModelState.REGISTERED)
    assert not any(map(is_alive, machine.starts("a")))
    assert running.fleet.memory.free == running.fleet.memory.total


async def test_a_model_that_is_terminated_before_its_load_has_begun_is_not_loaded(machine: Machine) -> None:
    running = await machine.start()
    await busy_state(running)
    launching = asyncio.create_task(running.launch(LaunchRequest(model=machine.model())))
    await eventually(lambda: "tiny" in running.fleet.managed, "its entry")
    await running.fleet.terminate("tiny")
    result = (await asyncio.gather(launching, return_exceptions=True))[0]
    assert isinstance(result, FunitelError)
    await asyncio.sleep(0.5)
    assert machine.starts("tiny") == []


async def test_a_request_does_not_end_the_loads_at_a_start(machine: Machine) -> None:
    first = await machine.start()
    for name in ("a", "b"):
        await first.launch(LaunchRequest(model=machine.model(name)))
    await first.service.stop()
    await first.router.stop()
    await first.state.close()
    first.was_killed = True
    second = await machine.start()
    await second.until("b", ModelState.READY)
    await second.fleet.unload("a")
    await second.fleet.unload("b")
    for name in ("a", "b"):
        second.fleet.managed[name].enter(ModelState.QUEUED, "is to be loaded")
    await busy_state(second, 0.5)
    demand = asyncio.create_task(second.fleet.load_on_demand("a"))
    await asyncio.sleep(0)
    await second.service._autostart(list(second.fleet.managed.values()))
    await demand
    assert [entry.state for entry in second.fleet.models()] == [ModelState.READY, ModelState.READY]


async def test_an_unexpected_error_fails_a_load(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    running = await machine.start()

    def broken(*_: object) -> int:
        raise OSError("the disk is gone")

    monkeypatch.setattr("funitel.launcher.lifecycle.launch.memory_need.most_bytes", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        await running.launch(LaunchRequest(model=machine.model()))
    entry = running.fleet.model("tiny")
    assert (entry.state, entry.error) == (ModelState.FAILED, "OSError: the disk is gone")


async def test_a_replica_that_starts_can_be_removed(machine: Machine) -> None:
    running = await machine.start()
    await running.launch(LaunchRequest(model=machine.model()))
    full = running.fleet.model("tiny").bytes
    for number in (1, 2, 3):
        machine.behave("tiny", load_seconds=60)
        await running.fleet.add_replica("tiny", count=1, weight=None)
        await eventually(lambda number=number: len(machine.starts("tiny")) == number + 1, "its shard")  # type: ignore[misc]
        await running.fleet.remove_replica("tiny", number)
        assert not is_alive(machine.starts("tiny")[-1])
        assert running.fleet.model("tiny").bytes == full
        assert [each.id for each in running.fleet.replicas("tiny")] == [0]
    request = running.fleet.managed["tiny"].request
    assert request is not None
    assert request.replicas == 1, "a later load starts those that were left"


async def test_no_replica_is_added_to_a_model_that_is_terminated_meanwhile(machine: Machine) -> None:
    running = await machine.start(memory_bytes=2 * ROOM_FOR_ONE)
    for name in ("a", "b"):
        await running.launch(LaunchRequest(model=machine.model(name)))
        running.fleet.managed[name].change(bytes=ROOM_FOR_ONE)
        running.fleet.memory.put(name, ROOM_FOR_ONE)
    running.router.holds.add("b")
    adding = asyncio.create_task(running.fleet.add_replica("a", count=1, weight=None))
    await running.until("b", ModelState.DRAINING)
    await running.fleet.terminate("a")
    running.router.holds.clear()
    running.fleet.released("b", 0)
    with pytest.raises(Conflict, match="is not ready any more"):
        await adding
    assert len(machine.starts("a")) == 1
    assert running.fleet.memory.free == running.fleet.memory.total


async def test_a_registration_that_meets_a_launch_leaves_no_process(machine: Machine) -> None:
    running = await machine.start()
    await busy_state(running, 0.3)
    model = machine.model("mine")
    registering = asyncio.create_task(running.fleet.register(Registration(type="LLM", name="mine", model=model)))
    await asyncio.sleep(0)
    launching = asyncio.create_task(running.launch(LaunchRequest(model=model)))
    await registering
    await launching
    assert running.fleet.model("mine").state is ModelState.READY
    removing = [busy_state(running, 0.3)]
    await running.fleet.unload("mine")
    await asyncio.gather(*removing)
    unregistering = asyncio.create_task(running.fleet.unregister("LLM", "mine"))
    await asyncio.sleep(0)
    load = asyncio.create_task(running.fleet.load("mine", wait_ready=True))
    await unregistering
    await asyncio.gather(load, return_exceptions=True)
    known = {entry.name for entry in running.fleet.models()}
    assert all("mine" in known or not is_alive(pid) for pid in machine.starts("mine"))


async def test_a_replica_that_is_lost_while_another_loads_fails_the_launch(machine: Machine) -> None:
    running = await machine.start(max_restarts=0)
    model = machine.model("tiny", load_seconds=0.5)
    launching = asyncio.create_task(running.launch(LaunchRequest(model=model, replicas=2)))
    await eventually(lambda: len(machine.starts("tiny")) == 2, "both shards")
    first, second = machine.starts("tiny")
    os.kill(second, signal.SIGSTOP)
    await eventually(lambda: any(each.state == "ready" for each in running.fleet.replicas("tiny")), "the first one")
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: running.fleet.managed["tiny"].gone_reason, "its loss")
    os.kill(second, signal.SIGCONT)
    with pytest.raises(LaunchFailed, match="SIGKILL"):
        await launching
    assert not any(map(is_alive, machine.starts("tiny")))


async def test_the_logs_of_many_loads_are_bounded(machine: Machine) -> None:
    running = await machine.start()
    model = machine.model("\U0001d49c" * 60)
    entry = await running.launch(LaunchRequest(model=model))
    running.fleet.managed[entry.name].next_replica = 40
    log = next((machine.folder / "logs").glob("*-0.log"))
    for number in range(40):
        log.with_name(log.name.replace("-0.log", f"-{number}.log")).touch()
    await running.fleet.unload(entry.name)
    await running.fleet.load(entry.name, wait_ready=True)
    numbers = sorted(int(path.stem.rpartition("-")[2]) for path in (machine.folder / "logs").glob("*-[0-9]*.log"))
    assert numbers == [*range(32, 41)]
