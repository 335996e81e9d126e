"""The router's link to the keeper, which runs as a process of its own."""

import asyncio
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from funitel.proto.errors import OtherKeeper, StartupError
from funitel.proto.keeper.channel import Channel, listen
from funitel.proto.keeper.messages import VERSION, JournalledRequest, Kind, Packet, RouterHello
from funitel.router.transport import keeper_link
from funitel.router.transport.keeper_link import KeeperLink, KeptSocket
from funitel.router.transport.kept_connection import Settled

PATIENCE_SECONDS = 30.0
BIG = os.urandom(1 << 20)


class Deployment:
    """A keeper, its clients, and routers that this process plays."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.keeper: subprocess.Popen[bytes] | None = None
        self.closing: list[Callable[[], object]] = [self.listener.close]

    def start_keeper(self) -> None:
        """Start a keeper with the listening socket; wait until it listens."""
        descriptor = self.listener.fileno()
        command = [sys.executable, "-m", "funitel.launcher.keeper", "--socket", self.path]
        self.keeper = subprocess.Popen([*command, "--listen-fd", str(descriptor)], pass_fds=[descriptor])
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                Channel.to(self.path).close()
                return
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def kill_keeper(self) -> None:
        """End it, as nothing that it could handle."""
        assert self.keeper is not None
        self.keeper.kill()
        self.keeper.wait()

    def client(self) -> socket.socket:
        """Connect as a client does."""
        client = socket.create_connection(self.listener.getsockname(), timeout=PATIENCE_SECONDS)
        self.closing.append(client.close)
        return client

    def close(self) -> None:
        """Close everything."""
        for close in self.closing:
            close()
        if self.keeper is not None:
            self.kill_keeper()


class RouterSide:
    """A link in use, and what it was given."""

    def __init__(self, deployment: Deployment, generation: int = 1) -> None:
        self.link, self.left = KeeperLink.connect(deployment.path, generation)
        self.got: list[KeptSocket] = []
        self.yields = 0
        self.link.on_connection = self.got.append
        self.link.on_yield = self._yield
        deployment.closing.append(self.end)

    def _yield(self) -> None:
        self.yields += 1

    def begin(self) -> "RouterSide":
        """Take connections."""
        self.link.watch(asyncio.get_running_loop())
        self.link.ready()
        return self

    def end(self) -> None:
        """End, as the kernel ends the descriptors of a process that was killed."""
        self.link.close()
        for kept in [*self.left, *self.got]:
            kept.sock.close()


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """A keeper that listens."""
    deployment = Deployment(tmp_path / "keeper")
    deployment.start_keeper()
    yield deployment
    deployment.close()


@pytest.fixture
async def router(deployment: Deployment, caplog: pytest.LogCaptureFixture) -> RouterSide:
    """A router that takes connections, and says what it does."""
    caplog.set_level(logging.INFO)
    return RouterSide(deployment).begin()


async def until(claim: Callable[[], object]) -> None:
    """Wait until `claim` holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not claim():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def another(deployment: Deployment, generation: int = 1) -> RouterSide:
    """Another router, in a thread: the loop may have a channel of an earlier one to close."""
    return await asyncio.to_thread(RouterSide, deployment, generation)


async def fed(caplog: pytest.LogCaptureFixture, num_routers: int = 1) -> None:
    """Wait until so many routers have brought their connections to the next keeper."""
    await until(lambda: caplog.text.count("another keeper holds the connections") == num_routers)


async def a_connection(deployment: Deployment, router: RouterSide) -> tuple[KeptSocket, socket.socket]:
    """A connection, and its client."""
    client, before = deployment.client(), len(router.got)
    await until(lambda: len(router.got) > before)
    return router.got[-1], client


async def test_connections_come_with_bytes_both_ways(deployment: Deployment, router: RouterSide) -> None:
    kept, client = await a_connection(deployment, router)
    assert (kept.listener, kept.requests, kept.settled) == (0, [], Settled())
    kept.sock.sendall(b"answer")
    assert client.recv(100) == b"answer"


async def test_another_router_gets_requests_facts_and_partial_input(deployment: Deployment, router: RouterSide) -> None:
    kept, client = await a_connection(deployment, router)
    other, _ = await a_connection(deployment, router)
    link = router.link
    link.put_request(kept.id, 1, b"done", {})
    link.put_facts(kept.id, 1, {"key": "a"})
    link.done(kept.id, 1, Settled(1, 4, 10))
    link.put_request(kept.id, 2, BIG, {"key": "b", "seed": 1 << 63, "time": 0.1, "text": "é\ud800", "none": None})
    link.put_facts(kept.id, 2, {"head": [["a", "b"]], "seed": 5})
    link.put_partial(kept.id, b"GET / HT")
    link.release(other.id)
    link.put_request(other.id, 1, b"too late", {})
    router.end()
    after = await another(deployment)
    (left,) = after.left
    assert (left.id, left.listener, left.settled, left.partial) == (kept.id, 0, Settled(1, 4, 10), b"GET / HT")
    facts = {"key": "b", "seed": 5, "time": 0.1, "text": "é\ud800", "none": None, "head": [["a", "b"]]}
    assert left.requests == [JournalledRequest(2, BIG, facts)]
    left.sock.sendall(b"on")
    assert client.recv(100) == b"on"
    # And it goes on with the request that it has found.
    after.link.put_facts(kept.id, 2, {"later": True})
    after.end()
    assert (await another(deployment)).left[0].requests == [JournalledRequest(2, BIG, facts | {"later": True})]


async def test_what_was_put_survives_sigkill(deployment: Deployment) -> None:
    script = (
        "import asyncio, os, signal, sys\n"
        "from funitel.router.transport.keeper_link import KeeperLink\n"
        "def serve(kept):\n"
        "    for number in range(1, 51):\n"
        "        link.put_request(kept.id, number, b'r' * number * 1000, {})\n"
        "        link.put_facts(kept.id, number, {'key': number})\n"
        "    kept.sock.send(b'told')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "async def main():\n"
        "    link.watch(asyncio.get_running_loop()); link.ready(); await asyncio.sleep(60)\n"
        "link, _ = KeeperLink.connect(sys.argv[1], 1); link.on_connection = serve; asyncio.run(main())\n"
    )
    killed = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", script, deployment.path])
    client = deployment.client()
    assert await asyncio.to_thread(client.recv, 100) == b"told"
    assert await asyncio.to_thread(killed.wait) == -signal.SIGKILL
    (left,) = (await another(deployment)).left
    assert left.requests == [
        JournalledRequest(number, b"r" * number * 1000, {"key": number}) for number in range(1, 51)
    ]


async def test_release_sends_the_end(deployment: Deployment, router: RouterSide) -> None:
    kept, client = await a_connection(deployment, router)
    kept.sock.close()
    router.link.release(kept.id)
    router.link.release(kept.id)
    assert await asyncio.to_thread(client.recv, 1) == b""


async def test_a_router_is_told_to_yield(deployment: Deployment, router: RouterSide) -> None:
    kept, _ = await a_connection(deployment, router)
    connecting = asyncio.ensure_future(another(deployment))
    await until(lambda: router.yields)
    assert not connecting.done()
    router.link.put_partial(kept.id, b"half")
    router.end()
    after = await connecting
    assert [left.partial for left in after.left] == [b"half"]
    assert router.yields == 1


async def test_generations_are_apart(deployment: Deployment, router: RouterSide) -> None:
    old, _ = await a_connection(deployment, router)
    second = (await another(deployment, 2)).begin()
    assert second.left == []
    await a_connection(deployment, second)
    assert (router.got, router.yields) == ([old], 0)


# A keeper that cannot be used -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/nowhere/keeper", "No such file or directory"), ("/tmp/" + "k" * 120, "AF_UNIX path too long")],
)
def test_no_keeper_is_there(path: str, reason: str) -> None:
    with pytest.raises(StartupError, match=f"cannot be reached: {reason}"):
        KeeperLink.connect(path, 1)


async def test_a_keeper_of_another_version_refuses_and_the_first_router_serves_on(
    deployment: Deployment, router: RouterSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_link, "RouterHello", lambda generation: RouterHello(generation, version=VERSION + 1))
    with pytest.raises(OtherKeeper, match=f"refuses this router: it speaks version {VERSION}, not {VERSION + 1}"):
        await asyncio.to_thread(KeeperLink.connect, deployment.path, 1)
    await a_connection(deployment, router)
    assert router.yields == 0


def test_a_keeper_that_says_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_link, "STATE_SECONDS", 0.05)
    with listen(str(tmp_path / "keeper")), pytest.raises(StartupError, match="sent nothing for 0.05 s"):
        KeeperLink.connect(str(tmp_path / "keeper"), 1)


@pytest.mark.parametrize("facts", [b"{", b"\xff", b"[1, 2]"])
async def test_facts_that_cannot_be_read_leave_a_request_without_any(
    deployment: Deployment, router: RouterSide, facts: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    kept, _ = await a_connection(deployment, router)
    router.link.put_request(kept.id, 1, b"asked", {})
    router.link.put_facts(kept.id, 1, {"key": 1, "input_end": 5})
    router.link._send(Packet(Kind.FACTS, kept.id, 1, facts))
    router.end()
    (left,) = (await another(deployment)).left
    assert left.requests == [JournalledRequest(1, b"asked", {})]
    assert "facts of request 1 in the journal cannot be read" in caplog.text


@pytest.mark.parametrize("raw", [b"", b"\1\0", b"\1\0\0\0{asked", b"\xff\xff\xff\xff{}asked"])
async def test_a_request_that_cannot_be_read_has_no_facts(
    deployment: Deployment, router: RouterSide, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    kept, _ = await a_connection(deployment, router)
    router.link._send(Packet(Kind.REQUEST, kept.id, 1, raw))
    router.end()
    (left,) = (await another(deployment)).left
    assert [(request.number, request.facts) for request in left.requests] == [(1, {})]
    assert "facts of request 1 in the journal cannot be read" in caplog.text


# The end of a keeper --------------------------------------------------------------------------------------------------


async def test_a_router_serves_on_and_feeds_the_next_keeper(
    deployment: Deployment, router: RouterSide, caplog: pytest.LogCaptureFixture
) -> None:
    (kept, client), (ended, leaving) = [await a_connection(deployment, router) for _ in range(2)]
    link = router.link
    for number in (1, 2):
        link.put_request(kept.id, number, b"before", {})
        link.put_facts(kept.id, number, {"key": number})
    deployment.kill_keeper()
    kept.sock.sendall(b"one ")
    link.done(kept.id, 1, Settled(1, 6, 4))
    link.put_request(kept.id, 3, BIG, {})
    link.put_facts(kept.id, 3, {"key": 3})
    ended.sock.close()
    link.release(ended.id)
    assert await asyncio.to_thread(leaving.recv, 1) == b""
    await until(lambda: "serving on without one" in caplog.text)
    waiting = deployment.client()  # in the backlog
    deployment.start_keeper()
    await until(lambda: len(router.got) == 3)
    assert router.got[-1].sock.getpeername() == waiting.getsockname()
    assert router.got[-1].id not in (kept.id, ended.id)
    kept.sock.sendall(b"two")
    assert client.recv(100) == b"one two"
    router.end()
    left = {each.id: each for each in (await another(deployment)).left}
    assert left.keys() == {kept.id, router.got[-1].id}
    assert left[kept.id].settled == Settled(1, 6, 4)
    assert left[kept.id].requests == [
        JournalledRequest(2, b"before", {"key": 2}),
        JournalledRequest(3, BIG, {"key": 3}),
    ]
    assert caplog.text.count("keeper is lost") == 1


async def test_a_connection_on_its_way_from_a_keeper_that_has_ended_is_served(
    deployment: Deployment, router: RouterSide, caplog: pytest.LogCaptureFixture
) -> None:
    kept, _ = await a_connection(deployment, router)
    client = deployment.client()
    channel = router.link._channel
    assert channel is not None
    select.select([channel.sock], [], [], PATIENCE_SECONDS)  # the loop does not run: the connection is not received
    deployment.kill_keeper()
    router.link.put_request(kept.id, 1, b"asked", {})  # notices it
    await until(lambda: len(router.got) == 2)
    assert router.got[-1].sock.getpeername() == client.getsockname()
    router.got[-1].sock.sendall(b"answered")
    assert client.recv(100) == b"answered"
    deployment.start_keeper()
    await fed(caplog)
    router.end()
    left = {each.id: each for each in (await another(deployment)).left}
    assert left.keys() == {kept.id, router.got[-1].id}


async def test_many_keepers_may_end(deployment: Deployment, router: RouterSide) -> None:
    kept, _ = await a_connection(deployment, router)
    for number in range(1, 4):
        router.link.put_request(kept.id, number, b"asked", {})
        deployment.kill_keeper()
        deployment.start_keeper()
        await a_connection(deployment, router)
    router.end()
    left = {each.id: each for each in (await another(deployment)).left}
    assert [request.number for request in left[kept.id].requests] == [1, 2, 3]
    assert len(left) == 4


async def test_a_keeper_that_ends_before_the_loop_runs_is_replaced_as_well(deployment: Deployment) -> None:
    router = RouterSide(deployment)
    deployment.kill_keeper()
    router.link.put_partial(1, b"")  # notices it
    router.begin()
    deployment.start_keeper()
    await a_connection(deployment, router)


async def test_both_generations_feed_the_next_keeper(
    deployment: Deployment, router: RouterSide, caplog: pytest.LogCaptureFixture
) -> None:
    old, _ = await a_connection(deployment, router)
    second = (await another(deployment, 2)).begin()
    new, _ = await a_connection(deployment, second)
    deployment.kill_keeper()
    deployment.start_keeper()
    again, _ = await a_connection(deployment, second)
    await fed(caplog, 2)
    router.end()
    second.end()
    assert [each.id for each in (await another(deployment, 1)).left] == [old.id]
    assert [each.id for each in (await another(deployment, 2)).left] == [new.id, again.id]


async def test_a_keeper_that_hangs_costs_a_moment(
    deployment: Deployment, router: RouterSide, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper_link, "SEND_SECONDS", 0.1)
    monkeypatch.setattr(keeper_link, "ANSWER_SECONDS", 0.1)
    kept, client = await a_connection(deployment, router)
    ended, leaving = await a_connection(deployment, router)
    assert deployment.keeper is not None
    os.kill(deployment.keeper.pid, signal.SIGSTOP)
    try:
        router.link.put_request(kept.id, 1, b"asked", {})
        count = 0
        while "received nothing for 0.1 s" not in caplog.text:
            router.link.put_facts(kept.id, 1, {str(count): "x" * 30_000})
            count += 1
            assert count < 10_000
        longest, end = 0.0, time.monotonic() + 0.5
        while time.monotonic() < end:  # it looks for another one, and finds the same, which does not answer
            since = time.monotonic()
            await asyncio.sleep(0.001)
            longest = max(longest, time.monotonic() - since)
        assert longest < 0.4
        kept.sock.sendall(b"served on")
        assert client.recv(100) == b"served on"
        router.link.done(kept.id, 1, Settled(1, 5, 9))
        ended.sock.close()
        router.link.release(ended.id)
    finally:
        os.kill(deployment.keeper.pid, signal.SIGCONT)
    # It gets what it has missed, from the same router.
    await fed(caplog)
    assert await asyncio.to_thread(leaving.recv, 1) == b""
    await a_connection(deployment, router)
    assert len(router.got) == 3
    router.end()
    left = (await another(deployment)).left
    assert [(each.id == kept.id, each.settled.number, each.requests) for each in left] == [
        (True, 1, []),
        (False, 0, []),
    ]


async def test_the_next_keeper_may_refuse(
    deployment: Deployment, router: RouterSide, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept, client = await a_connection(deployment, router)
    refusals: list[bool] = []
    router.link.on_refused = lambda: refusals.append(True)
    with monkeypatch.context() as patched:
        patched.setattr(
            keeper_link, "RouterHello", lambda generation, feeds: RouterHello(generation, feeds, VERSION + 1)
        )
        deployment.kill_keeper()
        deployment.start_keeper()
        await until(lambda: refusals)
    assert f"keeps none of them: it speaks version {VERSION}, not {VERSION + 1} connections=1" in caplog.text
    kept.sock.sendall(b"served on")
    assert client.recv(100) == b"served on"
    with pytest.raises(StartupError, match="of another version finishes its connections first"):
        await another(deployment)
    router.end()
    assert (await another(deployment)).left == []
    assert refusals == [True]


async def test_a_connection_without_room_for_its_descriptor_is_closed(
    deployment: Deployment, router: RouterSide, caplog: pytest.LogCaptureFixture
) -> None:
    await a_connection(deployment, router)
    receive = Channel.receive

    def without_descriptors(channel: Channel) -> Packet | None:
        packet = receive(channel)
        for descriptor in packet.fds if packet is not None else ():
            os.close(descriptor)
        return None if packet is None else Packet(packet.kind, packet.connection, packet.number, packet.raw)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Channel, "receive", without_descriptors)
        client = deployment.client()
        assert await asyncio.to_thread(client.recv, 1) == b""
    assert "no descriptor is left" in caplog.text
    assert len(router.got) == 1
    await a_connection(deployment, router)
