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


async def kill_shard(scene: Launched) -> None:
    """The first one."""
    os.kill(scene.server.shard_pids()[0], signal.SIGKILL)


async def kill_router(scene: Launched) -> None:
    """The router, which the launcher starts again."""
    os.kill(scene.server.router_pid(), signal.SIGKILL)


async def kill_keeper(scene: Launched) -> None:
    """The keeper, which the launcher starts again."""
    os.kill(scene.server.keeper_pid(), signal.SIGKILL)


async def kill_launcher(scene: Launched) -> None:
    """The launcher; another one is started, as an init system does."""
    scene.server.kill_launcher()
    await asyncio.to_thread(scene.server.relaunch)


async def kill_router_and_shards(scene: Launched) -> None:
    """The router and every shard, at once."""
    for pid in (scene.server.router_pid(), *scene.server.shard_pids()):
        os.kill(pid, signal.SIGKILL)


async def _kill_grammar_workers(scene: Launched) -> None:
    for pid in scene.grammar_workers():
        os.kill(pid, signal.SIGKILL)


async def replace_router(scene: Launched) -> None:
    """Have the launcher replace the router in place."""
    router = scene.server.router_pid()
    scene.server.process.send_signal(signal.SIGUSR2)
    await asyncio.to_thread(wait_until, lambda: router not in scene.server.router_pids(), REPLACED_SECONDS)


SHARD = Kill("shard", kill_shard, frozenset({"shards"}))
EVERY_KIND: Sequence[Kill] = (
    SHARD,
    Kill("router", kill_router, frozenset({"router", "workers"})),
    Kill("keeper", kill_keeper, frozenset({"keeper"})),
    Kill("launcher", kill_launcher, frozenset({"launcher"})),
    Kill("router and shards at once", kill_router_and_shards, frozenset({"router", "shards", "workers"})),
    Kill("grammar processes", _kill_grammar_workers, frozenset({"workers"})),
    Kill("replacement of the router", replace_router, frozenset({"router", "workers"})),
)
