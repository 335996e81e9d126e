"""Answers of a lone shard that cannot be read fail what ran, whichever way they come, and nothing else."""

import asyncio
from pathlib import Path

import pytest
from test_engine import expected, request, run, running

from funitel.proto import generate_pb2 as pb
from funitel.proto.errors import ShardUnsound

TOKENS = pb.Tokens(ids=[5], logprobs=[-1.0], texts=["<5>"], is_special=[False])
ANSWERS = {
    "garbage": b"\xff\xff\xff",
    "ragged columns": pb.PrefillResponse(columns=pb.Columns(request_ids=[0, 2], ids=[5])).SerializeToString(),
    "an unknown reason": pb.PrefillResponse(
        generations=[pb.Generation(tokens=TOKENS, generated_text=pb.GeneratedText(finish_reason=9))]  # type: ignore[arg-type]
    ).SerializeToString(),
}
both_ways = pytest.mark.parametrize("has_step_sockets", [True, False], ids=["step socket", "gRPC"])


@both_ways
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_its_requests_fail_and_the_engine_lives(
    tmp_path: Path, has_step_sockets: bool, answer: bytes, num_ranks: int
) -> None:
    async with running(tmp_path, num_ranks, {"has_step_sockets": has_step_sockets}) as (engine, fakes, _):
        fakes[-1].garbled.append(answer)
        answers = await asyncio.wait_for(
            asyncio.gather(*(run(engine, request(first=i)) for i in range(3)), return_exceptions=True), 5
        )
        assert any(isinstance(one, ShardUnsound) for one in answers)
        for i, one in enumerate(answers):
            if isinstance(one, ShardUnsound):
                assert one.message.startswith(f"shard rank {num_ranks - 1}: the answer cannot be read: ")
            else:
                assert one == expected(request(first=i))
        assert await asyncio.wait_for(run(engine, request()), 5) == expected(request())
        assert bool(fakes[0].step_ends) is has_step_sockets


@both_ways
async def test_a_shard_that_makes_no_sense_fails_all_that_comes_until_it_does(
    tmp_path: Path, has_step_sockets: bool
) -> None:
    async with running(tmp_path, 1, {"has_step_sockets": has_step_sockets}) as (engine, (fake,), _):
        fake.garbled += [ANSWERS["garbage"]] * 50
        for _ in range(3):
            with pytest.raises(ShardUnsound, match="shard rank 0: the answer cannot be read"):
                await asyncio.wait_for(run(engine, request()), 5)
        fake.garbled.clear()
        assert await asyncio.wait_for(run(engine, request()), 5) == expected(request())
