"""Runners and the compute thread's loop: order, what is sent before the next job begins, threads, the end."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from funitel.model_server.rpc.compute_threads import ComputeLoop, InlineRunner, Runner, ThreadedRunner


async def outcomes(runner: Runner, count: int) -> list[str]:
    """Run jobs of which every third fails; what was told, in order."""
    told: list[str] = []
    ended = asyncio.Event()

    def job(i: int) -> int:
        if i % 3 == 2:
            raise ValueError(i)
        return i

    def tell(outcome: object) -> None:
        told.append(repr(outcome))
        if len(told) == count:
            ended.set()

    def finish(i: int) -> int:
        if i % 3 == 1:
            raise KeyError(i)
        return i

    for i in range(count):
        runner.run(partial(job, i), finish, tell, tell)
    await asyncio.wait_for(ended.wait(), 10)
    return told


async def test_either_lane_keeps_the_order_and_goes_on_behind_a_failure() -> None:
    expected = ["0", "KeyError(1)", "ValueError(2)", "3", "KeyError(4)"]
    assert await outcomes(InlineRunner(), 5) == expected
    with ThreadPoolExecutor(1) as compute, ThreadPoolExecutor(1) as answers:
        assert await outcomes(ThreadedRunner(compute, answers), 5) == expected


async def test_a_job_runs_while_the_one_before_it_is_finished_beside_it() -> None:
    has_run, ended = threading.Event(), asyncio.Event()
    with ThreadPoolExecutor(1) as compute, ThreadPoolExecutor(1) as answers:
        runner = ThreadedRunner(compute, answers)
        runner.run(
            lambda: None, lambda _: has_run.wait(10), lambda was_run: ended.set() if was_run else None, pytest.fail
        )
        runner.run(has_run.set, lambda _: None, lambda _: None, pytest.fail)
        await asyncio.wait_for(ended.wait(), 20)


async def test_the_loop_turns_between_two_jobs_of_its_own_lane() -> None:
    """What the first answers is written in that turn, so it must not wait for the second."""
    runner, events = InlineRunner(), []
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    runner.run(
        lambda: events.append("first"), lambda _: None, lambda _: loop.call_soon(events.append, "turn"), events.append
    )
    runner.run(lambda: events.append("second"), lambda _: None, lambda _: ended.set(), events.append)
    await asyncio.wait_for(ended.wait(), 10)
    assert events == ["first", "turn", "second"]


async def test_a_reply_that_raises_does_not_stop_its_lane() -> None:
    runner, ended = InlineRunner(), asyncio.Event()
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context["exception"]))
    error = RuntimeError("the socket is gone")

    def answer(_: None) -> None:
        raise error

    runner.run(lambda: None, lambda _: None, answer, pytest.fail)
    runner.run(lambda: None, lambda _: None, lambda _: ended.set(), pytest.fail)
    await asyncio.wait_for(ended.wait(), 10)
    assert raised == [error]


async def test_a_compute_loop_turns_on_the_compute_thread_until_it_is_stopped() -> None:
    async def where() -> int:
        return threading.get_ident()

    with ThreadPoolExecutor(1) as compute:
        thread = await asyncio.wrap_future(compute.submit(threading.get_ident))
        turning = ComputeLoop(compute)
        turning.start()
        assert await turning.run(where()) == thread
        await turning.stop()
        assert await asyncio.wrap_future(compute.submit(threading.get_ident)) == thread
        assert turning.loop.is_closed()


async def test_a_compute_loop_that_never_started_can_be_stopped() -> None:
    with ThreadPoolExecutor(1) as compute:
        turning = ComputeLoop(compute)
        await turning.stop()
        assert turning.loop.is_closed()
