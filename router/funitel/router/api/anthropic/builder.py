"""Build Anthropic's events and content blocks from the parts of an answer, streamed or whole."""

import hashlib
from collections.abc import Iterator
from typing import Any

import pydantic_core

from funitel.router.api.anthropic.schema_response import (
    Content,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputAddition,
    MessageAnswer,
    MessageDelta,
    MessageEnding,
    MessageStart,
    MessageStop,
    MessageTokensDetails,
    MessageUsage,
    SignatureAddition,
    StopReason,
    TextAddition,
    TextContent,
    ThinkingAddition,
    ThinkingContent,
    ToolUseContent,
)
from funitel.router.chat.parts import (
    EndReason,
    Finished,
    Part,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from funitel.router.transport.sse_frames import HOLE, Event, Template

Addition = TextAddition | ThinkingAddition | SignatureAddition | InputAddition


class MessageBuilder:
    """Feed the parts of one answer; get its events. `message` is what they amount to."""

    def __init__(self, message: MessageAnswer, max_tokens: int, *, shows_thinking: bool, omits_thinking: bool) -> None:
        """Begin.

        Args:
            message: the answer while it is empty, its usage counting the prompt; added to.
            max_tokens: what the client allowed.
            shows_thinking: whether thoughts become blocks; else they are left out.
            omits_thinking: whether those blocks come without their text.
        """
        self.message = message
        self._max_tokens = max_tokens
        self._shows_thinking = shows_thinking
        self._omits_thinking = omits_thinking
        self._is_open = False  # whether more of the last block may come
        self._gathered: list[str] = []  # text of the open block so far
        self._more: Template  # more of the open block

    def feed(self, part: Part) -> Iterator[Event]:
        """Take the next part; yield the events it makes."""
        match part:
            case Started():
                yield MessageStart(message=self.message.model_copy(deep=True))
            case TextDelta(text=text):
                yield from self._opened(TextContent(text=""), TextAddition(text=HOLE))
                yield self._added(text)
            case ReasoningDelta(text=text) if self._shows_thinking:
                yield from self._opened(ThinkingContent(thinking="", signature=""), ThinkingAddition(thinking=HOLE))
                added = self._added(text)
                if not self._omits_thinking:
                    yield added
            case ToolCallStart():
                yield from self._closed()
                yield from self._opened(
                    ToolUseContent(id=part.id, name=part.name, input={}), InputAddition(partial_json=HOLE)
                )
            case ToolCallArguments(delta=delta):
                yield self._added(delta)
            case Finished():
                yield from self._closed()
                yield from self._ended(part)

    @property
    def _last(self) -> int:
        return len(self.message.content) - 1

    def _opened(self, block: Content, addition: Addition) -> Iterator[Event]:
        """Begin a block, to which such additions come, unless one of its kind is open."""
        if self._is_open and self.message.content[-1].type == block.type:
            return
        yield from self._closed()
        self.message.content.append(block)
        self._is_open = True
        self._more = Template(self._delta(addition), is_named=True)
        yield ContentBlockStart(index=self._last, content_block=block.model_copy())

    def _added(self, text: str) -> bytes:
        """Add to the open block; the event that says so."""
        self._gathered.append(text)
        return self._more.fill(text)

    def _closed(self) -> Iterator[Event]:
        """End the open block, if there is one."""
        if not self._is_open:
            return
        gathered = "".join(self._gathered)
        match self.message.content[-1]:
            case TextContent() as block:
                block.text = gathered
            case ThinkingContent() as block:
                block.thinking = "" if self._omits_thinking else gathered
                block.signature = hashlib.sha256(gathered.encode()).hexdigest()
                yield self._delta(SignatureAddition(signature=block.signature))
            case ToolUseContent() as block:
                block.input = _input(gathered)
        self._is_open = False
        self._gathered.clear()
        yield ContentBlockStop(index=self._last)

    def _delta(self, addition: Addition) -> ContentBlockDelta:
        return ContentBlockDelta(index=self._last, delta=addition)

    def _ended(self, finished: Finished) -> Iterator[Event]:
        reason = _stop_reason(finished, self._max_tokens)
        stop = finished.stop_sequence if reason == "stop_sequence" else None
        self.message.stop_reason, self.message.stop_sequence = reason, stop
        self.message.usage = _usage(finished)
        yield MessageDelta(delta=MessageEnding(stop_reason=reason, stop_sequence=stop), usage=self.message.usage)
        yield MessageStop()


def _input(arguments: str) -> dict[str, Any]:
    """The input of a call; of one that was cut off as much as is there, a string that was cut in the middle too."""
    try:
        parsed = pydantic_core.from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _stop_reason(finished: Finished, max_tokens: int) -> StopReason:
    match finished.reason:
        case EndReason.TOOL_CALLS:
            return "tool_use"
        case EndReason.STOP_SEQUENCE:
            return "stop_sequence"
        case EndReason.LENGTH:
            is_full = finished.usage.completion_tokens < max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens"
        case EndReason.ABORT:  # Anthropic has no word for it; this one says that the answer is cut off
            return "max_tokens"
        case EndReason.END:
            return "end_turn"


def _usage(finished: Finished) -> MessageUsage:
    usage = finished.usage
    details = MessageTokensDetails(thinking_tokens=usage.reasoning_tokens) if usage.reasoning_tokens else None
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        output_tokens_details=details,
    )
