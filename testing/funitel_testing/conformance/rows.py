"""What a row of the contract is, and how an answer is held against it. Knows no route."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

DONE = "[DONE]"


class Absent:
    """Expected where a field must not be."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = Absent()


@dataclass(frozen=True)
class Matches:
    """Expected where a text must have a form."""

    pattern: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One claim of the contract.

    Attributes:
        section: where the contract makes it.
        claim: in a few words.
        path: of the request; POST when there is a body, else GET.
        body: JSON value, or bytes to send as they are.
        headers: of the request, besides the content type.
        status: expected.
        error_type: expected tag of an error in TGI's shape, or `error_type` beside OpenAI's object.
        says: words expected in the error's message, or in a text.
        answer: dotted path into the JSON answer, or the list of events -> value, type, predicate, `Matches`, ABSENT.
        sends: response header -> pattern, or ABSENT.
        server: which of the servers is asked.
        differs: why the answer is not TGI's, where it deliberately is not.
    """

    section: str
    claim: str
    path: str
    body: Any = None
    method: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int = 200
    error_type: str | None = None
    says: tuple[str, ...] = ()
    answer: Mapping[str, Any] = field(default_factory=dict)
    sends: Mapping[str, str | Absent] = field(default_factory=dict)
    server: str = "open"
    differs: str | None = None

    @property
    def name(self) -> str:
        """For the report of a test."""
        return f"{self.section} {self.path} {self.claim}"

    def send(self, client: httpx.Client) -> httpx.Response:
        """Make the request."""
        method = self.method or ("GET" if self.body is None else "POST")
        content = self.body if isinstance(self.body, bytes | None) else json.dumps(self.body).encode()
        kind = {} if content is None else {"content-type": "application/json"}
        return client.request(method, self.path, content=content, headers=kind | dict(self.headers))

    def problems(self, response: httpx.Response) -> list[str]:
        """What of the answer is not as expected."""
        found = []
        if response.status_code != self.status:
            return [f"status {response.status_code} instead of {self.status}: {response.text[:300]}"]
        found += [p for name, wanted in self.sends.items() if (p := _header_problem(response, name, wanted))]
        content: Any = _content(response) if self.answer or self.error_type else {}
        if self.error_type is not None and content.get("error_type") != self.error_type:
            found.append(f"error_type {content.get('error_type')!r} instead of {self.error_type!r}")
        found += [f"{word!r} is not in {response.text[:300]}" for word in self.says if word not in response.text]
        for path, wanted in self.answer.items():
            value = _value(content, path)
            if not _is_as(value, wanted):
                found.append(f"{path} is {value!r:.200} instead of {wanted!r}")
        return found


def _header_problem(response: httpx.Response, name: str, wanted: str | Absent) -> str | None:
    value = response.headers.get(name)
    if isinstance(wanted, Absent):
        return None if value is None else f"header {name} is {value!r} instead of nothing"
    return None if value is not None and re.fullmatch(wanted, value) else f"header {name} is {value!r}, not {wanted}"


def _content(response: httpx.Response) -> Any:
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        return response.json()
    frames = response.text.split("\n\n")
    assert frames.pop() == "", "the stream does not end with a whole frame"
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames), response.text[:300]
    texts = [frame.removeprefix("data: ") for frame in frames]
    return [text if text == DONE else json.loads(text) for text in texts]


def _value(content: Any, path: str) -> Any:
    value = content
    for step in path.split(".") if path else ():
        if isinstance(value, list):
            place = int(step)
            if not -len(value) <= place < len(value):
                return ABSENT
            value = value[place]
        elif isinstance(value, dict) and step in value:
            value = value[step]
        else:
            return ABSENT
    return value


def _is_as(value: Any, wanted: Any) -> bool:
    match wanted:
        case Absent():
            return value is ABSENT
        case Matches():
            return isinstance(value, str) and re.fullmatch(wanted.pattern, value, re.DOTALL) is not None
        case type():
            return isinstance(value, wanted) and not (wanted in (int, float) and isinstance(value, bool))
        case _ if callable(wanted):
            predicate: Callable[[Any], bool] = wanted
            return value is not ABSENT and predicate(value)
        case _:
            return type(value) is type(wanted) and bool(value == wanted)
