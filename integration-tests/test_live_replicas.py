"""Replicas of real shards that join and leave under load, and what the metrics of each replica say."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from funitel.router.app import build_app
from funitel.router.connect import connect
from funitel.router.replica_set.replica_set import ReplicaSet
from funitel.router.replica_set.table import ReplicaAddress
from funitel.router.settings import RouterSettings
from funitel_testing.clients import Answer, client_of, generate, stream
from funitel_testing.servers import Server, serving, wait_until
from funitel_testing.tiny import VOCAB_SIZE, save_tiny

FLAGS = ("--dtype", "float32", "--max-batch-total-tokens", "8192")
LOAD = 60
OF_THE_CONTROL_PLANE = {  # families that always name a model; it comes beside a model while that serves already
    "funitel_load_duration_seconds",
    "funitel_load_failures",
    "funitel_model_evictions",
    "funitel_replica_restarts",
    "funitel_model_memory_bytes",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model without a token that ends an answer early."""
    folder = tmp_path_factory.mktemp("model")
    return save_tiny("llama", folder, max_position_embeddings=2048, eos_token_id=VOCAB_SIZE)


def of_replicas(server: Server, name: str) -> list[float]:
    """The values of a series of replicas 0 and 1."""
    metrics = server.metrics()
    return [metrics[f'funitel_replica_{name}{{replica="{replica}"}}'] for replica in range(2)]


# Through the launcher


async def test_x5_x17_short_requests_go_to_the_replica_that_is_not_busy(
    model: Path, tmp_path: Path, figures: dict[str, object]
) -> None:
    with serving(tmp_path, "--model-id", str(model), *FLAGS, "--num-replicas", "2") as server:
        async with client_of(server.url) as client:
            long = Answer()
            task = asyncio.create_task(
                stream(client, "a long one " * 50, max_new_tokens=1200, answer=long, do_sample=True, seed=1)
            )
            await asyncio.to_thread(wait_until, lambda: bool(long.ids), 60, "it has begun")
            assert of_replicas(server, "requests_total") == [1, 0]
            for index in range(10):
                answer = await generate(client, f"a short one, number {index}", max_new_tokens=4)
                assert len(answer.ids) == 4
            assert not task.done(), "the long one was too short to tell"
            text = (await client.get("/metrics")).text
            assert of_replicas(server, "requests_total") == [1, 10]
            assert of_replicas(server, "generated_tokens_total")[1] == 40
            assert server.metrics()['funitel_replica_sequences{replica="0",state="running"}'] == 1
            assert 0 < server.metrics()["funitel_kv_cache_utilisation"] < 1
            await task
        figures["replicas: requests of each while one is busy"] = of_replicas(server, "requests_total")
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert families["funitel_time_to_first_token_seconds"].type == "histogram"
        assert {"tgi_request_input_length", "tgi_request_generated_tokens"} <= families.keys()
        assert {sample.value for sample in families["tgi_batch_current_size"].samples} == {1}
        assert [sample.value for sample in families["funitel_replica_up"].samples] == [1, 1]
        (load,) = families["funitel_model_load_seconds"].samples
        assert 0 < load.value < 180
        labelled = {name for name, family in families.items() if any("model" in each.labels for each in family.samples)}
        assert labelled <= OF_THE_CONTROL_PLANE, "of one model nothing of the router has the label"


async def test_x7_a_killed_replica_is_back_while_the_other_serves(
    model: Path, tmp_path: Path, figures: dict[str, object]
) -> None:
    with serving(tmp_path, "--model-id", str(model), *FLAGS, "--num-replicas", "2") as server:
        async with client_of(server.url) as client:
            load = [asyncio.create_task(generate(client, f"number {index}", max_new_tokens=120)) for index in range(24)]
            await asyncio.wait(load, return_when=asyncio.FIRST_COMPLETED)
            os.kill(server.shard_pids()[0], signal.SIGKILL)
            began = time.monotonic()
            answers = await asyncio.gather(*load)
            assert [len(answer.ids) for answer in answers] == [120] * 24
            await asyncio.to_thread(
                wait_until, lambda: server.metrics()["funitel_replica_returns_total"] == 1, 60, "it is back"
            )
            figures["replicas: seconds from kill -9 until it serves again"] = round(time.monotonic() - began, 2)
            assert of_replicas(server, "up") == [1, 1]
            assert of_replicas(server, "losses_total") == [1, 0]
        log = await asyncio.to_thread(server.wait_log, "replica 0 serves again after")
        assert re.search(r"replica 0 is lost: .* 1 of 2 replicas serve", log)


# Shards that come and go


@contextmanager
def shards(model: Path, folder: Path, replica: int) -> Iterator[str]:
    """The shard of one replica, started without a launcher; yields its address."""
    socket = folder / f"shard-{replica}"
    command = [sys.executable, "-m", "funitel.model_server", "serve", str(model), "--uds-path", str(socket)]
    command += ["--dtype", "float32", "--num-threads", "1"]
    with (folder / f"shard-{replica}.log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log)
    try:
        yield f"unix://{socket}-0"
    finally:
        process.terminate()
        process.wait(30)


@asynccontextmanager
async def routing(model: Path, *addresses: str) -> AsyncIterator[tuple[httpx.AsyncClient, ReplicaSet]]:
    """A router of this process over shards."""
    settings = RouterSettings(tokenizer_name=str(model), max_batch_total_tokens=8192)
    places = [ReplicaAddress(replica, address) for replica, address in enumerate(addresses)]
    app = build_app(settings, partial(connect, replicas=places))
    async with app.router.lifespan_context(app), asyncio.timeout(180):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as client:
            await asyncio.to_thread(wait_until, lambda: app.state.service.is_started, 120, "it has started")
            yield client, app.state.service.engine


async def test_x6_one_joins_and_one_leaves_under_a_load_of_sixty(
    model: Path, tmp_path: Path, figures: dict[str, object]
) -> None:
    with ExitStack() as stack:
        addresses = [stack.enter_context(shards(model, tmp_path, replica)) for replica in range(3)]

        async def ask(client: httpx.AsyncClient, index: int) -> list[int]:
            prompt = f"{index} bottles of beer on the wall. " * (1 + index % 3)
            return (await generate(client, prompt, max_new_tokens=120, do_sample=True, seed=index)).ids

        async with routing(model, *addresses[:2]) as (client, replicas):
            expected = await asyncio.gather(*(ask(client, index) for index in range(LOAD)))
            assert {len(ids) for ids in expected} == {120}
            began = time.monotonic()
            load = [asyncio.create_task(ask(client, index)) for index in range(LOAD)]
            await asyncio.sleep(0.1)
            await replicas.add(2, addresses[2], weight=1.0)
            figures["replicas: seconds to join under load"] = round(time.monotonic() - began, 2)
            late = [asyncio.create_task(ask(client, index)) for index in range(20)]
            await asyncio.sleep(0.1)
            assert not all(task.done() for task in load), "the load was too small to tell"
            began = time.monotonic()
            await replicas.drain(0)
            figures["replicas: seconds to drain under load"] = round(time.monotonic() - began, 2)
            answers = await asyncio.gather(*load, *late, return_exceptions=True)
            assert answers == [*expected, *expected[:20]]
            assert [each.replica_id for each in replicas.replicas] == [1, 2]
            text = (await client.get("/metrics")).text
            assert 'replica="0"' not in text
            given = re.search(r'funitel_replica_requests_total{replica="2"} (\d+)', text)
            assert given is not None
            assert int(given[1]) > 0, "the new one had its part"
            assert (await client.get("/health")).status_code == 200
            for replica in (1, 2):
                await replicas.drain(replica)
            held = asyncio.create_task(ask(client, 0))
            await asyncio.sleep(0.2)
            assert not held.done()
            await replicas.add(3, addresses[0])
            assert await held == expected[0], "the shards of a drained replica serve again"
