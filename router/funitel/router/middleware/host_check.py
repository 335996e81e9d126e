"""Refuse requests that name another host than this machine, on a server that only this machine is to reach.

A page in a browser here can make its own name resolve to 127.0.0.1 (DNS rebinding). Its requests then are those of one
origin, so that no rule of CORS applies; only their `Host` tells them apart.
"""

import ipaddress
import re
from collections.abc import Awaitable, Callable, Collection
from functools import lru_cache

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from funitel.proto.errors import Forbidden
from funitel.proto.printable import shortened

ANY = "*"
# Pages of this machine's own servers, on any port.
LOOPBACK_ORIGIN = r"https?://(([a-z0-9_-]+\.)*localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?"
MAX_SHOWN = 80

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]@/\s]+)(:[0-9]{0,5})?", re.IGNORECASE)


class HostCheck:
    """Answer 403 unless every `Host` of a request is loopback or allowed; a request without one is not a browser's.

    Args:
        app: what is guarded.
        allowed: names beside loopback, in lower case; `*` allows all.
        answer: makes the answer of an error.
    """

    def __init__(
        self, app: ASGIApp, allowed: Collection[str], answer: Callable[[Request, Exception], Awaitable[Response]]
    ) -> None:
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        foreign = self._foreign(scope) if scope["type"] == "http" else None
        if foreign is None:
            await self._app(scope, receive, send)
            return
        words = f"Host {shortened(foreign, MAX_SHOWN)!r} is neither loopback nor one that --allowed-host names"
        answer = await self._answer(Request(scope), Forbidden(words))
        await answer(scope, receive, send)

    def _foreign(self, scope: Scope) -> str | None:
        """The first `Host` that is neither loopback nor allowed."""
        hosts = (value.decode("latin-1") for name, value in scope["headers"] if name == b"host")
        return None if ANY in self._allowed else next((host for host in hosts if not self._is_allowed(host)), None)

    def _is_allowed(self, host: str) -> bool:
        parts = _HOST.fullmatch(host.strip())
        if parts is None:
            return False
        name = parts[1].lower().removesuffix(".")
        return name in self._allowed or is_loopback_name(name)


@lru_cache(maxsize=64)
def is_loopback_name(name: str) -> bool:
    """Whether a host of a URL is this machine for every browser: localhost, names below it, loopback addresses."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
