"""Shards that raise, lack memory, give scores that are no numbers, lie or hang: whom that costs what."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from funitel_testing.faults.vitals import IN_USE
from funitel_testing.faulty_shard import Fault, Faults
from funitel_testing.servers import FAULTY_LAUNCHER, Server, serving, wait_until

NUM_TOKENS = 24


class Deployment:
    """A server, and what goes wrong in its shards."""

    def __init__(self, server: Server, faults: Faults) -> None:
        self.server = server
        self.faults = faults

    def ask(self, prompt: str, **parameters: Any) -> httpx.Response:
        body = {"inputs": prompt, "parameters": {"max_new_tokens": NUM_TOKENS, "details": True, **parameters}}
        return httpx.post(f"{self.server.url}/generate", json=body, timeout=120)

    def num_sequences(self) -> float:
        """Sequences that wait or run."""
        metrics = self.server.metrics()
        return sum(metrics[IN_USE[name]] for name in ("waiting", "running"))

    def ask_all(self, prompts: list[str], **parameters: Any) -> list[httpx.Response]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, **parameters), prompts))


@pytest.fixture(scope="module")
def shared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("faulty")
    faults = Faults(folder / "faults.json")
    flags = ("--model-id", str(tiny_model), "--num-shard", "1", "--num-threads", "1", "--step-timeout-s", "3")
    with serving(folder, *flags, environ=faults.environ, program=FAULTY_LAUNCHER) as server:
        yield Deployment(server, faults)


@pytest.fixture
def deployment(shared: Deployment) -> Deployment:
    shared.faults.set()
    return shared


def outcome(answer: httpx.Response) -> tuple[int, Any]:
    body = answer.json()
    return answer.status_code, body["generated_text"] if answer.status_code == 200 else body["error"]


PROMPTS = [f"number {i}: the quick brown fox" for i in range(7)]
POISON = "poison, and the quick brown fox"


@pytest.mark.parametrize(
    "parameters", [{}, {"do_sample": True, "seed": 7, "temperature": 0.9}], ids=["greedy", "seeded"]
)
@pytest.mark.parametrize("min_generated", [0, 5], ids=["at the prompt", "while it streams"])
def test_whoever_fails_its_steps_fails_alone(
    deployment: Deployment, parameters: dict[str, Any], min_generated: int
) -> None:
    well = [outcome(answer) for answer in deployment.ask_all(PROMPTS, **parameters)]
    deployment.faults.set(Fault(kind="raise", text="poison", min_generated=min_generated))
    *others, poison = deployment.ask_all([*PROMPTS, POISON], **parameters)
    assert [outcome(answer) for answer in others] == well
    assert poison.status_code == 424
    assert "RuntimeError: told to raise poison" in poison.json()["error"]
    deployment.faults.set()
    assert deployment.ask(POISON, **parameters).status_code == 200


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_scores_that_are_no_numbers_fail_their_sequence_alone(deployment: Deployment, kind: str) -> None:
    well = [outcome(answer) for answer in deployment.ask_all(PROMPTS)]
    undisturbed = outcome(deployment.ask(POISON))
    deployment.faults.set(Fault(kind=kind, text="poison", min_generated=3))
    *others, poison = deployment.ask_all([*PROMPTS, POISON])
    assert [outcome(answer) for answer in others] == well
    error = "Request failed during generation: the model's scores are not numbers, or infinite"
    assert outcome(poison) == (424, error)
    deployment.faults.set()
    assert outcome(deployment.ask(POISON)) == undisturbed, "nothing of it was kept"


def test_for_want_of_memory_steps_are_smaller_and_nobody_fails(deployment: Deployment) -> None:
    well = [outcome(answer) for answer in deployment.ask_all(PROMPTS)]
    no_memory = Fault(kind="no_memory", min_rows=4)
    deployment.faults.set(Fault(kind="held"), no_memory)  # until all of them are there, to be in one step
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(deployment.ask_all, PROMPTS)
        try:
            wait_until(lambda: deployment.num_sequences() == len(PROMPTS), 60, "not all requests came in")
        finally:
            deployment.faults.set(no_memory)
        assert [outcome(answer) for answer in asking.result()] == well
    assert deployment.faults.fired()[-1]["kind"] == "no_memory"
    deployment.faults.set(Fault(kind="memory_error", text="poison"))
    assert "there is no memory for a step of" in deployment.ask(POISON).json()["error"]


@pytest.mark.parametrize(
    "kind", ["garbage", "truncated", "stranger", "missing", "twice", "vocabulary", "ragged", "batch"]
)
def test_a_lie_costs_a_pause_and_no_token_of_it_is_believed(deployment: Deployment, kind: str, is_full: bool) -> None:
    if kind != "missing" and not is_full:
        pytest.skip("--full tells every lie: each costs a restart of the shard")
    undisturbed = outcome(deployment.ask(POISON))
    deployment.faults.set(Fault(kind=kind, min_generated=3, times=1))
    deployment.faults.forget()
    assert outcome(deployment.ask(POISON)) == undisturbed
    (lie,) = deployment.faults.fired()
    assert lie["kind"] == kind
    log = deployment.server.wait_log("is lost: ")
    assert "the answer cannot be" in log or "the shards' answer cannot be" in log or "the shards keep" in log


def test_a_shard_that_hangs_is_started_again_and_its_stream_goes_on(deployment: Deployment) -> None:
    undisturbed = outcome(deployment.ask(POISON))
    deployment.faults.forget()
    deployment.faults.set(Fault(kind="hang", min_generated=6, times=1))
    assert outcome(deployment.ask(POISON)) == undisturbed
    (hang,) = deployment.faults.fired()
    assert hang["pid"] not in deployment.server.shard_pids()


def test_a_shard_that_was_stopped_for_a_moment_costs_a_pause(deployment: Deployment) -> None:
    undisturbed = outcome(deployment.ask(POISON))
    (pid,) = deployment.server.shard_pids()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(deployment.ask, POISON)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(pid, signal.SIGCONT)
        assert outcome(asking.result()) == undisturbed
    assert deployment.server.shard_pids() == [pid]
