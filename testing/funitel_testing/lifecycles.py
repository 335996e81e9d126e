"""A fleet over imitated shards, with a router that attaches what it is told of; for tests of the launcher."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from funitel.launcher.config.child_commands import Commands
from funitel.launcher.control_plane.model_settings import settings_of
from funitel.launcher.control_plane.model_tools import ModelTools
from funitel.launcher.control_plane.records import LaunchRequest, ModelState, ReplicaStage, Snapshot
from funitel.launcher.control_plane.registry import Registry
from funitel.launcher.control_plane.store import StateStore, StateThread
from funitel.launcher.lifecycle.fleet import ModelFleet
from funitel.launcher.lifecycle.placement import LocalPlacement
from funitel.launcher.lifecycle.resources.gpu_shares import GpuShares
from funitel.launcher.lifecycle.server import Placement, ServerFacts
from funitel.launcher.lifecycle.service import FleetService
from funitel.launcher.settings import LauncherSettings

FAKE = (sys.executable, str(Path(__file__).with_name("fake_model_server.py")))
GB = 10**9
PATIENCE_SECONDS = 30.0


async def eventually(claim: Callable[[], object], what: str) -> None:
    """Wait until `claim` holds."""
    for _ in range(int(PATIENCE_SECONDS / 0.02)):
        if claim():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"in vain waited for: {what}")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class FakeRouter:
    """Attaches each replica that is ready, and releases what is drained or gone."""

    def __init__(self, fleet: ModelFleet) -> None:
        self.fleet = fleet
        self.attached: set[tuple[str, int]] = set()
        self.refuses: dict[str, str] = {}
        self.holds: set[str] = set()  # models with a request that does not end
        self.seen: list[Snapshot] = []
        self.task = asyncio.create_task(self.run())

    async def run(self) -> None:
        async for snapshot in self.fleet.watch():
            self.seen.append(snapshot)
            self.follow(snapshot)

    def follow(self, snapshot: Snapshot) -> None:
        there = {(model.name, each.id): each.state for model in snapshot.models for each in model.replicas}
        for key, state in there.items():
            if state is ReplicaStage.READY and key not in self.attached:
                name, replica = key
                error = self.refuses.get(name)
                if error is None:
                    self.attached.add(key)
                self.fleet.attached(name, replica, seconds=None if error else 0.1, error=error)
            if state in (ReplicaStage.DRAINING, ReplicaStage.SLEEPING) and key[0] not in self.holds:
                self.attached.discard(key)
                self.fleet.released(*key)
        self.attached &= {*there}

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Running:
    """One control plane over a folder: its fleet, its router and its service."""

    def __init__(self, fleet: ModelFleet, service: FleetService, router: FakeRouter, state: StateThread) -> None:
        self.fleet = fleet
        self.service = service
        self.router = router
        self.state = state
        self.was_killed = False

    async def launch(self, request: LaunchRequest, **more: Any) -> Any:
        return await self.fleet.launch(request, wait_ready=more.get("wait_ready", True))

    def stages(self, name: str) -> list[str]:
        return [event.stage for event in self.fleet.events(name)]

    def pids(self, name: str) -> list[int]:
        return [pid for replica in self.fleet.replicas(name) for pid in replica.pids]

    async def until(self, name: str, state: ModelState) -> None:
        await eventually(lambda: self.fleet.model(name).state is state, f"{name} {state}")

    async def kill(self) -> None:
        """End as by SIGKILL: nothing is said to the shards, nor written any more."""
        await self.fleet.writer.flushed()
        self.was_killed = True
        await self.router.stop()
        for task in self.service._tasks:
            task.cancel()
        for model in self.fleet.managed.values():
            for task in [model._work, *model._starting.values()]:
                if task is not None and not task.done():
                    task.remove_done_callback(lambda _: None)
                    _abandon(task)
            for replica in model.replicas.values():
                await replica.forget()
                if replica._running is not None:
                    replica._running.forget()  # type: ignore[attr-defined]
        self.fleet.writer._task.cancel()
        await self.state.close()


def _abandon(task: "asyncio.Task[Any]") -> None:
    """Leave a task where it is: it is garbage once the loop has closed."""
    _abandoned.append(task)


_abandoned: list["asyncio.Task[Any]"] = []


Start = Callable[..., "Awaitable[Running]"]


class Machine:
    """Folders that outlive control planes, and the models on the disk."""

    def __init__(self, folder: Path, run_folder: Path) -> None:
        self.folder = folder
        self.run_folder = run_folder
        self.running: list[Running] = []

    def model(self, name: str = "tiny", *, weights: int = 1000, **behaviour: Any) -> str:
        """A folder of a model."""
        folder = self.folder / "models" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        (folder / "model.safetensors").write_bytes(b"0" * weights)
        self.behave(name, **behaviour)
        return str(folder)

    def behave(self, name: str, **behaviour: Any) -> None:
        (self.folder / "models" / name / "behaviour.json").write_text(json.dumps(behaviour))

    def starts(self, name: str) -> list[int]:
        """The pids of all shards of a model that were ever started."""
        path = self.folder / "models" / name / "starts"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    async def start(
        self,
        *,
        memory_bytes: int = 100 * GB,
        configured: tuple[LaunchRequest, ...] = (),
        max_restarts: int = 5,
        wait_seconds: float = 20.0,
        has_router: bool = False,
        grace_seconds: float = 5.0,
        placement: Placement | None = None,
    ) -> Running:
        state = StateThread(StateStore(self.folder / "fleet.db"))
        defaults = LauncherSettings(device="cpu")
        environ = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
        commands = Commands(model_server=FAKE)
        registry = Registry(state, self.folder / "registrations")
        server = ServerFacts(
            settings_of=lambda request: settings_of(defaults, request, registry.find(request.model)),
            defaults=defaults,
            environ=environ,
            commands=commands,
            placement=placement or LocalPlacement(),
            gpus=GpuShares(()),
            run_folder=self.run_folder,
            log_folder=self.folder / "logs",
            max_restarts=max_restarts,
            grace_seconds=grace_seconds,
            wait_seconds=wait_seconds,
            outlives=True,
        )
        tools = ModelTools(environ, command=FAKE)
        fleet = ModelFleet(server, state, registry, tools, memory_bytes=memory_bytes)
        service = FleetService(fleet, state)
        running = Running(fleet, service, FakeRouter(fleet), state)
        self.running.append(running)
        await service.start(configured, has_router=has_router)
        return running

    async def end(self) -> None:
        for running in self.running:
            if not running.was_killed:
                await running.service.stop()
                await running.router.stop()
                await running.state.close()
        for folder in (self.folder / "models").glob("*"):
            for pid in self.starts(folder.name):
                assert not is_alive(pid), f"a shard of {folder.name} is left"


@asynccontextmanager
async def machine_of(folder: Path, run_folder: Path) -> AsyncIterator[Machine]:
    machine = Machine(folder, run_folder)
    try:
        yield machine
    finally:
        await machine.end()
