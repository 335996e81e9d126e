"""HTTPS as clients see it: versions, client certificates, a certificate that is replaced."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fakes import FakeEngine, eventually

from funitel.proto.security.tls import Pair, client_context
from funitel.router.app import build_app
from funitel.router.settings import RouterSettings
from funitel.router.transport.connection import HttpConnection
from funitel.router.transport.connection_limits import Connections
from funitel.router.transport.server import uvicorn_config
from funitel.router.transport.tls import Https
from funitel_testing.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def listening(model: Path, **settings: Any) -> AsyncIterator[str]:
    """The application behind HTTPS, as the router serves it; its address."""
    given = RouterSettings(tokenizer_name=str(model), **settings)
    https = Https.of(given.tls_cert, given.tls_key, given.tls_client_ca)
    assert https is not None
    app = build_app(given, FakeEngine().connect, refreshed=[https])
    protocol = partial(HttpConnection, Connections(100, given, app.state.service.metrics), given)
    server = uvicorn.Server(uvicorn_config(app, protocol, https))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = asyncio.create_task(server._serve([listener]))

        async def is_started() -> bool:
            return server.started

        await eventually(is_started, "started")
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await running


def client(context: ssl.SSLContext) -> httpx.AsyncClient:
    return httpx.AsyncClient(verify=context, trust_env=False)


async def serial(url: str, context: ssl.SSLContext) -> str:
    """Which certificate is shown to a new connection."""
    parts = httpx.URL(url)
    _, writer = await asyncio.open_connection(parts.host, parts.port, ssl=context)
    peer = writer.get_extra_info("peercert") or {}
    writer.close()
    return str(peer.get("serialNumber"))


def signed(authority: Authority) -> tuple[bytes, bytes]:
    """A new certificate and its key."""
    files = authority.sign("server")
    return Path(files.cert).read_bytes(), Path(files.key).read_bytes()


def write(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)


async def test_https_answers_whoever_trusts_it(model: Path, authority: Authority) -> None:
    files = authority.sign("server")
    async with listening(model, tls_cert=files.cert, tls_key=files.key) as url:
        async with client(client_context(authority.ca)) as trusting:
            assert (await trusting.get(f"{url}/health/live")).status_code == 200
            old = ssl.create_default_context(cafile=authority.ca)
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
        async with client(old) as older:
            assert (await older.get(f"{url}/health/live")).status_code == 200
        async with client(ssl.create_default_context()) as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get(f"{url}/health/live")
        async with httpx.AsyncClient(trust_env=False) as plain:
            with pytest.raises(httpx.RemoteProtocolError):
                await plain.get(f"{url.replace('https', 'http')}/health/live")


async def test_old_versions_are_refused(model: Path, authority: Authority) -> None:
    files = authority.sign("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match=r"TLSv1(_1)? is deprecated"):
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    async with listening(model, tls_cert=files.cert, tls_key=files.key) as url:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await serial(url, context)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        await serial(url, context)


async def test_a_client_without_a_certificate_is_refused_where_one_is_wanted(
    model: Path, authority: Authority, tmp_path: Path
) -> None:
    files, own = authority.sign("server"), authority.sign("client")
    strangers = Authority(tmp_path, "strangers").sign("stranger")
    settings = {"tls_cert": files.cert, "tls_key": files.key, "tls_client_ca": authority.ca}
    async with listening(model, **settings) as url:
        known = client_context(authority.ca, Pair(own.cert, own.key))
        async with client(known) as one:
            assert (await one.get(f"{url}/health/live")).status_code == 200
        for pair in (None, Pair(strangers.cert, strangers.key)):
            async with client(client_context(authority.ca, pair)) as one:
                with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                    await one.get(f"{url}/health/live")


async def test_a_new_certificate_is_shown_without_a_restart_and_old_connections_go_on(
    model: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.sign("server")
    context = client_context(authority.ca)
    async with listening(model, tls_cert=files.cert, tls_key=files.key) as url, client(context) as old:
        assert (await old.get(f"{url}/health/live")).status_code == 200
        before = await serial(url, context)
        write(files.cert, b"half of a certificate")

        async def is_said() -> bool:
            return any("the certificate stays as it was: --tls-cert" in line for line in caplog.messages)

        async def is_new() -> bool:
            return await serial(url, context) != before

        await eventually(is_said, "a line about the half")
        assert not await is_new()
        authority.sign("server")
        await eventually(is_new, "the new certificate")
        assert (await old.get(f"{url}/health/live")).status_code == 200


async def test_no_handshake_fails_while_certificates_are_reloaded(model: Path, authority: Authority) -> None:
    files = authority.sign("server")
    https = Https.of(files.cert, files.key, None)
    assert https is not None
    context = client_context(authority.ca)
    pairs = [signed(authority) for _ in range(2)]

    def reload() -> None:
        for number in range(100):
            cert, key = pairs[number % 2]
            write(files.cert, cert)
            write(files.key, key)
            https.refresh()

    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=https.context)
    async with server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        reloading = asyncio.create_task(asyncio.to_thread(reload))
        while not reloading.done():
            await serial(url, context)
        await reloading
