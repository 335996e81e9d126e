"""What is fetched, and from where: SSRF by names, addresses, redirects and rebinding; sizes, times, encodings."""

import asyncio
import base64
import gzip
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trustme

from funitel.proto.errors import InvalidRequest, SettingsError
from funitel.proto.step import MediaKind
from funitel.router.media.addresses import is_public
from funitel.router.media.fetch import Fetcher, decode_data_url
from funitel.router.media.interface import MediaSource
from funitel.router.settings import RouterSettings

CONTENT = bytes(range(256)) * 8
PLACE = "messages[0].content[1].image_url"

Respond = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


def answer(body: bytes = CONTENT, status: str = "200 OK", **headers: Any) -> bytes:
    named = {name.replace("_", "-"): value for name, value in ({"content_length": len(body)} | headers).items()}
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in named.items() if value is not None)]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Site:
    """A server of tests: `pages` by path, and the requests it got."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes | Respond] = {"/a.png": answer()}
        self.asked: list[str] = []
        self.hosts: list[str] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split()[1]
            self.asked.append(path)
            self.hosts += [line[6:] for line in head.splitlines() if line.lower().startswith("host: ")]
            page = self.pages.get(path, answer(b"", "404 Not Found"))
            if callable(page):
                await page(path, writer)
            else:
                writer.write(page)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    async with server, asyncio.timeout(60):
        yield made


def fetcher(*domains: str, addresses: dict[str, list[str]] | None = None, **settings: Any) -> Fetcher:
    """A fetcher that resolves some names as given, and others to 127.0.0.1."""
    given = {"allow_private_media_addresses": True, "media_fetch_timeout_s": 5.0} | settings
    given_context = given.pop("ssl_context", None)

    async def ask(host: str, port: int) -> list[str]:
        return (addresses or {}).get(host, ["127.0.0.1"])

    return Fetcher(RouterSettings(allowed_media_domains=domains, **given), ask=ask, ssl_context=given_context)


def image(url: str) -> MediaSource:
    return MediaSource(MediaKind.IMAGE, PLACE, url=url)


async def refusal(made: Fetcher, url: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await made.get(image(url), b"owner")
    assert caught.value.param == PLACE
    assert caught.value.message.startswith(f"`{PLACE}` ")
    return caught.value.message


async def test_an_allowed_url_is_fetched(site: Site) -> None:
    made = fetcher(f"example.com:{site.port}")
    assert await made.get(image(f"http://example.com:{site.port}/a.png"), b"") == CONTENT
    assert await made.get(image(f"HTTP://EXAMPLE.com.:{site.port}/a.png#part"), b"") == CONTENT
    site.pages["/a?b=c"] = answer(b"query")
    assert await made.get(image(f"http://example.com:{site.port}/a?b=c"), b"") == b"query"
    site.pages["/chunks"] = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    assert await made.get(image(f"http://example.com:{site.port}/chunks"), b"") == b"abcde"
    site.pages["/until-closed"] = answer(content_length=None)
    assert await made.get(image(f"http://example.com:{site.port}/until-closed"), b"") == CONTENT
    assert set(site.hosts) == {f"example.com:{site.port}"}


async def test_without_domains_nothing_is_fetched(site: Site) -> None:
    assert "send the content as a data: URL" in await refusal(fetcher(), f"http://127.0.0.1:{site.port}/a.png")
    assert site.asked == []


@pytest.mark.parametrize(
    ("domain", "url", "is_allowed"),
    [
        ("example.com", "http://example.com/a", True),
        ("example.com", "https://example.com:443/a", True),
        ("Example.COM", "https://example.com/a", True),
        ("example.com", "http://example.com:8080/a", False),
        ("example.com", "http://example.com:443/a", False),
        ("example.com", "http://www.example.com/a", False),
        ("example.com", "http://example.com.evil.org/a", False),
        ("example.com", "http://evil-example.com/a", False),
        ("example.com", "http://evil.org/example.com", False),
        ("example.com", "http://evil.org#@example.com/", False),
        ("example.com", "http://evil.org?@example.com/", False),
        ("example.com", "http://example.com@evil.org/", False),
        ("example.com", "http://user:pass@example.com/", False),
        ("example.com", "http://evil.org\\@example.com/", False),
        ("example.com", "http://example.com\\.evil.org/", False),
        ("example.com", "http://example.com\n.evil.org/", False),
        ("example.com", "http://example.com%2eevil.org/", False),
        ("example.com", "http://ex\u00e4mple.com/", False),
        ("example.com", "http:///a", False),
        ("example.com", "http://[::1/", False),
        ("example.com", "http://example.com:99999/", False),
        ("example.com", "//example.com/a", False),
        ("example.com", "", False),
        ("*.example.com", "http://a.example.com/a", True),
        ("*.example.com", "http://a.b.example.com/a", True),
        ("*.example.com", "http://example.com/a", False),
        ("*.example.com", "http://evilexample.com/a", False),
        ("*.example.com:81", "http://a.example.com:81/a", True),
        ("[::1]:81", "http://[::1]:81/a", True),
    ],
)
def test_domains(domain: str, url: str, is_allowed: bool) -> None:
    from funitel.router.media.addresses import AllowedDomains, NotFetched

    domains = AllowedDomains([domain])
    if is_allowed:
        assert domains.target(url).host in url.lower()
    else:
        with pytest.raises(NotFetched):
            domains.target(url)


@pytest.mark.parametrize(
    "text", ["", "*", "*.", "a b", "http://a.com", "a.com/b", "*.*.com", "a.*", "user@a.com", "a:b"]
)
def test_domains_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--allowed-media-domains"):
        RouterSettings(allowed_media_domains=(text,))


@pytest.mark.parametrize("scheme", ["file", "ftp", "gopher", "unix", "javascript", "blob", "ws", "dict", "jar"])
async def test_other_schemes_are_refused(scheme: str) -> None:
    assert f"scheme {scheme}" in await refusal(fetcher("example.com"), f"{scheme}://example.com/etc/passwd")


PRIVATE = [
    *("127.0.0.1", "127.8.9.1", "10.0.0.1", "172.16.5.4", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
    *("224.0.0.1", "255.255.255.255", "240.0.0.1", "192.0.0.1", "192.0.2.1", "198.18.0.1", "203.0.113.7", "0.1.2.3"),
    *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "fec0::1", "2001:db8::1", "100::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "::10.0.0.1"),
    *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::", "2002:a00:1::", "2001:0:7f00:1::1"),
    *("2130706433", "0x7f000001", "0177.0.0.1", "127.1", "localhost", ""),
]


@pytest.mark.parametrize("address", PRIVATE)
async def test_addresses_that_are_not_public_are_not_connected_to(address: str, site: Site) -> None:
    assert not is_public(address)
    for answers in ([address], ["93.184.215.14", address]):
        made = fetcher(
            f"example.com:{site.port}", addresses={"example.com": answers}, allow_private_media_addresses=False
        )
        assert "not one of the public internet" in await refusal(made, f"http://example.com:{site.port}/a.png")
    assert site.asked == []


def test_public_addresses() -> None:
    for address in (
        "93.184.215.14",
        "8.8.8.8",
        "2606:4700::1111",
        "64:ff9b::808:808",
        "2002:808:808::",
        "::ffff:8.8.8.8",
    ):
        assert is_public(address)


@pytest.mark.parametrize(
    "host",
    ["2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "127.1", "127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "0"],
)
async def test_other_ways_to_write_loopback_are_resolved_and_refused(host: str, site: Site) -> None:
    settings = RouterSettings(allowed_media_domains=(f"{host}:{site.port}",))
    message = await refusal(Fetcher(settings), f"http://{host}:{site.port}/a.png")
    assert "not one of the public internet" in message or "has no address" in message
    assert site.asked == []


async def test_a_name_is_resolved_once_and_its_answer_connected_to(site: Site) -> None:
    answers = iter([["127.0.0.1"], ["127.0.0.2"]])
    asked = []

    async def ask(host: str, port: int) -> list[str]:
        asked.append(host)
        return next(answers)

    settings = RouterSettings(
        allowed_media_domains=(f"rebinding.example:{site.port}",), allow_private_media_addresses=True
    )
    made = Fetcher(settings, ask=ask)
    assert await made.get(image(f"http://rebinding.example:{site.port}/a.png"), b"") == CONTENT
    assert asked == ["rebinding.example"]


async def test_a_second_answer_is_checked_at_every_redirect(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("funitel.router.media.addresses.is_public", lambda address: address == "127.0.0.1")
    site.pages["/to"] = answer(b"", "302 Found", location="/a.png")
    answers = iter([["127.0.0.1"], ["127.0.0.3"]])

    async def ask(host: str, port: int) -> list[str]:
        return next(answers)

    made = Fetcher(RouterSettings(allowed_media_domains=(f"rebinding.example:{site.port}",)), ask=ask)
    assert "not one of the public" in await refusal(made, f"http://rebinding.example:{site.port}/to")
    assert site.asked == ["/to"]


async def test_redirects_are_followed_within_the_domains(site: Site) -> None:
    base = f"http://example.com:{site.port}"
    made = fetcher(f"example.com:{site.port}", f"[::ffff:127.0.0.1]:{site.port}", allow_private_media_addresses=True)
    for status in (301, 302, 303, 307, 308):
        site.pages[f"/{status}"] = answer(b"", f"{status} Moved", location="/a.png")
        assert await made.get(image(f"{base}/{status}"), b"") == CONTENT
    for number in range(4):
        site.pages[f"/hop{number}"] = answer(b"", "302 Found", location=f"/hop{number - 1}" if number else "/a.png")
    assert await made.get(image(f"{base}/hop2"), b"") == CONTENT
    assert "more than 3 other URLs" in await refusal(made, f"{base}/hop3")
    for location, words in (
        (f"http://127.0.0.1:{site.port}/a.png", "not in --allowed-media-domains"),
        (f"//evil.org:{site.port}/a.png", "not in --allowed-media-domains"),
        ("http://example.com/a.png", None),  # port 80, which is not the one allowed
        ("file:///etc/passwd", "scheme file"),
        ("data:image/png;base64,AAAA", "scheme data"),
        ("http://\u00e9vil.org", "no URL"),
        ("http://[::1", "leads to what is no URL"),
    ):
        site.pages["/away"] = answer(b"", "302 Found", location=location)
        message = await refusal(made, f"{base}/away")
        assert (words or "not in --allowed-media-domains") in message
    checked = fetcher(
        f"example.com:{site.port}",
        f"inner.example:{site.port}",
        addresses={"example.com": ["93.184.215.14"]},
        allow_private_media_addresses=False,
    )
    checked._request = lambda target, _: asyncio.sleep(0, f"http://inner.example:{site.port}/a.png")  # type: ignore[method-assign,assignment]
    asked = len(site.asked)
    assert "inner.example, which has an address that is not" in await refusal(checked, f"{base}/away")
    assert len(site.asked) == asked


async def test_bodies_are_bounded(site: Site) -> None:
    base = f"http://example.com:{site.port}"
    made = fetcher(f"example.com:{site.port}", max_image_fetch_size=2048)
    assert await made.get(image(f"{base}/a.png"), b"") == CONTENT
    site.pages["/large"] = answer(CONTENT + b"x")
    assert "has 2049 bytes: at most 2048" in await refusal(made, f"{base}/large")
    site.pages["/unsaid"] = answer(CONTENT + b"x", content_length=None)
    assert "more than 2048 bytes" in await refusal(made, f"{base}/unsaid")
    sent = 0

    async def endless(path: str, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while sent < 1 << 30:
            writer.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
            await writer.drain()
            sent += 1 << 16

    site.pages["/endless"] = endless
    assert "more than 2048 bytes" in await refusal(made, f"{base}/endless")
    assert sent < 1 << 26
    site.pages["/zipped"] = answer(gzip.compress(bytes(1 << 20)), content_encoding="gzip")
    assert "compressed" in await refusal(made, f"{base}/zipped")
    site.pages["/short"] = answer(content_length=5000)
    assert "cannot be fetched" in await refusal(fetcher(f"example.com:{site.port}"), f"{base}/short")
    assert "status 404" in await refusal(made, f"{base}/none")
    site.pages["/header"] = b"HTTP/1.1 200 OK\r\nx: " + b"a" * (1 << 20) + b"\r\n\r\n"
    assert "cannot be fetched" in await refusal(made, f"{base}/header")
    site.pages["/garbage"] = b"SSH-2.0-OpenSSH\r\n"
    assert "cannot be fetched" in await refusal(made, f"{base}/garbage")


async def test_slow_servers_are_left(site: Site) -> None:
    base = f"http://example.com:{site.port}"

    async def drip(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"", content_length=1000))
        for _ in range(100):
            writer.write(b"a")
            await writer.drain()
            await asyncio.sleep(0.05)

    site.pages["/drip"] = drip
    made = fetcher(f"example.com:{site.port}", media_fetch_timeout_s=0.5)
    began = asyncio.get_running_loop().time()
    assert "more than 0.5 s" in await refusal(made, f"{base}/drip")
    assert asyncio.get_running_loop().time() - began < 3
    assert "cannot be fetched" in await refusal(fetcher("example.com:1"), "http://example.com:1/a.png")


async def test_the_first_address_that_answers_is_taken(site: Site) -> None:
    made = fetcher(f"example.com:{site.port}", addresses={"example.com": ["127.0.0.2", "::1", "127.0.0.1"]})
    assert await made.get(image(f"http://example.com:{site.port}/a.png"), b"") == CONTENT
    assert "which has no address" in await refusal(fetcher("a.com", addresses={"a.com": []}), "http://a.com/")


async def test_https_names_the_host_and_checks_its_certificate() -> None:
    authority = trustme.CA()
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("images.example").configure_cert(served)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    names: list[str | None] = []
    served.sni_callback = lambda _socket, name, _context: names.append(name)
    site = Site()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(await asyncio.start_server(site.serve, "127.0.0.1", 0, ssl=served))
        port = server.sockets[0].getsockname()[1]
        made = fetcher(f"images.example:{port}", f"other.example:{port}", ssl_context=context)
        assert await made.get(image(f"https://images.example:{port}/a.png"), b"") == CONTENT
        assert names == ["images.example"]
        assert "certificate" in await refusal(made, f"https://other.example:{port}/a.png")
        site.pages["/down"] = answer(b"", "302 Found", location=f"http://images.example:{port}/a.png")
        assert "from https to http" in await refusal(made, f"https://images.example:{port}/down")


async def test_data_urls() -> None:
    made = fetcher(max_image_fetch_size=3 << 20)
    text = base64.b64encode(CONTENT).decode()
    for header in ("data:image/png;base64", "data:;base64", "DATA:image/svg+xml;charset=x;BASE64"):
        assert await made.get(image(f"{header},{text}"), b"") == CONTENT
    large = bytes(2 << 20)
    assert await made.get(image(f"data:;base64,{base64.b64encode(large).decode()}"), b"") == large
    assert await made.get(MediaSource(MediaKind.IMAGE, PLACE, data=CONTENT), b"") == CONTENT
    for wrong in (
        text[:-1],
        text + "\n",
        text[:8] + " " + text[8:],
        "!" * 8,
        text.replace("/", "_"),
        "é" * 4,
        "A===",
        "=AAA",
    ):
        assert "base64" in await refusal(made, f"data:image/png;base64,{wrong}")
    for url in ("data:image/png,abc", "data:", f"data:image/png;base64;{text}", f"data:base64,{text}"):
        assert "not of base64" in await refusal(made, url)
    too_large = base64.b64encode(bytes((3 << 20) + 1)).decode()
    assert "at most 3145728" in await refusal(made, f"data:;base64,{too_large}")
    with pytest.raises(InvalidRequest, match="at most 3145728"):
        await made.get(MediaSource(MediaKind.IMAGE, PLACE, data=bytes((3 << 20) + 1)), b"")
    assert decode_data_url("data:;base64,", 5) == b""
