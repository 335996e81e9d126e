"""Outputs that an earlier router has got are taken first, in the order in which they were made, and not measured."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine

from funitel.proto.errors import FunitelError
from funitel.proto.step import FinishReason, GeneratedText, Generation, Tokens
from funitel.proto.takeover.state import OutputStep
from funitel.router.core import request_context
from funitel.router.core.journal import KeptJournal
from funitel.router.core.request import Request
from funitel.router.core.stream import TokenStream
from funitel.router.serving.arrival import Arrival
from funitel.router.serving.prepare import GenerationJob, Prompt, prepare
from funitel.router.serving.run import collect_all, run_all
from funitel.router.serving.sampling_request import SamplingRequest
from funitel.router.serving.service import Service
from funitel.router.settings import RouterSettings


def made(step: int, row: int, *ids: int, is_last: bool = False) -> OutputStep:
    many = len(ids)
    texts = tuple(f"<{each}>" for each in ids)
    finished = GeneratedText("".join(texts), many, FinishReason.LENGTH) if is_last else None
    return OutputStep(step, Generation(row, Tokens(ids, (-0.5,) * many, texts, (False,) * many), finished=finished))


@dataclass
class RecordedEngine(FakeEngine):
    """What it has recorded of each output key is delivered before its script, or in its place if it has ended."""

    recorded: dict[str, list[OutputStep]] = field(default_factory=dict)

    def submit(self, request: Request) -> TokenStream:
        steps = self.recorded.get(request.output_key, [])
        if steps and steps[-1].generation.finished is not None:
            self.requests.append(request)
            stream = TokenStream(request, lambda: None)
        else:
            stream = super().submit(request)
        stream.record(steps)
        return stream


async def job_of(model: Path, engine: FakeEngine) -> GenerationJob:
    service = Service(RouterSettings(tokenizer_name=str(model)))

    def fail(error: FunitelError) -> None:
        raise error

    await service.start(engine.connect, fail)
    return await prepare(
        service, SamplingRequest(do_sample=True, seed=7), Prompt("Hi"), stream=False, arrived=Arrival(0.0)
    )


@pytest.fixture
def context() -> Iterator[request_context.RequestContext]:
    with request_context.request_context("x") as made:
        yield made


def journalled(context: request_context.RequestContext, *, is_replayed: bool, **known: Any) -> KeptJournal:
    journal = KeptJournal("key", dict(known), lambda facts: None, is_replayed=is_replayed)
    context.journal = journal
    return journal


async def test_siblings_go_on_behind_what_an_earlier_router_has_got(
    model: Path, context: request_context.RequestContext
) -> None:
    engine = RecordedEngine()
    job = await job_of(model, engine)
    journal = journalled(context, is_replayed=True, **{"cached.key/1": (4, {"memory": 4})})
    engine.recorded = {
        "key/1": [made(3, 1, 10), made(5, 1, 11, is_last=True)],
        "key/2": [made(4, 2, 20)],
    }
    jobs = job.siblings(3)
    answers = await collect_all(jobs)
    assert [each.output_key for each in engine.requests] == ["key/1", "key/2", "key/3"]
    assert [each.is_replayed for each in engine.requests] == [True] * 3
    assert [each.was_begun for each in engine.requests] == [True, False, False]
    assert [each.tokens.ids for each in answers[0].generations] == [(10,), (11,)]
    assert answers[1].generations[0].tokens.ids == (20,)
    assert len(answers[1].generations) == len(answers[2].generations) + 1
    assert jobs[0].num_cached_tokens == 4, "a fact of the earlier router"
    value = job.service.metrics.registry.get_sample_value
    assert value("funitel_time_to_first_token_seconds_count") == 1.0, "of the third one alone"
    assert not engine.released
    journal.done()
    assert engine.released == ["key/1", "key/2", "key/3"]
    await job.service.close()


async def test_what_takes_recorded_outputs_may_fail(model: Path, context: request_context.RequestContext) -> None:
    engine = RecordedEngine()
    job = await job_of(model, engine)
    journalled(context, is_replayed=True)
    engine.recorded = {"key/1": [made(3, 1, 10)]}

    def refuse(place: int, generation: Generation) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await run_all([job], refuse)
    assert len(engine.cancelled) == 1
    await job.service.close()


async def test_a_request_that_is_not_kept_has_no_key(model: Path) -> None:
    engine = FakeEngine()
    job = await job_of(model, engine)
    await collect_all([job])
    assert engine.requests[0].output_key == ""
    await job.service.close()
