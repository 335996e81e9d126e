"""The three streaming APIs that the benchmark speaks: request bodies and parsing of events."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from funitel.launcher.bench.figures import Failure, Timeline
from funitel.launcher.bench.http import HttpReply
from funitel.launcher.terminal_ui.http_client import JSON, parsed

IGNORE_EOS, USAGE = "ignore_eos", "usage"
"""Options that not every server supports: go on after the end token; report the number of tokens."""


@dataclass(frozen=True, slots=True)
class GenerationQuery:
    """Parameters of one request; an empty `model` is left out."""

    model: str
    prompt: str
    num_tokens: int
    options: frozenset[str]


@dataclass(frozen=True, slots=True)
class Event:
    """Content of one event of a stream; None and False where absent."""

    has_token: bool = False
    is_end: bool = False
    num_tokens: int | None = None
    num_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API: its path, request body and event parser."""

    path: str
    body: Callable[[GenerationQuery], JSON]
    read: Callable[[Mapping[str, Any]], Event]
    options: frozenset[str]
    needs_model: bool


def read_reply(dialect: Dialect, started: float, reply: HttpReply) -> Timeline:
    """Convert an answer to the timeline of its request."""
    timeline = Timeline(started=started, ended=reply.ended)
    if reply.status != 200:
        message = error_message(parsed(reply.body)) or "without a reason"
        return replace(timeline, failure=Failure(f"HTTP {reply.status}", message))
    arrivals: list[float] = []
    is_ended, num_tokens, num_prompt_tokens = False, None, None
    for instant, data in _events(reply.pieces):
        content = parsed(data)
        if not isinstance(content, dict):
            return replace(timeline, failure=Failure("malformed", f"an event is no JSON object: {data[:80]!r}"))
        if content.get("error"):
            message = error_message(content) or "without a reason"
            return replace(timeline, failure=Failure("error event", message))
        try:
            event = dialect.read(content)
        except (KeyError, TypeError, AttributeError, IndexError):
            return replace(timeline, failure=Failure("malformed", f"an event of another API: {data[:80]!r}"))
        if event.has_token:
            arrivals.append(instant)
        is_ended |= event.is_end
        num_tokens = num_tokens if event.num_tokens is None else event.num_tokens
        num_prompt_tokens = num_prompt_tokens if event.num_prompt_tokens is None else event.num_prompt_tokens
    if not is_ended:
        return replace(timeline, failure=Failure("unfinished", "the stream ended without a finish reason"))
    if not arrivals:
        return replace(timeline, failure=Failure("empty", "the answer has no token"))
    return replace(
        timeline,
        arrivals=tuple(arrivals),
        num_tokens=num_tokens or len(arrivals),
        is_counted=bool(num_tokens),
        num_prompt_tokens=num_prompt_tokens,
    )


def error_message(content: JSON) -> str:
    """The text of an error in OpenAI's form, TGI's or FastAPI's."""
    if not isinstance(content, dict):
        return ""
    error = content.get("error") or content.get("message") or content.get("detail") or ""
    text = error.get("message", "") if isinstance(error, dict) else error
    return " ".join(str(text).split())


def _events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of server-sent events except [DONE], each with the instant at which its line was complete."""
    partial_line = b""
    for instant, piece in pieces:
        *lines, partial_line = (partial_line + piece).split(b"\n")
        for line in lines:
            name, _, value = line.partition(b":")
            if name == b"data" and (data := value.strip()) and data != b"[DONE]":
                yield instant, data


def _openai_body(query: GenerationQuery, prompt: Mapping[str, Any]) -> JSON:
    return {
        **({"model": query.model} if query.model else {}),
        **prompt,
        "max_tokens": query.num_tokens,
        "temperature": 0,
        "stream": True,
        **({"stream_options": {"include_usage": True}} if USAGE in query.options else {}),
        **({"ignore_eos": True} if IGNORE_EOS in query.options else {}),
    }


def _chat_body(query: GenerationQuery) -> JSON:
    return _openai_body(query, {"messages": [{"role": "user", "content": query.prompt}]})


def _completions_body(query: GenerationQuery) -> JSON:
    return _openai_body(query, {"prompt": query.prompt})


def _tgi_body(query: GenerationQuery) -> JSON:
    options = {"ignore_eos_token": True} if IGNORE_EOS in query.options else {}
    parameters = {"max_new_tokens": query.num_tokens, "do_sample": False, "details": True, **options}
    return {"inputs": query.prompt, "parameters": parameters}


def _read_openai(content: Mapping[str, Any], has_token: Callable[[Mapping[str, Any]], bool]) -> Event:
    usage = content.get("usage") or {}
    choices = content["choices"]
    return Event(
        has_token=any(map(has_token, choices)),
        is_end=any(choice.get("finish_reason") for choice in choices),
        num_tokens=usage.get("completion_tokens"),
        num_prompt_tokens=usage.get("prompt_tokens"),
    )


def _has_chat_token(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


def _read_chat(content: Mapping[str, Any]) -> Event:
    return _read_openai(content, _has_chat_token)


def _read_completion(content: Mapping[str, Any]) -> Event:
    return _read_openai(content, lambda choice: bool(choice.get("text")))


def _read_tgi(content: Mapping[str, Any]) -> Event:
    details = content.get("details") or {}
    return Event(
        has_token="id" in content["token"],
        is_end=bool(details.get("finish_reason")) or content.get("generated_text") is not None,
        num_tokens=details.get("generated_tokens"),
        num_prompt_tokens=details.get("input_length"),
    )


_OPENAI_OPTIONS = frozenset({IGNORE_EOS, USAGE})

DIALECTS: Mapping[str, Dialect] = {
    "openai-chat": Dialect("/v1/chat/completions", _chat_body, _read_chat, _OPENAI_OPTIONS, needs_model=True),
    "openai-completions": Dialect(
        "/v1/completions", _completions_body, _read_completion, _OPENAI_OPTIONS, needs_model=True
    ),
    "tgi": Dialect("/generate_stream", _tgi_body, _read_tgi, frozenset({IGNORE_EOS}), needs_model=False),
}
