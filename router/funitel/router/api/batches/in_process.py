"""Run a request of a batch through the application as if it had come by HTTP, with its owner's key, in the background.

It takes the same routes, checks, admission, charges, logs and metrics; no socket, and none of the owner's headers.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from funitel.proto.errors import Forbidden
from funitel.router.auth.accounts import Account, Accounts
from funitel.router.batch.formats import BatchAnswer, CheckModel
from funitel.router.middleware.auth import act_in_background


class InProcess:
    """Runs requests on an application."""

    def __init__(self, accounts: Accounts, app: Callable[[], ASGIApp]) -> None:
        """`app` returns the application, once that is made."""
        self._accounts = accounts
        self._app = app

    async def run(self, endpoint: str, body: bytes, owner: str, request_id: str) -> BatchAnswer | None:
        """Answer one request; None where its owner's key is not valid any more."""
        account = self._account(owner)
        if (owner != "") != self._accounts.is_asked_for or (owner and account is None):
            return None
        scope = _scope(endpoint, len(body), request_id)
        act_in_background(scope, account)
        status, headers, content = 0, {}, bytearray()
        is_received = False

        async def receive() -> Message:
            nonlocal is_received
            if is_received:
                await asyncio.get_running_loop().create_future()  # the client never leaves
            is_received = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = {name.lower(): value for name, value in message.get("headers", ())}
            elif message["type"] == "http.response.body":
                content.extend(message.get("body", b""))

        await self._app()(scope, receive, send)
        retry_after = headers.get(b"retry-after", b"")
        return BatchAnswer(
            status,
            bytes(content).replace(b"\n", b" ") or b"null",
            request_id,
            float(retry_after) if retry_after.isdigit() else None,
        )

    def _account(self, owner: str) -> Account | None:
        return self._accounts.find_owner(owner) if owner else None

    def model_check(self, owner: str) -> CheckModel:
        """What says which models an owner may not ask for."""
        account = self._account(owner)

        def refusal(model: str) -> str | None:
            try:
                if account is not None and model:
                    account.check_model(model)
            except Forbidden as error:
                return error.message
            return None

        return refusal


def _scope(endpoint: str, num_bytes: int, request_id: str) -> Scope:
    headers: list[tuple[bytes, bytes]] = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", str(num_bytes).encode()),
        (b"x-request-id", request_id.encode()),
    ]
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": endpoint,
        "raw_path": endpoint.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": ("localhost", 0),
        "state": {},
    }
    return scope
