"""Code whose keeper speaks another version is installed while the server runs: what goes on, and what ends."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from funitel_testing import takeovers
from funitel_testing.faults.model import save_endless
from funitel_testing.faults.scenes import ALIKE, LIMITS
from funitel_testing.servers import Server, serving, wait_until
from funitel_testing.takeovers.asks import ASKS
from funitel_testing.takeovers.load import Comparison, Reference, report, undisturbed
from funitel_testing.takeovers.raw import BrokenFraming, RawAnswer, RawConnection

NUM_CLIENTS, NUM_TOKENS = 15, 120
BEFORE_SECONDS = 0.05  # of a signal: fast machines answer all within 0.3
REPLACED = "the keeper is replaced, since a router of another version was started"
AGAIN = "the router answers again after"


class InstalledVersion:
    """A server, and the version that its next processes speak."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "version"
        self.file.write_text("1")

    def install(self) -> None:
        """Install another one."""
        self.file.write_text(str(int(self.file.read_text()) + 1))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> InstalledVersion:
    return InstalledVersion(tmp_path_factory.mktemp("version"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, installed: InstalledVersion) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("takeover")
    flags = ("--model-id", str(save_endless(folder / "model")), *LIMITS, *ALIKE, "--shard-uds-path", str(folder / "s"))
    path = os.pathsep.join([str(Path(takeovers.__file__).with_name("versions")), os.environ.get("PYTHONPATH", "")])
    with serving(folder, *flags, environ={"PYTHONPATH": path, "VERSION_FILE": str(installed.file)}) as server:
        yield server


@pytest.fixture(scope="module")
def known(server: Server) -> Reference:
    return asyncio.run(undisturbed(server.port, NUM_CLIENTS, NUM_TOKENS))


async def asked(port: int, number: int) -> RawAnswer:
    """The answer to one request on a connection of its own."""
    connection = await RawConnection.to(port)
    try:
        await connection.send(ASKS[number % len(ASKS)].request(number, NUM_TOKENS))
        answer = await connection.answer()
    finally:
        await connection.close()
    answer.head = answer.head.replace(b"connection: close\r\n", b"")
    return answer


def times_again(server: Server) -> int:
    """How often a router has been started again."""
    return server.log.read_text().count(AGAIN)


async def replaced(server: Server, known: Reference) -> Comparison:
    """Clients that ask while another router is asked for, until it answers; compared with an undisturbed run."""
    comparison, before = Comparison(), times_again(server)

    async def ask(number: int) -> None:
        kind = ASKS[number % len(ASKS)]
        is_last = False
        while not is_last:
            is_last = times_again(server) > before
            comparison.take(kind, number, await asked(server.port, number), known[kind.name, number])

    async def strike() -> None:
        await asyncio.sleep(BEFORE_SECONDS)
        server.process.send_signal(signal.SIGUSR2)

    await asyncio.gather(strike(), *map(ask, range(NUM_CLIENTS)))
    return comparison


@pytest.mark.parametrize("adopts", [False, True])
def test_a_router_finishes_and_another_one_follows(
    server: Server, installed: InstalledVersion, known: Reference, adopts: bool
) -> None:
    if adopts:
        server.kill_launcher()
        server.relaunch()
    shards, router, keeper = server.shard_pids(), server.router_pid(), server.keeper_pid()
    count = times_again(server)
    installed.install()
    comparison = asyncio.run(replaced(server, known))
    print(report(comparison))
    assert not comparison.problems, report(comparison)
    assert server.router_pid() != router
    assert server.keeper_pid() != keeper
    assert server.shard_pids() == shards
    assert times_again(server) == count + 1
    assert not server.error_lines()


def test_connections_of_a_router_that_has_died_are_reset(
    server: Server, installed: InstalledVersion, known: Reference
) -> None:
    shards, router = server.shard_pids(), server.router_pid()
    num_replaced, count = server.log.read_text().count(REPLACED), times_again(server)
    installed.install()

    async def ask_and_strike() -> list[RawAnswer | BaseException]:
        asks = [asyncio.create_task(asked(server.port, number)) for number in range(NUM_CLIENTS)]
        await asyncio.sleep(BEFORE_SECONDS)
        os.kill(router, signal.SIGKILL)
        return await asyncio.gather(*asks, return_exceptions=True)

    ends = asyncio.run(ask_and_strike())
    lost = [end for end in ends if isinstance(end, BaseException)]
    assert lost, "no request was under way"
    assert all(isinstance(end, ConnectionResetError | BrokenFraming) for end in lost), lost
    server.wait_log(f"connections={len(lost)} requests=", 30)
    server.wait_ready()
    assert server.log.read_text().count(REPLACED) == num_replaced + 1
    wait_until(lambda: times_again(server) == count + 1, 30, "no router answers")
    assert server.shard_pids() == shards
    again = asyncio.run(undisturbed(server.port, NUM_CLIENTS, NUM_TOKENS))
    comparison = Comparison()
    for number in range(NUM_CLIENTS):
        kind = ASKS[number % len(ASKS)]
        comparison.take(kind, number, again[kind.name, number], known[kind.name, number])
    assert not comparison.problems, report(comparison)
