"""Requests that are started, read, paused, resumed, stopped and aborted: what they answer, and that nothing stays."""

import asyncio
import gc
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from funitel.llm import (
    LLM,
    AsyncLLM,
    CompletionOutput,
    Grammar,
    InvalidRequest,
    RequestHandle,
    RequestOutput,
    RequestOutputKind,
    RequestState,
    SamplingParams,
)
from funitel.proto.errors import NotReady
from funitel_testing.tiny import byte_tokenizer, save_tiny
from funitel_testing.zoo import ZOO

SECONDS = 30.0  # after which a test has hung
DELTA = RequestOutputKind.DELTA
LONG = SamplingParams(seed=3, max_tokens=120, ignore_eos=True)


@pytest.fixture
def engine(llm: LLM) -> Iterator[AsyncLLM]:
    """The requests of the tiny model; each test leaves nothing behind."""
    with AsyncLLM(llm) as engine:
        yield engine
    settle(llm)
    check_empty(llm)


def begun(handle: RequestHandle, num_tokens: int = 3) -> RequestHandle:
    """The same request once it has some tokens."""
    deadline = time.monotonic() + SECONDS
    while handle.num_tokens < num_tokens and not handle.is_finished:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return handle


def settle(llm: LLM) -> None:
    """Wait until the engine has taken into account everything that was posted, and steps in flight are answered."""
    is_reached = threading.Event()
    llm._model.loop.post(is_reached.set)  # behind what was posted, such as an abort of a paused request
    assert is_reached.wait(SECONDS)
    deadline = time.monotonic() + SECONDS
    while llm._model.engine._steps._pipeline._calls or llm._model.engine._scheduler._in_flight:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def check_empty(llm: LLM) -> None:
    """No stream, sequence, block, state slot, row, timer or task is left."""
    settle(llm)
    engine = llm._model.engine
    scheduler, requests = engine._scheduler, engine.requests
    deadline = time.monotonic() + SECONDS
    while scheduler.running or requests.streams or engine._replica._batches:
        assert time.monotonic() < deadline, (scheduler.running, requests.streams, engine._replica._batches)
        engine._steps._woken and llm._model.loop.post_if_open(engine._steps.wake)
        time.sleep(0.005)
    assert not len(scheduler.waiting)
    assert not scheduler.shares.sequences
    assert not (requests._sequences)
    assert not (requests._timers)
    assert not (requests._num_of_key)
    assert not len(engine.paused)
    assert not engine.paused._num_of_key
    assert not engine._preparing
    blocks = scheduler.blocks
    assert (blocks.num_used, blocks.num_free) == (0, blocks.num_blocks)
    assert blocks.states is None or blocks.states.num_used == 0


def text_of(output: RequestOutput) -> tuple[str, tuple[int, ...]]:
    (completion,) = output.outputs
    return completion.text, completion.token_ids


# Reading


def test_deltas_joined_are_the_whole_text(llm: LLM, engine: AsyncLLM) -> None:
    params = SamplingParams(seed=5, max_tokens=40, n=2, logprobs=2, stop="e", output_kind=DELTA)
    whole = llm.generate("Some text", params, use_tqdm=False)[0]
    handle = engine.start_request("Some text", params, request_id="mine")
    texts, ids, places = ["", ""], [(), ()], [0, 0]
    for output in handle:
        assert output.request_id == "mine"
        for part in output.outputs:
            texts[part.index] += part.text
            ids[part.index] += part.token_ids
            places[part.index] += len(part.logprobs or ())
    assert texts == [each.text for each in whole.outputs]
    assert ids == [each.token_ids for each in whole.outputs]
    assert places == [len(each) for each in ids]
    assert handle.output.outputs == whole.outputs
    assert handle.state is RequestState.FINISHED
    assert output.finished


def test_cumulative_outputs_grow_and_final_ones_are_single(llm: LLM, engine: AsyncLLM) -> None:
    (whole,) = llm.generate("Grow", LONG, use_tqdm=False)
    found = [text_of(output) for output in engine.start_request("Grow", LONG)]
    assert found[-1] == text_of(whole)
    assert all(later[1][: len(earlier[1])] == earlier[1] for earlier, later in zip(found, found[1:], strict=False))
    final = SamplingParams(seed=3, max_tokens=120, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    assert [text_of(output) for output in engine.start_request("Grow", final)] == [text_of(whole)]


def test_reading_waits_as_long_as_it_is_told(engine: AsyncLLM) -> None:
    handle = begun(engine.start_request("Wait", LONG))
    handle.pause()
    assert handle.sync(SECONDS)
    assert handle.get_nowait() is not None
    began = time.monotonic()
    assert handle.get_nowait() is None
    assert handle.get(timeout=0.05) is None
    assert time.monotonic() - began >= 0.05
    handle.stop()
    assert handle.sync(SECONDS)
    assert handle.get().finished
    assert (handle.get(), handle.get_nowait(), list(handle)) == (None, None, [])  # the end, at once


def test_metrics_say_when_tokens_came(engine: AsyncLLM) -> None:
    before = time.time()
    *_, output = engine.start_request("Times", LONG)
    metrics = output.metrics
    assert metrics is not None
    instants = [
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.last_token_time,
        metrics.finished_time,
    ]
    assert instants == sorted(instants)
    assert before - 0.01 <= metrics.arrival_time <= time.time()
    assert metrics.num_generation_tokens == 120
    assert metrics.time_to_first_token == pytest.approx(metrics.first_token_time - metrics.arrival_time)
    decoding = metrics.last_token_time - metrics.first_scheduled_time
    assert metrics.tokens_per_second == pytest.approx(120 / decoding)


# Course


@pytest.mark.parametrize(
    "ways",
    [
        {"temperature": 0},
        {"seed": 9, "temperature": 1.2, "top_k": 40},
        {"seed": 4, "mirostat": 2, "mirostat_tau": 3.0},
        {"seed": 2, "frequency_penalty": 0.8, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"seed": 6, "grammar": Grammar.regex("(alpha|beta|gamma|delta)( [a-z]{3,9}){8}")},
        {"seed": 8, "stop": ["ab", "x"], "n": 3},
    ],
)
def test_a_paused_request_goes_on_with_the_same_text(llm: LLM, engine: AsyncLLM, ways: dict[str, Any]) -> None:
    params = SamplingParams(**({"max_tokens": 60, "ignore_eos": True} | ways))
    (expected,) = llm.generate("Pause me", params, use_tqdm=False)
    handle = engine.start_request("Pause me", params)
    for num_tokens in (0, 1, 7, 20):
        begun(handle, num_tokens)
        handle.pause()
        assert handle.sync(SECONDS)
        if handle.is_finished:
            break
        assert handle.state is RequestState.PAUSED
        held = handle.num_tokens
        time.sleep(0.01)
        assert handle.num_tokens == held
        assert llm._model.engine._scheduler.blocks.num_used == 0
        handle.resume()
    assert handle.sync(SECONDS)
    while not handle.is_finished:
        handle.get(1)
    assert handle.output.outputs == expected.outputs


def test_pausing_before_it_is_queued_and_twice_is_one_pause(llm: LLM, engine: AsyncLLM) -> None:
    (expected,) = llm.generate("Early", LONG, use_tqdm=False)
    handle = engine.start_request("Early", LONG)
    for _ in range(2):
        handle.pause()
    assert handle.sync(SECONDS)
    assert handle.state is RequestState.PAUSED
    for _ in range(2):
        handle.resume()
    *_, output = handle
    assert text_of(output) == text_of(expected)
    handle.pause()
    handle.stop()
    assert handle.sync(SECONDS)
    assert handle.state is RequestState.FINISHED


def test_a_pause_before_the_last_resumption_is_not_waited_for(llm: LLM, engine: AsyncLLM) -> None:
    handle = begun(engine.start_request("Later", LONG))
    handle.pause()
    assert handle.sync(SECONDS)
    is_blocked, goes_on = threading.Event(), threading.Event()
    llm._model.loop.post(lambda: (is_blocked.set(), goes_on.wait(SECONDS)))
    assert is_blocked.wait(SECONDS)
    handle.resume()
    handle.pause()
    assert not handle.sync(0.02), "it is still in the pause before"
    goes_on.set()
    assert handle.sync(SECONDS)
    assert handle.state is RequestState.PAUSED
    handle.abort()


def test_a_stopped_request_keeps_what_it_has(llm: LLM, engine: AsyncLLM) -> None:
    (whole,) = llm.generate("Stop", LONG, use_tqdm=False)
    for pauses in (False, True):
        handle = begun(engine.start_request("Stop", LONG))
        if pauses:
            handle.pause()
        handle.stop()
        assert handle.sync(SECONDS)
        (completion,) = handle.output.outputs
        assert (handle.state, completion.finish_reason) == (RequestState.STOPPED, "abort")
        assert 3 <= len(completion.token_ids) < 120
        assert completion.token_ids == whole.outputs[0].token_ids[: len(completion.token_ids)]
        assert whole.outputs[0].text.startswith(completion.text.rstrip("\ufffd"))


@pytest.mark.parametrize(("end", "state"), [("stop", RequestState.STOPPED), ("abort", RequestState.ABORTED)])
def test_sync_waits_for_the_end_of_a_paused_request(llm: LLM, engine: AsyncLLM, end: str, state: RequestState) -> None:
    handle = begun(engine.start_request("Stop", LONG))
    handle.pause()
    assert handle.sync(SECONDS)
    is_free = threading.Event()
    llm._model.loop.post(lambda: None if is_free.wait(SECONDS) else None)  # the end comes behind it
    getattr(handle, end)()
    assert not handle.sync(0.02)
    is_free.set()
    assert handle.sync(SECONDS)
    assert handle.state is state


def test_text_held_back_for_a_stop_is_shown_when_the_request_is_stopped(llm: LLM, engine: AsyncLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    text = llm.generate("Held", params, use_tqdm=False)[0].outputs[0].text
    never = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, stop=text[:90] + "\0")
    handle = begun(engine.start_request("Held", never), 8)
    assert handle.output.outputs[0].text == ""  # all of it may begin the stop
    handle.stop()
    assert handle.sync(SECONDS)
    stopped = handle.output.outputs[0].text
    assert stopped
    assert text.startswith(stopped.rstrip("\ufffd"))


def test_an_aborted_request_has_nothing(engine: AsyncLLM) -> None:
    handle = begun(engine.start_request("Abort", LONG, request_id="a"))
    assert engine.abort("a")
    assert handle.sync(SECONDS)
    assert (handle.state, handle.get(), handle.output.outputs[0].text) == (RequestState.ABORTED, None, "")
    assert not engine.abort("a")
    assert not engine.abort("never")


def test_a_dropped_handle_aborts_its_request(llm: LLM, engine: AsyncLLM) -> None:
    handle = begun(engine.start_request("Drop", LONG))
    handle.pause()
    assert handle.sync(SECONDS)
    del handle
    gc.collect()
    check_empty(llm)


def test_release_frees_the_results(engine: AsyncLLM) -> None:
    handle = engine.start_request("Free", LONG)
    assert [text_of(output)[1] for output in handle][-1]
    handle.release()
    assert (handle.num_tokens, handle.output.outputs[0].token_ids) == (0, ())
    running = begun(engine.start_request("Free", LONG))
    running.release()
    assert running.sync(SECONDS)
    assert running.state is RequestState.ABORTED


def test_states_go_forward(engine: AsyncLLM) -> None:
    order = [RequestState.WAITING, RequestState.GENERATING, RequestState.FINISHED]
    handles = [engine.start_request(f"State {i}", LONG) for i in range(16)]
    seen: list[list[RequestState]] = [[] for _ in handles]
    while not all(states and states[-1].is_last for states in seen):
        for handle, states in zip(handles, seen, strict=True):
            states.append(handle.state)
    assert all(states == sorted(states, key=order.index) for states in seen)
    assert engine.sync(timeout=SECONDS)


def test_an_id_is_of_one_running_request(engine: AsyncLLM) -> None:
    handle = engine.start_request("Twice", LONG, request_id="x")
    handle.pause()
    with pytest.raises(InvalidRequest, match="request_id must be new, given 'x' of a request that runs"):
        engine.start_request("Twice", LONG, request_id="x")
    handle.abort()
    assert handle.sync(SECONDS)
    assert engine.start_request("Twice", LONG, request_id="x").request_id == "x"


def test_a_wrong_request_is_refused_at_once(engine: AsyncLLM) -> None:
    with pytest.raises(InvalidRequest, match="prompt must be one text or its token ids, given 2 prompts"):
        engine.start_request(["a", "b"], LONG)
    with pytest.raises(InvalidRequest, match="output_kind must be a RequestOutputKind, given 'delta'"):
        SamplingParams(output_kind="delta")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="takes no arguments, given dtype"):
        AsyncLLM(engine.llm, dtype="float32")


# Event loops, threads and life


def test_requests_of_an_event_loop(llm: LLM) -> None:
    expected = [text_of(output) for output in llm.generate([f"Loop {i}" for i in range(8)], LONG, use_tqdm=False)]

    async def one(engine: AsyncLLM, i: int) -> tuple[str, tuple[int, ...]]:
        outputs = [output async for output in engine.generate(f"Loop {i}", LONG, request_id=f"r{i}")]
        return text_of(outputs[-1])

    async def paused(engine: AsyncLLM) -> tuple[str, tuple[int, ...]]:
        handle = engine.start_request("Loop 0", LONG)
        async for output in handle:
            if output.outputs[0].token_ids:
                break
        handle.pause()
        assert await handle.sync_async(SECONDS)
        handle.resume()
        return [text_of(output) async for output in handle][-1]

    async def left(engine: AsyncLLM) -> None:
        async for _ in engine.generate("Left", LONG, request_id="left"):
            break

    async def all_of_them() -> list[Any]:
        async with AsyncLLM(llm) as engine:
            return await asyncio.gather(*(one(engine, i) for i in range(8)), paused(engine), left(engine))

    for _ in range(2):  # each time in another event loop
        assert asyncio.run(all_of_them()) == [*expected, expected[0], None]
    check_empty(llm)


def test_waiting_for_the_end_can_time_out_in_an_event_loop(engine: AsyncLLM) -> None:
    async def wait() -> list[bool]:
        handle = engine.start_request("Slow", SamplingParams(seed=1, max_tokens=None, ignore_eos=True))
        early = await handle.sync_async(0.0)
        handle.abort()
        return [early, await handle.sync_async(SECONDS)]

    assert asyncio.run(wait()) == [False, True]


def test_it_starts_once_and_closes(model: Path) -> None:
    engine = AsyncLLM(model, num_threads=1, block_size=4, max_batch_total_tokens=400)
    with pytest.raises(NotReady, match="was not started"):
        engine.start_request("x")
    with engine:
        engine.start()
        handle = begun(engine.start_request("Close", LONG))
        handle.pause()
        assert handle.sync(SECONDS)
        other = engine.start_request("Close", LONG)
    assert handle.is_finished
    assert other.is_finished
    for again in (engine.start, lambda: engine.start_request("x")):
        with pytest.raises(NotReady, match="this AsyncLLM is closed"):
            again()
    engine.close()


def test_closing_fails_what_runs(model: Path) -> None:
    llm = LLM(model, num_threads=1, block_size=4, max_batch_total_tokens=400)
    handles = [llm.start_request(f"Fail {i}", LONG) for i in range(4)]
    handles[0].pause()
    llm.close()
    assert {handle.state for handle in handles} <= {RequestState.FAILED, RequestState.FINISHED}
    assert handles[0].state is RequestState.FAILED
    with pytest.raises(NotReady, match="closed before the answer was complete"):
        list(handles[0])
    with pytest.raises(NotReady):
        llm.start_request("x", LONG)


# Many at random


def save_hybrid(folder: Path) -> Path:
    """A random model with recurrent layers."""
    ZOO["qwen3_5"].save(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"seed": 1, "temperature": 1.3, "top_k": 30},
    {"seed": 2, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 1},
    {"seed": 3, "n": 2, "frequency_penalty": 0.6},
    {"seed": 4, "mirostat": 1},
    {"temperature": 0, "grammar": Grammar.regex("(yes|no), (certainly|never)( [0-9]{3}){4}")},
)


def said(completion: CompletionOutput) -> tuple[Any, ...]:
    """What a completion is, without sums of scores: in torch their last digit hangs on what shares a step."""
    return completion.index, completion.text, completion.token_ids, completion.finish_reason, completion.stop_reason


ENDS = ("stop", "abort", "release", "drop")


@pytest.mark.parametrize(
    ("family", "num_requests", "share_of_ends"),
    [("llama", 300, 0.2), pytest.param("llama", 1000, 0.1, marks=pytest.mark.slow), ("qwen3_5", 60, 0.25)],
)
def test_requests_disturbed_at_random(tmp_path: Path, family: str, num_requests: int, share_of_ends: float) -> None:
    draw = random.Random(19)
    fates = {i: ENDS[i // 3 % len(ENDS)] for i in range(0, num_requests, 3)}  # the others are to finish
    prompts = [f"{'word ' * draw.randrange(6)}{draw.randrange(40)}" for _ in range(num_requests)]
    params = [
        SamplingParams(max_tokens=draw.randrange(1, 40), ignore_eos=True, **WAYS[i % len(WAYS)])
        for i in range(num_requests)
    ]
    folder = save_tiny(family, tmp_path) if family == "llama" else save_hybrid(tmp_path)
    # The pool holds a few of them only, so that they are preempted, too.
    with LLM(folder, num_threads=1, block_size=4, max_batch_total_tokens=400, max_total_tokens=120) as llm:
        expected = [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]
        num_threads = threading.active_count()
        found: dict[int, Any] = {}
        with AsyncLLM(llm) as engine:
            running: dict[int, RequestHandle] = {}
            left = list(range(num_requests))
            counts = dict.fromkeys(("pause", "resume", *ENDS), 0)
            ended: dict[int, RequestHandle] = {}
            while left or running:
                while left and len(running) < 60:
                    i = left.pop()
                    running[i] = engine.start_request(prompts[i], params[i])
                    if i in fates:
                        running[i].pause()  # a fast engine would finish it before it is struck
                i = draw.choice(list(running))
                handle, kind = running[i], draw.random()
                if handle.is_finished:
                    ended[i] = running.pop(i)
                elif kind < 0.4:
                    handle.pause()
                    counts["pause"] += 1
                elif kind < 1 - share_of_ends or i not in fates:
                    handle.resume()
                    counts["resume"] += 1
                else:
                    counts[fates[i]] += 1
                    match fates[i]:
                        case "stop":
                            handle.stop()
                        case "abort":
                            handle.abort()
                        case "release":
                            running.pop(i).release()
                        case "drop":
                            del running[i]
                del handle  # the last of a dropped request
                time.sleep(0.002)  # more often, they would leave the engine no time
            kinds = counts if family == "llama" else ("pause", "resume")  # so few may end before they are struck
            assert all(counts[kind] for kind in kinds), counts
            states = {i: handle.state for i, handle in ended.items()}
            found = {i: handle.output.outputs for i, handle in ended.items()}
        finished = [i for i, state in states.items() if state is RequestState.FINISHED]
        stopped = [i for i, state in states.items() if state is RequestState.STOPPED]
        assert len(finished) >= num_requests * 2 // 3
        assert stopped or not counts["stop"]
        assert RequestState.FAILED not in states.values()
        for i in finished:
            assert list(map(said, found[i])) == list(map(said, expected[i]))
        for i in stopped:
            for part, whole in zip(found[i], expected[i], strict=True):
                assert part.token_ids == whole.token_ids[: len(part.token_ids)]
                assert whole.text.startswith(part.text.rstrip("\ufffd"))
        del running, ended
        gc.collect()
        check_empty(llm)
        assert threading.active_count() == num_threads
