"""A control plane for tests: it answers on a Unix socket, says what a test makes it say, and notes what it is told."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fake_unix_server import FakeUnixServer, chunk_of, head_of, question
from fakes import FakeEngine, eventually, write_model

from funitel.proto.errors import StartupError
from funitel.router.app import build_app
from funitel.router.fleet.models import ConnectReplicas
from funitel.router.replica_set.table import ReplicaAddress
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics


@dataclass
class Asked:
    """A question that the control plane got."""

    method: str
    target: str
    body: bytes

    @property
    def content(self) -> Any:
        return json.loads(self.body)


@dataclass
class FakeControl(FakeUnixServer):
    """Models by name, as entries of a snapshot; `push` says them to the router."""

    folder: Path
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    default: str | None = None
    wait: bool = True
    asked: list[Asked] = field(default_factory=list)
    answers: dict[tuple[str, str], tuple[int, Any]] = field(default_factory=dict)
    slow: set[str] = field(default_factory=set)  # targets that are never answered
    on_load: Callable[[str], None] = lambda name: None
    num_watchers: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    # What a test does -----------------------------------------------------------------------------------------------

    def add(self, name: str, *, state: str = "registered", replicas: int = 0, **fields: Any) -> dict[str, Any]:
        """Add a model; one with replicas is ready."""
        entry = {
            "name": name,
            "model_id": f"owner/{name}",
            "state": "ready" if replicas else state,
            "stage": "ready" if replicas else state,
            "task": "generate",
            "created": 1000.0,
            "router": {"tokenizer_name": str(self.folder)},
            "replicas": [self.replica(name, place) for place in range(replicas)],
        } | fields
        self.models[name] = entry
        return entry

    def replica(self, name: str, place: int, state: str = "ready") -> dict[str, Any]:
        address = f"unix:///{name}-{place}"
        return {"id": place, "address": address, "state": state, "weight": 1.0, "worker": "local", "pids": [7]}

    def load(self, name: str) -> None:
        """Let a model become ready, and say so."""
        self.models[name] |= {"state": "ready", "replicas": [self.replica(name, 0)]}
        self.push()

    def unload(self, name: str) -> None:
        """Drain the replicas of a model."""
        self.models[name]["state"] = "draining"
        for replica in self.models[name]["replicas"]:
            replica["state"] = "draining"
        self.push()

    def push(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def told(self, path: str) -> list[Any]:
        """What the router posted to a path."""
        return [asked.content for asked in self.asked if asked.target.partition("?")[0] == path]

    async def heard(self, path: str, count: int = 1) -> list[Any]:
        async def is_heard() -> bool:
            return len(self.told(path)) >= count

        await eventually(is_heard, f"{count} of {path}: {self.told(path)}")
        return self.told(path)

    # The server -----------------------------------------------------------------------------------------------------

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = Asked(*await question(reader))
        method, target = asked.method, asked.target
        path = target.partition("?")[0]
        if path == "/v1/fleet/watch":
            await self._watch(reader, writer)
            return
        self.asked.append(asked)
        if path in self.slow:
            await reader.read()
            return
        status, body = self.answers.get((method, path), (200, {}))
        if path == "/v1/fleet/load" and (method, path) not in self.answers:
            status = 202
            self.on_load(asked.content["name" if "name" in asked.content else "model"])
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        writer.write(head_of(status, len(content)) + content)
        await writer.drain()

    async def _watch(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_watchers += 1
        writer.write(head_of(200))
        gone = asyncio.ensure_future(reader.read())
        try:
            while not gone.done():
                line = json.dumps({"default": self.default, "wait": self.wait, "models": list(self.models.values())})
                for piece in (line.encode() + b"\n", b"\n"):
                    writer.write(chunk_of(piece))
                await writer.drain()
                waiting = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait([gone, waiting], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
        finally:
            gone.cancel()
            self.num_watchers -= 1


@dataclass
class FakeFleet:
    """A router with a control plane, and fake engines by the address of their replica."""

    control: FakeControl
    client: httpx.AsyncClient
    app: Any
    engines: dict[str, FakeEngine]

    def engine(self, name: str, place: int = 0) -> FakeEngine:
        return self.engines[f"unix:///{name}-{place}"]

    async def state(self, name: str) -> dict[str, Any] | None:
        listed = (await self.client.get("/v1/models")).json()["data"]
        return next((entry for entry in listed if entry["id"] == name), None)

    async def attached(self, *names: str) -> None:
        async def is_attached() -> bool:
            return all(self.service(name) is not None for name in names)

        await eventually(is_attached, f"attached: {names}")

    def service(self, name: str) -> Any:
        model = self.app.state.models._models.get(name)
        return None if model is None else model.service

    async def generate(self, model: str | None, **body: Any) -> httpx.Response:
        named = {} if model is None else {"model": model}
        return await self.client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 5} | named | body)


@asynccontextmanager
async def fake_fleet(
    tmp_path: Path,
    *models: str,
    make: Callable[[str], FakeEngine] = lambda address: FakeEngine(),
    broken: Callable[[str], bool] = lambda address: False,
    connect: ConnectReplicas | None = None,
    prepare: Callable[[FakeControl], None] = lambda control: None,
    is_local: bool = True,
    **settings: Any,
) -> AsyncIterator[FakeFleet]:
    """A router without a model of its own; `models` are ready."""
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    control = FakeControl(write_model(folder), path=tmp_path / "control.sock")
    for name in models:
        control.add(name, replicas=1)
    prepare(control)
    engines: dict[str, FakeEngine] = {}

    async def connect_fakes(
        given: RouterSettings, metrics: Metrics, replicas: "list[ReplicaAddress] | None" = None
    ) -> FakeEngine:
        address = given.master_url if replicas is None else replicas[0].address
        if broken(address):
            raise StartupError(f"no shard answers at {address}")
        engines[address] = make(address)
        return engines[address]

    given = RouterSettings(
        **{"control_socket": str(control.path), "no_model": True, "tokenizer_name": str(folder)} | settings
    )
    async with AsyncExitStack() as stack:
        await control.start()
        stack.push_async_callback(control.stop)
        replicas_by = connect or connect_fakes
        app = build_app(given, connect_fakes, connect_replicas=replicas_by, is_local=is_local)  # type: ignore[arg-type]
        await stack.enter_async_context(app.router.lifespan_context(app))
        await stack.enter_async_context(asyncio.timeout(20))
        transport = httpx.ASGITransport(app)
        client = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://localhost"))
        fleet = FakeFleet(control, client, app, engines)

        async def is_known() -> bool:
            return app.state.models.snapshot is not None

        await eventually(is_known, "known")
        await fleet.attached(*(name for name, entry in control.models.items() if entry["state"] == "ready"))
        yield fleet
