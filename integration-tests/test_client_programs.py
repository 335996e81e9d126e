"""`funitel chat` and `funitel generate` with real servers: one that runs, and one they start and stop."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from funitel_testing.clients import client_of, generate
from funitel_testing.servers import MARK, Server, marked, wait_until

PATIENCE_SECONDS = 120.0
SOON = 30.0


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "funitel", *words]


def run(*words: str, text: str = "", environ: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(*words),
        input=text,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env=os.environ | (environ or {}),
    )


@pytest.fixture
def server(launch: Any, tiny_model: Path) -> Server:
    found: Server = launch("--model-id", str(tiny_model), "--dtype", "float32", "--max-batch-total-tokens", "4000")
    return found


async def test_a_completion_is_the_servers(server: Server) -> None:
    async with client_of(server.url) as client:
        expected = await generate(client, "The sea", max_new_tokens=8, temperature=0.7, seed=5)
    words = ("--url", server.url, "--max-tokens", "8", "--temperature", "0.7", "--seed", "5", "--json")
    done = run("generate", "The sea", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["text"], found["num_tokens"], found["seed"]) == (expected.text, len(expected.ids), 5)
    assert run("generate", "-", *words, text="The sea").stdout == done.stdout


def test_a_chat_is_the_servers(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 8}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    first = answer["choices"][0]["message"]["content"]
    done = run("chat", "--url", server.url, "--temperature", "0", "--max-tokens", "8", text="Hi\n/reset\nHi\n")
    assert (done.returncode, done.stdout) == (0, f"{first}\n" * 2), done.stderr


def test_what_the_server_refuses_is_one_line(server: Server) -> None:
    done = run("generate", "a" * 600, "--url", server.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: Input validation error: ")


@pytest.fixture
def mark() -> Iterator[str]:
    """A word in the environment of everything the test starts; whatever is left of that is killed."""
    word = uuid.uuid4().hex
    yield word
    for pid in marked(word):
        os.kill(pid, signal.SIGKILL)


def test_with_no_server_one_is_started_and_stopped(tiny_model: Path, mark: str) -> None:
    environ = {MARK: mark, "MAX_BATCH_TOTAL_TOKENS": "4000"}
    done = run("generate", "a", "--model-id", str(tiny_model), "--max-tokens", "4", "--json", environ=environ)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == str(tiny_model)
    assert f"starting a server for {tiny_model}" in done.stderr
    assert "loading weights: 100%" in done.stderr
    assert marked(mark) == set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_started_server_ends_with_its_client(number: signal.Signals, tiny_model: Path, mark: str) -> None:
    process = subprocess.Popen(
        command("chat", "--model-id", str(tiny_model), "--max-tokens", "2"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {MARK: mark, "MAX_BATCH_TOTAL_TOKENS": "4000"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"Hi\n")
    process.stdin.flush()
    assert process.stdout.read(1)  # it answers
    assert len(marked(mark)) > 3  # client, launcher, router and shard
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == (143 if number is signal.SIGTERM else -signal.SIGKILL)
    wait_until(lambda: marked(mark) == set(), SOON)


def test_a_server_that_cannot_start_says_why(tmp_path: Path, mark: str) -> None:
    done = run("chat", "--model-id", f"{tmp_path}/none", environ={MARK: mark})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == f"error: no such folder or file: {tmp_path}/none"
    assert marked(mark) == set()
