"""The short form of `make fuzz` for calls of a shard and for chats, and that it would notice what it looks for."""

import random
from pathlib import Path

import pytest

from funitel.model_server.executor.executor import Executor
from funitel_testing import fuzz_chats, fuzz_inputs, fuzz_shard
from funitel_testing.fuzz_requests import fault


@pytest.mark.parametrize("kind", ["messages", "frames"])
async def test_malformed_calls_change_nothing_for_others(tmp_path: Path, kind: str) -> None:
    async with fuzz_shard.prepare(tmp_path) as tries:
        for number in range(25):
            assert await tries[kind](random.Random(number)) == "", number


async def test_a_shard_that_goes_on_otherwise_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fuzz_shard.prepare(tmp_path) as tries:
        monkeypatch.setattr(Executor, "compute_decode", Executor.warmup)
        result = await fuzz_inputs._result(tries["messages"], random.Random(0))
    assert result["outcome"] == "AssertionError"


@pytest.mark.parametrize(("kind", "count"), [("chats", 40), ("grammars", 40), ("templates", 2)])
async def test_strange_chats_and_grammars(tmp_path: Path, kind: str, count: int) -> None:
    async with fuzz_chats.prepare(tmp_path) as tries:
        for number in range(count):
            assert await tries[kind](random.Random(number)) == "", number


@pytest.mark.parametrize(
    ("status", "content_type", "answer", "expected"),
    [
        (200, "application/json", b"{}", ""),
        (200, "text/event-stream", b'data: {"a": 1}\n\ndata: [DONE]\n\n', ""),
        (422, "application/json", b'{"error": "one line", "error_type": "validation"}', ""),
        (500, "application/json", b'{"error": "internal error"}', "5xx"),
        (200, "application/json", b"{", "not JSON"),
        (200, "text/event-stream", b"data: {\n\n", "not JSON"),
        (200, "text/event-stream", b'data: {"a": 1}\n', "an event without an end"),
        (422, "application/json", b'{"error": "two\\nlines"}', "an error of several lines"),
        (422, "application/json", b'{"error": "' + b"x" * 20_000 + b'"}', "a long error"),
        (422, "application/json", b"[]", "not the shape of an error"),
    ],
)
def test_what_is_wrong_with_an_answer_is_noticed(status: int, content_type: str, answer: bytes, expected: str) -> None:
    found = fault(status, content_type, answer)
    assert found.startswith(expected) if expected else found == ""
