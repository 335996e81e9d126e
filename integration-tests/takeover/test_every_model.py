"""The router is killed under streams of every kind of model, and every client gets the bytes of an undisturbed run.

With `--full`, all kinds; else some. The router is killed three times under the same streams. A request that it had read
and not yet put into the journal gets 503.
"""

import asyncio
import os
import random
import re
import signal
from pathlib import Path

import httpx
import pytest

from funitel_testing.servers import Server, serving, wait_until
from funitel_testing.takeovers.load import Comparison, disturbed, report, undisturbed
from funitel_testing.takeovers.models import COMMON_FLAGS, KILLED_DEPLOYMENTS

IN_SHORT = ("adapters-on-two-ranks",)
NUM_KILLS, MAX_REFUSED = 3, 2
AGAIN = "the router answers again after"
USED = 'funitel_blocks{state="used"}'
TAKEN = re.compile(r"(?m)^router .* took over connections=\d+ requests=(\d+)$")
SEQUENCES = re.compile(r"took over sequences=.* seconds=[\d.]+")


@pytest.mark.parametrize("kind", KILLED_DEPLOYMENTS)
def test_bytes_are_those_of_an_undisturbed_run(kind: str, is_full: bool, tmp_path: Path) -> None:
    if kind not in IN_SHORT and not is_full:
        pytest.skip("with --full")
    made = KILLED_DEPLOYMENTS[kind](tmp_path)
    moments = random.Random(kind)
    with serving(tmp_path, *made.flags, *COMMON_FLAGS) as server:
        for load in made.loads:
            httpx.post(f"{server.url}/v1/load_lora_adapter", json=load, timeout=30).raise_for_status()
        known = asyncio.run(undisturbed(server.port, made.num_clients, made.num_tokens, made.asks))
        wrong = [answer.body for answer in known.values() if answer.status != 200]
        assert not wrong, wrong
        shards = server.shard_pids()
        comparison = Comparison()

        async def strike() -> None:
            await asyncio.to_thread(server.wait_steps, 3)
            for _ in range(NUM_KILLS):
                await asyncio.sleep(moments.uniform(0.0, 0.5))
                await asyncio.to_thread(kill_router, server)

        asyncio.run(disturbed(server.port, made.num_clients, made.num_tokens, known, strike, comparison, made.asks))
        log = server.log.read_text()
        print(report(comparison), *SEQUENCES.findall(log), sep="\n")
        assert not comparison.problems, report(comparison)
        assert comparison.num_refused <= MAX_REFUSED, report(comparison)
        assert server.shard_pids() == shards, "the shards were started again"
        wait_until(lambda: server.metrics()[USED] == 0, 10, "blocks are left")
        assert [int(each) > 0 for each in TAKEN.findall(log)] == [True] * NUM_KILLS, "no stream was under way"
        assert "Traceback" not in server.log.read_text()


def kill_router(server: Server) -> None:
    """Kill the router, and wait until the next one serves."""
    told = server.log.read_text().count(AGAIN)
    os.kill(server.router_pid(), signal.SIGKILL)
    wait_until(lambda: server.log.read_text().count(AGAIN) > told, 60, "the next router does not serve")
