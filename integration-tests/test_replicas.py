"""Several replicas: one is told to end and others are killed under load, and no request is lost."""

import asyncio
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from funitel_testing.clients import Answer, client_of, generate, stream
from funitel_testing.servers import serving, wait_until
from funitel_testing.tiny import VOCAB_SIZE, save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model without a token that ends an answer early."""
    folder = tmp_path_factory.mktemp("model")
    return save_tiny("llama", folder, max_position_embeddings=1024, eos_token_id=VOCAB_SIZE)


async def _ask(client: httpx.AsyncClient, index: int, tokens: int) -> Answer:
    """One of many different requests: sampled, each by its seed, streamed or whole."""
    prompt = f"{index} bottles of beer on the wall, {index} bottles of beer. " * (1 + index % 3)
    ask = generate if index % 4 == 0 else stream
    return await ask(client, prompt, max_new_tokens=tokens, do_sample=True, seed=index)


def _load(client: httpx.AsyncClient, count: int, tokens: int) -> "list[asyncio.Task[Answer]]":
    return [asyncio.create_task(_ask(client, index, tokens)) for index in range(count)]


async def _hurt(
    load: "list[asyncio.Task[Answer]]", pid: int, number: signal.Signals
) -> tuple[list[Answer | BaseException], dict[str, int]]:
    """Signal a shard once the first answer is there, as others are made and more wait.

    Returns the answers; and of the requests that were not over then, how many had a token and how many had none, and
    how many of each failed.
    """
    over, _ = await asyncio.wait(load, return_when=asyncio.FIRST_COMPLETED)
    os.kill(pid, number)
    instant = time.monotonic()
    answers = await asyncio.gather(*load, return_exceptions=True)
    counts = dict.fromkeys(("not started", "not started and failed", "started", "started and failed"), 0)
    for task, answer in zip(load, answers, strict=True):
        if task not in over:
            is_started = isinstance(answer, Answer) and bool(answer.instants) and answer.instants[0] < instant
            kind = "started" if is_started else "not started"
            counts[kind] += 1
            counts[f"{kind} and failed"] += isinstance(answer, BaseException)
    return answers, counts


def _ids(answer: Answer | BaseException) -> list[int]:
    if isinstance(answer, BaseException):
        raise answer
    return answer.ids


async def test_replicas_are_lost_one_after_the_other_and_no_request_with_them(
    model: Path, tmp_path: Path, figures: dict[str, object]
) -> None:
    flags = ("--dtype", "float32", "--max-batch-total-tokens", "4096", "--max-batch-size", "2", "--num-replicas", "3")
    flags += ("--max-restarts", "0")
    with serving(tmp_path, "--model-id", str(model), *flags) as server:
        footprint = server.footprint()
        assert server.metrics()['funitel_replicas{state="serving"}'] == 3
        pids = server.shard_pids()
        assert len(pids) == 3
        async with client_of(server.url) as client:
            expected = await asyncio.gather(*_load(client, 24, 250))
            moved = 0.0
            for place, (number, left) in enumerate(((signal.SIGTERM, 2), (signal.SIGKILL, 1))):
                answers, counts = await _hurt(_load(client, 24, 250), pids[place], number)
                figures[f"replicas: {number.name} under load"] = counts
                assert [_ids(answer) for answer in answers] == [answer.ids for answer in expected]
                assert counts["not started"] >= 4, "the load was too small to tell"
                metrics = server.metrics()
                assert metrics['funitel_replicas{state="serving"}'] == left
                assert metrics["funitel_moved_total"] > moved, "it had nothing to lose"
                moved = metrics["funitel_moved_total"]
                assert (await client.get("/health")).status_code == 200
        server.wait_log("1 of 3 replicas go on")
        os.kill(pids[2], signal.SIGKILL)
        wait_until(lambda: server.process.poll() is not None, 5)
        assert server.process.returncode == 1
        (line,) = server.error_lines()
        assert line.startswith("error: replica 2 shard rank 0 exited with code -9 (killed by SIGKILL)")
        assert server.log.read_text().count("a replica is lost: replica") == 2
        assert "Traceback" not in server.log.read_text()
        footprint.wait_gone()


async def test_kill_one_of_two_replicas_of_the_demo_model_under_load(
    demo_model: Path, tmp_path: Path, figures: dict[str, object], *, is_full: bool
) -> None:
    if not is_full:
        pytest.skip("the long form: --full")
    flags = ("--num-replicas", "2", "--max-batch-total-tokens", "16384", "--max-batch-size", "8")
    with serving(tmp_path, "--model-id", str(demo_model), *flags) as server:
        async with client_of(server.url) as client:
            answers, counts = await _hurt(_load(client, 96, 48), server.shard_pids()[0], signal.SIGKILL)
            figures["replicas: kill -9 of one of two under load, 96 requests to the demo model"] = counts
            assert counts["not started and failed"] == 0
            again = await asyncio.gather(*_load(client, 96, 48))
    assert [_ids(answer) for answer in answers] == [answer.ids for answer in again]
