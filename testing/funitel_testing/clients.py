"""A small HTTP client of the native routes that notes when each token came."""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from funitel_testing.servers import PLAIN


@dataclass
class Answer:
    """One completion as its client saw it; instants on the monotonic clock."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    instants: list[float] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in zip(self.instants, self.instants[1:], strict=False)]


async def generate(client: httpx.AsyncClient, inputs: str, **parameters: Any) -> Answer:
    """POST /generate and read the whole answer."""
    answer = Answer()
    body = {"inputs": inputs, "parameters": {"details": True} | parameters}
    response = await client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    found = response.json()
    answer.text = found["generated_text"]
    answer.ids = [token["id"] for token in found["details"]["tokens"]]
    answer.finish_reason = found["details"]["finish_reason"]
    return answer


async def stream(
    client: httpx.AsyncClient,
    inputs: str,
    *,
    leave_after: int | None = None,
    answer: Answer | None = None,
    **parameters: Any,
) -> Answer:
    """POST /generate_stream; hang up after `leave_after` tokens if given (0: as soon as the headers are there).

    `answer` is what tokens are added to as they arrive, and what is returned.
    """
    answer = answer or Answer()
    body = {"inputs": inputs, "parameters": {"details": True} | parameters}
    async with client.stream("POST", "/generate_stream", json=body) as response:
        assert response.status_code == 200, await response.aread()
        if leave_after == 0:
            return answer
        async for line in _lines(response):
            if not line.startswith(b"data:"):
                continue
            event = json.loads(line[5:])
            assert "token" in event, event
            answer.instants.append(time.monotonic())
            answer.ids.append(event["token"]["id"])
            if event["generated_text"] is not None:
                answer.text = event["generated_text"]
                answer.finish_reason = event["details"]["finish_reason"]
            if leave_after is not None and len(answer.ids) >= leave_after:
                return answer
    return answer


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of a body; `aiter_lines` would also break at separators that texts of JSON may have, like U+2028."""
    rest = b""
    async for data in response.aiter_bytes():
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line


def client_of(url: str) -> httpx.AsyncClient:
    """A client with no limit on connections and a long timeout, which makes a connection for each request.

    One that is kept is closed by the server after some idle seconds, and a busy test may send on it right then.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, timeout=300, limits=limits, verify=PLAIN)
