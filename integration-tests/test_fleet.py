"""A fleet over real processes: three models on one port with memory for two, loaded as requests name them.

The acceptance checks of rows X1 to X8 are in the tests of their parts; here all of it works at once.
"""

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from funitel_testing.fleet import Fleet
from funitel_testing.servers import PLAIN, wait_until
from funitel_testing.tiny import save_tiny

CHAT, EMBED, TINY = "smol", "minilm", "tiny"
DEMO, MINILM = "smollm2-135m-instruct", "all-minilm-l6-v2"
CHAT_FLAGS = {"max_batch_total_tokens": 4096}
TINY_FLAGS = {"max_batch_total_tokens": 200_000}  # a pool as large as the weights of the others
SECONDS = 180.0


@pytest.fixture(scope="module")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3."""
    return save_tiny("qwen3", tmp_path_factory.mktemp("qwen"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def fleet(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three models that were each launched once, so that what each takes is known, and memory for any two."""
    folder = tmp_path_factory.mktemp("fleet")
    with Fleet(folder) as probe:
        launch_all(probe, tiny_qwen)
        sizes = {entry["name"]: int(entry["bytes"]) for entry in probe.models()}
    any_two = sum(sorted(sizes.values())[1:]) + min(sizes.values()) // 2
    budget = max(any_two, sizes[CHAT] * 21 // 10)  # two replicas of one fit as well, with what a measurement varies by
    assert sum(sizes.values()) > budget, sizes
    with Fleet(tmp_path_factory.mktemp("bounded"), "--memory-budget", str(budget)) as running:
        launch_all(running, tiny_qwen)
        yield running
        assert "Traceback" not in running.log.read_text(), running.tail()


def launch_all(fleet: Fleet, tiny_qwen: Path) -> None:
    fleet.launch(DEMO, name=CHAT, settings=CHAT_FLAGS)
    fleet.launch(MINILM, name=EMBED)
    fleet.launch(str(tiny_qwen), name=TINY, dtype="float32", settings=TINY_FLAGS)


@dataclass(frozen=True)
class Asked:
    """One request and its answer."""

    model: str
    answer: Any
    seconds: float


async def ask(http: httpx.AsyncClient, model: str, index: int) -> Asked:
    """A request of the kind that the model is for; the same index asks the same."""
    began = time.monotonic()
    if model == EMBED:
        body: dict[str, Any] = {"model": model, "input": f"sentence number {index % 5}"}
        response = await http.post("/v1/embeddings", json=body)
        assert response.status_code == 200, response.text
        return Asked(model, response.json()["data"][0]["embedding"], time.monotonic() - began)
    body = {"model": model, "prompt": f"Count from {index % 5}:", "max_tokens": 8, "temperature": 0}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return Asked(model, response.json()["choices"][0]["text"], time.monotonic() - began)


async def test_300_mixed_requests_with_memory_for_two_of_three_models(
    fleet: Fleet, figures: dict[str, object], is_full: bool
) -> None:
    count, clients = (300, 4) if is_full else (60, 4)
    names = [CHAT, EMBED, TINY]
    async with httpx.AsyncClient(base_url=fleet.url, timeout=SECONDS, verify=PLAIN) as http:
        expected = {}
        for name in names:
            for index in range(5):
                expected[name, index] = (await ask(http, name, index)).answer
        before = fleet.metrics()
        order = random.Random(7)
        # Runs of one model, as users have them: a load costs seconds.
        wanted = [name for _ in range(count // 15) for name in [order.choice(names)] * 15]
        queue = list(enumerate(wanted))
        done: list[Asked] = []

        async def client() -> None:
            while queue:
                index, name = queue.pop(0)
                asked = await ask(http, name, index)
                done.append(asked)
                if name == EMBED:
                    assert asked.answer == pytest.approx(expected[name, index % 5], abs=1e-4)
                else:
                    assert asked.answer == expected[name, index % 5]

        await asyncio.gather(*(client() for _ in range(clients)))
    assert Counter(asked.model for asked in done) == Counter(wanted)
    after = fleet.metrics()
    loads, evictions = (
        sum(value - before.get(key, 0.0) for key, value in after.items() if key.startswith(name))
        for name in ("funitel_load_duration_seconds_count", "funitel_model_evictions_total")
    )
    assert evictions >= 1
    assert loads >= evictions
    figures[f"{count} mixed requests over three models, memory for two"] = (
        f"loads {loads:.0f}, evictions {evictions:.0f}, slowest {max(asked.seconds for asked in done):.1f} s"
    )


async def test_a_cold_model_beside_a_warm_one(fleet: Fleet, figures: dict[str, object]) -> None:
    body = {"model": CHAT, "prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
    async with httpx.AsyncClient(base_url=fleet.url, timeout=SECONDS, verify=PLAIN) as http:

        async def first_token() -> float:
            began = time.monotonic()
            response = await http.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            return time.monotonic() - began

        fleet.post(f"/v1/models/{CHAT}/unload")
        wait_until(lambda: fleet.model(CHAT)["state"] == "registered", SECONDS)
        cold = await first_token()
        warm = statistics.median([await first_token() for _ in range(5)])
        fleet.post(f"/v1/models/{CHAT}/sleep")
        wait_until(lambda: fleet.model(CHAT)["state"] == "sleeping", SECONDS)
        woken = await first_token()
    assert warm < woken < cold
    figures["first token of the demo model: loaded, woken, warm"] = f"{cold:.2f} s, {woken:.2f} s, {warm * 1e3:.0f} ms"


async def test_replicas_come_and_go_under_load_without_a_failure(fleet: Fleet, figures: dict[str, object]) -> None:
    ended = False
    async with httpx.AsyncClient(base_url=fleet.url, timeout=SECONDS, verify=PLAIN) as http:
        expected = {index: (await ask(http, CHAT, index)).answer for index in range(5)}
        served = 0

        async def client(start: int) -> None:
            nonlocal served
            index = start
            while not ended:
                assert (await ask(http, CHAT, index)).answer == expected[index % 5]
                index, served = index + 1, served + 1

        clients = [asyncio.create_task(client(start)) for start in range(4)]
        try:
            # The others make room for the second replica.
            await asyncio.to_thread(fleet.post, f"/v1/models/{TINY}/unload")
            await asyncio.to_thread(fleet.post, f"/v1/models/{EMBED}/unload")
            await asyncio.to_thread(fleet.post, f"/v1/models/{CHAT}/replicas", {"weight": 1.0})
            await asyncio.to_thread(wait_until, lambda: ready_replicas(fleet) == 2, SECONDS)
            at_two = served
            await asyncio.to_thread(wait_until, lambda: served >= at_two + 40, SECONDS)
            first = fleet.model(CHAT)["replicas"][0]["id"]
            await asyncio.to_thread(fleet.delete, f"/v1/models/{CHAT}/replicas/{first}")
            await asyncio.to_thread(wait_until, lambda: ready_replicas(fleet) == 1, SECONDS)
            at_one = served
            await asyncio.to_thread(wait_until, lambda: served >= at_one + 40, SECONDS)
        finally:
            ended = True
            await asyncio.gather(*clients)
    figures["requests while a replica was added and one was drained"] = f"{served}, none failed"


def ready_replicas(fleet: Fleet) -> int:
    return sum(replica["state"] == "ready" for replica in fleet.model(CHAT)["replicas"])


def test_an_unknown_name_is_404_with_the_names(fleet: Fleet) -> None:
    answer = httpx.post(
        f"{fleet.url}/v1/completions", json={"model": "gpt-7", "prompt": "x"}, timeout=SECONDS, verify=PLAIN
    )
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert all(name in message for name in (CHAT, EMBED, TINY)), message
