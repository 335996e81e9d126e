"""Assemble the parts of a chat answer into one whole answer."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from funitel.router.chat.parts import (
    Finished,
    Part,
    ReasoningDelta,
    ScoredToken,
    Started,
    TextDelta,
    TokenIds,
    ToolCallArguments,
    ToolCallStart,
)


@dataclass(slots=True)
class ToolCall:
    """A call of a tool; `arguments` is JSON text, cut off where the answer was."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ChatAnswer:
    """One choice, whole; `parts` are what it was put together from, in order."""

    finished: Finished
    parts: tuple[Part, ...]
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Iterable[Part]) -> "ChatAnswer":
        """Put all parts of a choice together; the last is `Finished`."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        tokens: list[ScoredToken] = []
        ids: list[int] = []
        parts = tuple(parts)
        for part in parts:
            match part:
                case TextDelta():
                    texts.append(part.text)
                    tokens += part.tokens
                case ReasoningDelta():
                    thoughts.append(part.text)
                case ToolCallStart():
                    calls.append(ToolCall(part.id, part.name))
                case ToolCallArguments():
                    calls[part.index].arguments += part.delta
                case Finished():
                    return cls(part, parts, "".join(texts), "".join(thoughts), calls, tokens, ids)
                case TokenIds():
                    ids += part.ids
                case Started():
                    pass
        raise ValueError("the parts have no end")
