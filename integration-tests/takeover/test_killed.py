"""Processes are killed under load of every API, and every client gets the bytes of an undisturbed run.

A request that the router had read and not yet put into the journal gets 503.

With `--full`, 50 kills under 100 clients; else a few.
"""

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from funitel_testing.faults.model import save_endless
from funitel_testing.faults.scenes import ALIKE, LIMITS
from funitel_testing.servers import Server, serving, wait_until
from funitel_testing.takeovers.load import Comparison, Reference, disturbed, report, undisturbed

NUM_TOKENS = 160
SECONDS = 1.5  # after the start of a load, within which something dies
MAX_RESTARTS = "1000"


@pytest.fixture(scope="module")
def num_clients(request: pytest.FixtureRequest) -> int:
    return 100 if request.config.getoption("--full") else 45


@pytest.fixture(scope="module")
def num_kills(request: pytest.FixtureRequest) -> int:
    return 50 if request.config.getoption("--full") else 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("takeover")
    model = save_endless(folder / "model")
    flags = ("--model-id", str(model), *LIMITS, *ALIKE, "--max-restarts", MAX_RESTARTS)
    with serving(folder, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def known(server: Server, num_clients: int) -> Reference:
    found = asyncio.run(undisturbed(server.port, num_clients, NUM_TOKENS))
    assert all(answer.status == 200 for answer in found.values()), [a.body for a in found.values() if a.status != 200]
    return found


async def struck(
    server: Server, known: Reference, strikes: int, strike: Callable[[], Awaitable[None]], seed: int
) -> Comparison:
    """So many loads, during each of which `strike` is done once at a random moment."""
    comparison, moments = Comparison(), random.Random(seed)

    async def later() -> None:
        await asyncio.sleep(moments.uniform(0, SECONDS))
        await strike()

    for _ in range(strikes):
        await disturbed(server.port, len(known), NUM_TOKENS, known, later, comparison)
    return comparison


def test_nothing_dies(server: Server, known: Reference) -> None:
    async def nothing() -> None:
        pass

    comparison = asyncio.run(struck(server, known, 1, nothing, 0))
    assert not comparison.problems, report(comparison)


def test_the_router_dies(server: Server, known: Reference, num_kills: int) -> None:
    async def strike() -> None:
        os.kill(server.router_pid(), signal.SIGKILL)

    shards = server.shard_pids()
    comparison = asyncio.run(struck(server, known, num_kills, strike, 1))
    print(report(comparison))
    assert not comparison.problems, report(comparison)
    assert comparison.num_refused <= comparison.num_answers // 50, report(comparison)
    assert server.shard_pids() == shards, "the shards were started again"


def test_the_router_is_upgraded_in_place(server: Server, known: Reference, num_kills: int) -> None:
    async def strike() -> None:
        router = server.router_pid()
        server.process.send_signal(signal.SIGUSR2)
        await asyncio.to_thread(wait_until, lambda: server.router_pid() != router, 30)

    comparison = asyncio.run(struck(server, known, max(2, num_kills * 2 // 5), strike, 2))
    print(report(comparison))
    assert not comparison.problems, report(comparison)
    assert not comparison.num_refused, report(comparison)


def test_the_keeper_dies(server: Server, known: Reference) -> None:
    async def strike() -> None:
        os.kill(server.keeper_pid(), signal.SIGKILL)

    comparison = asyncio.run(struck(server, known, 3, strike, 3))
    assert not comparison.problems, report(comparison)


def test_router_and_shard_die_at_once(server: Server, known: Reference) -> None:
    async def strike() -> None:
        for pid in (server.router_pid(), *server.shard_pids()):
            os.kill(pid, signal.SIGKILL)

    comparison = asyncio.run(struck(server, known, 3, strike, 4))
    print(report(comparison))
    assert not comparison.problems, report(comparison)
