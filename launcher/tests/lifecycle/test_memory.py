"""Memory of several models: eviction, waiting, refusal, ttl, loads on demand."""

import asyncio
import time
from dataclasses import replace

import pytest

from funitel.launcher.control_plane.records import Activity, LaunchRequest, ModelChange, ModelState
from funitel.launcher.executors.interface import ReplicaJob
from funitel.launcher.executors.local import LocalExecutor, LocalReplica
from funitel.launcher.lifecycle.placement import LocalPlacement
from funitel.proto.errors import DoesNotFit, LaunchFailed, ModelNotFound
from funitel_testing.lifecycles import GB, Machine, Running, eventually

# An imitated shard has some 60 MB; before the first load it is thought to have 450 MB and its weights.
ROOM_FOR_ONE = 600_000_000
LARGE = 200_000_000  # bytes of weights, which with a shard need more
BUSY = Activity(running=1, waiting=0, idle_s=0.0, requests=1)
IDLE = Activity(running=0, waiting=0, idle_s=0.0, requests=1)


def states(running: Running) -> dict[str, str]:
    return {entry.name: str(entry.state) for entry in running.fleet.models()}


async def with_three(machine: Machine) -> Running:
    """Room for two models of which each takes what it is thought to take at first, with `a` and `b` loaded."""
    running = await machine.start(memory_bytes=2 * ROOM_FOR_ONE, wait_seconds=20)
    for name in ("a", "b", "c"):
        machine.model(name, weights=1000)
    for name in ("a", "b"):
        await running.launch(LaunchRequest(model=str(machine.folder / "models" / name)))
        running.fleet.managed[name].change(bytes=ROOM_FOR_ONE)
        running.fleet.memory.put(name, ROOM_FOR_ONE)
    return running


def launch_c(running: Running, machine: Machine) -> "asyncio.Task[object]":
    return asyncio.create_task(running.launch(LaunchRequest(model=str(machine.folder / "models" / "c"))))


async def test_the_least_recently_used_idle_model_is_evicted(machine: Machine) -> None:
    running = await with_three(machine)
    running.fleet.activity({"a": IDLE})  # later than the load of b
    await launch_c(running, machine)
    assert states(running) == {"a": "ready", "b": "registered", "c": "ready"}
    assert any("evicted for c" in event.message for event in running.fleet.events("b"))
    assert b'funitel_model_evictions_total{model="b"} 1' in running.fleet.metrics()


async def test_a_pinned_model_is_not_evicted(machine: Machine) -> None:
    running = await with_three(machine)
    await running.fleet.change("a", ModelChange(pinned=True))
    running.fleet.activity({"b": IDLE})
    await launch_c(running, machine)
    assert states(running) == {"a": "ready", "b": "registered", "c": "ready"}


async def test_a_load_waits_for_a_busy_model_to_become_idle(machine: Machine) -> None:
    running = await with_three(machine)
    running.fleet.activity({"a": BUSY, "b": BUSY})
    loading = launch_c(running, machine)
    events = running.fleet.history.of
    await eventually(lambda: any("waits for" in event.message for event in events("c") or ()), "a wait")
    assert states(running)["a"] == states(running)["b"] == "ready"
    running.fleet.activity({"b": IDLE})
    await loading
    assert states(running) == {"a": "ready", "b": "registered", "c": "ready"}


async def test_a_load_that_waits_in_vain_is_refused(machine: Machine) -> None:
    running = await machine.start(memory_bytes=ROOM_FOR_ONE, wait_seconds=0.5)
    await running.launch(LaunchRequest(model=machine.model("a")))
    running.fleet.memory.put("a", ROOM_FOR_ONE)
    running.fleet.activity({"a": BUSY})
    with pytest.raises(DoesNotFit, match="became idle within"):
        await running.launch(LaunchRequest(model=machine.model("c")))
    assert states(running) == {"a": "ready", "c": "failed"}


class _Worker(LocalExecutor):
    """Another machine, whose memory is not this one's."""

    async def start(self, job: ReplicaJob) -> LocalReplica:
        running = await super().start(job)
        running.worker = "w1"
        return running


class _WithWorker(LocalPlacement):
    """A placement with a worker, whose shards run here, and which has room for models of a size."""

    def __init__(self, free_bytes: int) -> None:
        super().__init__(executors={"worker": _Worker()})
        self.free_bytes = free_bytes

    def elsewhere(self, request: LaunchRequest, *, num_shard: int, rank_bytes: int) -> LaunchRequest | None:
        return replace(request, executor="worker") if num_shard * rank_bytes <= self.free_bytes else None


async def test_a_model_without_room_here_runs_on_a_worker_and_so_do_its_further_replicas(machine: Machine) -> None:
    running = await machine.start(memory_bytes=ROOM_FOR_ONE, placement=_WithWorker(GB))
    await running.launch(LaunchRequest(model=machine.model("a")))
    big = machine.model("big", weights=LARGE)
    machine.behave("big", weights=LARGE)  # what the estimate says
    await running.launch(LaunchRequest(model=big))
    assert states(running) == {"a": "ready", "big": "ready"}
    await running.fleet.add_replica("big", count=1, weight=None)
    assert [replica.executor for replica in running.fleet.replicas("big")] == ["worker", "worker"]
    assert running.fleet.managed["big"].entry.bytes in (None, 0)
    assert running.fleet.managed["big"].request == LaunchRequest(model=big, replicas=2)


async def test_a_model_without_room_anywhere_is_refused_by_what_this_machine_lacks(machine: Machine) -> None:
    running = await machine.start(memory_bytes=ROOM_FOR_ONE, placement=_WithWorker(ROOM_FOR_ONE))
    with pytest.raises(DoesNotFit, match=r"--memory-budget is 600\.0 MB"):
        await running.launch(LaunchRequest(model=machine.model("big", weights=LARGE)))


async def test_a_model_that_cannot_fit_is_refused_at_once(machine: Machine) -> None:
    running = await machine.start(memory_bytes=GB)
    with pytest.raises(DoesNotFit, match=r"needs 1\.5 GB of memory, --memory-budget is 1\.0 GB; .*int8 or q4"):
        await running.launch(LaunchRequest(model=machine.model("big", weights=GB + 1)), wait_ready=False)
    assert running.fleet.models() == []


async def test_a_refusal_says_what_would_fit(machine: Machine) -> None:
    running = await machine.start(memory_bytes=GB)
    model = machine.model("big", weights=500_000_000)  # the model server estimates it: 1.2 GB in float32
    machine.behave("big", weights=1_200_000_000, options=[{"usable": True, "quantize": "int8", "bytes": 900_000_000}])
    with pytest.raises(DoesNotFit, match=r"needs 1\.7 GB of memory.*quantize int8 would fit, with 900\.0 MB"):
        await running.launch(LaunchRequest(model=model))
    machine.behave("big", weights=1_000_000_000)  # without options: smaller weights are estimated
    with pytest.raises(DoesNotFit, match="quantize int8 would fit, with 950"):
        await running.launch(LaunchRequest(model=model))
    assert machine.starts("big") == []


async def test_a_tight_budget_bounds_the_pool(machine: Machine) -> None:
    running = await machine.start(memory_bytes=1_000_000_000)
    model = machine.model("big", weights=400_000_000)
    machine.behave("big", weights=500_000_000)
    await running.launch(LaunchRequest(model=model))
    tokens = (1_000_000_000 - 950_000_000) // 10  # at 160 bytes a block of 16
    assert running.fleet.model("big").router["max_batch_total_tokens"] == tokens // 16 * 16


async def test_an_idle_model_is_unloaded_after_its_ttl_and_comes_back_on_demand(machine: Machine) -> None:
    running = await machine.start()
    await running.launch(LaunchRequest(model=machine.model(), ttl=1.0))
    running.fleet.activity({"tiny": BUSY})
    await asyncio.sleep(1.6)
    assert states(running) == {"tiny": "ready"}
    running.fleet.activity({"tiny": IDLE})
    await running.until("tiny", ModelState.REGISTERED)
    assert running.fleet.memory.free == running.fleet.memory.total
    began = time.monotonic()
    await asyncio.gather(*(running.fleet.load_on_demand("tiny") for _ in range(5)))
    assert time.monotonic() - began < 1
    await running.until("tiny", ModelState.READY)
    assert len(machine.starts("tiny")) == 2, "five requests are one load"
    assert running.fleet.model("tiny").expected_load_seconds is not None


async def test_a_sleeping_model_is_woken_on_demand(machine: Machine) -> None:
    running = await machine.start()
    await running.launch(LaunchRequest(model=machine.model()))
    await running.fleet.sleep("tiny")
    await running.fleet.load_on_demand("tiny")
    await running.until("tiny", ModelState.READY)
    assert len(machine.starts("tiny")) == 1


async def test_a_failure_is_told_to_the_next_requests(machine: Machine) -> None:
    running = await machine.start()
    with pytest.raises(ModelNotFound, match="the models are: none"):
        await running.fleet.load_on_demand("tiny")
    with pytest.raises(LaunchFailed):
        await running.launch(LaunchRequest(model=machine.model("tiny", load_error="broken")))
    with pytest.raises(LaunchFailed, match="broken"):
        await running.fleet.load_on_demand("tiny")


async def test_load_durations_are_kept(machine: Machine) -> None:
    running = await machine.start()
    await running.launch(LaunchRequest(model=machine.model("tiny", load_seconds=0.5)))
    assert b'funitel_load_duration_seconds_count{model="tiny"} 1' in running.fleet.metrics()
    await running.fleet.terminate("tiny")
    entry = await running.launch(LaunchRequest(model=machine.model("tiny", load_seconds=0.5)), wait_ready=False)
    assert entry.expected_load_seconds is not None
    assert entry.expected_load_seconds >= 0.5
    await running.until("tiny", ModelState.READY)
