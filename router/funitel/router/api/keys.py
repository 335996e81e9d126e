"""API keys: who may ask, and whose share of the service a request takes.

A key is compared and hashed here, and goes no further: what the scheduler knows of it is a hash salted anew at every
start, and nothing logs or shows either.
"""

import hashlib
import hmac
import secrets
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from funitel.proto.errors import Unauthorized

_SALT = secrets.token_bytes(16)


class KeyCheck:
    """Refuse a request that carries none of the keys as `Authorization: Bearer <key>` or `x-api-key: <key>`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = [token for token in _tokens(scope) if any([hmac.compare_digest(token, key) for key in self._keys])]
        if not given:
            raise Unauthorized("missing or wrong API key")
        scope[_CHECKED] = given[0]
        await self._app(scope, receive, send)


_CHECKED = "funitel.key"


def owner_of(scope: Scope) -> bytes:
    """Whose request it is, as a hash: the key's that was checked, else of the token it carries; empty without one."""
    token = scope.get(_CHECKED) or next((token for token in _tokens(scope) if token), b"")
    return hashlib.blake2b(token, key=_SALT, digest_size=16).digest() if token else b""


def _tokens(scope: Scope) -> tuple[bytes, bytes]:
    """What a request carries as a bearer token and as `x-api-key`; empty where it carries none."""
    scheme, _, token = _header(scope, b"authorization").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b"", _header(scope, b"x-api-key")


def _header(scope: Scope, name: bytes) -> bytes:
    """The value of a request's header, or nothing."""
    return next((value for key, value in scope["headers"] if key == name), b"")
