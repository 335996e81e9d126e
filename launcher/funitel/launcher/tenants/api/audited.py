"""The audit of operators: rows of the database for each request that changes models, with the object's states.

Changes of users, keys and prices write their rows themselves, in the transaction of the change. A change of models
takes a while and may end with this process: its first row says that it began, a second one how it ended.
"""

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from funitel.launcher.control_plane.api.requests import MAX_BODY_BYTES
from funitel.launcher.control_plane.interface import Fleet
from funitel.launcher.tenants.api.requests import actor_of_headers
from funitel.launcher.tenants.records import AuditRow
from funitel.proto.errors import FunitelError

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_OF_THE_ROUTER = "/v1/fleet/"  # reports of routers, not changes by operators
_OF_TENANTS = ("/v1/users", "/v1/keys", "/v1/prices", "/v1/auth/")
_MODELS, _REGISTRATIONS, _CACHE = "/v1/models", "/v1/model_registrations", "/v1/cache/models"
_MOST_CHARACTERS = 200  # of a name
Note = Callable[[AuditRow], Awaitable[None]]


class Audited:
    """Around the application of the control socket.

    Args:
        app: the application.
        fleet: the models that requests change.
        note: appends a row; None for nowhere.
    """

    def __init__(self, app: ASGIApp, fleet: Fleet, note: Note | None) -> None:
        self._app = app
        self._fleet = fleet
        self._note = note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Note a request that changes models, and answer it."""
        method, path = scope["method"], scope["path"]
        if self._note is None or method in _READING or path.startswith((_OF_THE_ROUTER, *_OF_TENANTS)):
            await self._app(scope, receive, send)
            return
        body = await _read(receive)
        named = _named(path, body)
        actor = actor_of_headers(Headers(scope=scope), f"{method} {path}")
        begun = replace(actor.row(named, status=None), before=self._state(named))
        await self._note(begun)
        status: int | None = None

        async def answer(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, _again(body, receive), answer)
        finally:
            await self._note(replace(begun, at=time.time(), after=self._state(named), status=status or 499))

    def _state(self, named: str) -> Mapping[str, Any] | None:
        """What is there under the name of an object."""
        kind, _, name = named.partition(" ")
        try:
            if kind == "model":
                return self._fleet.model(name).to_json()
            if kind == "registration":
                of_type, _, name = name.partition("/")
                found = (each for each in self._fleet.registrations(of_type) if each.name == name)
                return next((each.to_json() for each in found), None)
        except FunitelError:
            return None
        return None


async def _read(receive: Receive) -> list[Message]:
    """The messages of a body; the first ones of one that is too long, which the application refuses."""
    messages, num_bytes = [], 0
    while True:
        message = await receive()
        messages.append(message)
        num_bytes += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body") or num_bytes > MAX_BODY_BYTES:
            return messages


def _named(path: str, messages: Sequence[Message]) -> str:
    """The object that a request changes: its kind and its name."""
    if path.startswith(_CACHE):
        return "cache"
    if path == _MODELS:
        return f"model {_field(messages, 'name', 'model_uid', 'model', 'model_name')}"
    if path.startswith(f"{_MODELS}/"):
        parts = path.removeprefix(f"{_MODELS}/").split("/")  # a slash of a name is encoded
        return f"model {unquote(parts[0])}"
    if path.startswith(_REGISTRATIONS):
        of_type, _, name = path.removeprefix(f"{_REGISTRATIONS}/").partition("/")
        return f"registration {of_type}/{unquote(name) or _field(messages, 'model_name', 'name')}"
    return path


def _field(messages: Sequence[Message], *names: str) -> str:
    """The first of some fields of a body of JSON that is a text; nothing where there is none."""
    try:
        content = json.loads(b"".join(message.get("body", b"") for message in messages) or b"{}")
    except (ValueError, RecursionError):
        return ""
    found = content.get("model", content) if isinstance(content, dict) else {}
    bodies = [body for body in (content, found) if isinstance(body, dict)]
    texts = (body.get(name) for body in bodies for name in names)
    return next((text[:_MOST_CHARACTERS] for text in texts if isinstance(text, str) and text), "")


def _again(messages: list[Message], receive: Receive) -> Receive:
    """Give messages that were taken once more, then those that come."""
    rest = list(messages)

    async def next_message() -> Message:
        return rest.pop(0) if rest else await receive()

    return next_message
