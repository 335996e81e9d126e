"""Traces of arrivals: read and written as JSON lines, or drawn from a seed.

One line is one request: when it came and how long it is, never what it said. That is all the scheduler's decisions
depend on, so a router could record it without recording anybody's words.
"""

import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

MAX_TOKENS = 2**24  # of a prompt or a completion, so that a damaged line is found before it fills the memory
MAX_PRIORITY = 1000


class TraceError(Exception):
    """A line of a trace that cannot be used; says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a trace. Requests of one `prefix_group` begin with the same `prefix_tokens` tokens.

    Where the whole prompt is its group's, so is the completion: the next turn of a chat is the same group with a
    longer prefix.
    """

    at: float  # seconds since the trace began
    prompt_tokens: int
    completion_tokens: int  # it ends after so many
    max_new_tokens: int  # what it asked for
    prefix_group: int = 0
    prefix_tokens: int = 0
    key: str = ""  # of the fair share
    priority: int = 0  # lower is sooner

    def __post_init__(self) -> None:
        if not (math.isfinite(self.at) and self.at >= 0):
            raise TraceError(f"at is {self.at}, must be a number >= 0")
        for name, low, high in (
            ("prompt_tokens", 1, MAX_TOKENS),
            ("max_new_tokens", 1, MAX_TOKENS),
            ("completion_tokens", 1, self.max_new_tokens),
            ("prefix_group", 0, 2**31 - 1),
            ("prefix_tokens", 0, self.prompt_tokens),
            ("priority", -MAX_PRIORITY, MAX_PRIORITY),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise TraceError(f"{name} is {value}, must be from {low} to {high}")


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """A trace drawn from a seed: Poisson arrivals, log-normal lengths, some prompts behind one of several prefixes.

    The default lengths have the means of samples of ShareGPT that other servers are benchmarked with (about 215 and
    200 tokens) and long tails; they are not those conversations.
    """

    num_requests: int
    rate: float = math.inf  # requests per second; infinite: all at once
    seed: int = 0
    mean_prompt_tokens: float = 215
    mean_completion_tokens: float = 200
    spread_prompt: float = 1.1  # standard deviation of the logarithm
    spread_completion: float = 0.9
    max_prompt_tokens: int = 4096
    max_completion_tokens: int = 1024
    asks_for_most: bool = False  # every request asks for the most completion tokens, however early it ends
    num_groups: int = 0
    prefix_tokens: int = 1024
    grouped_share: float = 0.5  # of the requests begin with a group's prefix

    def __iter__(self) -> Iterator[Arrival]:
        draw = random.Random(self.seed)
        at = 0.0
        for _ in range(self.num_requests):
            if math.isfinite(self.rate):
                at += draw.expovariate(self.rate)
            own = _length(draw, self.mean_prompt_tokens, self.spread_prompt, self.max_prompt_tokens)
            completion = _length(draw, self.mean_completion_tokens, self.spread_completion, self.max_completion_tokens)
            is_grouped = self.num_groups > 0 and draw.random() < self.grouped_share
            group = draw.randrange(self.num_groups) if is_grouped else 0
            prefix = self.prefix_tokens if is_grouped else 0
            yield Arrival(
                at=at,
                prompt_tokens=prefix + own,
                completion_tokens=completion,
                max_new_tokens=self.max_completion_tokens if self.asks_for_most else completion,
                prefix_group=group,
                prefix_tokens=prefix,
            )


def _length(draw: random.Random, mean: float, spread: float, most: int) -> int:
    """A log-normal length of that mean, cut to 1..most."""
    return max(1, min(most, round(draw.lognormvariate(math.log(mean) - spread**2 / 2, spread))))


def read(path: Path) -> Iterator[Arrival]:
    """Arrivals of a file, in order of time.

    Raises:
        TraceError: a line is not a request, or came before the one above it.
    """
    last = 0.0
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                arrival = _parse(line)
                if arrival.at < last:
                    raise TraceError(f"at is {arrival.at}, before the line above ({last})")
            except TraceError as error:
                raise TraceError(f"{path}, line {number}: {error}") from None
            last = arrival.at
            yield arrival


def write(path: Path, arrivals: Iterable[Arrival]) -> int:
    """Write arrivals as `read` takes them; returns how many."""
    count = 0
    with path.open("w") as file:
        for arrival in arrivals:
            file.write(json.dumps(asdict(arrival)) + "\n")
            count += 1
    return count


TYPES: dict[str, Any] = {field.name: field.type for field in fields(Arrival)}
ALLOWED: dict[Any, tuple[tuple[type, ...], str]] = {
    float: ((int, float), "a number"),
    int: ((int,), "an integer"),
    str: ((str,), "a string"),
}


def _parse(line: str) -> Arrival:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise TraceError(f"not JSON: {error}") from None
    if not isinstance(values, dict):
        raise TraceError(f"a JSON object is expected, not {type(values).__name__}")
    if "completion_tokens" in values:
        values.setdefault("max_new_tokens", values["completion_tokens"])
    for name, value in values.items():
        if name not in TYPES:
            raise TraceError(f"{name} is no field of a request; fields are {', '.join(TYPES)}")
        allowed, words = ALLOWED[TYPES[name]]
        if not isinstance(value, allowed) or isinstance(value, bool):
            raise TraceError(f"{name} is {value!r}, must be {words}")
    for field in fields(Arrival):
        if field.name not in values and field.default is MISSING:
            raise TraceError(f"{field.name} is missing")
    return Arrival(**values)
