"""Damaged requests, to a tiny server of this process's own: each must be answered as documented, and soon.

Kinds: `bodies`, spoilt values and spoilt JSON; `heads`, spoilt bytes from the first on. A worker of `fuzz`.
"""

import asyncio
import http.client
import json
import random
import re
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from funitel_testing import fuzz_inputs
from funitel_testing.fuzz_inputs import Try, rss_mib
from funitel_testing.fuzz_mutants import damaged
from funitel_testing.fuzz_values import body_bytes, mangled
from funitel_testing.servers import Server, serving
from funitel_testing.tiny import save_tiny

MAX_SECONDS = 30.0  # for an answer; a grammar that is a bomb takes five, and a process to be started
MAX_ERROR_BYTES = 16_384
CALM = (424, 500, 502, 503)  # what a tiny, idle and sound server has no reason to answer
# A request that names no limit generates to the end of a short context.
FLAGS = (
    "--dtype",
    "float32",
    "--max-batch-total-tokens",
    "4096",
    "--max-total-tokens",
    "48",
    "--max-input-tokens",
    "32",
)

USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
STRATEGIES = {
    **{"tfs_z": 0.9, "top_n_sigma": 2.0, "max_k": 9, "xtc_probability": 0.5, "dry_multiplier": 1.0, "fsd_alpha": 0.5},
    **{"fsd_random_tokens": 2, "no_repeat_ngram_size": 2, "dry_sequence_breakers": ["."], "dry_penalty_last_n": 9},
}
SAMPLING = {
    **{"temperature": 0.5, "top_p": 0.9, "stop": ["x"], "seed": 1, "logit_bias": {"5": 1.0}, "priority": 1},
    **STRATEGIES,
}
PARAMETERS = {
    **{"max_new_tokens": 3, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "typical_p": 0.9, "do_sample": True},
    **{"repetition_penalty": 1.1, "frequency_penalty": 0.1, "stop": ["x"], "truncate": 5, "watermark": False},
    **{"details": True, "seed": 1, "top_n_tokens": 2, "logit_bias": {"5": 1.0}, "min_p": 0.1, "cache_salt": "s"},
    **{"decoder_input_details": False, "best_of": 1, "return_full_text": True, "priority": 0},
}
CHAT = {
    **{"messages": [{"role": "system", "content": "S"}, USER], "max_tokens": 3, "n": 1, "logprobs": True},
    **{"top_logprobs": 2, "stream": False, "user": "u", "chat_template_kwargs": {"a": [1]}},
    **SAMPLING,
}
GENERATE = {"inputs": "Hello", "parameters": PARAMETERS}
MIROSTAT = {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.1, "max_new_tokens": 3, "decoding_alg": "mirostat"}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/generate", GENERATE),
    ("/generate", {"inputs": "Hello", "parameters": STRATEGIES | {"max_new_tokens": 3}}),
    ("/generate", {"inputs": "Hello", "parameters": MIROSTAT}),
    ("/generate", {"inputs": "Hi", "parameters": {"max_new_tokens": 3, "grammar": {"type": "json", "value": SCHEMA}}}),
    (
        "/generate",
        {"inputs": "Hi", "parameters": {"max_new_tokens": 3, "grammar": {"type": "regex", "value": "a{2}b"}}},
    ),
    ("/generate_stream", GENERATE),
    ("/", GENERATE | {"stream": True}),
    ("/tokenize", {"inputs": "Hello", "add_special_tokens": True}),
    ("/chat_tokenize", CHAT),
    ("/invocations", GENERATE),
    ("/invocations", CHAT),
    ("/vertex", {"instances": [GENERATE, {"inputs": "Hi"}, {"messages": [USER], "max_tokens": 2}]}),
    (
        "/v2/models/m/versions/1/infer",
        {
            "id": "1",
            "inputs": [{"name": "i", "shape": [1], "datatype": "BYTES", "data": [72, 105]}],
            "outputs": [{"name": "o"}],
            "parameters": {"max_new_tokens": 2},
        },
    ),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL], "tool_choice": "required", "max_tokens": 4}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "x"}]},
            ],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
            "max_tokens": 3,
        },
    ),
    ("/v1/completions", {"prompt": ["Hi", "a"], "max_tokens": 2, "best_of": 1, "echo": True, "logprobs": 1} | SAMPLING),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 2, "stream": True}),
    (
        "/v1/messages",
        {
            **{"model": "m", "max_tokens": 3, "system": [{"type": "text", "text": "S"}], "stop_sequences": ["x"]},
            **{"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "stream": True, "top_k": 3},
        },
    ),
    (
        "/v1/messages",
        {
            **{"model": "m", "max_tokens": 4, "tools": [{"name": "f", "input_schema": SCHEMA}]},
            **{"messages": [USER], "tool_choice": {"type": "tool", "name": "f"}},
        },
    ),
    ("/v1/messages/count_tokens", {"model": "m", "messages": [USER]}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 3, "store": False, "metadata": {"a": "b"}}),
    (
        "/v1/responses",
        {
            "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
            "max_output_tokens": 3,
            "stream": True,
            "text": {"format": {"type": "text"}},
        },
    ),
)
HEADERS: tuple[tuple[str, str], ...] = (
    *(("x-request-timeout", value) for value in ("1e-9", "nan", "-1", "1e308", "9" * 5000, "", "1_0", "60")),
    *(("x-request-priority", value) for value in ("9" * 5000, "-0", "+5", "\u0661", "", "0x1")),
    *(("traceparent", value) for value in ("00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ff-x", "0" * 5000, "")),
    *(("authorization", value) for value in ("Bearer " + "k" * 5000, "Basic x", "Bearer", "")),
    *(("content-type", value) for value in ("application/json; charset=utf-7", "text/plain", "a/b+json", "x" * 5000)),
    *(("anthropic-version", "2023-06-01"), ("accept", "text/event-stream"), ("expect", "100-continue")),
    *(("host", value) for value in ("x/?", "x" * 5000, "[::1", "", "a b")),
    *(("x-forwarded-for", "127.0.0.1"), ("content-encoding", "gzip"), ("origin", "null"), ("upgrade", "websocket")),
)


class Target:
    """A running server, and what became of requests to it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._connection: http.client.HTTPConnection | None = None
        self._pids = [server.router_pid(), *server.shard_pids()]

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def held_mib(self) -> int:
        """Memory of its processes."""
        return sum(map(rss_mib, self._pids))

    async def bodies(self, rng: random.Random) -> str:
        """Ask with a spoilt body, and maybe a strange header."""
        path, body = rng.choice(BODIES)
        for _ in range(rng.choice((1, 1, 2, 4))):
            body = mangled(body, rng)
        headers = {"content-type": "application/json"} | dict(rng.sample(HEADERS, rng.choice((0, 0, 0, 1, 2))))
        content = body_bytes(body, rng)
        return await asyncio.to_thread(self._ask, path, content, {n: v.encode() for n, v in headers.items()})

    def _ask(self, path: str, content: bytes, headers: Mapping[str, bytes]) -> str:
        logged = self._server.log.stat().st_size
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=MAX_SECONDS)
        try:
            self._connection.request("POST", path, content, headers)  # type: ignore[arg-type]
            response = self._connection.getresponse()
            answer = response.read()
        except TimeoutError:
            self.close()
            return f"no end within {MAX_SECONDS:g} seconds: {path} {content[:500]!r} {headers}"
        except (http.client.HTTPException, OSError):
            self.close()
            return self._ended(logged)
        problem = fault(response.status, response.headers.get("content-type") or "", answer)
        if problem in ("5xx", "a traceback"):
            problem += "" if self._is_logged(logged) else " without a logged cause"
        return f"{problem}: {path} {content[:1000]!r} {headers} {answer[:500]!r}" if problem else ""

    async def heads(self, rng: random.Random) -> str:
        """Send spoilt bytes, and end sending."""
        path, body = rng.choice(BODIES)
        content = json.dumps(body).encode()
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
        ]
        for _ in range(rng.choice((0, 1, 2))):
            lines.insert(rng.randrange(1, len(lines)), ": ".join(rng.choice(HEADERS)))
        if rng.random() < 0.2:
            lines.append("Transfer-Encoding: chunked")
        request = "\r\n".join([*lines, "", ""]).encode() + content
        for _ in range(rng.choice((1, 1, 2, 5))):
            request = damaged(request, rng, within=rng.choice((40, 200, len(request))))
        return await asyncio.to_thread(self._send, request)

    def _send(self, request: bytes) -> str:
        logged = self._server.log.stat().st_size
        answer = b""
        try:
            with socket.create_connection(("127.0.0.1", self._server.port), timeout=MAX_SECONDS) as sock:
                sock.sendall(request)
                sock.shutdown(socket.SHUT_WR)
                while chunk := sock.recv(1 << 16):
                    answer += chunk
        except TimeoutError:
            return f"no end within {MAX_SECONDS:g} seconds: {request[:1000]!r}"
        except OSError:
            return self._ended(logged)
        statuses = [int(status) for status in re.findall(rb"^HTTP/1\.1 (\d{3}) ", answer, re.MULTILINE)]
        if answer and not statuses:
            return f"no HTTP: {request[:1000]!r} {answer[:500]!r}"
        if set(statuses) & set(CALM) or b"Traceback" in answer:
            return f"5xx{'' if self._is_logged(logged) else ' without a logged cause'}: {request[:1000]!r}"
        return ""

    def _ended(self, logged: int) -> str:
        """A connection that was closed is right for what is no HTTP, as long as the server goes on."""
        with socket.create_connection(("127.0.0.1", self._server.port), timeout=MAX_SECONDS) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            head = sock.recv(64)
        return "" if head.startswith(b"HTTP/1.1 200 ") and not self._is_logged(logged) else f"not healthy: {head!r}"

    def _is_logged(self, start: int) -> bool:
        """Whether a failure was logged from a place in the log on."""
        with self._server.log.open("rb") as log:
            log.seek(start)
            return any(word in log.read() for word in (b"Traceback", b" ERROR "))


def fault(status: int, content_type: str, answer: bytes) -> str:
    """What is wrong with an answer."""
    if status in CALM:
        return "5xx"
    if b"Traceback (most recent" in answer:
        return "a traceback"
    try:
        text = answer.decode("utf-8")
        if content_type.startswith("text/event-stream"):
            return _stream_fault(text)
        if content_type == "application/json":
            record = json.loads(text)
            return _error_fault(record, text) if status >= 400 else ""
    except ValueError as error:
        return f"not JSON {error}"
    return ""


def _stream_fault(text: str) -> str:
    *whole, rest = text.split("\n\n")
    for line in (line for frame in whole for line in frame.split("\n")):
        if line.startswith("data: ") and line != "data: [DONE]":
            json.loads(line.removeprefix("data: "))
        elif not line.startswith(("event: ", ":", "data: [DONE]")):
            return "not a line of an event"
    return "an event without an end" if rest else ""


def _error_fault(record: Any, text: str) -> str:
    if not isinstance(record, dict) or "error" not in record:
        return "not the shape of an error"
    error = record["error"]
    message = error if isinstance(error, str) else error["message"]
    if "\n" in message:
        return "an error of several lines"
    return "a long error" if len(text) > MAX_ERROR_BYTES else ""


_targets: list[Target] = []


@asynccontextmanager
async def prepare(work: Path) -> AsyncIterator[Mapping[str, Try]]:
    """A server for the length of the job; at the end it must be idle and sound."""
    (work / "model").mkdir()
    model = save_tiny("llama", work / "model", max_position_embeddings=64)
    with serving(work, "--model-id", str(model), *FLAGS) as server:
        target = Target(server)
        _targets.append(target)
        yield {"bodies": target.bodies, "heads": target.heads}
        target.close()
        assert await asyncio.to_thread(target._ended, server.log.stat().st_size) == ""


if __name__ == "__main__":
    fuzz_inputs.run(prepare, lambda: _targets[0].held_mib())
