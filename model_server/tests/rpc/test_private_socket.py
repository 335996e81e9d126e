"""Access to a shard: the owner of its Unix sockets, and a client that shows a certificate over TCP."""

import asyncio
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest

from funitel.model_server.rpc.listen_address import listen_address
from funitel.model_server.rpc.servicer import make_server
from funitel.model_server.rpc.step_socket_server import StepServer
from funitel.model_server.settings import ModelServerSettings
from funitel.proto import generate_pb2 as pb
from funitel.proto import generate_pb2_grpc
from funitel.proto.errors import SettingsError
from funitel.proto.process.private_socket import bind_private
from funitel.proto.security.tls import MutualTls
from funitel_testing.certificates import Authority
from funitel_testing.servers import free_port


class Healthy(generate_pb2_grpc.TextGenerationServiceServicer):
    async def Health(self, request: pb.HealthRequest, context: object) -> pb.HealthResponse:
        return pb.HealthResponse()


@asynccontextmanager
async def serving(address: str, tls: MutualTls | None = None) -> AsyncIterator[None]:
    server = make_server(Healthy(), address, tls=tls)
    await server.start()
    yield
    await server.stop(None)


async def is_healthy(channel: grpc.aio.Channel) -> bool:
    async with channel:
        stub = generate_pb2_grpc.TextGenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            await stub.Health(pb.HealthRequest(), timeout=5)
        except grpc.aio.AioRpcError:
            return False
    return True


# Unix sockets


def mode(path: str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture
def folder() -> Iterator[str]:
    """A folder that every user may look into, unlike pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield folder


async def test_sockets_are_their_owner_s_alone_from_their_first_instant(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    chmod = os.chmod
    monkeypatch.setattr("os.chmod", lambda path, bits: (seen.append(mode(path)), chmod(path, bits)))
    before = os.umask(0)
    try:
        async with serving(f"unix:{folder}/s"):
            assert mode(f"{folder}/s") == 0o600
            assert seen == [0o700], "nobody else could have connected before its mode was set"
            assert os.umask(0) == 0, "the process makes its other files as ever"
            steps = StepServer(Mock(), f"{folder}/s.steps")
            await steps.start()
            assert mode(f"{folder}/s.steps") == 0o600
            await steps.stop()
            assert await is_healthy(grpc.aio.insecure_channel(f"unix:{folder}/s"))
    finally:
        os.umask(before)


def test_a_socket_takes_nobody_in_before_somebody_listens(folder: str) -> None:
    with bind_private(f"{folder}/s"), socket.socket(socket.AF_UNIX) as other:
        assert mode(f"{folder}/s") == 0o600
        with pytest.raises(ConnectionRefusedError):
            other.connect(f"{folder}/s")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
async def test_another_user_is_refused(folder: str) -> None:
    code = (
        "import os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "for path in sys.argv[1:]:\n"
        "    try: socket.socket(socket.AF_UNIX).connect(path); print('open')\n"
        "    except PermissionError: print('refused')\n"
    )
    async with serving(f"unix:{folder}/s"):
        steps = StepServer(Mock(), f"{folder}/s.steps")
        await steps.start()
        paths = (f"{folder}/s", f"{folder}/s.steps")
        run = [sys.executable, "-c", code, *paths]
        done = await asyncio.to_thread(subprocess.run, run, capture_output=True, text=True)
        await steps.stop()
    assert done.stdout.split() == ["refused", "refused"], done.stderr


# TCP


def contents(path: str) -> bytes:
    return Path(path).read_bytes()


async def test_over_tcp_each_side_shows_a_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    shard, router = authority.sign("shard"), authority.sign("router", "router.invalid")
    strangers = Authority(tmp_path, "strangers")
    stranger = strangers.sign("stranger")
    address = f"localhost:{free_port()}"
    tls = MutualTls.of(shard.cert, shard.key, authority.ca)
    async with serving(address, tls):
        known = MutualTls.of(router.cert, router.key, authority.ca)
        assert known is not None
        assert await is_healthy(grpc.aio.secure_channel(address, known.channel_credentials()))
        assert not await is_healthy(grpc.aio.insecure_channel(address)), "a plain client"
        nobody = grpc.ssl_channel_credentials(contents(authority.ca))
        assert not await is_healthy(grpc.aio.secure_channel(address, nobody)), "a client that shows nothing"
        wrong = MutualTls.of(stranger.cert, stranger.key, authority.ca)
        assert wrong is not None
        assert not await is_healthy(grpc.aio.secure_channel(address, wrong.channel_credentials()))
        wary = MutualTls.of(router.cert, router.key, strangers.ca)
        assert wary is not None
        assert not await is_healthy(grpc.aio.secure_channel(address, wary.channel_credentials())), "a shard unknown"


async def test_a_shard_must_be_who_it_says_it_is(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    shard, router = authority.sign("shard", "elsewhere.invalid"), authority.sign("router")
    address = f"localhost:{free_port()}"
    tls, known = (MutualTls.of(files.cert, files.key, authority.ca) for files in (shard, router))
    assert known is not None
    async with serving(address, tls):
        assert not await is_healthy(grpc.aio.secure_channel(address, known.channel_credentials()))


@pytest.mark.parametrize(("host", "is_open"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
def test_a_shard_that_is_open_to_a_network_says_so(host: str, is_open: bool, caplog: pytest.LogCaptureFixture) -> None:
    plain = ModelServerSettings(model_id="m", listen=f"{host}:7000")
    assert listen_address(plain) == (f"{host}:7000", f"tcp://{host}:7000")
    assert [f"--listen {host}:7000 without --shard-tls-cert" in line for line in caplog.messages] == [True] * is_open
    caplog.clear()
    files = {"shard_tls_cert": "a", "shard_tls_key": "b", "shard_tls_ca": "c"}
    listen_address(ModelServerSettings(model_id="m", listen=f"{host}:7000", **files))
    assert not caplog.messages


def test_certificates_are_for_shards_on_tcp() -> None:
    files = {"shard_tls_cert": "a", "shard_tls_key": "b", "shard_tls_ca": "c"}
    with pytest.raises(SettingsError, match="are for --listen, which is not given"):
        ModelServerSettings(model_id="m", **files)
    with pytest.raises(SettingsError, match="give all three"):
        ModelServerSettings(model_id="m", listen="h:1", shard_tls_cert="a")
