"""Templates render what the records themselves would."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic_core import to_json

from funitel.proto.errors import FunitelError
from funitel.router.api.anthropic.schema_response import (
    ContentBlockDelta,
    InputAddition,
    TextAddition,
    ThinkingAddition,
)
from funitel.router.api.native.schema import StreamResponse, Token
from funitel.router.api.openai.schema_answers import ChatCompletionChunk, ChunkChoice, Delta
from funitel.router.api.openai.schema_completions import CompletionChoice, CompletionChunk
from funitel.router.api.responses.builder import ResponseBuilder
from funitel.router.api.responses.schema_response import ModelResponse, TextDeltaEvent
from funitel.router.chat.parts import TextDelta
from funitel.router.transport import sse_frames
from funitel.router.transport.sse_frames import HOLE, Template, frame, named_frame, text_json

HOSTILE = (
    "",
    " ",
    'a "quoted" \\ back\\slash / slash',
    "".join(map(chr, range(0x20))) + "\x7f\x80\x9f",
    "line\r\nline\n\ndata: [DONE]\n\n",
    "%b %s %(x)d %% {0} {}",
    "\u2028\u2029\ufeff\ufffd\ufffe\uffff",
    "naïve 日本語 🚠 👨‍👩‍👧 \U0010ffff",
    "</script><!--",
)
HEAD = {"id": "x", "created": 1, "model": '%s "m" \\', "system_fingerprint": "1-native"}


class Named(BaseModel):
    type: str = "some.event"
    number: int
    ratio: float | None
    text: str


def token_event(index: int, id: int, text: str, logprob: float | None, special: bool) -> StreamResponse:
    token = Token(id=id, text=text, logprob=logprob, special=special)
    return StreamResponse(index=index, token=token, generated_text=None, details=None)


def chat_chunk(text: Any) -> ChatCompletionChunk:
    return ChatCompletionChunk(**HEAD, choices=[ChunkChoice(index=3, delta=Delta(content=text))])


def thought_chunk(text: Any) -> ChatCompletionChunk:
    return ChatCompletionChunk(**HEAD, choices=[ChunkChoice(delta=Delta(reasoning_content=text, reasoning=text))])


def completion_chunk(text: Any) -> CompletionChunk:
    return CompletionChunk(**HEAD, choices=[CompletionChoice(index=0, text=text)])


@pytest.mark.parametrize("make", [chat_chunk, thought_chunk, completion_chunk])
@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_is_written_as_its_record_writes_it(make: Any, text: str) -> None:
    assert Template(make(HOLE)).fill_all(text) == frame(make(text))


@given(
    text=st.text(),
    index=st.integers(0, 2**40),
    number=st.floats(allow_nan=False, allow_infinity=False),
    flag=st.booleans(),
)
def test_values_of_other_types_too(text: str, index: int, number: float, flag: bool) -> None:
    empty = StreamResponse.model_construct(
        index=HOLE,
        token=Token.model_construct(id=HOLE, text=HOLE, logprob=HOLE, special=HOLE),
        generated_text=None,
        details=None,
    )
    template = Template(empty)
    assert template.fill(index, 7, text, number, flag) == frame(token_event(index, 7, text, number, flag))
    assert template.fill(index, 7, text, None, flag) == frame(token_event(index, 7, text, None, flag))
    assert template.insert(b"%d" % index, b"7", to_json(text), b"null", to_json(flag)) == template.fill(
        index, 7, text, None, flag
    )
    assert Template(chat_chunk(HOLE)).fill(text) == frame(chat_chunk(text))


def test_named_events_keep_their_names() -> None:
    template = Template(Named.model_construct(number=HOLE, ratio=HOLE, text="100%"), is_named=True)
    assert template.fill(5, -1e-7) == named_frame(Named(number=5, ratio=-1e-7, text="100%"))


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("addition", [TextAddition, ThinkingAddition, InputAddition])
def test_additions_to_a_message_too(addition: Any, text: str) -> None:
    [field] = set(addition.model_fields) - {"type"}
    template = Template(ContentBlockDelta(index=2, delta=addition(**{field: HOLE})), is_named=True)
    assert template.fill(text) == named_frame(ContentBlockDelta(index=2, delta=addition(**{field: text})))


@pytest.mark.parametrize("text", HOSTILE)
def test_a_response_is_streamed_as_its_records_are_written(text: str) -> None:
    builder = ResponseBuilder(ModelResponse.model_construct(output=[]), {}, wants_logprobs=False)
    *_, first = builder.feed(TextDelta(text))
    [second] = builder.feed(TextDelta(text))
    place = {"item_id": builder.response.output[0].id, "output_index": 0, "logprobs": []}
    assert first == named_frame(TextDeltaEvent(sequence_number=2, **place, delta=text))
    assert second == named_frame(TextDeltaEvent(sequence_number=3, **place, delta=text))
    builder.failed(FunitelError("broken"))
    assert builder.response.output[0].content[0].text == 2 * text  # type: ignore[union-attr]


@pytest.mark.parametrize("text", [*HOSTILE, "a" * 32, "a" * 33])
def test_a_text_is_rendered_as_the_library_does_and_only_short_ones_are_kept(text: str) -> None:
    before = sse_frames._kept_texts.cache_info()
    assert text_json(text) == text_json(text) == to_json(text)
    after = sse_frames._kept_texts.cache_info()
    assert after.hits + after.misses - before.hits - before.misses == (2 if len(text) <= 32 else 0)
