"""The only shard is killed with streams running: it is started again, every stream goes on, and nobody is told."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from funitel_testing.clients import Answer, client_of, generate, stream
from funitel_testing.servers import Server, serving, wait_until
from funitel_testing.tiny import save_tiny

GRAMMAR = {"type": "regex", "value": "[a-z]{3,9}( [a-z]{3,9}){60}"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; few of its answers end early."""
    return save_tiny("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


async def _ask(client: httpx.AsyncClient, index: int, tokens: int) -> Answer:
    """One of many different requests: greedy, sampled or kept to a grammar; streamed or whole."""
    prompt = f"{index} bottles of beer on the wall, {index} bottles of beer. " * (1 + index % 3)
    ask = generate if index % 8 == 0 else stream
    parameters = [{}, {"do_sample": True, "seed": index}, {"repetition_penalty": 1.3}, {"grammar": GRAMMAR}][index % 4]
    return await ask(client, prompt, max_new_tokens=tokens, **parameters)


async def _all(client: httpx.AsyncClient, count: int, tokens: int) -> list[Answer]:
    return await asyncio.gather(*(_ask(client, index, tokens) for index in range(count)))


def _is_back(server: Server, times: int) -> bool:
    return server.metrics().get("funitel_replica_returns_total") == times


@pytest.mark.parametrize("num_shard", [1, 2])
async def test_streams_outlive_their_only_shard(
    model: Path, tmp_path: Path, figures: dict[str, object], num_shard: int, *, is_full: bool
) -> None:
    count, tokens = (100, 400) if is_full else (16, 200)
    flags = ("--dtype", "float32", "--max-batch-total-tokens", "60000", "--num-shard", str(num_shard))
    with serving(tmp_path, "--model-id", str(model), *flags) as server:
        footprint = server.footprint()
        async with client_of(server.url) as client:
            expected = await _all(client, count, tokens)
            asking = asyncio.create_task(_all(client, count, tokens))
            await _until_running(server, count // 2)
            await asyncio.to_thread(server.wait_steps, 10)
            victim = server.shard_pids()[-1]
            os.kill(victim, signal.SIGKILL)
            await asyncio.to_thread(wait_until, lambda: _status(server, "/health") == 503, 5)
            assert _status(server, "/health/live") == 200
            late = asyncio.create_task(_ask(client, 1, tokens))
            answers = await asyncio.wait_for(asking, 120)
            assert [answer.ids for answer in answers] == [answer.ids for answer in expected]
            assert [answer.text for answer in answers] == [answer.text for answer in expected]
            assert (await late).ids == expected[1].ids
        assert _is_back(server, 1)
        assert _status(server, "/health") == 200
        assert victim not in server.shard_pids()
        assert len(server.shard_pids()) == num_shard
        log = await asyncio.to_thread(server.wait_log, "restart 1 of 5")
        assert server.error_lines() == []
        assert "Traceback" not in log
        figures[f"restart: kill -9 of a shard of the only replica ({num_shard}) under load"] = {
            "asked": count,
            "failed": 0,
        }
    footprint.wait_gone()


async def test_a_stop_that_comes_during_a_restart_lets_streams_finish(
    model: Path, tmp_path: Path, *, is_full: bool
) -> None:
    if not is_full:
        pytest.skip("the long form: --full; launcher and router are held to it apart")
    flags = ("--dtype", "float32", "--max-batch-total-tokens", "8192")
    with serving(tmp_path, "--model-id", str(model), *flags) as server:
        footprint = server.footprint()
        async with client_of(server.url) as client:
            expected = await _all(client, 4, 600)
            asking = asyncio.create_task(_all(client, 4, 600))
            await _until_running(server, 2)
            os.kill(server.shard_pids()[0], signal.SIGKILL)
            await asyncio.to_thread(server.wait_log, "restart 1 of 5")
            server.process.send_signal(signal.SIGTERM)
            answers = await asyncio.wait_for(asking, 60)
            assert [answer.ids for answer in answers] == [answer.ids for answer in expected]
        await asyncio.to_thread(wait_until, lambda: server.process.poll() is not None, 20)
        assert server.process.returncode == 0
    footprint.wait_gone()


async def _until_running(server: Server, count: int) -> None:
    running = 'funitel_sequences{state="running"}'
    await asyncio.to_thread(wait_until, lambda: server.metrics()[running] >= count, 20)


def _status(server: Server, path: str) -> int:
    return httpx.get(server.url + path, timeout=5).status_code
