"""Requests with known answers: each follows from its number, so an undisturbed run gives the expected answer."""

import json
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import httpx

CONTEXT = 2048  # tokens, of the models that are asked


class Kind(StrEnum):
    """How a completion is asked for."""

    STREAM = "a greedy stream"
    SAMPLE = "a seeded stream"
    WHOLE = "a greedy answer in one piece"
    CHAT = "a chat stream"
    CHOICES = "two seeded choices, streamed"
    GRAMMAR = "a stream under a grammar"
    LONG = "a greedy stream behind a long prompt"


class Refused(Exception):
    """The server said when to come back; nothing was begun."""


class Lost(Exception):
    """A request ended in any way but with its whole answer."""


@dataclass
class Heard:
    """What a client has heard of its answer: texts by choice, and tokens where the route names them."""

    texts: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    ids: list[int] = field(default_factory=list)
    final: str = ""  # the whole text once more, as native streams end with it
    ended: set[int] = field(default_factory=set)  # choices that are whole
    num_pieces: int = 0

    def add(self, text: str, choice: int = 0) -> None:
        """Take a piece of an answer."""
        self.texts[choice] += text
        self.num_pieces += 1

    def begins(self, whole: "Heard") -> bool:
        """Whether this is `whole`, or the beginning of it where it is not whole itself."""
        if self.ended == whole.ended:
            return (dict(self.texts), self.ids, self.final) == (dict(whole.texts), whole.ids, whole.final)
        are_texts = all(whole.texts.get(choice, "").startswith(text) for choice, text in self.texts.items())
        return are_texts and whole.ids[: len(self.ids)] == self.ids


@dataclass(frozen=True)
class Ask:
    """One request. Equal requests have equal answers under any load.

    Args:
        kind: of what.
        number: what makes its prompt, and its noise, differ from others'.
        num_tokens: of its answer.
        leave_after: pieces after which the client hangs up.
        salt: makes a grammar one that was never compiled before, and describes the same texts.
    """

    kind: Kind
    number: int
    num_tokens: int
    leave_after: int | None = None
    salt: str = ""

    @property
    def undisturbed(self) -> "Ask":
        """What to ask for the answer that this one is to be held against."""
        return replace(self, leave_after=None, salt="")

    @property
    def _num_choices(self) -> int:
        return 2 if self.kind is Kind.CHOICES else 1

    @property
    def _prompt(self) -> str:
        verse = f"{self.number} bottles of beer on the wall, {self.number} bottles of beer. "
        return verse * (14 if self.kind is Kind.LONG else 1 + self.number % 3)

    @property
    def _call(self) -> tuple[str, dict[str, Any]]:
        """Route and body."""
        if self.kind is Kind.CHAT:
            messages = [{"role": "user", "content": self._prompt}]
            limits = {"max_tokens": self.num_tokens, "temperature": 0, "stream": True}
            return "/v1/chat/completions", {"messages": messages, **limits}
        if self.kind is Kind.CHOICES:
            sampling = {"n": self._num_choices, "seed": self.number, "max_tokens": self.num_tokens, "stream": True}
            return "/v1/completions", {"prompt": self._prompt, **sampling}
        ends = self.kind is Kind.GRAMMAR
        parameters: dict[str, Any] = {"max_new_tokens": self.num_tokens, "ignore_eos": not ends, "details": True}
        if self.kind is Kind.SAMPLE:
            parameters |= {"do_sample": True, "seed": self.number, "temperature": 0.9}
        if self.kind is Kind.GRAMMAR:
            parameters["grammar"] = {"type": "json", "value": self._schema}
        route = "/generate" if self.kind is Kind.WHOLE else "/generate_stream"
        return route, {"inputs": self._prompt, "parameters": parameters}

    @property
    def _schema(self) -> dict[str, Any]:
        numbers = {"type": "array", "items": {"type": "integer"}, "minItems": 20 + self.number % 7}
        schema = {"type": "object", "properties": {"numbers": numbers}, "required": ["numbers"]}
        return schema | ({"description": self.salt} if self.salt else {})

    async def put(self, client: httpx.AsyncClient, heard: Heard) -> None:
        """Ask, and write down what is heard as it comes.

        Raises:
            Refused: by 429 or 503 with a Retry-After.
            Lost: the answer ended early, or in an error.
            httpx.HTTPError: the connection could not be made, or broke.
        """
        route, body = self._call
        async with client.stream("POST", route, json=body) as response:
            if response.status_code in (429, 503) and "retry-after" in response.headers:
                raise Refused
            if response.status_code != 200:
                raise Lost(f"{response.status_code}: {(await response.aread()).decode()}")
            if self.kind is Kind.WHOLE:
                _take_whole(json.loads(await response.aread()), heard)
                return
            async for event in _events(response):
                _take(event, heard)
                if len(heard.ended) == self._num_choices or heard.num_pieces == self.leave_after:
                    return
        raise Lost("the stream ended early")


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data:") and line != "data: [DONE]":
            yield json.loads(line[5:])


def _take(event: dict[str, Any], heard: Heard) -> None:
    """Take an event of a stream into account. Raises Lost for an error."""
    if "error" in event:
        raise Lost(json.dumps(event["error"]))
    if "token" in event:
        heard.ids.append(event["token"]["id"])
        heard.add(event["token"]["text"])
        if event["generated_text"] is not None:
            heard.final = event["generated_text"]
            heard.ended.add(0)
        return
    for choice in event["choices"]:
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        heard.add(text, choice["index"])
        if choice["finish_reason"]:
            heard.ended.add(choice["index"])


def _take_whole(answer: dict[str, Any], heard: Heard) -> None:
    heard.ids = [token["id"] for token in answer["details"]["tokens"]]
    heard.add(answer["generated_text"])
    heard.ended.add(0)
