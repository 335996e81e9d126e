"""The rim of every request: its note is begun, and read at its end."""

from starlette.types import ASGIApp, Receive, Scope, Send

from funitel.router import request_note


class Noted:
    """Give each request a note of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request_note.begin()
        await self._app(scope, receive, send)
