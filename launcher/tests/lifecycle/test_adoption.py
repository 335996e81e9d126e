"""A control plane that is killed: the next one adopts what lives, and starts what died."""

import os
import signal

from funitel.launcher.control_plane.records import LaunchRequest, ModelState, Registration
from funitel_testing.lifecycles import Machine, eventually, is_alive


def shown(entries: object) -> list[object]:
    return [(each.name, each.state, each.replicas, each.ttl, each.bytes) for each in entries]  # type: ignore[attr-defined]


async def test_shards_are_adopted_with_their_pids(machine: Machine) -> None:
    first = await machine.start()
    await first.launch(LaunchRequest(model=machine.model("a"), replicas=2, ttl=500.0))
    await first.launch(LaunchRequest(model=machine.model("b")))
    await first.fleet.sleep("b")
    await first.fleet.unload("b")
    before = shown(first.fleet.models())
    await first.kill()
    second = await machine.start(has_router=True)
    assert shown(second.fleet.models()) == before
    assert len(machine.starts("a")) == 2
    assert len(machine.starts("b")) == 1
    assert [event.message for event in second.fleet.events("a")][-1].startswith("replica 1 is adopted")
    victim = second.pids("a")[0]
    os.kill(victim, signal.SIGKILL)
    await eventually(lambda: len(machine.starts("a")) == 3, "its restart by the new control plane")
    await second.fleet.terminate("a")
    assert not any(map(is_alive, machine.starts("a")))


async def test_what_died_meanwhile_is_started_again(machine: Machine) -> None:
    first = await machine.start()
    await first.launch(LaunchRequest(model=machine.model("a"), replicas=2))
    await first.launch(LaunchRequest(model=machine.model("b")))
    before = first.pids("a")
    await first.kill()
    for pid in (before[0], machine.starts("b")[0]):
        os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not is_alive(before[0]), "its end")
    second = await machine.start(has_router=True)
    await eventually(lambda: all(each.state == "ready" for each in second.fleet.replicas("a")), "both replicas")
    assert second.pids("a")[1] == before[1]
    await second.until("b", ModelState.READY)
    assert len(machine.starts("b")) == 2


async def test_a_load_that_was_under_way_goes_on(machine: Machine) -> None:
    first = await machine.start()
    await first.launch(LaunchRequest(model=machine.model("tiny", load_seconds=2.0)), wait_ready=False)
    await eventually(lambda: machine.starts("tiny"), "a shard")
    await first.kill()
    second = await machine.start()
    await second.until("tiny", ModelState.READY)
    assert len(machine.starts("tiny")) == 1, "it was adopted while it loaded"


async def test_a_sleeping_model_still_sleeps(machine: Machine) -> None:
    first = await machine.start()
    await first.launch(LaunchRequest(model=machine.model()))
    await first.fleet.sleep("tiny")
    await first.kill()
    second = await machine.start(has_router=True)
    assert second.fleet.model("tiny").state is ModelState.SLEEPING
    await second.fleet.load("tiny", wait_ready=True)
    assert len(machine.starts("tiny")) == 1


async def test_a_shard_that_the_state_does_not_know_is_ended(machine: Machine) -> None:
    first = await machine.start()
    await first.launch(LaunchRequest(model=machine.model()))
    await first.kill()
    (machine.folder / "fleet.db").unlink()
    second = await machine.start()
    assert second.fleet.models() == []
    await eventually(lambda: not is_alive(machine.starts("tiny")[0]), "the end of the orphan")


async def test_models_come_back_by_priority_with_retries(machine: Machine) -> None:
    first = await machine.start()
    for name, priority in (("low", 1), ("high", 2)):
        await first.launch(LaunchRequest(model=machine.model(name), priority=priority))
    await first.service.stop()
    await first.router.stop()
    await first.state.close()
    first.was_killed = True
    assert not any(map(is_alive, [*machine.starts("low"), *machine.starts("high")]))
    machine.behave("high", load_error="the disk is slow", load_errors=2)
    second = await machine.start(configured=(LaunchRequest(model=machine.model("set"), priority=3),))
    await second.until("low", ModelState.READY)
    ready = {name: second.fleet.events(name)[-1].at for name in ("set", "high", "low")}
    assert [*ready.values()] == sorted(ready.values())
    assert len(machine.starts("high")) == 3
    assert any("attempt 2 of 4" in event.message for event in second.fleet.events("high"))


async def test_registrations_are_models_that_are_not_loaded(machine: Machine) -> None:
    first = await machine.start()
    await first.fleet.register(Registration(type="LLM", name="mine", model=machine.model()))
    assert first.fleet.model("mine").state is ModelState.REGISTERED
    await first.fleet.load("mine", wait_ready=True)
    await first.kill()
    second = await machine.start(has_router=True)
    assert second.fleet.model("mine").state is ModelState.READY
    await second.fleet.terminate("mine")
    assert second.fleet.model("mine").state is ModelState.REGISTERED
    await second.fleet.unregister("LLM", "mine")
    assert second.fleet.models() == []
