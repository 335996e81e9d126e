"""A proxy between a client and a server that notes every call, one a line of JSON: what a failure is judged by."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from funitel_testing.servers import free_port

KEPT = 200_000  # characters of a body
_OF_A_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "host", "content-length", "upgrade"}


class Recorder:
    """Forwards to `target` from a port of its own, and writes `calls`. To be used in a `with`."""

    def __init__(self, target: str, calls: Path) -> None:
        self.target = target
        self.calls = calls
        self.port = free_port()
        self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
        app = Starlette(routes=[Route("/{path:path}", self._forward, methods=["GET", "POST", "PUT", "DELETE", "HEAD"])])
        config = uvicorn.Config(app, port=self.port, log_level="error", timeout_graceful_shutdown=2)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve()), daemon=True)

    @property
    def url(self) -> str:
        """Where clients go."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Recorder":
        self.calls.touch()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join(10)

    async def _forward(self, request: Request) -> StreamingResponse:
        body = await request.body()
        headers = [(name, text) for name, text in request.headers.items() if name not in _OF_A_CONNECTION]
        url = self.target + request.url.path + (f"?{request.url.query}" if request.url.query else "")
        response = await self._client.send(
            self._client.build_request(request.method, url, headers=headers, content=body), stream=True
        )
        kept = {name: text for name, text in response.headers.items() if name not in _OF_A_CONNECTION}
        return StreamingResponse(self._noted(request, body, response), response.status_code, kept)

    async def _noted(self, request: Request, body: bytes, response: httpx.Response) -> AsyncIterator[bytes]:
        got = bytearray()
        try:
            async for chunk in response.aiter_raw():
                got += chunk[: max(0, KEPT - len(got))]
                yield chunk
        finally:
            call: dict[str, Any] = {
                "method": request.method,
                "path": request.url.path,
                "status": response.status_code,
                "request": body.decode(errors="replace")[:KEPT],
                "answer": got.decode(errors="replace"),
            }
            with self.calls.open("a") as file:
                file.write(json.dumps(call) + "\n")
            await response.aclose()
