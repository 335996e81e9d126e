"""An imitated server that streams at a set pace, in OpenAI's two APIs or TGI's, and fails on demand."""

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

TOKENIZE_ANSWERS = {
    "prompt": lambda tokens: {"count": len(tokens), "tokens": tokens},
    "content": lambda tokens: {"tokens": tokens},
    "inputs": lambda tokens: [{"id": token, "text": "", "start": 0, "stop": 0} for token in tokens],
}


@dataclass
class FakeStreams:
    """How it behaves. `fates` names what happens to the requests after the first one, in turn; "" is an answer.

    Fates: a status such as "429", "error" for an error event, "cut" for a connection that closes in the midst,
    "unfinished" for a stream without an end, "garbage" for events that are no JSON, "silence" for nothing at all,
    "empty" for an answer without tokens.
    """

    first_seconds: float = 0.0  # before the first token
    gap_seconds: float = 0.0  # before each other
    refuses: tuple[str, ...] = ()  # fields that are answered with 422
    reports_usage: bool = True
    counts_by: str | None = None  # field of /tokenize: "prompt", "content" or "inputs"
    tokens_per_word: int = 1
    template_tokens: int = 0
    fates: tuple[str, ...] = ()
    models: tuple[str, ...] = ("fake-model",)
    tokens_per_event: int = 1
    bodies: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    url: str = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._answer(reader, writer)
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        _, path, _ = head.split(" ", 2)
        length = next(int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length:"))
        body = json.loads(await reader.readexactly(length) or b"null")
        if path == "/v1/models":
            _whole(writer, 200, {"data": [{"id": name} for name in self.models]})
        elif path == "/tokenize":
            self._tokenize(writer, body)
        else:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            try:
                await self._stream(writer, path, body)
            finally:
                self.in_flight -= 1
        await writer.drain()

    def _tokenize(self, writer: asyncio.StreamWriter, body: Mapping[str, Any]) -> None:
        if self.counts_by is None:
            _whole(writer, 404, {"error": "no such route"})
        else:
            text = body.get(self.counts_by, "")
            tokens = list(range(len(text.split()) * self.tokens_per_word))
            _whole(writer, 200, TOKENIZE_ANSWERS[self.counts_by](tokens))

    async def _stream(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> None:
        refused = [name for name in self.refuses if name in body or name in body.get("parameters", {})]
        if refused:
            _whole(writer, 422, {"error": {"message": f"unknown field: {refused[0]}"}})
            return
        self.bodies.append(body)
        number = len(self.bodies) - 2
        fate = self.fates[number] if 0 <= number < len(self.fates) else ""
        if fate.isdigit():
            _whole(writer, int(fate), {"error": {"message": "not now"}})
            return
        if fate == "silence":
            await asyncio.sleep(60)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await self._events(writer, path, body, fate)

    async def _events(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any], fate: str) -> None:
        num_tokens = body.get("max_tokens") or body["parameters"]["max_new_tokens"]
        num_events = 0 if fate == "empty" else -(-num_tokens // self.tokens_per_event)
        for index in range(num_events):
            await asyncio.sleep(self.gap_seconds if index else self.first_seconds)
            if fate in ("error", "cut", "garbage") and index == num_events // 2:
                if fate == "cut":
                    return
                _send(
                    writer, b"data: {half\n\n" if fate == "garbage" else b'data: {"error":{"message":"it broke"}}\n\n'
                )
                break
            _event(writer, self._token(path, index))
        else:
            if fate != "unfinished":
                for event in self._end(path, body, num_tokens):
                    _event(writer, event)
        _send(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _token(self, path: str, index: int) -> dict[str, Any]:
        match path:
            case "/generate_stream":
                return {"index": index + 1, "token": {"id": index, "text": " word", "special": False}}
            case "/v1/completions":
                return {"choices": [{"index": 0, "text": " word", "finish_reason": None}]}
            case _:
                delta = {"role": "assistant", "content": " word"}
                return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}

    def _end(self, path: str, body: dict[str, Any], num_tokens: int) -> Iterator[dict[str, Any]]:
        words = len(str(self.prompt_of(body)).split()) * self.tokens_per_word + self.template_tokens
        if path == "/generate_stream":
            details = {"finish_reason": "length", "generated_tokens": num_tokens + 1, "input_length": words}
            yield {"token": {"id": 0, "text": "", "special": True}, "generated_text": "all", "details": details}
            return
        end = {"text": ""} if path == "/v1/completions" else {"delta": {}}
        yield {"choices": [{"index": 0, **end, "finish_reason": "length"}]}
        if self.reports_usage and body.get("stream_options"):
            yield {"choices": [], "usage": {"prompt_tokens": words, "completion_tokens": num_tokens}}

    @staticmethod
    def prompt_of(body: Mapping[str, Any]) -> Any:
        """The text of a request of any API."""
        return body.get("inputs") or body.get("prompt") or body["messages"][0]["content"]


def _whole(writer: asyncio.StreamWriter, status: int, content: Any) -> None:
    data = json.dumps(content).encode()
    writer.write(f"HTTP/1.1 {status} Answer\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


def _event(writer: asyncio.StreamWriter, content: Any) -> None:
    _send(writer, b"data: " + json.dumps(content).encode() + b"\n\n")


def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@contextmanager
def streaming(fake: FakeStreams) -> Iterator[FakeStreams]:
    """The server on a free port, on a thread of its own."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    started = threading.Event()

    async def serve() -> None:
        server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await stop.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # connections close in the next turn

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="fake-streams")
    thread.start()
    started.wait(10)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
