"""Steps over a step socket: answers, failures, timeouts, a shard that dies or cannot be reached."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from fake_shards import FakeShard, FakeStepEnd, fake_shards

from funitel.proto.errors import InvalidRequest, ShardFailed, StepFailed
from funitel.proto.step import CachedBatch, SamplingParams, SequenceStart, StoppingParams
from funitel.proto.step_socket import Frame
from funitel.router.shard_client import rank
from funitel.router.shard_client.shards import Shards


class Served:
    """Shards with step sockets, and what they answered over these."""

    def __init__(self, shards: Shards, fakes: list[FakeShard]) -> None:
        self.shards = shards
        self.fakes = fakes

    @property
    def ends(self) -> list[FakeStepEnd]:
        return [end for fake in self.fakes for end in fake.step_ends]

    async def prefill(self, step_seq: int) -> list[int]:
        """Run one step; the requests that got a token of it."""
        start = SequenceStart(
            request_id=step_seq,
            sampling=SamplingParams(),
            stopping=StoppingParams(max_new_tokens=5),
            input_ids=(1, 2, 3),
            blocks=(step_seq,),
            chunk_len=3,
        )
        results = await self.shards.prefill(step_seq, [start], None, (), (), step_seq)
        return [generation.request_id for result in results for generation in result.generations]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with fake_shards(tmp_path, 2, has_step_sockets=True) as fakes:
        shards = await Shards.connect(f"unix://{tmp_path}/shard-0")
        yield Served(shards, fakes)
        await shards.close()


async def test_steps_go_over_the_socket_to_every_rank(served: Served) -> None:
    ahead = [asyncio.ensure_future(served.prefill(number)) for number in (1, 2)]
    assert await asyncio.gather(*ahead) == [[1], [2]]
    results = await served.shards.decode([CachedBatch(1, (1,)), CachedBatch(2, (2,))], (), (), 3)
    assert sorted(generation.request_id for result in results for generation in result.generations) == [1, 2]
    assert [len(end.contexts) for end in served.ends] == [3, 3]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.ABORTED, StepFailed),
        (grpc.StatusCode.UNAVAILABLE, ShardFailed),
    ],
)
async def test_statuses_mean_what_they_mean_in_grpc(
    served: Served, status: grpc.StatusCode, error: type[Exception]
) -> None:
    served.fakes[1].failures.append(status)
    with pytest.raises(error, match="told to fail"):
        await served.prefill(1)
    assert await served.prefill(2) == [2]


async def test_a_shard_that_hangs_is_given_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "STEP_TIMEOUT_SECONDS", 0.05)
    served.fakes[0].pause.clear()
    served.fakes[1].pause.clear()
    with pytest.raises(ShardFailed, match="shard rank 0 does not answer: Deadline Exceeded"):
        await served.prefill(1)
    for fake in served.fakes:
        fake.pause.set()
    monkeypatch.undo()
    assert await served.prefill(2) == [2]  # what comes late is nobody's answer


async def test_a_lost_connection_is_noticed_at_once(served: Served) -> None:
    disconnected = asyncio.create_task(served.shards.disconnected())
    served.fakes[0].pause.clear()
    served.fakes[1].pause.clear()
    step = asyncio.create_task(served.prefill(1))
    await asyncio.sleep(0.05)
    assert not disconnected.done()
    for end in served.ends:
        end.close()
    with pytest.raises(ShardFailed, match="shard rank 0 does not answer: the connection has ended"):
        await step
    await served.fakes[0].die()
    await asyncio.wait_for(disconnected, 10)


async def test_steps_go_over_grpc_when_the_socket_is_lost(served: Served) -> None:
    for end in served.ends:
        end.close()
    await asyncio.sleep(0.05)
    assert await served.prefill(1) == [1]
    assert [end.contexts for end in served.ends] == [[], []]


async def test_steps_go_over_grpc_when_the_socket_is_out_of_reach(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fake_shards(tmp_path) as fakes:
        fakes[0].step_socket = f"{tmp_path}/nowhere"
        with caplog.at_level(logging.WARNING):
            shards = await Shards.connect(f"unix://{tmp_path}/shard-0")
        assert "steps go over gRPC" in caplog.text
        assert await Served(shards, fakes).prefill(1) == [1]
        await shards.close()


async def test_words_of_a_failure_that_are_no_text_are_told_all_the_same(served: Served) -> None:
    served.fakes[0].pause.clear()
    step = asyncio.create_task(served.prefill(1))
    await asyncio.sleep(0.05)
    served.ends[0].send(Frame(1, grpc.StatusCode.ABORTED.value[0], b"\xff ran out"))
    with pytest.raises(StepFailed, match="shard rank 0: \ufffd ran out"):
        await step
    served.fakes[0].pause.set()
