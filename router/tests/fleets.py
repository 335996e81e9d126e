"""A fleet over fake shards, for tests: replicas that can be lost and come back."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_shards import FakeShard, fake_shards, next_token
from fakes import eventually

from funitel.proto.step import SamplingParams, StoppingParams
from funitel.router.connect import connect
from funitel.router.core.request import Request
from funitel.router.replica_set.replica_set import ReplicaSet
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics


@dataclass
class Running:
    """A fleet, its fake shards by replica and rank, and its metrics."""

    fleet: ReplicaSet
    folders: list[Path]
    replicas: list[list[FakeShard]]
    metrics: Metrics
    stack: AsyncExitStack
    shard: dict[str, Any] = field(default_factory=dict)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    async def start(self, **changes: Any) -> str:
        """Start the shards of a further replica, to be added by the address that is returned."""
        folder = self.folders[0].parent / str(len(self.folders))
        folder.mkdir()
        self.folders.append(folder)
        fresh = fake_shards(folder, len(self.replicas[0]), **(self.shard | changes))
        self.replicas.append(await self.stack.enter_async_context(fresh))
        return f"unix://{folder}/shard-0"

    async def lose(self, replica: int) -> None:
        for fake in self.replicas[replica]:
            await fake.die()

    async def restart(self, replica: int, **changes: Any) -> list[FakeShard]:
        """Start a lost replica's shards again: they know nothing of what was."""
        count = len(self.replicas[replica])
        sockets = [self.folders[replica] / f"shard-{rank}" for rank in range(count)]
        # The old servers are of this process, and would remove the sockets of the new ones.
        await holds(lambda: not any(socket.exists() for socket in sockets), "the old ones have ended")
        fresh = fake_shards(self.folders[replica], count, **(self.shard | changes))
        self.replicas[replica] = await self.stack.enter_async_context(fresh)
        return self.replicas[replica]


@asynccontextmanager
async def running(
    folder: Path, num_replicas: int = 2, num_shards: int = 1, shard: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Running]:
    """A fleet that is not waited for where it is lost, unless `shard_return_timeout` is set."""
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        replicas, folders = [], [folder / str(index) for index in range(num_replicas)]
        for each in folders:
            each.mkdir()
            replicas.append(await stack.enter_async_context(fake_shards(each, num_shards, **(shard or {}))))
        chosen = RouterSettings(
            master_shard_uds_path=f"{folders[0]}/shard-0",
            replica_address=tuple(f"unix://{each}/shard-0" for each in folders[1:]),
            **({"max_batch_prefill_tokens": 32, "shard_return_timeout": 0} | settings),
        )
        fleet = await connect(chosen, metrics)
        assert isinstance(fleet, ReplicaSet)
        yield Running(fleet, folders, replicas, metrics, stack, shard or {})
        for fake in (fake for replica in replicas for fake in replica):
            fake.pause.set()
        await asyncio.wait_for(fleet.close(), 10)


def request(prompt_len: int = 9, max_new_tokens: int = 6, first: int = 0, **sampling: Any) -> Request:
    return Request(
        input_ids=tuple(range(first, first + prompt_len)),
        sampling=SamplingParams(**sampling),
        stopping=StoppingParams(max_new_tokens=max_new_tokens),
        inputs="".join(map(chr, range(first, first + prompt_len))),
    )


def expected(asked: Request) -> list[int]:
    tokens = list(asked.input_ids)
    for _ in range(asked.stopping.max_new_tokens):
        tokens.append(next_token(tokens, "" if asked.adapter is None else asked.adapter.name))
    return tokens[len(asked.input_ids) :]


async def run(fleet: ReplicaSet, asked: Request, began: asyncio.Event | None = None) -> list[int]:
    ids: list[int] = []
    async with fleet.submit(asked) as stream:
        async for generation in stream:
            ids += generation.tokens.ids
            if began is not None:
                began.set()
    return ids


async def holds(claim: Callable[[], bool], what: str) -> None:
    async def ask() -> bool:
        return claim()

    await eventually(ask, what)
