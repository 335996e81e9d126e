"""Requests of every API, as bytes, and what of their answers may differ between two runs."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from funitel_testing.takeovers.raw import RawAnswer

PROMPT = "{0} bottles of beer on the wall, {0} bottles of beer. "
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "count",
            "parameters": {
                "type": "object",
                "properties": {"numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 12}},
                "required": ["numbers"],
            },
        },
    }
]
SCHEMA = {
    "type": "object",
    "properties": {"numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 20}},
    "required": ["numbers"],
}

# What two runs may differ in: ids and times that are drawn for each request, and counts of what was cached.
_DRAWN = (
    (
        re.compile(rb'"((?:[a-z_]*_)?id|item_id)":"(?:chatcmpl|cmpl|call|msg|resp|item|fc|rs|req)[-_][0-9a-f]{8,}"'),
        rb'"\1":"drawn"',
    ),
    (re.compile(rb'"(created|created_at|completed_at)":\d+'), rb'"\1":0'),
    (re.compile(rb'"(cached_tokens|cache_read_input_tokens|num_cached_tokens|input_tokens)":\d+'), rb'"\1":0'),
)
# Headers of times, and the length of a body with such counts; everything else of a head is the same.
_TIMES = re.compile(
    rb"(?im)^(date|content-length|x-[a-z-]*time[a-z-]*|x-tokens-per-second|x-request-id|request-id): .*\r\n"
)


@dataclass(frozen=True)
class RawAsk:
    """One request: a name that says what it is, and a function of its number that makes route and body."""

    name: str
    make: Callable[[int, int], tuple[str, dict[str, Any]]]

    def request(self, number: int, num_tokens: int, *, closes: bool = False, version: str = "1.1") -> bytes:
        """The bytes to send."""
        route, body = self.make(number, num_tokens)
        content = json.dumps(body).encode()
        lines = [f"POST {route} HTTP/{version}", "host: 127.0.0.1", f"content-length: {len(content)}"]
        lines += ["content-type: application/json", *(["connection: close"] if closes else [])]
        return "\r\n".join([*lines, "", ""]).encode() + content


def _native(number: int, num_tokens: int, **parameters: Any) -> dict[str, Any]:
    known = {"max_new_tokens": num_tokens, "details": True, "ignore_eos_token": True}
    return {"inputs": PROMPT.format(number), "parameters": known | parameters}


def _chat(number: int, num_tokens: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPT.format(number)}]
    return {"model": "tgi", "messages": messages, "max_tokens": num_tokens, "ignore_eos": True} | fields


def _text(number: int, num_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": "tgi", "prompt": PROMPT.format(number), "max_tokens": num_tokens, "ignore_eos": True} | fields


def _message(number: int, num_tokens: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPT.format(number)}]
    return {"model": "tgi", "messages": messages, "max_tokens": num_tokens} | fields


def _response(number: int, num_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": "tgi", "input": PROMPT.format(number), "max_output_tokens": num_tokens} | fields


_SEEDED = {"do_sample": True, "temperature": 0.9}
_JSON = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": SCHEMA}}

ASKS: Sequence[RawAsk] = (
    RawAsk("generate_stream, greedy", lambda n, t: ("/generate_stream", _native(n, t))),
    RawAsk("generate_stream, seeded", lambda n, t: ("/generate_stream", _native(n, t, seed=n, **_SEEDED))),
    RawAsk(
        "generate_stream, grammar",
        lambda n, t: (
            "/generate_stream",
            _native(n, t, grammar={"type": "json", "value": SCHEMA}, ignore_eos_token=False),
        ),
    ),
    RawAsk("generate_stream, top tokens", lambda n, t: ("/generate_stream", _native(n, t, top_n_tokens=3))),
    RawAsk("generate, whole", lambda n, t: ("/generate", _native(n, t))),
    RawAsk("chat, streamed, greedy", lambda n, t: ("/v1/chat/completions", _chat(n, t, stream=True, temperature=0))),
    RawAsk(
        "chat, streamed, seeded, two choices, log-probabilities",
        lambda n, t: ("/v1/chat/completions", _chat(n, t, stream=True, n=2, seed=n, logprobs=True, top_logprobs=2)),
    ),
    RawAsk(
        "chat, streamed, schema",
        lambda n, t: (
            "/v1/chat/completions",
            _chat(n, t, stream=True, seed=n, response_format=_JSON, ignore_eos=False),
        ),
    ),
    RawAsk(
        "chat, streamed, tools",
        lambda n, t: (
            "/v1/chat/completions",
            _chat(n, t, stream=True, seed=n, tools=TOOLS, tool_choice="required", ignore_eos=False),
        ),
    ),
    RawAsk(
        "chat, whole, tools",
        lambda n, t: (
            "/v1/chat/completions",
            _chat(n, t, seed=n, tools=TOOLS, tool_choice="required", ignore_eos=False),
        ),
    ),
    RawAsk(
        "completions, streamed, usage",
        lambda n, t: ("/v1/completions", _text(n, t, stream=True, seed=n, stream_options={"include_usage": True})),
    ),
    RawAsk("completions, whole, best of two", lambda n, t: ("/v1/completions", _text(n, t, seed=n, best_of=2))),
    RawAsk("messages, streamed", lambda n, t: ("/v1/messages", _message(n, t, stream=True, temperature=0))),
    RawAsk("responses, streamed", lambda n, t: ("/v1/responses", _response(n, t, stream=True, temperature=0))),
    RawAsk("responses, whole", lambda n, t: ("/v1/responses", _response(n, t, temperature=0, store=False))),
)


def comparable(answer: RawAnswer) -> tuple[bytes, list[bytes]]:
    """Head and chunks of an answer without what two runs may differ in."""
    return _TIMES.sub(b"", answer.head), sorted(map(_without_drawn, answer.chunks), key=_choice)


def _choice(chunk: bytes) -> int:
    """Which of several choices an event is of: how those of two follow each other depends on when each was queued."""
    found = re.search(rb'"choices":\[\{"index":(\d+)', chunk)
    return int(found[1]) if found else 0


def _without_drawn(chunk: bytes) -> bytes:
    for pattern, blank in _DRAWN:
        chunk = pattern.sub(blank, chunk)
    return chunk


def drawn_ids(answer: RawAnswer) -> dict[bytes, set[bytes]]:
    """The ids and times of creation of the whole answer: every event of a stream has the same."""
    found: dict[bytes, set[bytes]] = {}
    for name, value in re.findall(rb'[{,]"(id|created)":("(?:chatcmpl|cmpl)-[0-9a-f]+"|\d{10})[,}]', answer.body):
        found.setdefault(name, set()).add(value)
    return found
