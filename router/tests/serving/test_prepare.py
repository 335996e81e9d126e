"""Several sequences of one HTTP request: run side by side, cancelled together, counted once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import PIECES, FakeEngine, Serve

from funitel.proto.errors import FunitelError, Overloaded, ShardFailed
from funitel.proto.step import Generation
from funitel.router.serving.arrival import Arrival
from funitel.router.serving.prepare import GenerationJob, Prompt, prepare
from funitel.router.serving.run import collect_all, stream_all, stream_headers, summed_headers
from funitel.router.serving.sampling_request import SamplingRequest
from funitel.router.serving.service import Service
from funitel.router.settings import RouterSettings

NUM_TOKENS = len(PIECES) + 1


@asynccontextmanager
async def _job(model: Path, engine: FakeEngine, seed: int = 7) -> AsyncIterator[GenerationJob]:
    service = Service(RouterSettings(tokenizer_name=str(model)))

    def fail(error: FunitelError) -> None:
        raise error

    await service.start(engine.connect, fail)
    try:
        parameters = SamplingRequest(do_sample=True, seed=seed)
        yield await prepare(service, parameters, Prompt("Hi"), stream=False, arrived=Arrival(0.0))
    finally:
        await service.close()


def _sample(job: GenerationJob, name: str) -> float:
    value = job.service.metrics.registry.get_sample_value(name)
    return 0.0 if value is None else value


async def _texts(jobs: list[GenerationJob]) -> list[str]:
    texts = [""] * len(jobs)

    def take(place: int, generation: Generation) -> None:
        texts[place] += "".join(generation.tokens.texts)

    await stream_all(jobs, take)
    return texts


async def _leave_after_one(jobs: list[GenerationJob]) -> None:
    came = asyncio.Event()
    running = asyncio.create_task(stream_all(jobs, lambda place, generation: came.set()))
    await came.wait()
    running.cancel()
    await running


async def test_siblings_differ_in_their_seeds_alone(model: Path, engine: FakeEngine) -> None:
    async with _job(model, engine, seed=2**64 - 2) as job:
        siblings = job.siblings(3)
    assert [each.request.sampling.seed for each in siblings] == [2**64 - 2, 2**64 - 1, 0]
    plain = [replace(each.request, sampling=replace(each.request.sampling, seed=0)) for each in siblings]
    assert plain[0] == plain[1] == plain[2]


async def test_a_job_alone_is_not_copied(model: Path, engine: FakeEngine) -> None:
    async with _job(model, engine, seed=3) as job:
        assert job.siblings(1)[0] is job


async def test_collect_all_answers_in_order_and_counts_one_request(model: Path) -> None:
    engine = FakeEngine(logprobs=[-1.0, -2.0, -3.0])
    async with _job(model, engine) as job:
        jobs = job.siblings(3)
        answers = await collect_all(jobs)
        assert [answer.mean_logprob for answer in answers] == [-1.0, -2.0, -3.0]
        assert _sample(job, "tgi_request_success_total") == 1
        assert _sample(job, "tgi_request_generated_tokens_sum") == 3 * NUM_TOKENS
        headers = summed_headers(jobs, answers)
        assert headers["x-generated-tokens"] == str(3 * NUM_TOKENS)
        assert headers["x-prompt-tokens"] == "3", "the siblings' prompt is one prompt"
        assert stream_headers(*jobs)["x-compute-characters"] == "2"


async def test_collect_all_runs_all_or_none(model: Path) -> None:
    engine = FakeEngine(max_requests=2, pause=60.0)
    async with _job(model, engine) as job:
        with pytest.raises(Overloaded):
            await collect_all(job.siblings(3))
        assert len(engine.cancelled) == len(engine.requests) == 2


async def test_collect_all_ends_with_the_first_failure(model: Path) -> None:
    engine = FakeEngine(error=ShardFailed("rank 1 died"), fails_at=1)
    async with _job(model, engine) as job:
        with pytest.raises(ShardFailed):
            await collect_all(job.siblings(2))
        assert _sample(job, "tgi_request_success_total") == 0


@pytest.mark.parametrize("count", [1, 3])
async def test_every_generation_is_taken_with_its_place(model: Path, engine: FakeEngine, count: int) -> None:
    async with _job(model, engine) as job:
        assert await _texts(job.siblings(count)) == ["".join(PIECES) + "</s>"] * count
        assert _sample(job, "tgi_request_success_total") == 1
        assert _sample(job, "funitel_time_to_first_token_seconds_count") == count
    assert engine.cancelled == []


@pytest.mark.parametrize("count", [1, 3])
async def test_leaving_early_cancels_all(model: Path, count: int) -> None:
    engine = FakeEngine(pause=0.01)
    async with _job(model, engine) as job:
        with pytest.raises(asyncio.CancelledError):
            await _leave_after_one(job.siblings(count))
        assert len(engine.cancelled) == count
        failures = job.service.metrics.registry.get_sample_value("tgi_request_failure_total", {"err": "dropped"})
        assert failures == 1


@pytest.mark.parametrize("count", [1, 3])
async def test_the_first_failure_is_raised(model: Path, count: int) -> None:
    engine = FakeEngine(error=ShardFailed("rank 1 died"), fails_at=1)
    async with _job(model, engine) as job:
        with pytest.raises(ShardFailed):
            await _texts(job.siblings(count))
        failures = job.service.metrics.registry.get_sample_value("tgi_request_failure_total", {"err": "generation"})
        assert failures == 1


@pytest.mark.parametrize("count", [1, 3])
async def test_a_failure_to_take_what_came_ends_its_request_alone(model: Path, count: int) -> None:
    def fail(place: int, generation: Generation) -> None:
        raise ZeroDivisionError

    engine = FakeEngine(pause=0.01)
    async with _job(model, engine) as job:
        other = asyncio.create_task(_texts([job]))
        await asyncio.sleep(0)
        with pytest.raises(ZeroDivisionError):
            await stream_all(job.siblings(count), fail)
        assert len(engine.cancelled) == count
        assert await other == ["".join(PIECES) + "</s>"]


async def test_a_text_whose_tokens_the_model_does_not_have_is_refused(
    serve: Serve, model: Path, engine: FakeEngine
) -> None:
    """A tokenizer may know more than the model: such an id would fail whoever shares the step."""
    (model / "config.json").write_text('{"vocab_size": 257}')
    async with serve(engine) as client:
        known = await client.post("/generate", json={"inputs": "Hi"})
        unknown = await client.post("/generate", json={"inputs": "Hi</s>"})
    assert known.status_code == 200
    assert unknown.status_code == 422
    assert "token ids must be >= 0 and < 257. Given: 257" in unknown.json()["error"]
    assert len(engine.requests) == 1
