"""Which URLs may be fetched, and which addresses connected to: names are resolved once, and the answer is checked."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Addresses of a host, for a port. Raises OSError."""

DEFAULT_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_LOCAL_NAT64 = ipaddress.ip_network("64:ff9b:1::/48")


class NotFetched(Exception):
    """A URL must not or cannot be fetched; the message follows the name of the field."""


async def resolve(host: str, port: int) -> list[str]:
    """Ask the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_public(address: str) -> bool:
    """Whether an address is one of the internet: not private, local, reserved, of a group, nor a way to such a one."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False  # with a zone, for example
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if ip.teredo is not None or ip.is_site_local or ip in _LOCAL_NAT64:
            return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


@dataclass(frozen=True, slots=True)
class FetchTarget:
    """A URL that may be fetched, taken apart; `host` is in lower case, `path` has the query."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """For the header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class _Domain:
    name: str
    is_suffix: bool
    port: int | None

    def allows(self, host: str, port: int, scheme: str) -> bool:
        is_named = host.endswith(f".{self.name}") if self.is_suffix else host == self.name
        return is_named and port == (DEFAULT_PORTS[scheme] if self.port is None else self.port)


class AllowedDomains:
    """The hosts of `--allowed-media-domains`: names, or `*.suffix` for all below one; each may have a port."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Read the entries, which the settings have checked."""
        self._domains = [_read_domain(text) for text in texts]

    def __bool__(self) -> bool:
        return bool(self._domains)

    def target(self, url: str) -> FetchTarget:
        """Take a URL apart. Raises NotFetched unless it is one of http or https, of an allowed host."""
        if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
            raise NotFetched("is no URL: characters beyond ASCII and blanks must be escaped")
        try:
            parts = urlsplit(url)
            scheme, port = parts.scheme.lower(), parts.port
        except ValueError as error:
            raise NotFetched(f"is no URL: {error}") from None
        if scheme not in DEFAULT_PORTS:
            raise NotFetched(f"has a URL of the scheme {scheme or 'none'}: only data, http and https are taken")
        if not self:
            raise NotFetched(
                "has a URL to fetch, which this server does not: send the content as a data: URL "
                "(--allowed-media-domains of the server names hosts to fetch from)"
            )
        host = (parts.hostname or "").rstrip(".")
        port = DEFAULT_PORTS[scheme] if port is None else port
        if not host or parts.username is not None or parts.password is not None:
            raise NotFetched("has a URL without a host, or with a user name")
        if not any(domain.allows(host, port, scheme) for domain in self._domains):
            raise NotFetched(f"has a URL of {host}:{port}, which is not in --allowed-media-domains of this server")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return FetchTarget(scheme, host, port, path)


def _read_domain(text: str) -> _Domain:
    parts = urlsplit(f"//{text.lower()}")
    host = parts.hostname or ""
    return _Domain(host.removeprefix("*."), host.startswith("*."), parts.port)


async def checked_addresses(target: FetchTarget, ask: Resolve, allows_private: bool) -> list[str]:
    """Resolve the host of a URL, once. Raises NotFetched where it has no address, or one that must not be used."""
    try:
        addresses = await ask(target.host, target.port)
    except (OSError, UnicodeError):
        addresses = []
    if not addresses:
        raise NotFetched(f"has a URL of {target.host}, which has no address")
    if not allows_private and not all(map(is_public, addresses)):
        raise NotFetched(f"has a URL of {target.host}, which has an address that is not one of the public internet")
    return addresses
