"""Get the content of a media item: from a data: URL, or by HTTP where the settings allow its host."""

import asyncio
import base64
import binascii
import ssl
from collections.abc import Iterable
from functools import cached_property
from urllib.parse import urljoin

import httpcore

from funitel.proto.errors import InvalidRequest
from funitel.proto.process.version import version
from funitel.router.media.addresses import AllowedDomains, FetchTarget, NotFetched, Resolve, checked_addresses, resolve
from funitel.router.media.interface import MediaSource
from funitel.router.sandbox.fair_semaphore import FairSemaphore
from funitel.router.settings import RouterSettings

MAX_REDIRECTS = 3
MAX_FETCHES, MAX_FETCHES_OF_A_KEY = 32, 16  # at once
LARGE_URL = 1 << 20  # characters; decoded in a thread
_REDIRECTS = frozenset((301, 302, 303, 307, 308))


class _Pinned(httpcore.AsyncNetworkBackend):
    """Connects to addresses that were checked, whatever the name of the host."""

    def __init__(self, addresses: list[str]) -> None:
        self._addresses = addresses
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address that answers."""
        *others, last = self._addresses
        for address in others:
            try:
                return await self._backend.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._backend.connect_tcp(last, port, timeout, local_address, socket_options)


class Fetcher:
    """Gets the bytes of media sources, within the limits of the settings. Event loop only.

    Args:
        settings: of the router.
        ask: resolves names; the system's resolver when not given.
        ssl_context: for https; the authorities of certifi when not given.
    """

    def __init__(
        self, settings: RouterSettings, *, ask: Resolve = resolve, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self._domains = AllowedDomains(settings.allowed_media_domains)
        self._allows_private = settings.allow_private_media_addresses
        self._max_bytes = settings.max_image_fetch_size
        self._timeout = settings.media_fetch_timeout_s
        self._ask = ask
        self._given_context = ssl_context
        self._semaphore = FairSemaphore(MAX_FETCHES, MAX_FETCHES_OF_A_KEY)

    @cached_property
    def _ssl_context(self) -> ssl.SSLContext:
        return self._given_context or httpcore.default_ssl_context()

    async def get(self, source: MediaSource, owner: bytes) -> bytes:
        """Return the content of a source. `owner` is the hash of the API key.

        Raises:
            InvalidRequest: it must not or cannot be had, or is too large.
        """
        try:
            if source.data is not None:
                return self._bounded(source.data)
            if source.url[:5].lower() == "data:":
                return await self._of_data(source.url)
            target = self._domains.target(source.url)
            return await self._fetch(source.url, target, owner)
        except NotFetched as problem:
            raise InvalidRequest(f"`{source.place}` {problem}", source.place) from None

    async def _of_data(self, url: str) -> bytes:
        if len(url) < LARGE_URL:
            return self._bounded(decode_data_url(url, self._max_bytes))
        return self._bounded(await asyncio.to_thread(decode_data_url, url, self._max_bytes))

    def _bounded(self, data: bytes) -> bytes:
        if len(data) > self._max_bytes:
            raise NotFetched(_too_large(f"has {len(data)} bytes", self._max_bytes))
        return data

    async def _fetch(self, url: str, target: FetchTarget, owner: bytes) -> bytes:
        """Follow redirects, each of which is checked as the first URL is."""
        try:
            async with self._semaphore.acquired(owner), asyncio.timeout(self._timeout):
                for _ in range(MAX_REDIRECTS + 1):
                    addresses = await checked_addresses(target, self._ask, self._allows_private)
                    found = await self._request(target, addresses)
                    if isinstance(found, bytes):
                        return found
                    url = _joined(url, found)
                    is_secure = target.scheme == "https"
                    target = self._domains.target(url)
                    if is_secure and target.scheme != "https":
                        raise NotFetched("has a URL that leads from https to http")
        except TimeoutError:
            raise NotFetched(f"cannot be fetched: it takes more than {self._timeout:g} s") from None
        except httpcore.TimeoutException:
            raise NotFetched(f"cannot be fetched: {target.host} does not answer in time") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            raise NotFetched(f"cannot be fetched: {error or type(error).__name__}") from None
        raise NotFetched(f"cannot be fetched: it leads to more than {MAX_REDIRECTS} other URLs")

    async def _request(self, target: FetchTarget, addresses: list[str]) -> bytes | str:
        """Return the body of the answer, or where it redirects to."""
        url = httpcore.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path)
        headers: list[tuple[bytes | str, bytes | str]] = [
            ("Host", target.authority),
            ("Accept", "*/*"),
            ("Accept-Encoding", "identity"),
            ("User-Agent", f"funitel/{version()}"),
            ("Connection", "close"),
        ]
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), self._timeout)
        async with (
            httpcore.AsyncConnectionPool(self._ssl_context, network_backend=_Pinned(addresses)) as pool,
            pool.stream("GET", url, headers=headers, extensions={"timeout": timeouts}) as response,
        ):
            given = {name.lower(): value.decode("latin-1") for name, value in response.headers}
            if response.status in _REDIRECTS and b"location" in given:
                return given[b"location"]
            if response.status != 200:
                raise NotFetched(f"cannot be fetched: {target.host} answers with status {response.status}")
            if given.get(b"content-encoding", "identity").strip().lower() != "identity":
                raise NotFetched("cannot be fetched: its content is compressed, which was not asked for")
            size = given.get(b"content-length", "")
            if size.isdecimal() and int(size) > self._max_bytes:
                raise NotFetched(_too_large(f"has {size} bytes", self._max_bytes))
            body = bytearray()
            async for part in response.aiter_stream():
                body += part
                if len(body) > self._max_bytes:
                    raise NotFetched(_too_large(f"has more than {self._max_bytes} bytes", self._max_bytes))
            return bytes(body)


def decode_data_url(url: str, max_bytes: int) -> bytes:
    """Decode a data: URL of base64. Raises NotFetched where it is not one, or has more than `max_bytes`."""
    header, comma, text = url.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise NotFetched("has a data: URL that is not of base64, as in data:image/png;base64,...")
    if len(text) // 4 * 3 - 2 > max_bytes:
        raise NotFetched(_too_large(f"has about {len(text) // 4 * 3} bytes", max_bytes))
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise NotFetched(f"has a data: URL with wrong base64: {error}") from None


def _joined(url: str, location: str) -> str:
    """The URL that a redirect leads to. Raises NotFetched where it is none."""
    try:
        return urljoin(url, location)
    except ValueError as error:
        raise NotFetched(f"cannot be fetched: it leads to what is no URL: {error}") from None


def _too_large(size: str, limit: int) -> str:
    return f"{size}: at most {limit} are taken (--max-image-fetch-size)"
