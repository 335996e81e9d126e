"""Outputs are released some at once, at every replica; at one that does not answer, later."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fleets import holds

from funitel.proto.errors import ShardFailed
from funitel.router.replica_set.output_releases import OutputReleases
from funitel.router.replica_set.table import Member, Slot


class FakeShards:
    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.is_lost = False

    async def release_outputs(self, keys: list[str]) -> None:
        if self.is_lost:
            raise ShardFailed("no answer")
        self.calls.append(list(keys))


@pytest.fixture(autouse=True)
def release_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("funitel.router.replica_set.output_releases.RELEASE_SECONDS", 0.02)


def made(count: int = 2) -> tuple[OutputReleases, list[FakeShards], list[Any]]:
    shards = [FakeShards() for _ in range(count)]
    members = [SimpleNamespace(slot=object(), shards=each) for each in shards]
    slots = [member.slot for member in members]
    return OutputReleases(lambda: cast(list[Member], members), lambda: cast(list[Slot], slots)), shards, members


async def test_some_at_once_everywhere() -> None:
    releases, shards, _ = made()
    for key in "abc":
        releases.add([key])
        await asyncio.sleep(0)
    await holds(lambda: all(each.calls == [["a", "b", "c"]] for each in shards), "one call for all")
    releases.add("d")
    await holds(lambda: all(each.calls[1:] == [["d"]] for each in shards), "another one later")


async def test_a_replica_that_was_away_gets_them_when_it_is_back() -> None:
    releases, (one, other), members = made()
    other.is_lost = True
    releases.add("a")
    await holds(lambda: one.calls == [["a"]], "the first has it")
    away = members.pop()
    releases.add("b")
    await holds(lambda: len(one.calls) == 2, "the first has both")
    members.append(away)
    other.is_lost = False
    releases.add()
    await holds(lambda: other.calls == [["a", "b"]], "the other has both")
    assert one.calls == [["a"], ["b"]]


async def test_the_last_ones_are_released_at_the_end() -> None:
    releases, (one, _), _ = made()
    releases.add("a")
    await releases.close()
    assert one.calls == [["a"]]
    releases.add("b")
    await asyncio.sleep(0.05)
    assert one.calls == [["a"]]
