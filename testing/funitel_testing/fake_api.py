"""A server's API for the clients: answers as told, word by word, and remembers what it was asked."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class FakeApi:
    """What it says: `words` to chats and prompts; `status` and `refusal` instead, if given."""

    words: tuple[str, ...] = ("Hello", " there")
    thoughts: tuple[str, ...] = ()  # before the words of a chat
    finish_reason: str = "stop"
    status: int = 200
    refusal: Any = None
    fails_after: int | None = None  # events until an error comes instead
    breaks_after: int | None = None  # events until it hangs up
    ends_after: int | None = None  # events until it ends as if all were said
    waits_after: int | None = None  # events until it waits for `go_on`
    key: str | None = None
    info: Any = field(default_factory=lambda: {"model_id": "fake"})
    get_status: int = 200  # of what is asked by GET
    starting: int = 0  # how many times it says that it is starting
    redirects_to: str | None = None
    bodies: list[Any] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)  # the Authorization of each request
    go_on: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def events(self, path: str) -> Iterator[Any]:
        """The events of one answer."""
        for thought in self.thoughts:
            yield {"choices": [{"delta": {"reasoning_content": thought}, "finish_reason": None}]}
        for word in self.words:
            if path == "/generate_stream":
                yield {"token": {"text": word, "special": False}, "generated_text": None}
            else:
                yield {"choices": [{"delta": {"content": word}, "finish_reason": None}]}
        if path == "/generate_stream":
            details = {"finish_reason": "length", "generated_tokens": 3, "input_length": 2, "seed": None}
            end = {"token": {"text": "</s>", "special": True}, "generated_text": "".join(self.words)}
            yield end | {"details": details}
        else:
            yield {"choices": [{"delta": {}, "finish_reason": self.finish_reason}]}


@contextmanager
def serving(api: FakeApi, host: str = "127.0.0.1") -> Iterator[FakeApi]:
    """The API on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            api.keys.append(self.headers["Authorization"])
            if api.redirects_to is not None:
                self._redirect(api.redirects_to)
            elif api.starting:
                api.starting -= 1
                self._json(503, {"error": "unhealthy: starting: waiting for the model shards"})
            elif not self._has_key():
                self._json(401, {"error": "missing or wrong API key"})
            else:
                self._json(api.get_status, api.info)

        def do_POST(self) -> None:
            api.keys.append(self.headers["Authorization"])
            api.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if api.redirects_to is not None:
                self._redirect(api.redirects_to)
                return
            if not self._has_key():
                self._json(401, {"error": "missing or wrong API key"})
                return
            if api.status != 200:
                self._json(api.status, api.refusal)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self._send(": keep-alive\n\n")
            for number, event in enumerate(api.events(self.path)):
                if number == api.breaks_after:
                    self.close_connection = True
                    return
                if number == api.ends_after:
                    break
                if number == api.waits_after:
                    api.go_on.wait(30)
                if number == api.fails_after:
                    event = {"error": "the step failed", "error_type": "generation"}
                self._send(f"data:{json.dumps(event)}\n\n")
            else:
                self._send("data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")

        def _send(self, text: str) -> None:
            data = text.encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        def _has_key(self) -> bool:
            return api.key is None or self.headers["Authorization"] == f"Bearer {api.key}"

        def _redirect(self, url: str) -> None:
            self.send_response(307)
            self.send_header("Location", url + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _json(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer((host, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        api.url = f"http://{host}:{server.server_port}"
        try:
            yield api
        finally:
            api.go_on.set()
            server.shutdown()
            thread.join()
