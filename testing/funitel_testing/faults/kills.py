"""What a soak kills, and which processes are other ones afterwards."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from funitel_testing.faults.scenes import Launched
from funitel_testing.servers import wait_until

REPLACED_SECONDS = 60.0  # until another router serves, on a busy machine


@dataclass(frozen=True)
class Kill:
    """One kind of kill.

    Args:
        name: what is killed.
        strike: does it.
        ends: roles of `vitals` whose processes end.
    """

    name: str
    strike: Callable[[Launched], Awaitable[None]]
    ends: frozenset[str]


async def _shard(scene: Launched) -> None:
    os.kill(scene.server.shard_pids()[0], signal.SIGKILL)


async def _router(scene: Launched) -> None:
    os.kill(scene.server.router_pid(), signal.SIGKILL)


async def _keeper(scene: Launched) -> None:
    os.kill(scene.server.keeper_pid(), signal.SIGKILL)


async def _launcher(scene: Launched) -> None:
    scene.server.kill_launcher()
    await asyncio.to_thread(scene.server.relaunch)


async def _router_and_shards(scene: Launched) -> None:
    for pid in (scene.server.router_pid(), *scene.server.shard_pids()):
        os.kill(pid, signal.SIGKILL)


async def _grammar_workers(scene: Launched) -> None:
    for pid in scene.grammar_workers():
        os.kill(pid, signal.SIGKILL)


async def _replacement(scene: Launched) -> None:
    router = scene.server.router_pid()
    scene.server.process.send_signal(signal.SIGUSR2)
    await asyncio.to_thread(wait_until, lambda: router not in scene.server.router_pids(), REPLACED_SECONDS)


SHARD = Kill("shard", _shard, frozenset({"shards"}))
EVERY_KIND: Sequence[Kill] = (
    SHARD,
    Kill("router", _router, frozenset({"router", "workers"})),
    Kill("keeper", _keeper, frozenset({"keeper"})),
    Kill("launcher", _launcher, frozenset({"launcher"})),
    Kill("router and shards at once", _router_and_shards, frozenset({"router", "shards", "workers"})),
    Kill("grammar processes", _grammar_workers, frozenset({"workers"})),
    Kill("replacement of the router", _replacement, frozenset({"router", "workers"})),
)
