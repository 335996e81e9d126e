"""Routers that end at random moments over real shards: another one goes on, and every generation is that of one run."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from funitel.proto import wire
from funitel.proto.step import Generation, GrammarType, SamplingParams, StoppingParams
from funitel.proto.strategy import DecodingStrategy
from funitel.router.connect import connect
from funitel.router.core.request import Request
from funitel.router.replica_set.replica_set import ReplicaSet
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics
from funitel_testing.servers import wait_until
from funitel_testing.shards import shards
from funitel_testing.takeovers.routers import abandon
from funitel_testing.tiny import save_tiny

NUM_TOKENS = 60
KINDS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "temperature": 1.3, "seed": 5},
    {"do_sample": True, "temperature": 1.1, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 6},
    {"strategy": DecodingStrategy(mirostat=2, mirostat_tau=3.0), "seed": 7},
    {"grammar_type": GrammarType.REGEX, "grammar": "[ab]{90}"},
    {"frequency_penalty": 0.7, "logit_bias": ((3, 2.0),)},
]


def requests() -> list[Request]:
    """One of each kind, two of them siblings; one with a long prompt, one with alternatives."""
    made = [
        Request(
            input_ids=tuple(range(40 + i, 60 + 2 * i)),
            sampling=SamplingParams(**kind),
            stopping=StoppingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True),
            top_n_tokens=2 if i == 1 else 0,
            output_key=f"r{i}/1",
        )
        for i, kind in enumerate(KINDS)
    ]
    made.append(replace(made[0], input_ids=tuple(range(30, 90)) * 3, output_key="long/1"))
    made.append(replace(made[1], sampling=replace(made[1].sampling, seed=9), output_key="r1/2"))
    return made


@asynccontextmanager
async def router(socket: Path) -> AsyncIterator[ReplicaSet]:
    """A router that ends without a word to the shards, at the end of the block."""
    settings = RouterSettings(
        master_shard_uds_path=f"{socket}-0", keeper="unused", max_batch_prefill_tokens=64, max_batch_size=6
    )
    fleet = await connect(settings, Metrics())
    assert isinstance(fleet, ReplicaSet)
    try:
        yield fleet
    finally:
        await abandon(fleet)


def on_wire(generations: list[Generation]) -> list[bytes]:
    """Generations as bytes, whatever their rows were called."""
    return [wire.encode_generation(replace(each, request_id=0)).SerializeToString() for each in generations]


async def submitted(fleet: ReplicaSet, asked: list[Request], *, is_replayed: bool) -> list[list[Generation]]:
    """What each request brings, as it comes."""
    found: list[list[Generation]] = [[] for _ in asked]
    fleet.replays_begun({each.output_key.partition("/")[0] for each in asked} if is_replayed else ())
    for each, into in zip(asked, found, strict=True):
        stream = fleet.submit(replace(each, is_replayed=is_replayed))
        stream.listen(lambda event, _, into=into: into.append(event))  # type: ignore[misc]
    return found


async def ended(found: list[list[Generation]]) -> None:
    for _ in range(6000):
        if all(each and (not isinstance(each[-1], Generation) or each[-1].finished is not None) for each in found):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("some have not ended")


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_generations_are_those_of_one_run(
    num_ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model, socket = save_tiny("llama", tmp_path / "model"), tmp_path / "shard"
    with shards(model, socket, num_ranks, "--block-size", "4"):
        wait_until(lambda: all(Path(f"{socket}-{rank}").exists() for rank in range(num_ranks)), 60)
        asked = requests()
        async with router(socket) as fleet:
            found = await submitted(fleet, asked, is_replayed=False)
            await ended(found)
            expected = [on_wire(each) for each in found]
            fleet.release_outputs([each.output_key for each in asked])
            await fleet._releases.close()
        chosen = random.Random(num_ranks)
        for _ in range(4):
            for turn in range(4):
                async with router(socket) as fleet:
                    found = await submitted(fleet, asked, is_replayed=turn > 0)
                    await (ended(found) if turn == 3 else asyncio.sleep(chosen.random() * 0.15))
                    if turn == 3:
                        fleet.release_outputs([each.output_key for each in asked])
                        await fleet._releases.close()
                        used = [member.engine._scheduler.blocks.num_used for member in fleet._serving]
                        assert used == [0]
            assert [on_wire(each) for each in found] == expected
    lines = [each.message for each in caplog.records if each.message.startswith("took over sequences")]
    assert any(" held=0 " not in line for line in lines), lines
