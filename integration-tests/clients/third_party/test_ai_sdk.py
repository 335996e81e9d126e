"""npm `ai` with `@ai-sdk/openai-compatible`, and with the providers for OpenAI's and Anthropic's APIs."""

import json
import os
import subprocess
from typing import Any

import pytest
from blame import ENCODER_URL, Calls, ModelFault, of_the_model

FOLDER = os.environ.get("FUNITEL_CLIENTS_NPM", "")
CHATS = {
    "compatible": "/v1/chat/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "anthropic": "/v1/messages",
}
# What the package says of text that is not the object asked for, or cut off.
OF_TEXT = ("AI_NoObjectGeneratedError", "AI_NoOutputGeneratedError")


def run(case: str, kind: str, url: str, calls: Calls, *, is_free: bool = False) -> dict[str, Any]:
    """What a case gave; `is_free` where the text is not kept to a schema."""
    command = ["node", "ai_sdk.mjs", case, kind, url]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-500:]
    got: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    error = got.get("error") or "; ".join(got["errors"])
    if is_free and error.startswith(OF_TEXT) and not calls.refused:
        raise ModelFault(error)
    assert not error, f"{error} {got.get('of')}"
    assert not calls.refused, calls.words()
    return got


@pytest.fixture(params=list(CHATS))
def kind(request: pytest.FixtureRequest) -> str:
    """One of the providers."""
    return str(request.param)


def test_text(kind: str, url: str, calls: Calls) -> None:
    got = run("text", kind, url, calls)
    calls.check(CHATS[kind])
    assert "Paris" in got["text"]
    assert got["usage"]["outputTokens"] > 0
    assert got["finishReason"] == "stop"


def test_streamed_text(kind: str, url: str, calls: Calls) -> None:
    got = run("streamed", kind, url, calls)
    assert "Paris" in "".join(got["pieces"])
    assert len(got["pieces"]) > 3
    assert got["usage"]["outputTokens"] > 0
    assert got["finishReason"] == "stop"


def test_completions(url: str, calls: Calls) -> None:
    assert run("text", "completion", url, calls)["text"]
    assert run("streamed", "completion", url, calls)["pieces"]
    calls.check("/v1/completions")


def test_tools(kind: str, url: str, calls: Calls) -> None:
    got = run("tools", kind, url, calls)
    assert got["asked"]
    assert got["count"] == 2


def test_streamed_tools(kind: str, url: str, calls: Calls) -> None:
    got = run("streamedTools", kind, url, calls)
    assert got["asked"]
    assert {"tool-call", "tool-result", "text-delta", "finish"} <= set(got["types"])


def test_tools_that_may_be_called(kind: str, url: str, calls: Calls) -> None:
    got = run("free", kind, url, calls)
    of_the_model(bool(got["text"] or got["asked"]), "neither text nor a call")


def test_an_object(kind: str, url: str, calls: Calls) -> None:
    assert run("object", kind, url, calls)["object"]["city"] in ("Paris", "Rome")


def test_a_streamed_object(kind: str, url: str, calls: Calls) -> None:
    got = run("streamedObject", kind, url, calls)
    assert got["object"]["city"] in ("Paris", "Rome")
    assert got["count"] > 0


def test_a_word_of_several(kind: str, url: str, calls: Calls) -> None:
    assert run("array", kind, url, calls)["object"] in ("Paris", "Rome")


def test_an_output(kind: str, url: str, calls: Calls) -> None:
    assert run("output", kind, url, calls)["object"]["city"] in ("Paris", "Rome")


def test_an_output_and_tools(kind: str, url: str, calls: Calls) -> None:
    got = run("outputAndTools", kind, url, calls)
    assert got["asked"]
    assert got["object"]["city"] in ("Paris", "Rome")


def test_embeddings(calls: Calls) -> None:
    got = run("embeddings", "compatible", ENCODER_URL, calls)
    calls.check("/v1/embeddings")
    assert (got["width"], got["count"]) == (384, 2)
    assert got["usage"]["tokens"] > 0
