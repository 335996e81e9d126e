"""A prompt with blocks in a file is answered as at first: after a restart, over damage, and when it was swapped out."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from funitel.llm.workers.ranks import LocalRanks
from funitel.llm.workers.threads import ComputeThread
from funitel.model_server.kv_cache.slot_file import PAGE
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import SettingsError
from funitel.proto.step import SamplingParams, StoppingParams
from funitel.router.core.request import Request
from funitel.router.engine.engine import Engine
from funitel.router.engine.warmup import start
from funitel.router.scheduler.scheduler import Scheduler
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics
from funitel_testing.tiny import save_tiny

GIB = 2**30
LENGTH = 90
NUM_FULL = (LENGTH - 1) // 4  # blocks that can be cached
PROMPTS = [tuple((7 * i + 3 * j) % 200 for j in range(LENGTH)) for i in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))


@dataclass
class Running:
    """An engine over a shard of this process."""

    engine: Engine
    metrics: Metrics
    cached: list[int] = field(default_factory=list)  # tokens of each prompt
    tiers: list[dict[str, int]] = field(default_factory=list)

    async def answer(self, prompt: Sequence[int], max_tokens: int = 8, salt: str = "") -> tuple[int, ...]:
        stopping = StoppingParams(max_new_tokens=max_tokens, ignore_eos=True)
        asked = Request(input_ids=tuple(prompt), sampling=SamplingParams(), stopping=stopping, cache_salt=salt)
        ids: list[int] = []
        async with self.engine.submit(asked) as stream:
            async for generation in stream:
                ids.extend(generation.tokens.ids)
        self.cached.append(stream.num_cached_tokens)
        self.tiers.append(stream.cached_by_tier)
        return tuple(ids)

    async def answers(self, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[tuple[int, ...]]:
        return [await self.answer(prompt) for prompt in prompts]

    def counts(self, name: str) -> float:
        found = [line.rpartition(" ") for line in self.metrics.exposition().decode().splitlines()]
        return sum(float(value) for series, _, value in found if series.partition("{")[0] == name)

    @property
    def scheduler(self) -> Scheduler:
        return self.engine._scheduler


@asynccontextmanager
async def running(
    folder: Path, disk: Path | None, *, pool_tokens: int = 140, num_bytes: int = 1 << 20, **router: Any
) -> AsyncIterator[Running]:
    shard = ModelServerSettings(
        model_id=str(folder),
        device="cpu",
        dtype="float32",
        block_size=4,
        num_threads=1,
        kv_disk_gb=0 if disk is None else num_bytes / GIB,
        kv_disk_dir=None if disk is None else str(disk),
    )
    executor, info = load_generator(shard, folder)
    compute, metrics = ComputeThread(), Metrics()
    settings = RouterSettings(
        max_batch_total_tokens=pool_tokens, max_batch_prefill_tokens=min(pool_tokens, 64), **router
    )
    try:
        engine = await start(LocalRanks(executor, info, compute), settings, metrics)
        try:
            yield Running(engine, metrics)
        finally:
            await engine.close()
    finally:
        compute.close()
        if executor.options.disk is not None:
            executor.options.disk.close()


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, ...]]:
    """What the prompts are answered without slots, with room for all."""

    async def ask() -> list[tuple[int, ...]]:
        async with running(folder, None, pool_tokens=2000) as alone:
            return await alone.answers()

    return asyncio.run(ask())


async def test_evicted_blocks_are_found_again(folder: Path, tmp_path: Path, expected: list[tuple[int, ...]]) -> None:
    async with running(folder, tmp_path) as server:
        assert await server.answers() == expected
        assert sum(server.cached) == 0
        assert await server.answers() == expected
        assert server.cached[6:] == [4 * NUM_FULL] * 6
        assert sum(tiers["disk"] for tiers in server.tiers[6:]) >= 5 * 4 * NUM_FULL
        for tiers, cached in zip(server.tiers, server.cached, strict=True):
            assert sum(tiers.values()) == cached
        assert server.counts("funitel_prefix_cache_tier_hit_tokens_total") == 6 * 4 * NUM_FULL
        assert server.counts("funitel_tier_lost_slots_total") == 0


async def test_they_outlive_the_process(folder: Path, tmp_path: Path, expected: list[tuple[int, ...]]) -> None:
    async with running(folder, tmp_path) as server:
        await server.answers()
    async with running(folder, tmp_path) as server:
        assert await server.answers() == expected
        assert server.cached == [4 * NUM_FULL] * 6
        assert server.tiers[0] == {"memory": 0, "disk": 4 * NUM_FULL}
        assert await server.answer(PROMPTS[0], salt="another") == expected[0]
        assert server.cached[-1] == 0, "salts stay apart"


@pytest.mark.parametrize("what", ["dtype", "model"])
async def test_blocks_of_something_else_are_not_found(
    folder: Path, tmp_path: Path, what: str, expected: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    own = save_tiny("llama", tmp_path / "model")
    disk = tmp_path / "kv"
    async with running(own, disk) as server:
        await server.answers()
    config = own / "config.json"
    if what == "model":
        config.write_text(config.read_text() + "\n")
    else:
        (own / "generation_config.json").write_text('{"eos_token_id": 2}')
    async with running(own, disk) as server:
        assert await server.answers() == expected
        assert sum(server.cached) == 0
    assert len([line for line in caplog.messages if "is discarded" in line]) == 1


def only_file(folder: Path) -> Path:
    [path] = folder.iterdir()
    return path


def damage(path: Path, chance: random.Random, kind: str) -> None:
    """Damage most of a file behind its head."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        if kind == "cut":
            file.truncate(size // 3)
            file.truncate(size)
            return
        places = range(PAGE, size, PAGE // 2) if kind == "bits" else range(size // 4 // PAGE * PAGE, size, PAGE)
        for at in places:
            file.seek(at)
            if kind == "zeros":
                file.write(bytes(PAGE))
                continue
            found = bytearray(file.read(PAGE // 2))
            found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
            file.seek(at)
            file.write(found)


@pytest.mark.parametrize("kind", ["bits", "zeros", "cut"])
async def test_a_damaged_file_is_computed_again(
    folder: Path, tmp_path: Path, kind: str, expected: list[tuple[int, ...]]
) -> None:
    async with running(folder, tmp_path) as server:
        await server.answers()
    path = only_file(tmp_path)
    damage(path, random.Random(3), kind)
    async with running(folder, tmp_path) as server:
        assert await server.answers() == expected
        assert await server.answers() == expected
        assert server.counts("funitel_tier_lost_slots_total") > 0


async def test_damage_beside_running_streams_fails_none(
    folder: Path, tmp_path: Path, expected: list[tuple[int, ...]]
) -> None:
    """The file is damaged again and again while six streams run."""
    async with running(folder, tmp_path, pool_tokens=300) as server:
        await server.answers()
        path = only_file(tmp_path)
        for number in range(10):
            damage(path, random.Random(number), "bits")
            assert await asyncio.gather(*map(server.answer, PROMPTS)) == expected
        assert server.counts("funitel_tier_lost_slots_total") > 0
        assert server.counts("funitel_tier_lost_slots_total") < 10 * 6 * NUM_FULL


async def test_content_expires_in_memory_and_on_disk(
    folder: Path, tmp_path: Path, expected: list[tuple[int, ...]]
) -> None:
    async with running(folder, tmp_path, prefix_cache_ttl=0.5) as server:
        await server.answers()
        server.cached.clear()
        assert await server.answer(PROMPTS[0]) == expected[0]
        assert await server.answer(PROMPTS[5]) == expected[5]
        assert server.cached == [4 * NUM_FULL] * 2
        await asyncio.sleep(0.6)
        assert await server.answers() == expected
        assert server.cached[2:] == [0] * 6
        assert server.counts("funitel_prefix_cache_expired_blocks_total") > 5 * NUM_FULL
    await asyncio.sleep(0.6)
    async with running(folder, tmp_path, prefix_cache_ttl=0.5) as server:
        assert await server.answers() == expected
        assert sum(server.cached) == 0, "time goes on while no server runs"


async def test_the_least_recently_used_slots_go_first(
    folder: Path, tmp_path: Path, expected: list[tuple[int, ...]]
) -> None:
    num_bytes = 2 * PAGE + 50 * (PAGE + 128)  # slots for two prompts
    async with running(folder, tmp_path, num_bytes=num_bytes) as server:
        assert server.scheduler.blocks.host.num_slots == 50
        await server.answers(PROMPTS[:4])
        server.cached.clear()
        assert await server.answer(PROMPTS[0]) == expected[0]
        assert server.cached[0] < 4 * NUM_FULL, "it has left for those behind it"


@pytest.mark.parametrize("mode", ["recompute", "swap"])
async def test_six_long_requests_in_room_for_three(
    folder: Path, tmp_path: Path, mode: str, expected: list[tuple[int, ...]]
) -> None:
    async with running(folder, None, pool_tokens=2000) as server:
        alone = [await server.answer(prompt, 60) for prompt in PROMPTS]
    disk = tmp_path if mode == "swap" else None
    async with running(folder, disk, pool_tokens=3 * (LENGTH + 30), preemption_mode=mode) as server:
        answers = [await server.answer(PROMPTS[0], 60)]
        answers += await asyncio.gather(*(server.answer(prompt, 60) for prompt in PROMPTS[1:]))
        assert answers == alone
        assert server.scheduler.num_preempted > 0
        assert (server.scheduler.num_swapped > 0) == (mode == "swap")
        assert server.counts("funitel_swapped_total") == server.scheduler.num_swapped
        recomputed = server.counts("funitel_recomputed_tokens_total")
        if mode == "swap":
            assert recomputed <= 4 * server.scheduler.num_preempted
            assert not server.scheduler.blocks.host._reserved


async def test_swapping_without_room_recomputes(folder: Path, tmp_path: Path) -> None:
    async with running(folder, None, pool_tokens=2000) as server:
        alone = [await server.answer(prompt, 60) for prompt in PROMPTS]
    num_bytes = 2 * PAGE + 3 * (PAGE + 128)
    async with running(folder, tmp_path, pool_tokens=350, num_bytes=num_bytes, preemption_mode="swap") as server:
        assert await asyncio.gather(*(server.answer(prompt, 60) for prompt in PROMPTS)) == alone
        assert server.scheduler.num_preempted > 0
        assert server.scheduler.num_swapped == 0


async def test_what_cannot_be_is_told_in_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match=r"^--preemption-mode swap needs slots of --kv-disk-gb, or on a GPU of "):
        async with running(folder, None, preemption_mode="swap"):
            pass
    with pytest.raises(SettingsError, match=r"^--kv-disk-gb .* has no room for a block, which has \d+ bytes$"):
        async with running(folder, tmp_path, num_bytes=5000):
            pass
    monkeypatch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_bavail=100, f_frsize=PAGE))
    with pytest.raises(SettingsError, match=r"^--kv-disk-gb: 1 x \d+ bytes need \d+ more in .* lower it$"):
        async with running(folder, tmp_path):
            pass
