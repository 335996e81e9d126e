"""The application over an in-memory transport, and over a real socket."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fakes import FakeEngine, RendersHere, Serve, eventually, write_model

from funitel.router.app import build_app
from funitel.router.serving.service import Connect
from funitel.router.settings import RouterSettings
from funitel.router.text import template_renderer

PATIENCE_SECONDS = 10.0


@pytest.fixture(autouse=True)
def render_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render chats in this process."""
    monkeypatch.setattr(template_renderer, "SandboxPool", RendersHere)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder whose tokens are bytes."""
    return write_model(tmp_path)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def serve(model: Path) -> Serve:
    """`async with serve(engine, **settings) as client`: the application, ready, with no socket."""

    @asynccontextmanager
    async def serving(
        engine: FakeEngine,
        *,
        connect: Connect | None = None,
        ready: bool = True,
        is_local: bool = False,
        **settings: Any,
    ) -> AsyncIterator[httpx.AsyncClient]:
        given = RouterSettings(**{"tokenizer_name": str(model)} | settings)
        app = build_app(given, connect or engine.connect, is_local=is_local)
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), asyncio.timeout(PATIENCE_SECONDS):
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

                async def is_started() -> bool:
                    return not ready or (await client.get("/info")).status_code != 503

                await eventually(is_started, "ready")
                yield client

    return serving


@pytest.fixture
async def client(serve: Serve, engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """The application over `engine` with default settings."""
    async with serve(engine) as client:
        yield client


@pytest.fixture
async def listening(model: Path, engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """The application over `engine` behind a real uvicorn socket."""
    app = build_app(RouterSettings(tokenizer_name=str(model)), engine.connect)
    server = uvicorn.Server(uvicorn.Config(app, http="httptools", log_config=None, ws="none"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = asyncio.create_task(server._serve([listener]))
        base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=base_url, timeout=PATIENCE_SECONDS) as client:

            async def is_healthy() -> bool:
                return server.started and (await client.get("/health")).status_code == 200

            await eventually(is_healthy, "ready")
            yield client
        server.should_exit = True
        await running
