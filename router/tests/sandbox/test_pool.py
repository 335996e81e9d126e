"""Questions are written ahead to processes that may be killed: all it changes is how soon they are answered."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import eventually

from funitel.router.sandbox.pool import Killed, SandboxPool, WorkerUnavailable
from funitel.router.sandbox.process import AHEAD_BYTES

MEMORY_LIMIT = 256 << 20
TIME_LIMIT = 1.0
PATIENCE_SECONDS = 30.0  # for a busy machine to start processes

# Does what it is told, and answers with the last word; may be set up to die at its first starts.
WORKER = """
import os, signal, time
from pathlib import Path
from funitel.router.sandbox.worker import serve

def answer(question):
    verb, value = question
    if verb == "sleep":
        time.sleep(value)
    if verb == "exit":
        os._exit(1)
    if verb == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return "a" * value if verb == "repeat" else value

for death in Path(__file__).with_name("deaths").glob("*"):
    death.unlink()
    os.kill(os.getpid(), signal.SIGKILL)
serve(lambda setup: answer)
"""

Pools = Callable[..., SandboxPool]


@pytest.fixture
async def pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pools]:
    """`pools(most=1, **limits)`: processes that do as they are told, ended at the end."""
    (tmp_path / "obedient_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path)
    made: list[SandboxPool] = []

    def make(most: int = 1, **limits: Any) -> SandboxPool:
        limits = {"time_limit": TIME_LIMIT, "memory_limit": MEMORY_LIMIT} | limits
        made.append(SandboxPool("obedient_worker", None, most=most, **limits))
        return made[-1]

    async with asyncio.timeout(PATIENCE_SECONDS):
        yield make
    for pool in made:
        await pool.close()


async def all_ready(pool: SandboxPool) -> None:
    while len(pool._processes) < pool._most:
        await pool.warm_up()


def asking(pool: SandboxPool, *questions: tuple[str, Any], key: bytes = b"") -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(pool.run(question, key)) for question in questions]


async def blamed(task: asyncio.Task[Any]) -> str:
    with pytest.raises(Killed) as caught:
        await task
    return str(caught.value)


async def test_a_busy_loop_gets_many_answers_in_each_turn(pools: Pools) -> None:
    pool = pools(time_limit=30.0)
    await pool.warm_up()
    answers = asyncio.gather(*asking(pool, *(("say", i) for i in range(300))))
    num_turns = 0
    while not answers.done():
        time.sleep(0.01)  # noqa: ASYNC251  what else a loop has to do
        num_turns += 1
        await asyncio.sleep(0)
    assert await answers == list(range(300))
    assert num_turns < 100


async def test_the_time_of_a_question_begins_when_nothing_is_before_it(pools: Pools) -> None:
    pool = pools()
    assert await asyncio.gather(*asking(pool, *[("sleep", 0.4)] * 4)) == [0.4] * 4


BOMBS = {"slow": (("sleep", 60), "1 s"), "large": (("exit", 0), "256 MiB"), "long": (("repeat", 2 << 20), "256 MiB")}


@pytest.mark.parametrize(("kind", "most"), [("slow", 1), ("slow", 2), ("large", 1), ("long", 1)])
async def test_only_the_first_question_is_blamed(pools: Pools, kind: str, most: int) -> None:
    pool = pools(most)
    await all_ready(pool)
    bomb, limit = BOMBS[kind]
    say = [("say", i) for i in range(20)]
    harmless, bombs = asking(pool, *say[:2]), asking(pool, *[bomb] * most)
    harmless += asking(pool, *say[2:])
    assert [await blamed(task) for task in bombs] == [f"it takes more than {limit}"] * most
    assert await asyncio.gather(*harmless) == list(range(20))


async def test_what_somebody_else_kills_is_asked_again_a_few_times(pools: Pools) -> None:
    pool = pools()
    deadly, *behind = asking(pool, ("die", 0), *(("say", i) for i in range(20)))
    assert await asyncio.gather(*behind) == list(range(20))
    assert await blamed(deadly) == "it takes more than 256 MiB"


@pytest.mark.parametrize(("num_deaths", "is_ready"), [(2, True), (3, False)])
async def test_what_somebody_else_kills_as_it_starts_is_started_again(
    num_deaths: int, is_ready: bool, tmp_path: Path, pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("funitel.router.sandbox.pool.MAX_START_DEATHS", 3)
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    for number in range(num_deaths):
        (deaths / str(number)).touch()
    asked = pools().run(("say", "well"))
    if is_ready:
        assert await asked == "well"
    else:
        with pytest.raises(WorkerUnavailable, match="does not start"):
            await asked
    assert list(deaths.iterdir()) == []


async def test_those_behind_a_bomb_are_asked_elsewhere_long_before_its_end(pools: Pools) -> None:
    pool = pools(2, time_limit=PATIENCE_SECONDS)
    await all_ready(pool)
    bomb, slow, *quick = asking(pool, ("sleep", 60), ("sleep", 0.2), *(("say", i) for i in range(40)))
    await asyncio.sleep(0)
    assert all(len(process.tasks) > 1 for process in pool._processes), "some are behind each"
    assert await asyncio.gather(slow, *quick) == [0.2, *range(40)]
    assert await asyncio.gather(*asking(pool, *[("say", 1)] * 40)) == [1] * 40
    assert not bomb.done()


async def test_they_do_not_wait_for_another_process_to_be_asked_for(pools: Pools) -> None:
    """One is started as soon as somebody has to wait."""
    pool = pools(2, time_limit=PATIENCE_SECONDS)
    await pool.warm_up()
    bomb, quick = asking(pool, ("sleep", 60), ("say", 1))
    assert await quick == 1
    assert not bomb.done()


async def test_small_questions_do_not_wait_behind_a_large_one(pools: Pools) -> None:
    pool = pools(2)
    await all_ready(pool)
    large, *small = asking(pool, ("say", "a" * AHEAD_BYTES), *(("say", i) for i in range(20)))
    await asyncio.sleep(0)
    assert sorted(len(process.tasks) for process in pool._processes) == [1, 20]
    await asyncio.gather(large, *small)


async def test_who_leaves_while_waiting_leaves_nothing_behind(pools: Pools) -> None:
    pool = pools()
    await pool.warm_up()
    first, leaving, last = asking(pool, ("sleep", 0.3), ("say", "a" * AHEAD_BYTES), ("say", 1))
    await asyncio.sleep(0)
    assert len(pool._waiting) == 2
    leaving.cancel()
    await asyncio.sleep(0)
    assert len(pool._waiting) == 1
    assert await asyncio.gather(first, last) == [0.3, 1]


async def test_a_bomb_whose_sender_has_left_is_killed_all_the_same(pools: Pools) -> None:
    pool = pools()
    await pool.warm_up()
    (process,) = pool._processes
    bomb, behind = asking(pool, ("sleep", 60), ("say", 1))
    await asyncio.sleep(0)
    bomb.cancel()
    assert await behind == 1
    assert process not in pool._processes


async def test_a_process_that_answers_too_much_is_killed(pools: Pools) -> None:
    pool = pools(time_limit=5, max_answer_bytes=100)
    assert await pool.run(("repeat", 98)) == "a" * 98
    with pytest.raises(Killed, match="more than 256 MiB"):
        await pool.run(("repeat", 99))
    assert json.dumps(await pool.run(("repeat", 1))) == '"a"'
    num_files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):  # a pipe is full, and nobody reads it
        with pytest.raises(Killed, match="more than 256 MiB"):
            await pool.run(("repeat", 24 << 20))
        await pool.run(("say", 1))
    await pool.close()
    assert len(os.listdir("/proc/self/fd")) <= num_files, "its pipes are closed"


async def test_closing_ends_all_and_cancels_who_asks(pools: Pools) -> None:
    pool = pools(2)
    await pool.warm_up()
    tasks = asking(pool, ("sleep", 60), ("say", 1), ("say", "a" * AHEAD_BYTES))
    await asyncio.sleep(0)
    await pool.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 3
    assert not pool._processes


async def test_a_process_that_is_gone_is_replaced(pools: Pools) -> None:
    pool = pools()
    await pool.warm_up()
    (process,) = pool._processes
    await process.kill()
    await eventually(lambda: asyncio.sleep(0, not pool._processes), "it is forgotten")
    assert await pool.run(("say", 1)) == 1


async def test_the_bombs_of_one_key_leave_a_process_to_others(pools: Pools) -> None:
    """Twenty slow grammars of one key delayed those of all others by a minute."""
    pool = pools(2, time_limit=PATIENCE_SECONDS, has_several_keys=True)
    await all_ready(pool)
    bombs = asking(pool, *[("sleep", 60)] * 6, key=b"a")
    await asyncio.sleep(0.3)
    assert await asyncio.gather(*asking(pool, *(("say", i) for i in range(20)), key=b"b")) == list(range(20))
    assert not any(bomb.done() for bomb in bombs)
    assert sum(bool(process.tasks) for process in pool._processes) == 1


async def test_one_key_may_use_every_process_where_there_are_no_others(pools: Pools) -> None:
    pool = pools(2, time_limit=PATIENCE_SECONDS)
    await all_ready(pool)
    asking(pool, *[("sleep", 60)] * 6, key=b"a")
    await asyncio.sleep(0)
    assert all(process.tasks for process in pool._processes)


async def test_keys_take_turns(pools: Pools) -> None:
    pool = pools(time_limit=PATIENCE_SECONDS)
    await pool.warm_up()
    answered: list[str] = []

    async def ask(name: str, key: bytes) -> None:
        answered.append(await pool.run(("say", name + "x" * AHEAD_BYTES), key))

    first = asking(pool, ("sleep", 0.2), key=b"a")
    await asyncio.sleep(0)
    tasks = [asyncio.create_task(ask(name, name[:1].encode())) for name in ("a1", "a2", "a3", "b1", "c1", "b2")]
    await asyncio.gather(*first, *tasks)
    assert [name[:2] for name in answered] == ["a1", "b1", "c1", "a2", "b2", "a3"]


ATTACHED_WORKER = """
from funitel.router.sandbox.worker import serve_attached

serve_attached(lambda setup: lambda task, attached: ([task, len(attached)], attached[::-1] * task))
"""


async def test_bytes_go_with_tasks_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reversing_worker.py").write_text(ATTACHED_WORKER)
    monkeypatch.syspath_prepend(tmp_path)
    limits: dict[str, Any] = {"time_limit": 30.0, "memory_limit": MEMORY_LIMIT}
    pool = SandboxPool("reversing_worker", None, most=1, **limits, max_answer_bytes=5 << 19)
    try:
        large = bytes(range(256)) * 4096
        answers = await asyncio.gather(
            *(pool.run_attached(times, data) for times, data in ((2, large), (0, b"ab"), (3, b""), (1, b"\x00\xff")))
        )
        assert answers == [([2, 1 << 20], large[::-1] * 2), ([0, 2], b""), ([3, 0], b""), ([1, 2], b"\xff\x00")]
        with pytest.raises(Killed):
            await pool.run_attached(3, large)
    finally:
        await pool.close()
