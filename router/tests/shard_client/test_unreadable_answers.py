"""Answers of a lone shard that cannot be read fail what ran, whichever way they come, and nothing else."""

import asyncio
from pathlib import Path

import pytest
from engines import expected, request, run, running
from fakes import eventually

from funitel.proto import generate_pb2 as pb
from funitel.proto.errors import ShardUnsound
from funitel.proto.step_socket import OK, Frame

TOKENS = pb.Tokens(ids=[5], logprobs=[-1.0], texts=["<5>"], is_special=[False])
ANSWERS = {
    "garbage": b"\xff\xff\xff",
    "ragged columns": pb.PrefillResponse(columns=pb.Columns(request_ids=[0, 2], ids=[5])).SerializeToString(),
    "ragged tokens": pb.PrefillResponse(
        generations=[pb.Generation(tokens=pb.Tokens(ids=[5, 6], logprobs=[-1.0], texts=["a"]))]
    ).SerializeToString(),
    "no token": pb.PrefillResponse(generations=[pb.Generation(request_id=0)]).SerializeToString(),
    "a token beyond the vocabulary": pb.PrefillResponse(
        columns=pb.Columns(request_ids=[0], ids=[97], logprobs=[-1.0], texts=["x"], is_special=[False])
    ).SerializeToString(),
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


LIES = {
    "a token for a stranger": (pb.Generation(request_id=9, tokens=TOKENS), "request 9 got tokens, which computed"),
    "no token": (None, "request 0 got no token"),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_answers_that_cannot_be_are_nobodys_tokens(tmp_path: Path, lie: tuple[pb.Generation | None, str]) -> None:
    generation, problem = lie
    generations = [generation] if generation is not None else []
    kept = pb.CachedBatch(id=0, request_ids=[0])
    async with running(tmp_path, 1, {"has_step_sockets": True}) as (engine, (fake,), _):
        fake.garbled.append(pb.PrefillResponse(generations=generations, batch=kept).SerializeToString())
        with pytest.raises(ShardUnsound, match=f"the shards' answer cannot be: {problem}"):
            await asyncio.wait_for(run(engine, request()), 5)
        assert await asyncio.wait_for(run(engine, request()), 5) == expected(request())


@pytest.mark.parametrize("kept", [None, pb.CachedBatch(id=7, request_ids=[0]), pb.CachedBatch(id=0, request_ids=[8])])
async def test_batches_that_were_not_given_are_not_kept(tmp_path: Path, kept: pb.CachedBatch | None) -> None:
    generation = pb.Generation(request_id=0, tokens=TOKENS)
    async with running(tmp_path, 1, {"has_step_sockets": True}) as (engine, (fake,), _):
        fake.garbled.append(pb.PrefillResponse(generations=[generation], batch=kept).SerializeToString())
        with pytest.raises(ShardUnsound, match="dropped before its end|keep batch 7|keep request 8"):
            await asyncio.wait_for(run(engine, request()), 5)
        assert await asyncio.wait_for(run(engine, request()), 5) == expected(request())


FRAMES = {
    "an answer to no call": (Frame(77, OK, b""), "it answers call 77, which was never made"),
    "a giant": (b"\xff" * 17, "a frame of 8589934590 bytes, at most 268435456 are allowed"),
}


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES.keys())
async def test_what_is_no_frame_of_ours_ends_the_connection(tmp_path: Path, frame: tuple[Frame | bytes, str]) -> None:
    sent, problem = frame
    async with running(tmp_path, 1, {"has_step_sockets": True}) as (engine, (fake,), _):
        fake.pause.clear()
        task = asyncio.create_task(run(engine, request()))

        async def has_begun() -> bool:
            return bool(fake.steps)

        await eventually(has_begun, "a step")
        (end,) = fake.step_ends
        if isinstance(sent, Frame):
            end.send(sent)
        else:
            end._transport.write(sent)
        with pytest.raises(ShardUnsound, match=f"shard rank 0: the answer cannot be read: {problem}"):
            await asyncio.wait_for(task, 5)
