"""Shards that raise, run out of memory, or give scores that are no numbers: whom that costs what."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from funitel_testing.faulty_shard import Fault, Faults
from funitel_testing.servers import FAULTY_LAUNCHER, Server, serving

NUM_TOKENS = 24


class Deployment:
    """A server, and what goes wrong in its shards."""

    def __init__(self, server: Server, faults: Faults) -> None:
        self.server = server
        self.faults = faults

    def ask(self, prompt: str, **parameters: Any) -> httpx.Response:
        body = {"inputs": prompt, "parameters": {"max_new_tokens": NUM_TOKENS, "details": True, **parameters}}
        return httpx.post(f"{self.server.url}/generate", json=body, timeout=60)

    def ask_all(self, prompts: list[str], **parameters: Any) -> list[httpx.Response]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, **parameters), prompts))


@pytest.fixture(scope="module")
def shared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("faulty")
    faults = Faults(folder / "faults.json")
    flags = ("--model-id", str(tiny_model), "--num-shard", "1", "--num-threads", "1")
    with serving(folder, *flags, environ=faults.environ, program=FAULTY_LAUNCHER) as server:
        yield Deployment(server, faults)


@pytest.fixture
def deployment(shared: Deployment) -> Deployment:
    shared.faults.set()
    return shared


def test_a_shard_goes_wrong_as_a_test_says_and_is_well_afterwards(deployment: Deployment) -> None:
    well = deployment.ask("hello").json()
    deployment.faults.set(Fault(kind="raise", text="poison"))
    failed = deployment.ask("poison")
    assert (failed.status_code, failed.json()["error_type"]) == (424, "generation")
    assert "told to raise poison" in failed.json()["error"]
    assert [one["text"] for one in deployment.faults.fired()] == ["poison"]
    assert deployment.ask("hello").json() == well
