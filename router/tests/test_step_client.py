"""Steps over a step socket: answers, failures, timeouts, a shard that dies or cannot be reached."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_shards import FakeShard, fake_shards

from funitel.proto import generate_pb2 as pb
from funitel.proto.errors import InvalidRequest, ShardFailed, StepFailed
from funitel.proto.step import CachedBatch, SamplingParams, SequenceStart, StoppingParams
from funitel.proto.step_socket import OK, Frame, FrameProtocol, Method, decode_context
from funitel.router import shards as shards_module
from funitel.router.shards import Shards

REQUESTS: dict[int, Any] = {Method.PREFILL: pb.PrefillRequest, Method.DECODE: pb.DecodeRequest}


class FakeStepEnd(FrameProtocol):
    """The shard's end: steps are answered by a fake shard, as its gRPC methods would."""

    def __init__(self, fake: FakeShard) -> None:
        super().__init__()
        self.fake = fake
        self.contexts: list[dict[str, str]] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def take(self, frame: Frame) -> None:
        self.tasks.add(asyncio.create_task(self._answer(frame)))

    def invocation_metadata(self) -> dict[str, str]:
        return self.contexts[-1]

    async def abort(self, status: grpc.StatusCode, details: str) -> None:
        raise Aborted(status, details)

    async def _answer(self, frame: Frame) -> None:
        self.contexts.append(decode_context(frame.context))
        method = Method(frame.code)
        try:
            answer = await getattr(self.fake, method.rpc)(REQUESTS[method].FromString(frame.payload), self)
        except Aborted as aborted:
            self.send(Frame(frame.call_id, aborted.status.value[0], aborted.details.encode()))
        else:
            self.send(Frame(frame.call_id, OK, answer.SerializeToString()))


class Aborted(Exception):
    def __init__(self, status: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.status = status
        self.details = details


class Served:
    """Shards with step sockets, and what they answered over these."""

    def __init__(self, shards: Shards, fakes: list[FakeShard], ends: list[FakeStepEnd]) -> None:
        self.shards = shards
        self.fakes = fakes
        self.ends = ends

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
        results = await self.shards.prefill(step_seq, [start], None, (), step_seq)
        return [generation.request_id for result in results for generation in result.generations]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    ends: list[FakeStepEnd] = []
    async with fake_shards(tmp_path, 2) as fakes:
        servers = []
        for fake in fakes:
            fake.step_socket = f"{tmp_path}/shard-{fake.rank}.steps"

            def connected(fake: FakeShard = fake) -> FakeStepEnd:
                ends.append(FakeStepEnd(fake))
                return ends[-1]

            servers.append(await asyncio.get_running_loop().create_unix_server(connected, fake.step_socket))
        shards = await Shards.connect(f"unix://{tmp_path}/shard-0")
        yield Served(shards, fakes, ends)
        await shards.close()
        for end in ends:
            end.close()
        for server in servers:
            server.close()


async def test_steps_go_over_the_socket_to_every_rank(served: Served) -> None:
    ahead = [asyncio.ensure_future(served.prefill(number)) for number in (1, 2)]
    assert await asyncio.gather(*ahead) == [[1], [2]]
    results = await served.shards.decode([CachedBatch(1, (1,)), CachedBatch(2, (2,))], (), 3)
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
    monkeypatch.setattr(shards_module, "STEP_TIMEOUT_SECONDS", 0.05)
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
        assert await Served(shards, fakes, []).prefill(1) == [1]
        await shards.close()
