"""Measure what the router spends to take a request in; `router.py --intake` runs it.

The shard answers each request with one token and its end, at once, so that all that the router spends on a request is
the taking in of it and one answer. Requests come one after the other, or in crowds that come at once. CPU time is that
of all threads of the router; that of its sandbox processes, which render chats and encode long texts, is beside it.

Then many chats come at once to a shard that computes so many tokens a second: the time until the last has its first
token is compared to the time in which that shard computes the prompts and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from funitel_testing.servers import cpu_seconds, descendants

HELDOUT = Path(__file__).parent / "heldout.txt"
VOCABULARY = 4096
TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INTAKE_ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")
PATIENCE_SECONDS = 100.0


# The model


def write_chat_model(folder: Path) -> tokenizers.Tokenizer:
    """Write a tokenizer and a chat template of the kinds that small models have."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[TURN, END_OF_TURN],
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train([str(HELDOUT)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": END_OF_TURN}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def chat_text(message: str) -> str:
    """The prompt of a chat of one message by this template."""
    variables = {"messages": [{"role": "user", "content": message}], "add_generation_prompt": True}
    return jinja2.Template(TEMPLATE).render(variables)


def make_prompts(tokenizer: tokenizers.Tokenizer, num_tokens: int, count: int) -> list[str]:
    """So many different texts of about as many tokens."""
    text = HELDOUT.read_text()
    ids = tokenizer.encode(text).ids
    starts = (place * 131 % (len(ids) // 2) for place in range(count))
    long = ids * (1 + num_tokens // (len(ids) // 2))
    return [f"{place}: {tokenizer.decode(long[start : start + num_tokens])}" for place, start in enumerate(starts)]


# Requests


def _body(route: str, prompt: str, max_tokens: int, *, stream: bool) -> dict[str, Any]:
    match route:
        case "/generate" | "/generate_stream":
            return {"inputs": prompt, "parameters": {"max_new_tokens": max_tokens}}
        case "/v1/completions":
            return {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "stream": stream}
        case _:
            messages = [{"role": "user", "content": prompt}]
            salt = uuid.uuid4().hex  # no prompt finds another's computed prefix
            options = {"max_tokens": max_tokens, "stream": stream, "cache_salt": salt}
            return {"model": "m", "messages": messages, **options}


def http_request(route: str, prompt: str, max_tokens: int = 8, *, stream: bool = False) -> bytes:
    """One request, as it is written to the connection."""
    body = json.dumps(_body(route, prompt, max_tokens, stream=stream)).encode()
    head = f"POST {route} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class Asker(asyncio.Protocol):
    """One request on a connection of its own; notes when the first token came, and `done` when the server has ended."""

    def __init__(self, request: bytes, done: Callable[[Asker], None]) -> None:
        self.first_token: float | None = None  # on the monotonic clock
        self.received = b""
        self._request = request
        self._done = done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if self.first_token is None:
            self.received += data
            if b"\r\n\r\n" in self.received and (b"data:" in self.received or b"event-stream" not in self.received):
                self.first_token = time.monotonic()

    def connection_lost(self, error: Exception | None) -> None:
        self._done(self)


async def ask_at_once(port: int, requests: list[bytes]) -> list[Asker]:
    """Ask all at once, each on a connection; return once all are answered, whole."""
    left, ended = len(requests), asyncio.Event()

    def done(asker: Asker) -> None:
        nonlocal left
        if not asker.received.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"error: a request was answered with {asker.received[:300]!r}")
        left -= 1
        if not left:
            ended.set()

    askers = [Asker(request, done) for request in requests]
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(PATIENCE_SECONDS):
        for asker in askers:
            await loop.create_connection(lambda asker=asker: asker, "127.0.0.1", port)  # type: ignore[misc]
        await ended.wait()
    return askers


# Taking in


@dataclass(frozen=True)
class Cost:
    """CPU time of one request, in ms: of the router and of its sandbox processes."""

    router: float
    sandboxes: float


def _cpu(pid: int) -> tuple[float, float]:
    below = 0.0
    for child in descendants(pid):
        try:
            below += cpu_seconds(child)
        except OSError:  # it has ended
            continue
    return cpu_seconds(pid), below


async def cost_of(port: int, pid: int, requests: list[bytes], at_once: int) -> Cost:
    """Ask in crowds of so many; return what a request cost."""
    before = _cpu(pid)
    for begin in range(0, len(requests), at_once):
        await ask_at_once(port, requests[begin : begin + at_once])
    router, sandboxes = (after - earlier for earlier, after in zip(before, _cpu(pid), strict=True))
    return Cost(router * 1e3 / len(requests), sandboxes * 1e3 / len(requests))


def median_cost(costs: list[Cost]) -> dict[str, float]:
    """Medians over rounds."""
    return {
        "cpu_ms": round(statistics.median(cost.router for cost in costs), 3),
        "sandbox_cpu_ms": round(statistics.median(cost.sandboxes for cost in costs), 3),
    }


# First tokens


async def last_first_token(
    port: int, prompts: list[str], num_tokens: int, tokens_per_second: float
) -> dict[str, float]:
    """Let so many chats come at once, streamed; return when the last has its first token, beside the bare prefill."""
    requests = [http_request("/v1/chat/completions", prompt, 4096, stream=True) for prompt in prompts]
    began = time.monotonic()
    askers = await ask_at_once(port, requests)
    seconds = max(asker.first_token or began for asker in askers) - began
    bare = num_tokens / tokens_per_second
    return {"seconds": round(seconds, 2), "bare_seconds": round(bare, 2), "ratio": round(seconds / bare, 2)}
