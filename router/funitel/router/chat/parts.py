"""The parts of a chat answer, in the order in which they stream."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class EndReason(Enum):
    """Why an answer ended."""

    END = "end"  # the model said so
    STOP_SEQUENCE = "stop_sequence"  # a stop of the request was found; it is not part of the text
    LENGTH = "length"
    ABORT = "abort"  # someone aborted it; the answer is cut off
    TOOL_CALLS = "tool_calls"  # the model called tools and waits for their results


@dataclass(frozen=True, slots=True)
class ChatUsage:
    """Tokens of one answer; the prompt's are the same for every choice."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0  # of the completion
    cached_tokens: int = 0  # of the prompt, computed for an earlier request
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)  # the same, see `TokenStream`


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log-probability, and the likeliest ones at its place."""

    text: str
    logprob: float
    top: tuple["ScoredToken", ...] = ()
    id: int = -1


@dataclass(frozen=True, slots=True)
class Started:
    """The first token was generated; nothing may be shown yet."""


@dataclass(slots=True)  # not frozen, which would treble the cost of what every token is made of
class TextDelta:
    """More of the answer's text; `tokens` are those that begin in it, where log-probabilities were asked for."""

    text: str
    tokens: tuple[ScoredToken, ...] = ()


@dataclass(slots=True)  # not frozen, which would treble the cost of what every token is made of
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The model calls a tool: the `index`-th call of this answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    delta: str


@dataclass(frozen=True, slots=True)
class TokenIds:
    """The tokens of one step, before what they add to the answer; where they were asked for."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The last part of a choice."""

    reason: EndReason
    usage: ChatUsage
    stop_sequence: str | None = None  # the one that was found


Part = Started | TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | TokenIds | Finished
