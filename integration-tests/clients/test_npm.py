"""The npm packages of OpenAI, Anthropic and Hugging Face, as they are, run by node."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from funitel_testing import npm
from funitel_testing.servers import Server

SCRIPTS = Path(__file__).parent / "npm"
MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts and the packages they use; npm's cache makes a second installation quick."""
    return npm.install(SCRIPTS, tmp_path_factory.mktemp("npm") / "clients")


def run(packages: Path, script: str, *args: str) -> Any:
    """What a script printed."""
    command = ["node", script, *args]
    done = subprocess.run(command, cwd=packages, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_openai(packages: Path, server: Server) -> None:
    got = run(packages, "openai.mjs", server.url)
    assert got["models"] == [MODEL]
    assert "Paris" in got["chat"]
    assert got["streamed"] == got["chat"]
    assert len(set(got["choices"])) == 2
    assert got["logprobs"] == got["choices"][0]
    assert "Paris" in got["response"]
    assert got["retrieved"] is True
    assert got["responseStreamed"] == got["response"]
    assert got["events"] == list(range(len(got["events"])))
    assert got["following"] is True
    assert got["error"] == 404


def test_openai_tools_and_schemas(packages: Path, server: Server) -> None:
    got = run(packages, "openai_forced.mjs", server.url)
    assert got["call"]["name"] == "get_weather"
    assert json.loads(got["call"]["arguments"])["city"] in ("Paris", "Rome")
    assert got["callStreamed"]["arguments"] == got["call"]["arguments"]
    assert json.loads(got["shaped"])["city"] in ("Paris", "Rome")


def test_anthropic(packages: Path, server: Server) -> None:
    got = run(packages, "anthropic.mjs", server.url)
    assert "Paris" in got["text"]
    assert got["streamed"] == got["text"] == got["final"]["content"][0]["text"]
    assert got["final"]["usage"]["output_tokens"] == got["usage"]["output_tokens"]
    assert got["stop"] == ["stop_sequence", "Paris"]
    assert got["count"] == got["usage"]["input_tokens"] + got["usage"]["cache_read_input_tokens"]
    assert got["error"] == [400, "invalid_request_error"]


def test_anthropic_tools(packages: Path, server: Server) -> None:
    got = run(packages, "anthropic_forced.mjs", server.url)
    assert got["call"]["input"]["city"] in ("Paris", "Rome")
    assert got["callStreamed"]["input"] == got["call"]["input"]


def test_huggingface(packages: Path, server: Server) -> None:
    got = run(packages, "huggingface.mjs", server.url)
    assert "Paris" in got["generated"]
    assert "".join(got["pieces"]) == got["generated"]
    assert len(got["pieces"]) > 3
    assert "Paris" in got["chat"]
    assert got["chatStreamed"] == got["chat"]


def test_b3_huggingface_encoders_on_a_bare_url(packages: Path, encoder: Server) -> None:
    got = run(packages, "huggingface_encoders.mjs", encoder.url)
    assert [len(row) for row in got["features"]] == [384]
    near, far = got["similarity"]
    assert 1 >= near > 0.5 > far > -1
