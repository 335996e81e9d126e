"""Build the events and items of a response from the parts of an answer, streamed or whole."""

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from funitel.proto.errors import FunitelError
from funitel.router.api.common.schema_base import CachedByTier
from funitel.router.api.responses.schema_request import Status
from funitel.router.api.responses.schema_response import (
    AnyEvent,
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    IncompleteDetails,
    InputTokensDetails,
    ItemEvent,
    Logprob,
    ModelResponse,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTokensDetails,
    PartEvent,
    ReasoningDeltaEvent,
    ReasoningDoneEvent,
    ReasoningPart,
    ResponseError,
    ResponseEvent,
    ResponseUsage,
    TextDeltaEvent,
    TextDoneEvent,
    TokenLogprob,
)
from funitel.router.chat.parts import (
    EndReason,
    Finished,
    Part,
    ReasoningDelta,
    ScoredToken,
    Started,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from funitel.router.core import request_context
from funitel.router.transport.sse_frames import HOLE, Template

MIN_LOGPROB = -9999.0  # OpenAI's, for a token that could not be drawn

Event = AnyEvent | bytes  # or a frame


def new_id(kind: str) -> str:
    """An id that says what it is of."""
    return f"{kind}_{uuid.uuid4().hex}"


class ResponseBuilder:
    """Feed the parts of one answer; get its events, numbered. `response` is what they amount to."""

    def __init__(
        self, response: ModelResponse, namespaces: Mapping[str, tuple[str, str]], *, wants_logprobs: bool
    ) -> None:
        """Begin with a response that has no output; it is added to.

        Args:
            response: the answer while it is empty.
            namespaces: namespace and name of the functions that have a namespace, by the names that the model calls.
            wants_logprobs: whether text comes with the log-probabilities of its tokens.
        """
        self.response = response
        self._namespaces = namespaces
        self._wants_logprobs = wants_logprobs
        self._open: OutputItem | None = None  # the last item, while more of it may come
        self._gathered: list[str] = []  # text of the open item so far
        self._more: Template  # more of the open item
        self._num_events = 0
        self._is_created = False
        self._journal = request_context.current().journal  # parts come outside of the request's context
        self._num_items = 0

    def _new_id(self, kind: str) -> str:
        """The id of the next item."""
        self._num_items += 1
        return self._journal.draw(f"item.{self._num_items}", lambda: new_id(kind))

    def feed(self, part: Part) -> Iterator[Event]:
        """Take the next part; yield the events it makes."""
        yield from self._numbered(self._events(part))

    def queued(self) -> Iterator[Event]:
        """Yield the events of a response that waits for its first part."""
        self.response.status = "queued"
        self._is_created = True
        yield from self._numbered(
            ResponseEvent(type=kind, response=self.response.model_copy(deep=True))
            for kind in ("response.created", "response.queued")
        )

    def cancelled(self) -> None:
        """End the response without an event, with what there is of it."""
        self._write_gathered()
        if self._open is not None:
            self._open.status = "incomplete"
        self.response.status = "cancelled"

    def _numbered(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            if not isinstance(event, bytes):
                event.sequence_number = self._num_events
            self._num_events += 1
            yield event

    def failed(self, error: FunitelError) -> ResponseEvent:
        """The event that ends a stream which fails."""
        self._write_gathered()
        self.response.status = "failed"
        self.response.error = ResponseError(code="server_error", message=error.public_message)
        return ResponseEvent(type="response.failed", response=self.response, sequence_number=self._num_events)

    def _events(self, part: Part) -> Iterator[Event]:
        match part:
            case Started():
                self.response.status = "in_progress"
                if not self._is_created:
                    yield ResponseEvent(type="response.created", response=self.response.model_copy(deep=True))
                yield ResponseEvent(type="response.in_progress", response=self.response.model_copy(deep=True))
            case TextDelta():
                yield from self._text(part)
            case ReasoningDelta():
                yield from self._reasoning(part)
            case ToolCallStart():
                yield from self._closed("completed")
                namespace, name = self._namespaces.get(part.name, (None, part.name))
                yield from self._opened(
                    OutputFunctionCall(id=self._new_id("fc"), call_id=part.id, name=name, namespace=namespace)
                )
                self._more = _template(ArgumentsDeltaEvent, **self._place)
            case ToolCallArguments():
                yield self._added(part.delta)
            case Finished():
                is_cut = part.reason in (EndReason.LENGTH, EndReason.ABORT)
                yield from self._closed("incomplete" if is_cut else "completed")
                yield self._ended(part, is_cut=is_cut)

    def _text(self, part: TextDelta) -> Iterator[Event]:
        if not isinstance(self._open, OutputMessage):
            yield from self._closed("completed")
            yield from self._opened(OutputMessage(id=self._new_id("msg")))
            assert isinstance(self._open, OutputMessage)
            self._open.content.append(OutputText())
            self._more = _template(TextDeltaEvent, **self._place, logprobs=[])
            yield PartEvent(type="response.content_part.added", **self._place, part=OutputText())
        if not self._wants_logprobs:
            yield self._added(part.text)
            return
        self._gathered.append(part.text)
        logprobs = _logprobs(part.tokens)
        self._open.content[0].logprobs += logprobs
        yield TextDeltaEvent(**self._place, delta=part.text, logprobs=logprobs)

    def _reasoning(self, part: ReasoningDelta) -> Iterator[Event]:
        if not isinstance(self._open, OutputReasoning):
            yield from self._closed("completed")
            yield from self._opened(OutputReasoning(id=self._new_id("rs")))
            assert isinstance(self._open, OutputReasoning)
            self._open.content.append(ReasoningPart())
            self._more = _template(ReasoningDeltaEvent, **self._place)
            yield PartEvent(type="response.content_part.added", **self._place, part=ReasoningPart())
        yield self._added(part.text)

    def _added(self, text: str) -> bytes:
        """Add to the open item; the event that says so, the next one."""
        self._gathered.append(text)
        return self._more.fill(self._num_events, text)

    def _write_gathered(self) -> None:
        """Put into the open item what was added to it."""
        text = "".join(self._gathered)
        self._gathered.clear()
        match self._open:
            case OutputMessage(content=[content]) | OutputReasoning(content=[content]):
                content.text += text
            case OutputFunctionCall() as call:
                call.arguments += text

    @property
    def _place(self) -> dict[str, Any]:
        """Where the open item is."""
        assert self._open is not None
        return {"item_id": self._open.id, "output_index": len(self.response.output) - 1}

    def _opened(self, item: OutputItem) -> Iterator[Event]:
        self.response.output.append(item)
        self._open = item
        index = len(self.response.output) - 1
        yield ItemEvent(type="response.output_item.added", output_index=index, item=item.model_copy(deep=True))

    def _closed(self, status: Status) -> Iterator[Event]:
        """End the open item, if there is one."""
        item = self._open
        if item is None:
            return
        self._write_gathered()
        item.status = status
        match item:
            case OutputMessage(content=[text]):
                yield TextDoneEvent(**self._place, text=text.text, logprobs=text.logprobs)
                yield PartEvent(type="response.content_part.done", **self._place, part=text)
            case OutputReasoning(content=[thought]):
                yield ReasoningDoneEvent(**self._place, text=thought.text)
                yield PartEvent(type="response.content_part.done", **self._place, part=thought)
            case OutputFunctionCall():
                yield ArgumentsDoneEvent(**self._place, name=item.name, arguments=item.arguments)
        yield ItemEvent(type="response.output_item.done", output_index=len(self.response.output) - 1, item=item)
        self._open = None

    def _ended(self, finished: Finished, *, is_cut: bool) -> Event:
        usage = finished.usage
        self.response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=usage.cached_tokens, cached_tokens_by_tier=CachedByTier.of(usage.cached_by_tier)
            ),
            output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )
        if is_cut:
            self.response.status = "incomplete"
            self.response.incomplete_details = IncompleteDetails()
            return ResponseEvent(type="response.incomplete", response=self.response)
        self.response.status = "completed"
        self.response.completed_at = self._journal.draw("completed", lambda: int(time.time()))
        return ResponseEvent(type="response.completed", response=self.response)


def _template(kind: type[TextDeltaEvent | ReasoningDeltaEvent | ArgumentsDeltaEvent], **fields: Any) -> Template:
    """Events of one kind that differ in their number and in what they add."""
    return Template(kind.model_construct(sequence_number=HOLE, delta=HOLE, **fields), is_named=True)


def _logprobs(tokens: Sequence[ScoredToken]) -> list[Logprob]:
    return [
        Logprob(**_fields(token), top_logprobs=[TokenLogprob(**_fields(top)) for top in token.top]) for token in tokens
    ]


def _fields(token: ScoredToken) -> dict[str, Any]:
    """A token's record; JSON has no infinity."""
    return {"token": token.text, "logprob": max(token.logprob, MIN_LOGPROB), "bytes": list(token.text.encode())}
