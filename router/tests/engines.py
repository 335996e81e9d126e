"""An engine over fake shards, the requests given to it, and what it must answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fake_shards import FakeShard, engine_over, fake_shards, next_token

from funitel.proto.step import SamplingParams, StoppingParams
from funitel.router.core.request import Request
from funitel.router.engine.engine import Engine
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics


@asynccontextmanager
async def running(
    folder: Path, count: int = 1, shard: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Engine, list[FakeShard], Metrics]]:
    """An engine connected to fake shards."""
    metrics = Metrics()
    async with fake_shards(folder, count, **(shard or {})) as shards:
        chosen = {"master_shard_uds_path": f"{folder}/shard-0", "max_batch_prefill_tokens": 32} | settings
        engine = await engine_over(RouterSettings(**chosen), metrics)
        yield engine, shards, metrics
        for fake in shards:
            fake.pause.set()
        await asyncio.wait_for(engine.close(), 10)


def request(prompt_len: int = 5, max_new_tokens: int = 6, first: int = 0) -> Request:
    ids = tuple(range(first, first + prompt_len))
    return Request(
        input_ids=ids,
        sampling=SamplingParams(),
        stopping=StoppingParams(max_new_tokens=max_new_tokens),
        inputs="".join(map(chr, ids)),
    )


def expected(asked: Request) -> list[int]:
    tokens = list(asked.input_ids)
    media = b"".join(each.span.key for each in asked.media)
    for _ in range(asked.stopping.max_new_tokens):
        tokens.append(next_token(tokens, "" if asked.adapter is None else asked.adapter.name, media))
    return tokens[len(asked.input_ids) :]


async def run(engine: Engine, asked: Request) -> list[int]:
    async with engine.submit(asked) as stream:
        return [token_id async for generation in stream for token_id in generation.tokens.ids]
