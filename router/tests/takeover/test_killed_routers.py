"""Routers are killed at random moments, or replaced, and every client gets the bytes of one router.

Processes, with the real keeper; a fake application whose answers a client can compute from what was drawn for them.
"""

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import dying_routers
import pytest
from dying_routers import EVERY_DRAWN, event

from funitel.launcher.keeper.keeper import Keeper
from funitel.proto.keeper.channel import listen
from funitel.router.transport.takeover import MAX_TRIES
from funitel_testing.servers import wait_until
from funitel_testing.takeovers.raw import RawAnswer, RawConnection

SEND_BUFFER = 1 << 14  # that slow readers hold answers up
NUM_EVENTS = 150
PATIENCE_SECONDS = 60.0
MOMENTS = (0.1, 0.8)  # seconds between two deaths, at random


MANY = 1_000_000  # kills


class Routers:
    """A keeper, and one router after the other."""

    def __init__(self, folder: Path) -> None:
        path = str(folder / "keeper")
        listener = socket.create_server(("127.0.0.1", 0), backlog=200)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self.port: int = listener.getsockname()[1]
        self.keeper = Keeper([listener], listen(path), adopt_seconds=PATIENCE_SECONDS)
        self._keeping = threading.Thread(target=self.keeper.run)
        self._keeping.start()
        self.log = folder / "log"
        with self.log.open("wb") as log:
            command = [sys.executable, dying_routers.__file__, path]
            self._forking = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=_env(), process_group=0
            )
        self._pid = 0

    def start(self, max_tries: int = MAX_TRIES) -> None:
        """Start a router; one that runs hands over to it."""
        assert self._forking.stdin is not None
        assert self._forking.stdout is not None
        self._forking.stdin.write(b"%d\n" % max_tries)
        self._forking.stdin.flush()
        self._pid = int(self._forking.stdout.readline())

    def kill(self) -> None:
        """Kill the router that was started last."""
        os.kill(self._pid, signal.SIGKILL)

    def num_open(self) -> tuple[int, int]:
        """Connections of the keeper, and requests in its journal."""
        kept = list(self.keeper._connections.values())
        return len(kept), sum(len(each.requests) for each in kept)

    def close(self) -> None:
        """End all of it."""
        assert self._forking.stdin is not None
        assert self._forking.stdout is not None
        # One that has not handed over yet would serve on without the keeper.
        os.killpg(self._forking.pid, signal.SIGKILL)
        self._forking.stdin.close()
        self._forking.stdout.close()
        self._forking.wait()
        self.keeper.stop()
        self._keeping.join()
        self.keeper.close()


def _env() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": ""}


@pytest.fixture
def routers(tmp_path: Path) -> Iterator[Routers]:
    found = Routers(tmp_path)
    found.start()
    yield found
    found.close()
    log = found.log.read_text()
    assert "Traceback" not in log, log[:5000]


def post(path: str, headers: str = "", version: str = "1.1") -> bytes:
    return f"POST {path} HTTP/{version}\r\nhost: x\r\ncontent-length: 4\r\n{headers}\r\ntext".encode()


def check_stream(answer: RawAnswer) -> None:
    """Every event is there once, with the text that belongs to the seed in the head."""
    assert answer.status == 200, answer.body
    chunks = answer.chunks if answer.is_chunked else re.findall(rb".*?\n\n", answer.body, re.DOTALL)
    events = [chunk for chunk in chunks if chunk != b":\n\n"]
    seed = int(re.search(rb"x-seed: (\d+)\r\n", answer.head)[1])  # type: ignore[index]
    assert events.pop() == b"data: [DONE]\n\n"
    assert len(events) == NUM_EVENTS
    for number, chunk in enumerate(events):
        drawn = int(chunk.split()[2])
        assert (drawn != 0) == (number % EVERY_DRAWN == 0)
        assert chunk == event(seed, number, drawn)


def check_whole(answer: RawAnswer, length: int) -> None:
    assert answer.status == 200, answer.body
    seed = int(re.search(rb"x-seed: (\d+)\r\n", answer.head)[1])  # type: ignore[index]
    assert answer.body == random.Random(seed).randbytes(length)


class Clients:
    """Clients of several kinds. What was refused, because it was read and not in the journal yet, is asked again."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.num_refused = self.num_answers = 0

    async def _ask(self, *requests: bytes, is_slow: bool = False) -> list[RawAnswer]:
        while True:
            connection = await RawConnection.to(self._port, is_slow=is_slow)
            await connection.send(*requests)
            answers = []
            for _ in requests:
                answers.append(await connection.answer())
                if answers[-1].status == 503:
                    assert b"connection: close\r\n" in answers[-1].head
                    assert b"retry-after: " in answers[-1].head
                    break
            self.num_answers += len(answers)
            if answers[-1].status != 503:
                if b"connection: close\r\n" in answers[-1].head:
                    assert await connection.has_ended()
                await connection.close()
                return answers
            assert await connection.has_ended()
            await connection.close()
            self.num_refused += 1

    async def streams(self, headers: str = "", version: str = "1.1", *, is_slow: bool = False) -> None:
        [answer] = await self._ask(post(f"/stream/{NUM_EVENTS}", headers, version), is_slow=is_slow)
        check_stream(answer)

    async def whole(self, length: int, headers: str = "", version: str = "1.1") -> None:
        [answer] = await self._ask(post(f"/whole/{length}", headers, version))
        check_whole(answer, length)

    async def pipelines(self) -> None:
        requests = (post(f"/stream/{NUM_EVENTS}"), post("/whole/3000"), post(f"/stream/{NUM_EVENTS}"))
        first, second, third = await self._ask(*requests)
        check_stream(first)
        check_whole(second, 3000)
        check_stream(third)

    async def reuses(self) -> None:
        """One connection, with pauses."""
        connection = await RawConnection.to(self._port)
        for number in range(6):
            await connection.send(post("/whole/500") if number % 2 else post("/stream/150"))
            answer = await connection.answer()
            self.num_answers += 1
            if answer.status == 503:
                self.num_refused += 1
                await connection.close()
                connection = await RawConnection.to(self._port)
                continue
            if number % 2:
                check_whole(answer, 500)
            else:
                check_stream(answer)
            await asyncio.sleep(0.1)
        await connection.close()

    async def all_kinds(self) -> None:
        """Some clients of each kind."""
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(self.streams())
                group.create_task(self.streams(is_slow=True))
                group.create_task(self.streams("connection: close\r\n"))
                group.create_task(self.streams(version="1.0"))
                group.create_task(self.streams("expect: 100-continue\r\n"))
                group.create_task(self.pipelines())
                group.create_task(self.reuses())
                group.create_task(self.whole(0))
                group.create_task(self.whole(1000, version="1.0"))
                group.create_task(self.whole(5_000_000, "connection: close\r\n"))


async def run(routers: Routers, *, kills: bool, seed: int) -> tuple[Clients, int]:
    """Let clients of all kinds come, while routers end; returns how many did."""
    clients, moments, num_ended = Clients(routers.port), random.Random(seed), 0
    async with asyncio.timeout(PATIENCE_SECONDS):
        asking = asyncio.create_task(clients.all_kinds())
        while not asking.done():
            await asyncio.wait([asking], timeout=moments.uniform(*MOMENTS))
            if kills:
                routers.kill()
            # Here it is not the requests that end routers; handovers do not count.
            await asyncio.to_thread(routers.start, MANY if kills else MAX_TRIES)
            num_ended += 1
        await asking
    return clients, num_ended


async def test_killed_routers_lose_no_byte(routers: Routers) -> None:
    clients, num_killed = await run(routers, kills=True, seed=1)
    assert num_killed > 5
    assert clients.num_refused <= clients.num_answers // 2, "most of what is read is in the journal"
    await asyncio.to_thread(wait_until, lambda: routers.num_open() == (0, 0), 10.0, "something is left")


async def test_replaced_routers_lose_no_byte_and_refuse_nothing(routers: Routers) -> None:
    clients, num_replaced = await run(routers, kills=False, seed=3)
    assert num_replaced > 5
    assert clients.num_refused == 0
    await asyncio.to_thread(wait_until, lambda: routers.num_open() == (0, 0), 10.0, "something is left")
