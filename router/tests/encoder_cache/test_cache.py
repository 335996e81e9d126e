"""Media of sequences over fake shards: encoded once, held, evicted, waited for in turn, and encoded again elsewhere."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fleets
import pytest
from engines import expected, request, run, running
from fake_media import FACTS, image, key_of, placed
from fakes import eventually

from funitel.proto.errors import InvalidRequest, Overloaded, ShardFailed, StartupError, StepFailed
from funitel.proto.step import MediaInput
from funitel.router.core.request import Request, background_key
from funitel.router.encoder_cache import cache as cache_module
from funitel.router.encoder_cache.cache import EncoderCache
from funitel.router.engine import request_table
from funitel.router.replica_set.slot import check_alike, smallest_limits
from funitel.router.telemetry.metrics import Metrics

SHARD = {"media": FACTS}  # with room for 20 items of five features
SMALL = {"media": replace(FACTS, cache_bytes=100)}  # for two


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items are encoded one by one, but where a test says otherwise."""
    monkeypatch.setattr(cache_module, "MAX_BATCH_BYTES", 0)


def asking(*urls: str, prompt_len: int = 30, max_new_tokens: int = 6, **fields: Any) -> Request:
    """Items begin at 2, 10, 18 and so on."""
    media = tuple(placed(url, 2 + 8 * number) for number, url in enumerate(urls))
    return replace(request(prompt_len, max_new_tokens), media=media, **fields)


async def holds(claim: Callable[[], bool], what: str) -> None:
    async def is_so() -> bool:
        return claim()

    await eventually(is_so, what)


def held(engine: Any) -> dict[int, tuple[bytes, ...]]:
    found: dict[int, tuple[bytes, ...]] = engine._media._held
    return found


@pytest.mark.parametrize("count", [1, 2])
async def test_items_are_encoded_on_every_rank_before_a_sequence_names_them(tmp_path: Path, count: int) -> None:
    async with running(tmp_path, count, SHARD) as (engine, shards, metrics):
        asked = asking("a", "b", "a")
        assert await run(engine, asked) == expected(asked)
        assert [shard.media_encodes for shard in shards] == [[key_of("a"), key_of("b")]] * count
        assert not held(engine)
        again = asking("b", "a")
        assert await run(engine, again) == expected(again)
        assert len(shards[0].media_encodes) == 2
        value = metrics.registry.get_sample_value
        assert value("funitel_media_encoded_total", {"outcome": "encoded"}) == 2
        assert value("funitel_media_uses_total") == 4
        assert value("funitel_media_bytes") == 100
        seconds = value("funitel_media_encode_seconds_total")
        assert seconds is not None
        assert seconds > 0
    assert value("funitel_media_bytes") == 0


async def test_others_go_on_while_an_item_is_encoded(tmp_path: Path) -> None:
    async with running(tmp_path, 1, SHARD) as (engine, [shard], _):
        await run(engine, asking("known"))
        shard.encoding.clear()
        waiting = asyncio.create_task(run(engine, asking("a")))
        for asked in (request(9, 3), asking("known", prompt_len=20)):
            assert await asyncio.wait_for(run(engine, asked), 5) == expected(asked)
        assert not waiting.done()
        shard.encoding.set()
        assert await waiting == expected(asking("a"))


async def test_sequences_share_an_item_that_is_encoded(tmp_path: Path) -> None:
    async with running(tmp_path, 1, SHARD) as (engine, [shard], _):
        shard.encoding.clear()
        asked = [asking("a", "b", prompt_len=25 + number) for number in range(4)]
        tasks = [asyncio.create_task(run(engine, each)) for each in asked]
        await holds(lambda: shard.num_encoding == 1, "it is encoded")
        shard.encoding.set()
        assert await asyncio.gather(*tasks) == [expected(each) for each in asked]
        assert shard.media_encodes == [key_of("a"), key_of("b")]


async def test_the_least_recently_used_item_gives_way(tmp_path: Path) -> None:
    async with running(tmp_path, 1, SMALL) as (engine, [shard], metrics):
        for url in ("a", "b", "a", "c"):
            asked = asking(url)
            assert await run(engine, asked) == expected(asked)
        assert set(shard.media) == {key_of("a"), key_of("c")}
        assert shard.most_media_bytes == 100
        assert metrics.registry.get_sample_value("funitel_media_evictions_total") == 1


async def test_many_items_pass_through_a_small_cache(tmp_path: Path) -> None:
    async with running(tmp_path, 1, SMALL) as (engine, [shard], _):
        shard.delay = lambda: 0.0005
        asked = [asking(f"{number}", f"{number // 2}x", max_new_tokens=3) for number in range(40)]
        answers = await asyncio.gather(*(run(engine, each) for each in asked))
        assert answers == [expected(each) for each in asked]
        assert shard.most_media_bytes == 100
        assert not held(engine)


async def test_shards_without_chunks_take_text_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path, 1, SHARD | {"is_chunked": False}) as (engine, _, _):
        assert engine.limits.media is None
        with pytest.raises(InvalidRequest, match="images and sounds are not supported"):
            await run(engine, asking("a"))
    assert "images are refused: they need shards that compute prompts in chunks" in caplog.text


async def test_keys_take_turns_sequence_by_sequence(tmp_path: Path) -> None:
    async with running(tmp_path, 1, SHARD) as (engine, [shard], _):
        shard.encoding.clear()
        asked = [asking(f"{number}", f"{number}b", key=b"many") for number in range(4)]
        tasks = [asyncio.create_task(run(engine, each)) for each in asked]
        await holds(lambda: shard.num_encoding == 1, "the first is encoded")
        other = [asking(name, key=b"few") for name in ("x", "y")]
        tasks += [asyncio.create_task(run(engine, each)) for each in other]
        await holds(lambda: len(engine._media._waiting) == 6, "all wait")
        shard.encoding.set()
        assert await asyncio.gather(*tasks) == [expected(each) for each in asked + other]
        order = ["0", "0b", "x", "1", "1b", "y", "2", "2b", "3", "3b"]
        assert shard.media_encodes == [key_of(name) for name in order]


async def test_items_of_others_are_encoded_only_where_they_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "MAX_BATCH_BYTES", 1 << 20)
    async with running(tmp_path, 1, SMALL) as (engine, [shard], _):
        asked = [asking(name, f"{name}2") for name in "abcd"]
        assert await asyncio.gather(*(run(engine, each) for each in asked)) == [expected(each) for each in asked]
        assert shard.most_media_bytes <= SMALL["media"].cache_bytes


async def test_an_item_that_a_sequence_holds_is_never_dropped(tmp_path: Path) -> None:
    async with running(tmp_path, 1, SMALL) as (engine, [shard], _):
        shard.delay = lambda: 0.002
        long = asyncio.create_task(run(engine, asking("a", max_new_tokens=150)))
        await holds(lambda: bool(shard.steps), "it runs")
        for number in range(5):
            asked = asking(f"{number}", max_new_tokens=2)
            assert await run(engine, asked) == expected(asked)
            assert key_of("a") in shard.media
        assert not long.done()
        assert await long == expected(asking("a", max_new_tokens=150))


async def test_room_is_given_in_the_order_of_arrival(tmp_path: Path) -> None:
    """One that needs the whole cache is not passed by those that find their item encoded."""
    async with running(tmp_path, 1, SMALL) as (engine, [shard], _):
        shard.delay = lambda: 0.002
        order: list[str] = []

        async def ask(name: str, asked: Request) -> None:
            assert await run(engine, asked) == expected(asked)
            order.append(name)

        first = asyncio.create_task(ask("first", asking("a", max_new_tokens=150)))
        await holds(lambda: bool(shard.steps), "it runs")
        large = asyncio.create_task(ask("large", asking("b", "c", max_new_tokens=2)))
        await holds(lambda: engine._media is not None and engine._media._is_short, "it waits for room")
        behind = [asyncio.create_task(ask("behind", asking("a", max_new_tokens=2))) for _ in range(3)]
        text = asyncio.create_task(ask("text", request(4, 2)))
        await asyncio.gather(first, large, text, *behind)
        assert order == ["text", "first", "large", "behind", "behind", "behind"]


async def test_a_batch_waits_behind_others(tmp_path: Path) -> None:
    async with running(tmp_path, 1, SMALL) as (engine, [shard], _):
        shard.encoding.clear()
        urls = ("a", "b", "c", "d")
        keys = {"b": background_key(b"x"), "c": background_key(b"x")}
        asked = [asking(url, key=keys.get(url, b"")) for url in urls]
        tasks = []
        for each in asked:
            tasks.append(asyncio.create_task(run(engine, each)))
            await asyncio.sleep(0)
        await holds(lambda: len(engine._media._waiting) == 4, "all wait")  # type: ignore[union-attr]
        shard.encoding.set()
        assert await asyncio.gather(*tasks) == [expected(each) for each in asked]
        assert shard.media_encodes == [key_of(url) for url in ("a", "d", "b", "c")]


async def test_items_larger_than_the_cache_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path, 1, SMALL) as (engine, [shard], _):
        with pytest.raises(InvalidRequest, match="take 150 bytes, the shards keep at most 100"):
            await run(engine, asking("a", "b", "c"))
        assert not shard.media_encodes
        assert await run(engine, asking("a", "b", "a")) == expected(asking("a", "b", "a"))


async def test_an_item_that_cannot_be_encoded_ends_its_request_alone(tmp_path: Path) -> None:
    async with running(tmp_path, 2, SHARD) as (engine, shards, metrics):
        shards[1].refused_media = {key_of("bad")}
        good = asking("good")
        tasks = [asyncio.create_task(run(engine, each)) for each in (asking("a", "bad"), good, asking("bad"))]
        first, answer, third = await asyncio.gather(*tasks, return_exceptions=True)
        assert answer == expected(good)
        for error in (first, third):
            assert isinstance(error, InvalidRequest)
            assert error.message == "of another shape"
        assert all(key_of("bad") not in shard.media for shard in shards), "it is dropped where it was encoded"
        assert not held(engine)
        assert metrics.registry.get_sample_value("funitel_media_encoded_total", {"outcome": "failed"}) == 2


async def test_a_client_that_leaves_ends_what_was_not_begun(tmp_path: Path) -> None:
    async with running(tmp_path, 1, SHARD) as (engine, [shard], _):
        shard.encoding.clear()
        leaving = asyncio.create_task(run(engine, asking("a", "b", "c")))
        staying = asyncio.create_task(run(engine, asking("c", "a")))
        await holds(lambda: shard.num_encoding == 1, "it is encoded")
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        shard.encoding.set()
        assert await staying == expected(asking("c", "a"))
        assert sorted(shard.media_encodes) == sorted([key_of("a"), key_of("c")])
        assert not engine._media._waiting  # type: ignore[union-attr]
        assert not held(engine)


async def test_a_client_that_leaves_while_it_runs_gives_its_items_back(tmp_path: Path) -> None:
    async with running(tmp_path, 1, SMALL) as (engine, [shard], _):
        shard.delay = lambda: 0.002
        leaving = asyncio.create_task(run(engine, asking("a", "b", max_new_tokens=150)))
        await holds(lambda: bool(shard.steps), "it runs")
        leaving.cancel()
        asked = asking("c", "d")
        assert await asyncio.wait_for(run(engine, asked), 5) == expected(asked)
        assert shard.most_media_bytes == 100


async def test_a_preempted_sequence_keeps_its_items(tmp_path: Path) -> None:
    """Four that outgrow the pool: what is preempted is computed again from its images."""
    shard = {"media": replace(FACTS, cache_bytes=200), "pool_tokens": 160}
    async with running(tmp_path, 1, shard, max_total_tokens=120) as (engine, [fake], _):
        asked = [asking(f"{number}", prompt_len=20, max_new_tokens=60) for number in range(4)]
        answers = await asyncio.gather(*(run(engine, each) for each in asked))
        assert answers == [expected(each) for each in asked]
        assert engine._scheduler.num_preempted > 0
        assert len(fake.media_encodes) == 4


async def test_prefixes_are_shared_by_requests_of_the_same_images_alone(tmp_path: Path) -> None:
    async with running(tmp_path, 1, SHARD) as (engine, [shard], _):

        async def computed(*media: Any) -> int:
            before = shard.num_computed
            asked = replace(request(24, 1), media=media)
            assert await run(engine, asked) == expected(asked)
            return shard.num_computed - before

        assert await computed(placed("a", 6)) == 24
        assert await computed(placed("a", 6)) == 4
        assert await computed(placed("b", 6)) == 20, "the block before it is shared"
        assert await computed(placed("a", 5)) == 20, "another place"
        assert await computed(placed("a", 6), placed("b", 14)) == 12, "the second image begins in the fourth block"
        assert await computed() == 20


async def test_whole_spans_are_computed_in_one_chunk(tmp_path: Path) -> None:
    """The fake shard refuses a chunk that ends within an item; prompts are longer than a step."""
    shard = {"media": replace(FACTS, has_whole_spans=True)}
    async with running(tmp_path, 1, shard, max_batch_prefill_tokens=16) as (engine, _, _):
        assert engine.limits.max_span_tokens == 16
        asked = []
        for number in range(12):
            spans = ((3, 16), (19, 9), (30 + number, 13), (60, 16), (76, 2))
            media = tuple(placed(f"{n}", p, length) for n, (p, length) in enumerate(spans))
            asked.append(replace(request(90, 4, first=number // 3), media=media))
        answers = await asyncio.gather(*(run(engine, each) for each in asked))
        assert answers == [expected(each) for each in asked]


async def test_the_memory_of_all_images_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_table, "MAX_MEDIA_BYTES", 7)  # an item has 3
    async with running(tmp_path, 1, SHARD) as (engine, [shard], _):
        shard.encoding.clear()
        tasks = [asyncio.create_task(run(engine, asking(*urls))) for urls in (("a",), ("b", "a"), ("a", "a"))]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="images of requests take at most 7 bytes at once"):
            await run(engine, asking("c"))
        shard.encoding.set()
        await asyncio.gather(*tasks)
        assert engine.requests._media_bytes == 0
        assert not engine.requests._num_of_media
        asked = asking("c", "d", "e")  # one alone is admitted
        assert await run(engine, asked) == expected(asked)


# Replicas


@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_items_are_encoded_again_where_a_sequence_goes_on(tmp_path: Path, num_replicas: int) -> None:
    async with fleets.running(tmp_path, num_replicas, shard=SHARD, shard_return_timeout=60) as run_:
        first = run_.replicas[0][0]
        for fakes in run_.replicas:
            fakes[0].delay = lambda: 0.003
        began = asyncio.Event()
        asked = asking("a", "b", max_new_tokens=60)
        task = asyncio.create_task(fleets.run(run_.fleet, asked, began))
        await began.wait()
        there = next(index for index, fakes in enumerate(run_.replicas) if fakes[0].media)
        await run_.lose(there)
        if num_replicas == 1:
            [first] = await run_.restart(0)
        else:
            first = run_.replicas[1 - there][0]
        assert await asyncio.wait_for(task, 10) == expected(asked)
        assert first.media_encodes == [key_of("a"), key_of("b")]


async def test_a_replica_that_is_lost_while_it_encodes(tmp_path: Path) -> None:
    async with fleets.running(tmp_path, 1, shard=SHARD, shard_return_timeout=60) as run_:
        [shard] = run_.replicas[0]
        shard.encoding.clear()
        asked = asking("a")
        task = asyncio.create_task(fleets.run(run_.fleet, asked))
        await holds(lambda: shard.num_encoding == 1, "it is encoded")
        await run_.lose(0)
        await holds(lambda: run_.value("funitel_replicas", state="lost") == 1, "the loss is seen")
        [shard] = await run_.restart(0)
        assert await asyncio.wait_for(task, 10) == expected(asked)
        assert shard.media_encodes == [key_of("a")]


async def test_replicas_take_the_same_media(tmp_path: Path) -> None:
    async with fleets.running(tmp_path, 1, shard=SHARD) as run_:
        info = run_.fleet._info
        check_alike(["a", "b"], [info, replace(info, media=replace(FACTS, cache_bytes=7))])
        for other in (None, replace(FACTS, has_whole_spans=True)):
            with pytest.raises(StartupError, match="replicas must be alike: media is"):
                check_alike(["a", "b"], [info, replace(info, media=other)])
        limits = run_.fleet.limits
        assert limits.media == FACTS
        small = replace(limits, media=replace(FACTS, cache_bytes=7), max_span_tokens=3)
        assert smallest_limits([limits, small]).media == replace(FACTS, cache_bytes=7)
        assert smallest_limits([limits, replace(limits, media=None)]).media is None


async def test_shards_of_text_take_no_media(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, _, _):
        assert engine.limits.media is None
        with pytest.raises(InvalidRequest, match="images and sounds are not supported by the shards"):
            engine.submit(asking("a"))


# The cache by itself


class Ranks:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.error: Exception | None = None

    async def encode_media(self, media: MediaInput) -> int:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.calls.append("encode")
        return 50

    async def drop_media(self, keys: Any) -> None:
        self.calls.append("drop")


async def rows_dropped() -> None:
    await asyncio.sleep(0)


class Together:
    """Ranks that note which items are encoded at a time."""

    def __init__(self) -> None:
        self.encoding: list[bytes] = []
        self.batches: list[list[bytes]] = []

    async def encode_media(self, media: MediaInput) -> int:
        self.encoding.append(media.key)
        await asyncio.sleep(0.001)
        if self.encoding:
            self.batches.append(self.encoding)
            self.encoding = []
        if media.key == key_of("bad"):
            raise InvalidRequest("of another shape")
        return 50

    async def drop_media(self, keys: Any) -> None:
        pass


async def test_small_items_of_several_sequences_are_encoded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the sequence that is served, and those behind it; one that is refused fails its own sequence alone."""
    monkeypatch.setattr(cache_module, "MAX_BATCH_BYTES", 4 * len(image("a").values))
    ranks = Together()
    cache = EncoderCache(ranks, FACTS, Metrics().media, rows_dropped)
    asked = [["first"], ["a", "b"], ["b", "bad"], ["c"], ["d", "large"], ["e"]]
    large = replace(image("large"), shape=(2, 1, 1, 3), values=b"abcdef")
    items = [[large if url == "large" else image(url) for url in urls] for urls in asked]
    found = await asyncio.gather(
        *(cache.wait(user, media, is_background=user == 5) for user, media in enumerate(items)), return_exceptions=True
    )
    assert isinstance(found[2], InvalidRequest)
    assert [each for place, each in enumerate(found) if place != 2] == [None] * 5
    names = [["first"], ["a", "b", "bad", "c"], ["d"], ["large"], ["e"]]
    assert ranks.batches == [[key_of(name) for name in batch] for batch in names]
    assert cache.num_bytes() == 50 * 7
    await cache.close()


async def test_a_closed_cache_leaves_none_waiting() -> None:
    cache = EncoderCache(Ranks(), FACTS, Metrics().media, rows_dropped)
    waiting = asyncio.create_task(cache.wait(1, [image("a")]))
    await asyncio.sleep(0)
    await cache.close()
    with pytest.raises(ShardFailed, match="the replica is closed"):
        await waiting
    with pytest.raises(ShardFailed, match="the replica is closed"):
        await cache.wait(2, [image("a")])


async def test_an_unforeseen_error_hangs_none() -> None:
    ranks = Ranks()
    ranks.error = RuntimeError("oops")
    cache = EncoderCache(ranks, FACTS, Metrics().media, rows_dropped)
    with pytest.raises(StepFailed, match="RuntimeError: oops"):
        await cache.wait(1, [image("a")])
    ranks.error = None
    await cache.wait(1, [image("a")])
    assert cache.has(key_of("a"))
    assert cache.num_bytes() == 50
    cache.release(1)
    cache.release(1)
    await cache.close()


async def test_what_is_larger_than_was_told_makes_room_later() -> None:
    """Features of 50 bytes that were to take 10: the bound is kept again with the next item."""
    ranks, facts = Ranks(), replace(FACTS, cache_bytes=100)
    cache = EncoderCache(ranks, facts, Metrics().media, rows_dropped)
    for user, url in enumerate(("a", "b", "c")):
        await cache.wait(user, [image(url, num_features=1)])
        cache.release(user)
    assert ranks.calls == ["encode", "encode", "drop", "encode"]
    assert not cache.has(key_of("a"))
    await cache.close()
