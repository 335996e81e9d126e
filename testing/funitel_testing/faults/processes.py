"""Faults of processes: killed, stopped for a while, started again."""

import asyncio
import os
import signal
import time

from funitel_testing.faults.kills import (
    kill_keeper,
    kill_launcher,
    kill_router,
    kill_router_and_shards,
    kill_shard,
    replace_router,
)
from funitel_testing.faults.scenes import BOUND_SECONDS, ONE, PAIR, TWO_RANKS, ByHand, Launched, by_hand
from funitel_testing.faults.table import Cost, Fault
from funitel_testing.servers import alive, wait_until

SHORT_STOP_SECONDS = 2.0  # well below the bound


async def _kill_last_shard(scene: Launched) -> None:
    os.kill(scene.server.shard_pids()[-1], signal.SIGKILL)


async def _kill_grammar_workers(scene: Launched) -> None:
    for _ in range(5):
        for pid in scene.grammar_workers():
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.1)


async def _stop_shard_shortly(scene: Launched) -> None:
    pid = scene.server.shard_pids()[0]
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(SHORT_STOP_SECONDS)
    os.kill(pid, signal.SIGCONT)


async def _stop_shard_for_good(scene: Launched) -> None:
    pid = scene.server.shard_pids()[0]
    os.kill(pid, signal.SIGSTOP)
    await asyncio.to_thread(wait_until, lambda: not alive({pid}), 60 * BOUND_SECONDS, "the hang is not detected")


async def _kill_router_alone(scene: ByHand) -> float:
    scene.router.process.kill()
    scene.router.process.wait()
    gone = time.monotonic()
    scene.router.start_again()
    return gone


async def _restart_router(scene: ByHand) -> None:
    await asyncio.to_thread(scene.router.end, signal.SIGTERM)
    scene.router.start_again()


FAULTS = (
    Fault(
        name="kill -9 of the only shard",
        cost=Cost.NOTHING,
        why="it is started again, and its streams wait",
        scene=ONE,
        strike=kill_shard,
        is_wearing=True,
    ),
    Fault(
        name="kill -9 of rank 1 of two",
        cost=Cost.NOTHING,
        why="its replica is started again, and its streams wait",
        scene=TWO_RANKS,
        strike=_kill_last_shard,
        is_wearing=True,
        is_brief=False,
    ),
    Fault(
        name="kill -9 of the shard of one of two replicas",
        cost=Cost.NOTHING,
        why="the other replica goes on with what it had",
        scene=PAIR,
        strike=kill_shard,
        is_wearing=True,
    ),
    Fault(
        name="kill -9 of the processes that check grammars",
        cost=Cost.NOTHING,
        why="a grammar is checked again in another process",
        scene=PAIR,
        strike=_kill_grammar_workers,
    ),
    Fault(
        name=f"SIGSTOP of a shard for {SHORT_STOP_SECONDS:g} s, less than the bound",
        cost=Cost.NOTHING,
        why="its streams pause",
        scene=PAIR,
        strike=_stop_shard_shortly,
    ),
    Fault(
        name=f"SIGSTOP of the only shard for longer than the bound, {BOUND_SECONDS:g} s",
        cost=Cost.NOTHING,
        why="it is killed and started again",
        scene=ONE,
        strike=_stop_shard_for_good,
        is_wearing=True,
    ),
    Fault(
        name="kill -9 of the launcher",
        cost=Cost.NOTHING,
        why="its children go on, and the next launcher adopts them",
        scene=PAIR,
        strike=kill_launcher,
    ),
    Fault(
        name="kill -9 of the router",
        cost=Cost.NOTHING,
        why="it is started again, and takes over connections and sequences",
        scene=PAIR,
        strike=kill_router,
        is_wearing=True,
    ),
    Fault(
        name="replacement of the router by SIGUSR2",
        cost=Cost.NOTHING,
        why="the next one takes over from it",
        scene=PAIR,
        strike=replace_router,
        is_wearing=True,
    ),
    Fault(
        name="kill -9 of the keeper",
        cost=Cost.NOTHING,
        why="the router has the connections too, and gives them to the next keeper",
        scene=PAIR,
        strike=kill_keeper,
        is_wearing=True,
    ),
    Fault(
        name="kill -9 of the router and of the only shard at once",
        cost=Cost.NOTHING,
        why="both are started again; sequences are computed again by their tokens",
        scene=ONE,
        strike=kill_router_and_shards,
        is_wearing=True,
    ),
    Fault(
        name="kill -9 of a router without a keeper, as with its host; the shards have other hosts",
        cost=Cost.IN_FLIGHT,
        why="the connections end with it; the shards serve the next router, which knows none of its streams",
        scene=by_hand,
        strike=_kill_router_alone,
        is_away=True,
    ),
    Fault(
        name="restart of a router without a keeper by SIGTERM",
        cost=Cost.NOTHING,
        why="it drains; requests that come meanwhile find no server and are repeated",
        scene=by_hand,
        strike=_restart_router,
        is_away=True,
    ),
)
