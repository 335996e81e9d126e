"""Values that a request should not have, put into those that it may have."""

import copy
import json
import random
from typing import Any

from funitel_testing.fuzz_mutants import STRANGE, damaged

WORDS = (
    *("inputs", "messages", "prompt", "parameters", "role", "content", "type", "text", "tools", "stop", "grammar"),
    *("stream", "logprobs", "top_logprobs", "n", "best_of", "seed", "model", "input", "instances", "image_url"),
)
HOSTILE: tuple[Any, ...] = (
    *STRANGE,
    *(10**4000, -(10**4000), 1e308, -1e308, 5e-324, 2**53 + 1, 2**32 - 1, 2**64 - 1, -(2**31)),
    *("\u202e\u2066", "\x1b]0;x\x07", "\r\nHTTP/1.1 200 OK\r\n\r\n", "data: x\n\n", "{{ 7 * 7 }}", "%s%n", "../../etc"),
    *("a" * 20_000, "\U0001f600" * 500, "<s></s>", "![](http://127.0.0.1:1/x.png)", "file:///etc/passwd"),
    *(
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}},
        {"$ref": "#"},
        {"type": "regex", "value": "(a|a)*b"},
    ),
)
MAX_PLACES = 20_000  # of a value: making more would take longer than what is tried


def mangled(value: Any, rng: random.Random) -> Any:
    """A copy of a JSON value that differs in one place."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places:
        return rng.choice(HOSTILE)
    holder, key = rng.choice(places)
    room = max(1, MAX_PLACES // len(places))
    match rng.randrange(7):
        case 0 | 1 | 2:
            holder[key] = rng.choice(HOSTILE)
        case 3:
            del holder[key]
        case 4:
            holder[key] = [holder[key]] * min(rng.choice((1, 2, 130, 3000)), room)
        case 5 if isinstance(holder, dict):
            holder[rng.choice(WORDS)] = rng.choice((holder[key], *HOSTILE))
        case _:
            other, other_key = rng.choice(places)
            holder[key] = copy.deepcopy(other[other_key])
    return value


def body_bytes(value: Any, rng: random.Random) -> bytes:
    """JSON of a value, now and then spoilt as text."""
    text = json.dumps(value)  # with NaN and Infinity, which are no JSON
    match rng.randrange(12):
        case 0:
            return damaged(text.encode(), rng)
        case 1 if text.startswith("{"):
            depth = rng.choice((50, 900, 30_000))
            return (text[:-1] + ', "deep": ' + "[" * depth + "]" * depth + "}").encode()
        case 2 if text.startswith("{"):
            return (text[:-1] + ", " + text[1:]).encode()  # every name twice
        case 3 if text.startswith("{"):
            more = ", ".join(f'"field {rng.random()}": {i}' for i in range(rng.choice((3, 900, 2000))))
            return (text[:-1] + ", " + more + "}").encode()
    return text.encode("utf-16" if rng.random() < 0.01 else "utf-8")


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Where in a value something stands: what holds it, and its name or number there."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += [(value, key), *_places(item)]
    return found
