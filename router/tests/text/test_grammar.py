"""Grammars are judged in a process of their own: bombs are refused by a limit, and the event loop never waits."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve, eventually, write_model
from hypothesis import given
from hypothesis import strategies as st

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import GrammarType
from funitel.router.core import request_context
from funitel.router.core.grammar import Grammar
from funitel.router.sandbox import pool as killable
from funitel.router.sandbox.pool import SandboxPool
from funitel.router.sandbox.process import SandboxProcess, SandboxTask
from funitel.router.text import grammar as module
from funitel.router.text.grammar import MAX_GRAMMAR_BYTES, GrammarChecker

STALL_SECONDS = 0.05
# Any of them may be left out: the engine takes many seconds.
BOMB = Grammar.json({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(9000)}})

MEMORY_LIMIT = 60 * 2**20  # 48 to 72 fit the engine and not the grammar below
HEAVY = Grammar.json({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}})


@pytest.fixture
async def checker(tmp_path: Path) -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(write_model(tmp_path) / "tokenizer.json", time_limit=1.0)
    yield checker
    await checker.close()


class Stalls:
    """The longest time the event loop was held up, in seconds, without what it waited for a core of the machine."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def watch(self) -> None:
        while True:
            begin = time.monotonic() - seconds_without_core()
            await asyncio.sleep(0.001)
            self.longest = max(self.longest, time.monotonic() - seconds_without_core() - begin - 0.001)


def seconds_without_core() -> float:
    """How long this thread was ready to run and had to wait. Source: Linux, scheduler/sched-stats.rst."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


async def refusal(checker: GrammarChecker, grammar: Grammar) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await checker.check(grammar)
    assert caught.value.param == "grammar"
    return caught.value.message


async def test_verdicts(checker: GrammarChecker) -> None:
    for good in (
        Grammar.regex("a+"),
        Grammar.regex(""),
        Grammar.json({"type": "string"}),
        Grammar.choice(["a b", "é"]),
    ):
        await checker.check(good)
    assert await refusal(checker, Grammar.regex("(")) == "grammar is not valid: unclosed group"
    assert "is no JSON" in await refusal(checker, Grammar.json("{"))
    assert "no JSON" in await refusal(checker, Grammar.json("\ud800"))
    assert "nested too deeply" in await refusal(checker, Grammar.json("[" * 20_000))


async def test_native_schemas_say_what_their_object_is(checker: GrammarChecker) -> None:
    await checker.check(Grammar.json({"properties": {}}, is_native=True))
    await checker.check(Grammar.json({"type": "object"}))
    for schema in ({}, {"type": "object"}, {"type": "array"}, True):
        assert "must have `properties`" in await refusal(checker, Grammar.json(schema, is_native=True))


async def test_a_bomb_is_refused_while_others_are_answered(checker: GrammarChecker) -> None:
    await asyncio.gather(checker.check(Grammar.regex("one")), checker.check(Grammar.regex("two")))
    bomb = asyncio.create_task(refusal(checker, BOMB))
    await asyncio.sleep(0.05)
    await checker.check(Grammar.regex("quick"))
    assert not bomb.done()
    assert await bomb == "grammar is not valid: it takes more than 1 s to compile"
    await checker.check(Grammar.regex("after"))
    begin = time.monotonic()
    assert "more than 1 s" in await refusal(checker, BOMB)
    assert time.monotonic() - begin < 1, "the verdict was not remembered"


async def test_one_key_neither_delays_the_grammars_of_others_nor_tells_what_they_are(tmp_path: Path) -> None:
    checker = GrammarChecker(write_model(tmp_path) / "tokenizer.json", time_limit=30.0, has_several_keys=True)

    async def check(owner: bytes, grammar: Grammar) -> None:
        with request_context.request_context("r") as context:
            context.owner = owner
            await checker.check(grammar)

    try:
        await asyncio.gather(check(b"a", Grammar.regex("one")), check(b"b", Grammar.regex("two")))
        bombs = [asyncio.create_task(check(b"a", Grammar(BOMB.kind, BOMB.text + " " * i))) for i in range(6)]
        await asyncio.sleep(0.3)
        await check(b"b", Grammar.regex("quick"))
        assert not any(bomb.done() for bomb in bombs)
        asked = len(checker._verdicts)
        await check(b"b", Grammar.regex("one"))
        assert len(checker._verdicts) == asked + 1, "compiled, although the other key had done so"
        await check(b"b", Grammar.regex("one"))
        assert len(checker._verdicts) == asked + 1
    finally:
        await checker.close()
        await asyncio.gather(*bombs, return_exceptions=True)


async def test_the_event_loop_never_waits_for_a_grammar(checker: GrammarChecker) -> None:
    """Not for a worker to start, to compile, or to be killed. A machine that stands still gets three tries."""
    longest = []
    for attempt in range(3):
        checker._pool.time_limit = 0.3
        stalls = Stalls()
        watching = asyncio.create_task(stalls.watch())
        await refusal(checker, Grammar(BOMB.kind, BOMB.text + " " * attempt))
        checker._pool.time_limit = 30.0
        await checker.check(Grammar.json({"enum": [f"{attempt}-{i}" for i in range(5000)]}))
        watching.cancel()
        longest.append(stalls.longest)
        if stalls.longest < STALL_SECONDS:
            return
    pytest.fail(f"the loop was held up for {longest} s")


async def test_a_verdict_of_a_limit_does_not_last(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_VERDICT_SECONDS", 0.0)
    checker._pool.time_limit = 0.0
    assert "more than 0 s" in await refusal(checker, Grammar.regex("a"))
    checker._pool.time_limit = 30.0
    await checker.check(Grammar.regex("a"))


async def test_memory_has_a_limit_too(tmp_path: Path) -> None:
    checker = GrammarChecker(write_model(tmp_path) / "tokenizer.json", memory_limit=MEMORY_LIMIT)
    await checker.check(Grammar.regex("a"))
    message = await refusal(checker, HEAVY)
    assert message == f"grammar is not valid: it takes more than {MEMORY_LIMIT >> 20} MiB to compile"
    await checker.check(Grammar.regex("b"))
    await checker.close()


async def test_many_who_ask_the_same_wait_for_one_answer(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ask = SandboxPool.run

    async def counting(pool: SandboxPool, question: Any, key: bytes) -> Any:
        asked.append(question["text"])
        return await ask(pool, question, key)

    monkeypatch.setattr(SandboxPool, "run", counting)
    waiting = [asyncio.create_task(checker.check(Grammar.regex("same"))) for _ in range(20)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    await asyncio.gather(*waiting[1:])
    await checker.check(Grammar.regex("same"))
    assert asked == ["same"]


async def test_a_worker_that_dies_is_replaced(checker: GrammarChecker) -> None:
    await checker.check(Grammar.regex("a"))
    (worker,) = checker._pool._processes
    os.kill(worker.pid, signal.SIGTERM)
    await eventually(lambda: asyncio.sleep(0, not checker._pool._processes), "it is gone")
    await checker.check(Grammar.regex("b"))


async def test_a_grammar_is_not_blamed_for_a_worker_that_somebody_killed(checker: GrammarChecker) -> None:
    await checker.check(Grammar.regex("a"))
    (worker,) = checker._pool._processes
    os.kill(worker.pid, signal.SIGSTOP)
    check = asyncio.create_task(checker.check(Grammar.regex("b")))
    await asyncio.sleep(0.05)
    os.kill(worker.pid, signal.SIGKILL)
    await check


async def test_a_grammar_whose_workers_are_all_killed_is_refused(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = []
    give = SandboxProcess.assign

    def die(process: SandboxProcess, question: SandboxTask) -> None:
        if b"text" in question.frame:
            killed.append(process)
            os.kill(process.pid, signal.SIGKILL)
        give(process, question)

    monkeypatch.setattr(SandboxProcess, "assign", die)
    assert "MiB to compile" in await refusal(checker, Grammar.regex("a"))
    assert len(killed) == killable.MAX_DEATHS


async def test_a_grammar_has_a_largest_size(checker: GrammarChecker) -> None:
    message = await refusal(checker, Grammar.regex("a" * (MAX_GRAMMAR_BYTES + 1)))
    assert message == f"grammar must have at most {MAX_GRAMMAR_BYTES} bytes, given {MAX_GRAMMAR_BYTES + 1}"
    assert not checker._pool._processes


async def test_a_tokenizer_the_engine_cannot_use_is_said(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    checker = GrammarChecker(tmp_path / "tokenizer.json")
    assert "grammar is not supported" in await refusal(checker, Grammar.regex("a"))
    await checker.close()


@given(st.lists(st.text(max_size=6), min_size=1, max_size=4))
def test_a_choice_is_one_of_its_texts(choices: list[str]) -> None:
    pattern = re.sub(r"\\x\{([0-9a-f]+)\}", lambda m: re.escape(chr(int(m[1], 16))), Grammar.choice(choices).text)
    for text in choices:
        assert re.fullmatch(pattern, text)
        if text + "\0" not in choices:
            assert not re.fullmatch(pattern, text + "\0")


# Over HTTP


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("grammar", "kind", "text"),
    [
        ({"type": "json", "value": SCHEMA}, GrammarType.JSON, json.dumps(SCHEMA)),
        ({"type": "json_object", "value": json.dumps(SCHEMA)}, GrammarType.JSON, json.dumps(SCHEMA)),
        ({"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}}, GrammarType.JSON, json.dumps(SCHEMA)),
        ({"type": "regex", "value": "a+"}, GrammarType.REGEX, "a+"),
        ({"type": "choice", "value": ["yes", "no"]}, GrammarType.REGEX, "yes|no"),
    ],
)
async def test_native_grammars_reach_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, grammar: dict[str, Any], kind: GrammarType, text: str
) -> None:
    response = await client.post("/generate", json={"inputs": "Hi", "parameters": {"grammar": grammar}})
    assert response.status_code == 200
    sampling = engine.requests[0].sampling
    assert (sampling.grammar_type, sampling.grammar) == (kind, text)


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_bad_grammar_is_tgis_422(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    body = {"inputs": "Hi", "parameters": {"grammar": {"type": "json", "value": {"type": "object"}}}}
    response = await client.post(path, json=body)
    assert response.status_code == 422
    assert response.json() == {
        "error": "Input validation error: grammar is not valid: the schema must have `properties`",
        "error_type": "validation",
    }
    assert engine.requests == []


async def test_grammars_may_be_switched_off(serve: Serve, engine: FakeEngine) -> None:
    async with serve(engine, disable_grammar_support=True) as client:
        body = {"inputs": "Hi", "parameters": {"grammar": {"type": "regex", "value": "a"}}}
        response = await client.post("/generate", json=body)
        assert response.status_code == 422
        assert (
            response.json()["error"]
            == "Input validation error: grammar is not supported: --disable-grammar-support is set"
        )
