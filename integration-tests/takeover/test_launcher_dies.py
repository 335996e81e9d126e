"""The launcher is killed under load: clients notice nothing, and the next launcher goes on with the same processes."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from funitel_testing.faults.model import save_endless
from funitel_testing.faults.scenes import ALIKE, LIMITS
from funitel_testing.servers import Server, alive, marked, serving, wait_until
from funitel_testing.takeovers.load import Comparison, Reference, disturbed, report, undisturbed

NUM_CLIENTS, NUM_TOKENS = 15, 120


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("launcher")
    model = save_endless(folder / "model")
    flags = ("--model-id", str(model), *LIMITS, *ALIKE, "--shard-uds-path", str(folder / "s"))
    with serving(folder, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def known(server: Server) -> Reference:
    return asyncio.run(undisturbed(server.port, NUM_CLIENTS, NUM_TOKENS))


def pids_of(server: Server) -> list[int]:
    return [server.router_pid(), server.keeper_pid(), *server.shard_pids()]


def test_a_killed_launcher_costs_no_byte(server: Server, known: Reference) -> None:
    before = pids_of(server)
    comparison = Comparison()

    async def strike() -> None:
        server.kill_launcher()
        await asyncio.to_thread(server.relaunch)

    asyncio.run(disturbed(server.port, NUM_CLIENTS, NUM_TOKENS, known, strike, comparison))
    assert not comparison.problems, report(comparison)
    assert pids_of(server) == before, "all of them were adopted"


def test_the_next_launcher_watches_what_it_has_adopted(server: Server) -> None:
    server.kill_launcher()
    server.relaunch()
    router, keeper, shard = pids_of(server)
    for pid in (router, keeper, shard):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.log.read_text().count("answers again after") == 2, 60, "they were not started again")
    server.wait_ready()
    assert not {router, keeper, shard} & set(pids_of(server))


def test_without_another_launcher_everything_ends(tmp_path: Path, server: Server) -> None:
    model = Path(server.log).with_name("model")
    flags = ("--model-id", str(model), *LIMITS, *ALIKE, "--shard-uds-path", str(tmp_path / "s"))
    with serving(tmp_path, *flags, "--adopt-timeout", "1") as other:
        pids = set(pids_of(other))
        other.kill_launcher()
        wait_until(lambda: not alive(pids), 30, "they still run")
        assert not marked(other.mark)
        assert not [*tmp_path.glob("s.*"), *tmp_path.glob("s-*")], "files are left"
