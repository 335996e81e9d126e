"""Batches over a real server, by OpenAI's client: to their end, cancelled, expired, and through kill -9."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from funitel_testing.clients import Answer, client_of, generate, stream
from funitel_testing.servers import Server, serving, wait_until
from funitel_testing.tiny import save_tiny

COMPLETIONS = "/v1/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}
SECONDS = 240.0
FLAGS = ("--dtype", "float32", "--max-batch-total-tokens", "20000")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; few of its answers end early."""
    return save_tiny("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a folder of batches."""
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, "--model-id", str(model), *FLAGS, "--batch-dir", str(folder / "batches")) as running:
        yield running
        assert "Traceback" not in running.log.read_text(), running.tail()


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return client_for(server)


def client_for(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)


def prompt_of(index: int) -> str:
    return f"{index} bottles of beer on the wall. " * (1 + index % 4)


def line(index: int, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    body = {"model": "tgi", "prompt": prompt_of(index), "max_tokens": max_tokens, "temperature": 0}
    return {"custom_id": f"r{index}", "method": "POST", "url": COMPLETIONS, "body": body | more}


def start(client: openai.OpenAI, lines: list[dict[str, Any]], window: Any = "24h") -> Batch:
    content = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    assert file.bytes == len(content)
    return client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window=window)


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    wait_until(lambda: client.batches.retrieve(batch.id).status in ENDED, SECONDS)
    return client.batches.retrieve(batch.id)


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


def completed(client: openai.OpenAI, batch: Batch) -> int:
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts is not None
    return counts.completed


def text_of(result: dict[str, Any]) -> str:
    return str(result["response"]["body"]["choices"][0]["text"])


async def test_a_batch_runs_to_its_end_beside_others_with_the_same_texts(server: Server, client: openai.OpenAI) -> None:
    count = 200
    async with client_of(server.url) as http:
        prompts = [(await generate(http, prompt_of(i), max_new_tokens=8)).text for i in range(0, count, 10)]
        alone = [await stream(http, f"say {i} " * 40, max_new_tokens=20) for i in range(6)]
        batch = await asyncio.to_thread(start, client, [line(i) for i in range(count)])
        beside = await asyncio.gather(*(stream(http, f"say {i} " * 40, max_new_tokens=20) for i in range(6)))
        found = await asyncio.to_thread(ended, client, batch)
    assert [answer.ids for answer in beside] == [answer.ids for answer in alone]
    assert found.status == "completed", found
    assert found.request_counts is not None
    assert found.request_counts.model_dump() == {"total": count, "completed": count, "failed": 0}
    output = results(client, found.output_file_id)
    assert [each["custom_id"] for each in output] == [f"r{i}" for i in range(count)]
    assert [text_of(output[i]) for i in range(0, count, 10)] == prompts
    assert found.error_file_id is None
    metrics = server.metrics()
    assert metrics['funitel_batch_requests_total{state="completed"}'] >= count
    assert metrics["funitel_batch_running_requests"] == 0
    assert batch.id in [each.id for each in client.batches.list(limit=5)]
    assert found.input_file_id in [each.id for each in client.files.list(purpose="batch")]


def test_what_is_wrong_is_said_by_line_or_by_request(client: openai.OpenAI) -> None:
    found = ended(client, start(client, [line(0), line(0), {**line(1), "method": "GET"}]))
    assert found.status == "failed"
    assert found.errors is not None
    assert [(each.line, each.code) for each in found.errors.data or []] == [
        (2, "duplicate_custom_id"),
        (3, "invalid_method"),
    ]
    found = ended(client, start(client, [line(0), line(1, temperature=-3), line(2, max_tokens=100_000)]))
    assert found.status == "completed"
    errors = {each["custom_id"]: each for each in results(client, found.error_file_id)}
    assert errors["r1"]["response"]["status_code"] == 422
    assert "temperature" in errors["r1"]["response"]["body"]["error"]["message"]
    assert len(errors) + len(results(client, found.output_file_id)) == 3


def test_a_batch_is_cancelled(client: openai.OpenAI) -> None:
    batch = start(client, [line(i, 60) for i in range(400)])
    wait_until(lambda: completed(client, batch) >= 5, SECONDS)
    assert client.batches.cancel(batch.id).status == "cancelling"
    found = ended(client, batch)
    assert found.status == "cancelled"
    assert found.request_counts is not None
    assert 5 <= found.request_counts.completed < 400
    assert len(results(client, found.output_file_id)) == found.request_counts.completed


def test_a_batch_expires(client: openai.OpenAI) -> None:
    found = ended(client, start(client, [line(i, 200) for i in range(3000)], "3s"))
    assert found.status == "expired"
    output, errors = results(client, found.output_file_id), results(client, found.error_file_id)
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}
    assert sorted(each["custom_id"] for each in output + errors) == sorted(f"r{i}" for i in range(3000))
    client.files.delete(found.input_file_id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(found.input_file_id)


def test_kill_9_in_the_middle_loses_none_and_repeats_none(
    model: Path, tmp_path: Path, figures: dict[str, object]
) -> None:
    count, flags = 200, ("--model-id", str(model), *FLAGS, "--batch-dir", str(tmp_path / "batches"))
    killed = Server(tmp_path, *flags)
    try:
        client = client_for(killed.wait_ready())
        batch = start(client, [line(i, 30) for i in range(count)])
        wait_until(lambda: completed(client, batch) >= 20, SECONDS)
    finally:
        killed.kill_all()
    with serving(tmp_path, *flags) as server:
        client = client_for(server)
        before = completed(client, batch)
        found = ended(client, batch)
        assert found.status == "completed", found
        output = results(client, found.output_file_id)
        assert [each["custom_id"] for each in output] == [f"r{i}" for i in range(count)]
        run_again = server.metrics()['funitel_batch_requests_total{state="completed"}']
        assert run_again <= count - 20
        assert "Traceback" not in server.log.read_text()
    figures["batch: requests with results at kill -9, of 200, and at the restart"] = before


def test_a_stop_in_the_middle_goes_on_with_the_next_server(model: Path, tmp_path: Path) -> None:
    flags = ("--model-id", str(model), *FLAGS, "--batch-dir", str(tmp_path / "batches"))
    with serving(tmp_path, *flags) as server:
        client = client_for(server)
        batch = start(client, [line(i, 30) for i in range(100)])
        wait_until(lambda: completed(client, batch) >= 5, SECONDS)
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 30
        assert "Traceback" not in server.log.read_text()
    with serving(tmp_path, *flags) as server:
        client = client_for(server)
        found = ended(client, batch)
        assert [each["custom_id"] for each in results(client, found.output_file_id)] == [f"r{i}" for i in range(100)]


async def test_interactive_requests_beside_a_batch(
    model: Path, demo_model: Path, tmp_path: Path, figures: dict[str, object], *, is_full: bool
) -> None:
    """Must show: the p99 of the time to first token beside a batch is at most 1.3 times that without one.

    The long form, on a quiet machine, checks it; the short one checks that both end.
    """
    count, asked = (2000, 300) if is_full else (60, 10)
    served = demo_model if is_full else model
    flags = ("--model-id", str(served), "--batch-dir", str(tmp_path / "batches"))
    with serving(tmp_path, *flags) as server:
        client = client_for(server)
        async with client_of(server.url) as http:
            await _interactive(http, asked // 4)  # the costs of steps are learnt
            alone = await _interactive(http, asked)
            batch = await asyncio.to_thread(start, client, [line(i, 16) for i in range(count)])
            await asyncio.to_thread(wait_until, lambda: completed(client, batch) >= 1, SECONDS)
            beside = await _interactive(http, asked)
            done = await asyncio.to_thread(completed, client, batch)
            found = await asyncio.to_thread(_ended_late, client, batch)
        assert found.status == "completed"
        assert len(results(client, found.output_file_id)) == count
    first, second = _p99(alone), _p99(beside)
    figures[f"batch: p99 of the time to first token without, and beside {count} requests [ms]"] = [
        round(first * 1e3, 1),
        round(second * 1e3, 1),
    ]
    figures[f"batch: requests of the batch that ended beside {asked} interactive ones"] = done
    if is_full:
        assert done < count, "the batch ended before the interactive requests did"
        assert second <= 1.3 * first


def _ended_late(client: openai.OpenAI, batch: Batch) -> Batch:
    wait_until(lambda: client.batches.retrieve(batch.id).status in ENDED, 3600)
    return client.batches.retrieve(batch.id)


async def _interactive(http: httpx.AsyncClient, count: int) -> list[float]:
    """Times to first token of requests at a steady pace, some of which overlap."""

    async def ask(index: int) -> Answer:
        await asyncio.sleep(index * 0.25)
        answer = Answer()
        return await stream(http, f"Question {index}: " + "why is it so? " * 8, answer=answer, max_new_tokens=12)

    answers = await asyncio.gather(*(ask(index) for index in range(count)))
    return [answer.instants[0] - answer.began for answer in answers]


def _p99(seconds: list[float]) -> float:
    return quantiles(seconds, n=100, method="inclusive")[98]


def test_a_batch_of_embeddings(tmp_path: Path) -> None:
    url, count = "/v1/embeddings", 40
    flags = ("--model-id", "all-minilm-l6-v2", "--device", "cpu", "--batch-dir", str(tmp_path / "batches"))
    with serving(tmp_path, *flags) as server:
        client = client_for(server)
        lines = [
            {"custom_id": f"r{i}", "method": "POST", "url": url, "body": {"model": "tgi", "input": f"Text {i}"}}
            for i in range(count)
        ]
        content = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
        file = client.files.create(file=("requests.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
        found = ended(client, batch)
        output = results(client, found.output_file_id)
        assert [each["custom_id"] for each in output] == [f"r{i}" for i in range(count)]
        vector = output[3]["response"]["body"]["data"][0]["embedding"]
        alone = client.embeddings.create(model="tgi", input="Text 3", encoding_format="float").data[0].embedding
        assert vector == pytest.approx(alone, abs=1e-4)
        assert "Traceback" not in server.log.read_text()
