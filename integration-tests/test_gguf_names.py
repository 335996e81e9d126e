"""A GGUF by its name on the hub, through the programs that a user starts: a server, `funitel models`, the class LLM."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from funitel_testing.cache import share_engines
from funitel_testing.fake_hub import FakeHub, running
from funitel_testing.servers import serving
from funitel_testing.tiny_gguf import TINY_GGUFS

NAME = "org/Tiny-GGUF:q8_0"
SCRIPT = f"""
from funitel.llm import LLM
with LLM({NAME!r}, max_total_tokens=64) as llm:
    print(len(llm.generate("a")))
try:
    LLM("org/Tiny-GGUF:Q2_K")
except Exception as error:
    print(error)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    TINY_GGUFS["qwen2"].write(path, "qwen2")
    return {"tiny-Q4_K_M.gguf": b"never asked for", "tiny-Q8_0.gguf": path.read_bytes(), "mmproj-Q8_0.gguf": b"GGUF"}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[FakeHub]:
    with running(FakeHub({"org/Tiny-GGUF": {"main": files}})) as hub:
        yield hub


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder for the caches, with the CPU engines."""
    (tmp_path / "cache").mkdir()
    share_engines(tmp_path / "cache")
    return tmp_path


def test_a_gguf_of_the_hub_is_served_by_its_name_and_later_without_the_hub(hub: FakeHub, home: Path) -> None:
    flags = ("--model-id", NAME, "--max-total-tokens", "64")
    with serving(home, *flags, environ=hub.environ(home)) as server:
        question = {"model": NAME, "prompt": "a", "max_tokens": 3}
        answer = httpx.post(f"{server.url}/v1/completions", json=question, timeout=60).json()
        (listed,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        info = httpx.get(f"{server.url}/info").json()
    assert (answer["model"], listed["id"], info["model_id"]) == (NAME, NAME, NAME)
    assert answer["usage"]["completion_tokens"] == 3
    assert [file for file, _ in hub.fetched] == ["tiny-Q8_0.gguf"]

    offline = hub.environ(home, HF_HUB_OFFLINE="1")
    models = [sys.executable, "-m", "funitel", "models", NAME, "--json"]
    told = subprocess.run(models, env=offline, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["fits"]
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    number, line = done.stdout.splitlines()
    assert number == "1"
    assert line.startswith("org/Tiny-GGUF has no GGUF Q2_K; it has Q8_0 on this machine, and the hub is unreachable: ")
