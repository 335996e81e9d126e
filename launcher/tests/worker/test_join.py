"""Who is let in: certificates, releases, names; one line at both ends for each that is not."""

import asyncio
import gc
import json
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from funitel.launcher.control_plane.workers import Workers
from funitel.launcher.settings.worker_port import WorkerPortSettings
from funitel.launcher.worker.settings import WorkerSettings
from funitel.launcher.worker_wire.handshake import MAX_BODY_BYTES, Url
from funitel.proto.errors import SettingsError
from funitel.proto.process.version import version
from funitel_testing.certificates import Authority, Files
from funitel_testing.machines.plane import Plane, eventually, is_alive


def worker_files(files: Files, ca: str) -> tuple[str, ...]:
    return ("--tls-cert", files.cert, "--tls-key", files.key, "--tls-ca", ca)


@pytest.fixture
async def secure(tmp_path: Path) -> AsyncIterator[tuple[Plane, Authority]]:
    authority = Authority(tmp_path)
    files = authority.sign("control")
    given = {"worker_tls_cert": files.cert, "worker_tls_key": files.key, "worker_tls_ca": authority.ca}
    plane = Plane(tmp_path, **given, worker_hostname="127.0.0.1")
    await plane.start()
    yield plane, authority
    await plane.close()


def secure_url(plane: Plane) -> str:
    return plane.url.replace("http:", "https:")


async def test_certificates_of_one_authority_let_a_worker_in_and_reach_its_shards(
    secure: tuple[Plane, Authority],
) -> None:
    plane, authority = secure
    agent = plane.agent(*worker_files(authority.sign("w1"), authority.ca), url=secure_url(plane))
    await plane.joined("w1")
    replica = await plane.executor.start(plane.job())
    await eventually(lambda: agent.events("ready"), "the shard")
    line = agent.events("start")[0]["argv"]
    assert line[line.index("--shard-tls-ca") + 1] == authority.ca
    assert await replica.answers()
    plane.executor._tls = None
    plain = await plane.executor.adopt(replica.record)
    assert plain is not None
    assert not await plain.answers(), "a shard answers nobody without a certificate"
    await replica.stop(1.0)


async def refused_at_both_ends(plane: Plane, agent: Any, caplog: pytest.LogCaptureFixture) -> tuple[str, str]:
    assert await agent.ended() == 1
    assert "Traceback" not in agent.said
    assert agent.last_line.startswith("error: ")
    await eventually(lambda: any("is refused" in line for line in caplog.messages), "the line of the control plane")
    (line,) = [line for line in caplog.messages if "is refused" in line]
    assert plane.workers.list() == []
    return agent.last_line, line


async def test_a_certificate_of_another_authority_is_refused(
    secure: tuple[Plane, Authority], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plane, authority = secure
    files = Authority(tmp_path, "other").sign("w1")
    agent = plane.agent(*worker_files(files, authority.ca), url=secure_url(plane))
    there, here = await refused_at_both_ends(plane, agent, caplog)
    assert re.fullmatch(r"error: https://127.0.0.1:\d+ refuses the certificate of this worker: .*unknown ca", there)
    assert here.startswith("a worker at 127.0.0.1 is refused: its certificate is not valid here: ")


async def test_a_control_plane_of_another_authority_is_refused_by_the_worker(
    secure: tuple[Plane, Authority], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plane, authority = secure
    other = Authority(tmp_path, "other")
    agent = plane.agent(*worker_files(authority.sign("w1"), other.ca), url=secure_url(plane))
    there, here = await refused_at_both_ends(plane, agent, caplog)
    assert re.fullmatch(r"error: the certificate of https://\S+ is not valid here: .*certificate.*", there)
    assert here.startswith("a worker at 127.0.0.1 is refused: it ended the handshake; it may not know")


async def test_a_worker_without_tls_is_refused_by_a_control_plane_with_it(
    secure: tuple[Plane, Authority], caplog: pytest.LogCaptureFixture
) -> None:
    plane, _ = secure
    agent = plane.agent()
    await eventually(lambda: "no connection to" in agent.said, "the line of the agent")
    assert "trying again" in agent.last_line
    await eventually(lambda: any("TLS failed" in line for line in caplog.messages), "the line of the control plane")


async def test_a_worker_without_a_certificate_is_refused(
    secure: tuple[Plane, Authority], caplog: pytest.LogCaptureFixture
) -> None:
    plane, authority = secure
    context = ssl.create_default_context(cafile=authority.ca)
    port = int(plane.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
    with pytest.raises(ssl.SSLError, match="certificate required"):
        await reader.read()
    writer.close()
    await eventually(lambda: any("it shows no certificate" in line for line in caplog.messages), "the line")


@pytest.mark.parametrize("protocol", [None, 99])
async def test_another_release_or_protocol_is_refused(
    plane: Plane, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, protocol: int | None
) -> None:
    if protocol is not None:
        monkeypatch.setattr("funitel.launcher.control_plane.workers.PROTOCOL", protocol)
    theirs = "9.9.9" if protocol is None else version()
    agent = plane.agent(FAKE_VERSION=theirs)
    there, here = await refused_at_both_ends(plane, agent, caplog)
    reason = f"it is funitel {theirs} with protocol 1, the control plane is funitel {version()} with protocol"
    assert f"refuses this worker: {reason} {protocol or 1}" in there
    assert here.startswith(f"worker w1 at 127.0.0.1 is refused: {reason} {protocol or 1}")


async def test_a_name_that_is_taken_is_refused_and_the_first_goes_on(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    plane.agent()
    await plane.joined("w1")
    other = plane.agent()
    assert await other.ended() == 1
    assert other.last_line.endswith("refuses this worker: the name w1 is taken by the worker at 127.0.0.1")
    assert "worker w1 at 127.0.0.1 is refused: the name w1 is taken by the worker at 127.0.0.1" in caplog.messages
    assert plane.state("w1") == "connected"


async def test_an_agent_waits_for_a_control_plane_that_is_not_there_yet(plane: Plane) -> None:
    await plane.workers.stop()
    agent = plane.agent()
    await eventually(lambda: "no connection to" in agent.said, "the line")
    await asyncio.sleep(1.0)
    assert agent.said.count("no connection to") == 1, "it is said once"
    await plane.start()
    await plane.joined("w1")


async def test_an_agent_that_is_refused_later_stops_its_shards(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = plane.agent()
    await plane.joined("w1")
    replica = await plane.executor.start(plane.job())
    await plane.workers.stop()
    monkeypatch.setattr("funitel.launcher.control_plane.workers.PROTOCOL", 2)
    await plane.start()
    assert await agent.ended() == 1
    assert "the control plane is funitel" in agent.last_line
    assert not any(map(is_alive, replica.pids))


# The port -----------------------------------------------------------------------------------------------------------


def request(body: bytes, *headers: str, line: str = "POST /v1/workers/join HTTP/1.1") -> bytes:
    lines = (line, *headers, f"Content-Length: {len(body)}", "", "")
    return "\r\n".join(lines).encode() + body


HELLO = {
    "name": "w1", "instance": "i", "version": version(), "protocol": 1, "address": "127.0.0.1",
    "machine": {"cores": 1, "memory_bytes": 1, "free_bytes": 1},
}  # fmt: skip
UPGRADE = "Upgrade: funitel-worker"


@pytest.mark.parametrize(
    ("sent", "status", "reason"),
    [
        (request(b"", line="GET / HTTP/1.1"), 404, "this port takes POST /v1/workers/join of workers only"),
        (request(b"{}"), 400, "the request must have Upgrade: funitel-worker"),
        (request(b"{", UPGRADE), 400, "the object: invalid json"),
        (request(b"{}", UPGRADE), 400, "name: field required"),
        (request(json.dumps(HELLO | {"name": "../x"}).encode(), UPGRADE), 400, "the name must match"),
        (request(json.dumps(HELLO | {"name": "local"}).encode(), UPGRADE), 400, "not be 'local'"),
        (request(json.dumps(HELLO | {"machine": {"cores": 0}}).encode(), UPGRADE), 400, "machine.cores"),
        (f"POST /v1/workers/join HTTP/1.1\r\n{UPGRADE}\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n".encode(), 400,
         "at most"),
        (f"POST /v1/workers/join HTTP/1.1\r\n{UPGRADE}\r\nContent-Length: -1\r\n\r\n".encode(), 400, "a number"),
        (b"POST / HTTP/1.1\r\nX: " + b"x" * (1 << 15) + b"\r\n\r\n", 400, "the head must have at most"),
    ],
)  # fmt: skip
async def test_what_is_no_request_to_join_is_answered_in_one_line(
    plane: Plane, sent: bytes, status: int, reason: str
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(plane.url.rpartition(":")[2]))
    writer.write(sent)
    answer = (await asyncio.wait_for(reader.read(), 10)).decode()
    writer.close()
    assert answer.startswith(f"HTTP/1.1 {status} ")
    error = json.loads(answer.partition("\r\n\r\n")[2])["error"]
    assert reason in error
    assert "\n" not in error
    assert plane.workers.list() == []


async def test_lines_that_are_no_objects_end_the_connection(plane: Plane) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(plane.url.rpartition(":")[2]))
    writer.write(request(json.dumps(HELLO).encode(), UPGRADE))
    assert (await reader.readline()).startswith(b"HTTP/1.1 101 ")
    await plane.joined("w1")
    writer.write(b'{"type": "heartbeat", "machine": {"cores": "many"}}\n{"type": "ended", "job": 3}\n[]\n')
    assert await asyncio.wait_for(reader.read(), 10)
    await eventually(lambda: plane.state("w1") == "away", "the connection to be closed")
    writer.close()


async def test_a_peer_that_says_nothing_does_not_keep_a_worker_out(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = int(plane.url.rpartition(":")[2])
    monkeypatch.setattr("funitel.launcher.worker_wire.handshake.HANDSHAKE_SECONDS", 0.3)
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    await eventually(lambda: len([line for line in caplog.messages if "no handshake" in line]) == 3, "the refusals")
    monkeypatch.undo()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(json.dumps(HELLO).encode(), UPGRADE))
    assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 101 ")
    for _, each in [*silent, (reader, writer)]:
        each.close()


async def test_a_peer_that_is_gone_at_once_is_no_error(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    found = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    gone = socket.create_connection(("127.0.0.1", int(plane.url.rpartition(":")[2])))
    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing it resets the connection
    gone.close()
    await asyncio.sleep(0.2)
    gc.collect()
    assert found == []


async def test_answers_of_any_form_and_depth_do_no_harm(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    found = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    for line in (b'{"type": "answer", "id": []}', b"[" * 100_000):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(plane.url.rpartition(":")[2]))
        writer.write(request(json.dumps(HELLO).encode(), UPGRADE))
        await plane.joined("w1")
        writer.write(line + b"\n[]\n")
        assert await asyncio.wait_for(reader.read(), 10)
        writer.close()
        await eventually(lambda: plane.state("w1") == "away", "the connection to be closed")
    gc.collect()
    assert found == []


async def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"--worker-port {port} is already in use"):
            await Workers(WorkerPortSettings(worker_port=port)).start()


async def test_without_a_port_nobody_listens() -> None:
    workers = Workers(WorkerPortSettings())
    await workers.start()
    assert workers.port is None
    await workers.stop()


async def test_files_that_are_none_are_named_at_the_start(tmp_path: Path) -> None:
    files = Authority(tmp_path).sign("control")
    given = {"worker_tls_cert": files.cert, "worker_tls_key": files.key}
    with pytest.raises(SettingsError, match=r"--worker-tls-ca /none must be a PEM file of certificates: No such file"):
        await Workers(WorkerPortSettings(worker_port=0, worker_tls_ca="/none", **given)).start()


# Settings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "--join must name the control plane"),
        ({"join": "ftp://a:1"}, "--join must be https://HOST:PORT"),
        ({"join": "https://a"}, "--join must be https://HOST:PORT"),
        ({"join": "https://a:99999"}, "--join must be https://HOST:PORT"),
        ({"join": "https://a:1/path"}, "--join must be https://HOST:PORT"),
        ({"join": "https://a:1"}, "--join https://a:1 needs --tls-cert, --tls-key and --tls-ca"),
        ({"join": "https://a:1", "tls_cert": "x"}, "need each other"),
        ({"join": "http://a:1"}, "--join http://a:1 is another machine without TLS"),
        ({"join": "http://localhost:1", "tls_cert": "x", "tls_key": "y", "tls_ca": "z"}, "--tls-cert x is for https"),
        ({"join": "http://localhost:1", "name": "a/b"}, "--name must match"),
        ({"join": "http://localhost:1", "name": "local"}, "--name must match"),
        ({"join": "http://localhost:1", "cores": 0}, "--cores must be >= 1, given 0"),
        ({"join": "http://localhost:1", "memory": -1.0}, "--memory must be > 0, given -1.0"),
    ],
)
def test_settings_of_a_worker_that_cannot_be(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(reason)):
        WorkerSettings(**given)


def test_a_worker_may_join_loopback_without_tls_and_others_if_it_says_so() -> None:
    assert WorkerSettings(join="http://localhost:1").tls is None
    assert WorkerSettings(join="http://10.0.0.1:1", insecure_workers=True).url == Url("10.0.0.1", 1, False)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"worker_hostname": "0.0.0.0"}, "--worker-hostname 0.0.0.0 without TLS lets anyone pose as a worker"),
        ({"worker_tls_cert": "x"}, "need each other"),
        ({"worker_port": None, "worker_tls_cert": "x", "worker_tls_key": "y", "worker_tls_ca": "z"},
         "--worker-tls-cert x needs --worker-port"),
    ],
)  # fmt: skip
def test_a_port_for_workers_that_is_not_safe_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(reason)):
        WorkerPortSettings(**{"worker_port": 0, **given}).check_worker_port()


def test_a_port_for_workers_is_on_loopback_unless_it_is_guarded_or_said_otherwise() -> None:
    assert WorkerPortSettings(worker_port=0).worker_address == "127.0.0.1"
    assert WorkerPortSettings(worker_port=0, insecure_workers=True).worker_address == "0.0.0.0"
    secured = WorkerPortSettings(worker_port=0, worker_tls_cert="x", worker_tls_key="y", worker_tls_ca="z")
    assert secured.worker_address == "0.0.0.0"


async def test_more_than_there_is_is_not_offered(plane: Plane) -> None:
    for flags, reason in (
        (("--memory", "1000000"), "--memory must be at most"),
        (("--gpus", "3"), "--gpus must be within 0..1, given 3"),
        (("--listen", "192.0.2.1"), "--listen 192.0.2.1 is not an address of this machine"),
    ):
        agent = plane.agent(*flags, CUDA_VISIBLE_DEVICES="0")
        assert await agent.ended() == 1
        assert agent.last_line.startswith(f"error: {reason}")
