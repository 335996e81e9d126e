"""A stream hands over what it was given, in order, whoever comes first."""

import asyncio
import gc
import weakref
from collections.abc import Callable

import pytest

from funitel.proto.errors import FunitelError, Incomplete, StepFailed
from funitel.proto.step import FinishReason, GeneratedText, Generation, SamplingParams, StoppingParams, Tokens
from funitel.proto.takeover.state import OutputStep
from funitel.router.core.request import Request
from funitel.router.core.stream import TokenStream

REQUEST = Request(input_ids=(1,), sampling=SamplingParams(), stopping=StoppingParams(max_new_tokens=9))


def generation(token: int, *, is_last: bool = False) -> Generation:
    finished = GeneratedText("x", token, FinishReason.LENGTH) if is_last else None
    return Generation(0, Tokens((token,), (-1.0,), (str(token),)), finished=finished)


def make(cancel: Callable[[], None] = lambda: None) -> TokenStream:
    return TokenStream(REQUEST, cancel)


async def test_what_came_before_anyone_asked_is_there() -> None:
    stream = make()
    for token in (1, 2, 3):
        stream.deliver(generation(token, is_last=token == 3))
    assert [each.tokens.ids for each in [g async for g in stream]] == [(1,), (2,), (3,)]
    assert [g async for g in stream] == []  # it has ended


async def test_who_waits_is_woken_for_each_and_for_several_at_once() -> None:
    stream = make()
    seen: list[int] = []

    async def read() -> None:
        async for each in stream:
            seen.extend(each.tokens.ids)

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    stream.deliver(generation(1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert seen == [1]
    stream.deliver(generation(2))
    stream.deliver(generation(3))
    stream.deliver(generation(4, is_last=True))
    async with asyncio.timeout(1.0):
        await reading
    assert seen == [1, 2, 3, 4]


async def test_nothing_is_lost_when_a_wait_is_given_up() -> None:
    stream = make()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await anext(stream)
    stream.deliver(generation(1))
    assert (await anext(stream)).tokens.ids == (1,)


@pytest.mark.parametrize("error", [StepFailed("broken"), Incomplete("cut")])
async def test_an_error_comes_after_the_tokens_before_it(error: FunitelError) -> None:
    stream = make()
    stream.deliver(generation(1))
    stream.deliver(error)
    assert (await anext(stream)).tokens.ids == (1,)
    with pytest.raises(type(error)):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_leaving_early_cancels_and_leaving_at_the_end_does_not() -> None:
    cancelled: list[str] = []
    async with make(lambda: cancelled.append("early")) as stream:
        stream.deliver(generation(1))
    async with make(lambda: cancelled.append("late")) as stream:
        stream.deliver(generation(1, is_last=True))
    assert cancelled == ["early"]


async def test_a_listener_is_told_of_what_came_before_and_of_the_rest_as_it_is_delivered() -> None:
    heard: list[Generation | FunitelError] = []
    stream = make()
    first, second, error = generation(1), generation(2), StepFailed("broken")
    stream.deliver(first)
    stream.listen(lambda event, now: heard.append(event))
    assert heard == [first]
    stream.deliver(second)
    assert heard == [first, second]
    stream.deliver(error)
    assert heard == [first, second, error]


async def test_a_stream_that_has_ended_is_freed_without_garbage_collection() -> None:
    stream = make()
    stream.listen(lambda event, now, stream=stream: None)  # type: ignore[misc]
    stream.deliver(generation(1, is_last=True))
    freed = weakref.ref(stream)
    gc.disable()
    try:
        del stream
        assert freed() is None
    finally:
        gc.enable()


async def test_outputs_of_an_earlier_router_come_first() -> None:
    stream = make()
    stream.record([OutputStep(3, generation(1)), OutputStep(5, generation(2))])
    stream.deliver(generation(3, is_last=True))
    assert stream.num_tokens == 3
    assert [each.tokens.ids for each in [g async for g in stream]] == [(1,), (2,), (3,)]


@pytest.mark.parametrize("listens", [True, False])
async def test_an_answer_may_have_ended_with_an_earlier_router(listens: bool) -> None:
    stream = make()
    stream.record([OutputStep(3, generation(1)), OutputStep(5, generation(2, is_last=True))])
    assert stream.has_ended
    seen: list[tuple[int, ...]] = []
    if listens:
        stream.listen(lambda event, _: seen.append(event.tokens.ids))  # type: ignore[union-attr]
        assert stream._listener is None, "it would refer back to the stream"
    else:
        seen = [each.tokens.ids async for each in stream]
    assert seen == [(1,), (2,)]
    async with stream:
        pass  # it does not cancel


async def test_siblings_take_recorded_outputs_themselves() -> None:
    stream = make()
    stream.record([OutputStep(3, generation(1))])
    assert [each.step for each in stream.take_recorded()] == [3]
    stream.deliver(generation(2, is_last=True))
    assert [each.tokens.ids for each in [g async for g in stream]] == [(2,)]
