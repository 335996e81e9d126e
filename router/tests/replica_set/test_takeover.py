"""A router ends at any moment, and another one goes on: no token is lost, repeated or out of order, no block leaks."""

import asyncio
import random
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_shards import FakeShard, fake_shards
from fleets import expected, holds, request

from funitel.proto.errors import ShardFailed
from funitel.proto.step import Generation
from funitel.router.connect import connect
from funitel.router.core.request import Request
from funitel.router.core.stream import TokenStream
from funitel.router.replica_set.kept_sequences import journal_key
from funitel.router.replica_set.replica_set import ReplicaSet
from funitel.router.serving.round_robin import RoundRobin
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics
from funitel_testing.takeovers.routers import abandon


class Routers:
    """Routers over the same fake shards, one after the other."""

    def __init__(self, folder: Path, num_replicas: int = 1, **settings: Any) -> None:
        self.folders = [folder / str(index) for index in range(num_replicas)]
        self.replicas: list[list[FakeShard]] = []
        self.settings = settings
        self.metrics = Metrics()
        self.fleet: ReplicaSet | None = None

    async def open(self, stack: AsyncExitStack, num_shards: int = 1, **shard: Any) -> None:
        for folder in self.folders:
            folder.mkdir()
            made = fake_shards(folder, num_shards, has_step_sockets=True, device_type="cpu", **shard)
            self.replicas.append(await stack.enter_async_context(made))

    async def begin(self, **changes: Any) -> ReplicaSet:
        """Start a router."""
        chosen: dict[str, Any] = {"max_batch_prefill_tokens": 32, "keeper": "unused"} | self.settings | changes
        settings = RouterSettings(
            master_shard_uds_path=f"{self.folders[0]}/shard-0",
            replica_address=tuple(f"unix://{each}/shard-0" for each in self.folders[1:]),
            **chosen,
        )
        self.metrics = Metrics()
        fleet = await connect(settings, self.metrics)
        assert isinstance(fleet, ReplicaSet)
        self.fleet = fleet
        return fleet

    async def kill(self) -> None:
        """End the router without a word to the shards."""
        assert self.fleet is not None
        fleet, self.fleet = self.fleet, None
        await abandon(fleet)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


def keyed(asked: Request, key: str) -> Request:
    return replace(asked, output_key=key)


def replayed(asked: Iterable[Request], *, was_begun: bool = False) -> list[Request]:
    return [replace(each, is_replayed=True, was_begun=was_begun) for each in asked]


def journals(asked: Iterable[Request]) -> set[str]:
    return {journal_key(each.output_key) for each in asked}


async def read(stream: TokenStream, into: list[Generation]) -> None:
    async with stream:
        async for generation in stream:
            into.append(generation)


def ids_of(generations: Iterable[Generation]) -> list[int]:
    return [token_id for each in generations for token_id in each.tokens.ids]


async def read_all(fleet: ReplicaSet, asked: Iterable[Request]) -> list[list[int]]:
    found: list[list[Generation]] = []
    tasks = []
    for each in asked:
        found.append([])
        tasks.append(asyncio.create_task(read(fleet.submit(each), found[-1])))
    await asyncio.wait_for(asyncio.gather(*tasks), 20)
    return [ids_of(each) for each in found]


async def begun(fleet: ReplicaSet, asked: Iterable[Request], num_tokens: int = 1) -> list[list[Generation]]:
    """Submit requests and read from them until each has so many tokens."""
    found: list[list[Generation]] = []
    for each in asked:
        into: list[Generation] = []
        found.append(into)
        fleet.submit(each).listen(lambda event, _, into=into: into.append(event))  # type: ignore[misc]
    await holds(lambda: all(len(ids_of(each)) >= num_tokens for each in found), "all have begun")
    return found


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("holds_rows", [True, False], ids=["held", "resumed"])
async def test_sequences_go_on_behind_what_they_have_brought(
    tmp_path: Path, num_shards: int, holds_rows: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with AsyncExitStack() as stack:
        routers = Routers(tmp_path)
        await routers.open(stack, num_shards)
        shards = routers.replicas[0]
        asked = [keyed(request(9, 40, first=10 * i), f"r{i}/1") for i in range(4)]
        for fake in shards:
            fake.delay = lambda: 0.002
        await begun(await routers.begin(), asked, 5)
        await routers.kill()
        for fake in shards:
            fake.refuses_takeover = not holds_rows
        fleet = await routers.begin()
        num_computed = [fake.num_computed for fake in shards]
        fleet.replays_begun(journals(asked))
        assert await read_all(fleet, replayed(asked)) == [expected(each) for each in asked]
        left = sum(fake.num_computed - before for fake, before in zip(shards, num_computed, strict=True))
        if holds_rows:  # no prompt is computed again
            assert left < num_shards * 4 * 40
        await holds(lambda: routers.value("funitel_blocks", state="used") == 0, "no block leaks")
        fleet.release_outputs([each.output_key for each in asked])
        await holds(lambda: not any(fake.parts for fake in shards), "outputs are released")
        await fleet.close()
        assert not any(fake.batches for fake in shards)
        [line] = [each.message for each in caplog.records if each.message.startswith("took over sequences")]
        how = "held=4 resumed=0" if holds_rows else "held=0 resumed=4"
        assert f"took over sequences=4 ended=0 {how} recomputed=0 " in line


async def test_ended_sequences_are_delivered_without_a_step(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        routers = Routers(tmp_path)
        await routers.open(stack)
        asked = [keyed(request(), "r/1")]
        assert await read_all(await routers.begin(), asked) == [expected(asked[0])]
        await routers.kill()
        fleet = await routers.begin()
        fleet.replays_begun(journals(asked))
        num_steps = len(routers.replicas[0][0].steps)
        stream = fleet.submit(replayed(asked)[0])
        assert stream.has_ended
        last = await stream.last()
        assert last.finished is not None
        assert last.finished.num_tokens == 6
        assert len(routers.replicas[0][0].steps) == num_steps
        assert stream.num_tokens == 6
        await fleet.close()


async def test_what_nothing_claims_is_dropped_and_forgotten(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        routers = Routers(tmp_path)
        await routers.open(stack)
        fake = routers.replicas[0][0]
        fake.delay = lambda: 0.002
        asked = [keyed(request(9, 100, first=10 * i), f"r{i}/1") for i in range(3)]
        asked.append(request(9, 100, first=70))  # not kept
        await begun(await routers.begin(), asked, 2)
        await routers.kill()
        fleet = await routers.begin()
        assert routers.value("funitel_blocks", state="used") is not None
        fleet.replays_begun({"r0", "r1"})
        await holds(lambda: set(fake.parts) == {"r0/1", "r1/1"}, "the outputs of the third one are released")
        task = asyncio.create_task(read_all(fleet, replayed(asked[:1])))
        await asyncio.sleep(0)
        fleet.replay_ended("r1")  # its client has left
        assert await task == [expected(asked[0])]
        await holds(lambda: routers.value("funitel_blocks", state="used") == 0, "no block leaks")
        await holds(lambda: set(fake.parts) == {"r0/1"}, "the outputs of the second one are released")
        await fleet.close()
        assert not fake.batches


async def test_steps_begin_after_a_while_whatever_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("funitel.router.replica_set.kept_sequences.HOLD_SECONDS", 0.1)
    async with AsyncExitStack() as stack:
        routers = Routers(tmp_path)
        await routers.open(stack)
        routers.replicas[0][0].delay = lambda: 0.002
        asked = [keyed(request(9, 100, first=10 * i), f"r{i}/1") for i in range(2)]
        await begun(await routers.begin(), asked, 2)
        await routers.kill()
        fleet = await routers.begin()
        fleet.replays_begun(journals(asked))
        assert await read_all(fleet, [*replayed(asked[:1]), request(3, 3)]) == [
            expected(asked[0]),
            expected(request(3, 3)),
        ]
        assert await read_all(fleet, replayed(asked[1:])) == [expected(asked[1])]  # late: it is resumed
        await fleet.close()


async def test_a_replayed_request_is_never_refused_for_room(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        routers = Routers(tmp_path, max_concurrent_requests=2)
        await routers.open(stack)
        fleet = await routers.begin()
        asked = replayed(keyed(request(first=i), f"r{i}/1") for i in range(5))
        fleet.replays_begun(journals(asked))
        assert await read_all(fleet, asked) == [expected(each) for each in asked]
        await fleet.close()


@pytest.mark.parametrize("is_repeatable", [True, False])
async def test_what_is_lost_is_computed_again_only_where_the_same_comes_of_it(
    tmp_path: Path, is_repeatable: bool
) -> None:
    async with AsyncExitStack() as stack:
        routers = Routers(tmp_path)
        await routers.open(stack)
        fake = routers.replicas[0][0]
        fake.delay = lambda: 0.002
        fake.device_type = "cpu" if is_repeatable else "cuda"
        asked = [keyed(request(9, 40), "r/1")]
        await begun(await routers.begin(), asked, 3)
        await routers.kill()
        fake.parts.clear()  # as of a shard that was started again
        fleet = await routers.begin()
        fleet.replays_begun({"r"})
        [again] = replayed(asked, was_begun=True)
        if is_repeatable:
            assert await read_all(fleet, [again]) == [expected(again)]
        else:
            with pytest.raises(ShardFailed, match="are lost"):
                fleet.submit(again)
            assert await read_all(fleet, replayed(asked)) == [expected(again)]  # nothing was delivered of it
        await holds(lambda: routers.value("funitel_blocks", state="used") == 0, "no block leaks")
        await fleet.close()


async def test_a_call_that_one_rank_lacks_is_sent_to_it(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        routers = Routers(tmp_path)
        await routers.open(stack, 2)
        one, other = routers.replicas[0]
        asked = [keyed(request(9, 60, first=10 * i), f"r{i}/1") for i in range(3)]
        for fake in (one, other):
            fake.delay = lambda: 0.002
        await begun(await routers.begin(), asked, 3)
        other.is_deaf = True
        await holds(lambda: one.latest[-1][0] > other.latest[-1][0], "one is ahead")
        await routers.kill()
        other.is_deaf = False
        fleet = await routers.begin()
        assert (one.takeovers, other.takeovers) == (1, 1)
        fleet.replays_begun(journals(asked))
        assert await read_all(fleet, replayed(asked)) == [expected(each) for each in asked]
        await fleet.close()


async def test_sequences_do_not_wait_for_a_replica_that_was_lost_with_the_router(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        routers = Routers(tmp_path, 2)
        await routers.open(stack)
        asked = [keyed(request(9, 60, first=10 * i), f"r{i}/1") for i in range(4)]
        for replica in routers.replicas:
            replica[0].delay = lambda: 0.002
        await begun(await routers.begin(), asked, 3)
        held = [set(replica[0].parts) for replica in routers.replicas]
        assert all(held), "both have some"
        await routers.kill()
        await routers.replicas[1][0].die()
        fleet = await asyncio.wait_for(routers.begin(), 5)
        fleet.replays_begun(journals(asked))
        assert await read_all(fleet, replayed(asked, was_begun=True)) == [expected(each) for each in asked]
        assert len(fleet.replicas) == 1
        sockets = routers.folders[1] / "shard-0"
        await holds(lambda: not sockets.exists(), "the old one has ended")
        await stack.enter_async_context(fake_shards(routers.folders[1], has_step_sockets=True, device_type="cpu"))
        await holds(lambda: len(fleet.replicas) == 2, "it serves when it is back")
        await fleet.close()


@pytest.mark.parametrize("seed", range(6))
async def test_tokens_are_those_of_an_undisturbed_run_over_takeovers_at_random_moments(
    tmp_path: Path, seed: int
) -> None:
    """Waiting, in the middle of prompts, preempted, running and ended ones, on several replicas, several times."""
    chosen = random.Random(seed)
    async with AsyncExitStack() as stack:
        num_replicas = chosen.choice((1, 2))
        routers = Routers(tmp_path, num_replicas, max_batch_size=chosen.choice((4, 32)))
        await routers.open(stack, chosen.choice((1, 2)), pool_tokens=chosen.choice((240, 800)))
        fakes = [fake for replica in routers.replicas for fake in replica]
        for fake in fakes:
            fake.delay = lambda: chosen.random() * 0.004
            fake.stride = 1 + seed % 2
        asked = [
            keyed(request(chosen.randrange(1, 60), chosen.randrange(1, 60), first=5 * i), f"r{i // 2}/{i % 2}")
            for i in range(14)
        ]
        before = [Delivered(0) for _ in range(len(asked) // 2)]
        for turn in range(5):
            for fake in fakes:
                fake.refuses_takeover = chosen.random() < 0.2
            fleet = await routers.begin()
            fleet.replays_begun(journals(asked) if turn else ())
            again = replayed(asked) if turn else asked
            after = [Delivered.of(fleet, again[i : i + 2]) for i in range(0, len(asked), 2)]
            for earlier, later in zip(before, after, strict=True):
                assert all(map(_begins_with, later.ids, earlier.ids)), "what was delivered is there at once"
                if num_replicas == 1:  # steps of several are not compared
                    assert later.order[: len(earlier.order)] == earlier.order, "siblings are in order"
            before = after
            if turn < 4:
                await asyncio.sleep(chosen.random() * 0.08)
                await routers.kill()
        await holds(lambda: all(each.has_ended for each in before), "all have ended")
        assert [ids for each in before for ids in each.ids] == [expected(each) for each in asked]
        await holds(lambda: _used(routers) == 0, "no block leaks")
        fleet.release_outputs([each.output_key for each in asked])
        await holds(lambda: not any(fake.parts for fake in fakes), "outputs are released")
        await fleet.close()
        assert not any(fake.batches for fake in fakes)


class Delivered:
    """What two siblings were given, by place, and in which order."""

    def __init__(self, num_open: int) -> None:
        self.ids: list[list[int]] = [[], []]
        self.order: list[tuple[int, tuple[int, ...]]] = []
        self.num_open = num_open

    @classmethod
    def of(cls, fleet: ReplicaSet, siblings: list[Request]) -> "Delivered":
        streams = [fleet.submit(each) for each in siblings]
        made = cls(len(streams))
        give = RoundRobin(len(streams), made.take).put
        for place, stream in enumerate(streams):
            for each in stream.take_recorded():
                give(place, each.generation)
            stream.listen(partial(lambda place, event, _: give(place, event), place))
        return made

    def take(self, place: int, event: Any) -> None:
        assert isinstance(event, Generation), event
        self.ids[place] += event.tokens.ids
        self.order.append((place, event.tokens.ids))
        self.num_open -= event.finished is not None

    @property
    def has_ended(self) -> bool:
        return not self.num_open


def _begins_with(whole: list[int], beginning: list[int]) -> bool:
    return whole[: len(beginning)] == beginning


def _used(routers: Routers) -> int:
    assert routers.fleet is not None
    return sum(member.engine._scheduler.blocks.num_used for member in routers.fleet._serving)
