"""Turn the generations of one sequence, step by step, into the parts of one choice of a chat answer."""

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import replace

from funitel.proto.step import FinishReason, GeneratedText, Generation
from funitel.router.chat.output_parser import CallArguments, CallStart, Parser, Piece, TextPiece, Thought
from funitel.router.chat.parts import (
    ChatUsage,
    EndReason,
    Finished,
    Part,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenIds,
    ToolCallArguments,
    ToolCallStart,
)
from funitel.router.chat.prompt import ChatPrompt
from funitel.router.chat.transcript import Transcript
from funitel.router.core import request_context
from funitel.router.serving.prepare import GenerationJob


class Choice:
    """Feed generations of one sequence; get parts."""

    def __init__(
        self,
        job: GenerationJob,
        prompt: ChatPrompt,
        index: int = 0,
        *,
        top_logprobs: int | None,
        parallel_calls: bool,
        wants_token_ids: bool = False,
    ) -> None:
        """`index`: of the choice in the answer. `top_logprobs` None: no log-probabilities are wanted."""
        self._wants_token_ids = wants_token_ids
        self._job = job
        self._index = index
        self._wants_tokens = top_logprobs is not None
        self._parallel_calls = parallel_calls
        self._reasoning, self._tools = _parsers(prompt)
        self._transcript = Transcript(
            job.request.stopping.stop_sequences,
            top_logprobs or 0,
            _markers(prompt),
            keeps_tokens=self._wants_tokens or self._reasoning is not None,  # those of thoughts are counted
            shows_special=job.request.shows_special,
            shows_stop=job.request.shows_stop,
        )
        # All that is generated is text, and of that the tokens do not matter: most answers, and cheaper by far.
        self._is_plain = not self._wants_tokens and self._reasoning is None and self._tools is None
        self._is_bare = self._is_plain and not wants_token_ids
        self._length = 0  # characters of the transcript so far
        self._num_calls = 0
        self._reasoning_tokens = 0
        self._has_started = False
        self._journal = request_context.current().journal  # generations come outside of the request's context

    def feed(self, generation: Generation) -> list[Part]:
        """Take what one step generated; return the parts it completes."""
        if self._is_bare and self._has_started and generation.finished is None:
            text = self._transcript.feed(generation)
            return [TextDelta(text)] if text else []
        parts: list[Part] = []
        if not self._has_started:
            self._has_started = True
            parts.append(Started())
        if self._wants_token_ids:
            parts.append(TokenIds(generation.tokens.ids))
        text = self._transcript.feed(generation)
        start, self._length = self._length, self._length + len(text)
        if self._is_plain:
            if text:
                parts.append(TextDelta(text))
        else:
            pieces = self._pieces(text, start, is_last=generation.finished is not None)
            parts += (part for piece in pieces for part in self._part(piece))
        if generation.finished is not None:
            parts.append(self._finished(generation.finished))
        return parts

    def _pieces(self, text: str, start: int, *, is_last: bool) -> Iterator[Piece]:
        """The text parsed: thoughts first, then calls in the rest."""
        outer = _parsed(self._reasoning, [TextPiece(text, start)] if text else [], is_last)
        return _parsed(self._tools, outer, is_last)

    def _part(self, piece: Piece) -> Iterator[Part]:
        match piece:
            case TextPiece():
                skipped = self._transcript.tokens_before(piece.start)
                tokens = self._transcript.tokens_before(piece.start + len(piece.text))
                if self._reasoning_tokens:  # what closed the block was skipped
                    self._reasoning_tokens += len(skipped)
                yield TextDelta(piece.text, tuple(tokens) if self._wants_tokens else ())
            case Thought():
                self._reasoning_tokens += len(self._transcript.tokens_before(piece.start + len(piece.text)))
                yield ReasoningDelta(piece.text)
            case CallStart():
                self._num_calls += 1
                if self._is_wanted_call:
                    yield ToolCallStart(self._num_calls - 1, self._new_call_id(), piece.name)
            case CallArguments():
                if self._is_wanted_call:
                    yield ToolCallArguments(self._num_calls - 1, piece.delta)

    def _new_call_id(self) -> str:
        return self._journal.draw(f"call.{self._index}.{self._num_calls}", lambda: f"call_{uuid.uuid4().hex}")

    @property
    def _is_wanted_call(self) -> bool:
        return self._parallel_calls or self._num_calls == 1

    @property
    def usage(self) -> ChatUsage:
        """Tokens of the prompt, and of the completion so far."""
        job = self._job
        return ChatUsage(
            len(job.request.input_ids),
            job.num_tokens,
            self._reasoning_tokens,
            job.num_cached_tokens,
            job.cached_by_tier,
        )

    def _finished(self, finished: GeneratedText) -> Finished:
        job, usage = self._job, replace(self.usage, completion_tokens=finished.num_tokens)
        reason = _end_reason(finished)
        if self._num_calls and reason not in (EndReason.LENGTH, EndReason.ABORT):
            return Finished(EndReason.TOOL_CALLS, usage)
        return Finished(reason, usage, _stop_found(finished, job.request.stopping.stop_sequences))


def _parsers(prompt: ChatPrompt) -> tuple[Parser | None, Parser | None]:
    tools = {tool.name: tool.parameters for tool in prompt.tools}
    reasoning, calls = prompt.reasoning, prompt.tool_format
    if reasoning is not None and reasoning.has_channels and calls is not None and calls.has_channels:
        return reasoning.parser(tools, is_open=False), None
    return (
        reasoning.parser(is_open=prompt.is_thinking) if reasoning else None,
        calls.parser(tools) if calls else None,
    )


def _markers(prompt: ChatPrompt) -> tuple[str, ...]:
    return (
        *(prompt.reasoning.markers if prompt.reasoning else ()),
        *(prompt.tool_format.markers if prompt.tool_format else ()),
    )


def _parsed(parser: Parser | None, pieces: Iterable[Piece], is_last: bool) -> Iterator[Piece]:
    """What a parser makes of the text among some pieces; the others pass."""
    if parser is None:
        yield from pieces
        return
    for piece in pieces:
        if isinstance(piece, TextPiece):
            yield from parser.feed(piece.text, piece.start)
        else:
            yield piece
    if is_last:
        yield from parser.finish()


def _end_reason(finished: GeneratedText) -> EndReason:
    """A stop found with the last token allowed is a stop."""
    if finished.stop_start is not None or finished.finish_reason is FinishReason.STOP_SEQUENCE:
        return EndReason.STOP_SEQUENCE
    return _END_REASONS.get(finished.finish_reason, EndReason.END)


_END_REASONS = {FinishReason.LENGTH: EndReason.LENGTH, FinishReason.ABORT: EndReason.ABORT}


def _stop_found(finished: GeneratedText, stops: tuple[str, ...]) -> str | None:
    """Which stop ended the text; a shard that speaks plain TGI does not say."""
    if _end_reason(finished) is not EndReason.STOP_SEQUENCE:
        return None
    if finished.stop_index is not None:
        return stops[finished.stop_index]
    return max((stop for stop in stops if finished.text.endswith(stop)), key=len, default=None)
