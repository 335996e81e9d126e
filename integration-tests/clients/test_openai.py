"""OpenAI's Python client, as it is."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from funitel_testing.servers import Server

openai = pytest.importorskip("openai", reason="install the extra `clients`")

MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def openai_client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_openai_client(server: Server) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(openai_client: Any) -> None:
    answer = openai_client.chat.completions.create(model="tgi", messages=MESSAGES, temperature=0, max_tokens=30)
    (choice,) = answer.choices
    assert "Paris" in choice.message.content
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert answer.model == MODEL
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 0 < answer.usage.completion_tokens <= 30


def test_chat_streamed(openai_client: Any) -> None:
    whole = openai_client.chat.completions.create(model="tgi", messages=MESSAGES, temperature=0, max_tokens=30)
    options = {"include_usage": True}
    stream = openai_client.chat.completions.create(
        model="tgi", messages=MESSAGES, temperature=0, max_tokens=30, stream=True, stream_options=options
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len([chunk for chunk in chunks if chunk.choices]) > 3, "it came in one piece"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason]
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_sampling_and_logprobs(openai_client: Any) -> None:
    wishes = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "max_tokens": 12, "frequency_penalty": 0.1}
    answers = [
        openai_client.chat.completions.create(
            model="tgi", messages=MESSAGES, logprobs=True, top_logprobs=2, stop=["\n"], **wishes
        )
        for _ in range(2)
    ]
    first, second = (answer.choices[0] for answer in answers)
    assert first.message.content == second.message.content
    assert "".join(entry.token for entry in first.logprobs.content) == first.message.content
    assert all(1 <= len(entry.top_logprobs) <= 2 for entry in first.logprobs.content)


def test_b8_exceptions(openai_client: Any) -> None:
    """Routes that TGI has keep its 422; others answer 400."""
    with pytest.raises(openai.UnprocessableEntityError):
        openai_client.chat.completions.create(model="tgi", messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.BadRequestError) as raised:
        openai_client.responses.create(model="tgi", input=QUESTION, temperature=-1)
    assert (raised.value.param, raised.value.code) == ("temperature", "integer_below_min_value")
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve("resp_none")
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("none")


def test_b6_fields_of_other_servers(openai_client: Any) -> None:
    def ask(**fields: Any) -> Any:
        return openai_client.chat.completions.create(
            model="tgi", messages=MESSAGES, temperature=0, max_tokens=20, extra_body=fields
        )

    whole = ask(return_token_ids=True, made_up=1, seed=None)
    ids = whole.choices[0].token_ids
    cut = ask(return_token_ids=True, stop_token_ids=[ids[3]])
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].token_ids == ids[: ids.index(ids[3]) + 1]
    assert ask(stop_token_ids=[ids[3]], min_tokens=20).usage.completion_tokens == 20
    assert ask(guided_choice=["no city", "a town"]).choices[0].message.content in ("no city", "a town")
    grammar = 'start: "Paris" /[!]{2}/'
    assert ask(structured_outputs={"grammar": grammar}).choices[0].message.content == "Paris!!"
    assert "Paris" not in ask(bad_words=["Paris"]).choices[0].message.content
    searched = openai_client.chat.completions.create(
        model="tgi", messages=MESSAGES, n=2, max_tokens=5, extra_body={"use_beam_search": True}
    )
    first, second = (choice.message.content for choice in searched.choices)
    assert first != second
    with pytest.raises(openai.UnprocessableEntityError, match="`use_beam_search` and `top_k` exclude"):
        ask(use_beam_search=True, top_k=5)
    scores = openai_client.completions.create(
        model="tgi", prompt="The capital of France is", max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    assert len(scores.choices[0].prompt_logprobs) == scores.usage.prompt_tokens


def test_stream_left_early(openai_client: Any, server: Server) -> None:
    with openai_client.chat.completions.create(
        model="tgi", messages=MESSAGES, temperature=0, max_tokens=400, stream=True
    ) as stream:
        next(iter(stream))
    answer = openai_client.chat.completions.create(model="tgi", messages=MESSAGES, temperature=0, max_tokens=5)
    assert answer.usage.completion_tokens == 5


def test_models(openai_client: Any) -> None:
    assert [model.id for model in openai_client.models.list()] == [MODEL]


def test_errors(openai_client: Any) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        openai_client.chat.completions.create(model="tgi", messages=[])
    assert caught.value.param == "messages"
    assert "Input validation error" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        openai_client.fine_tuning.jobs.list()


async def test_async(async_openai_client: Any) -> None:
    create = async_openai_client.chat.completions.create
    answer = await create(model="tgi", messages=MESSAGES, temperature=0, max_tokens=30)
    assert "Paris" in answer.choices[0].message.content
    stream = await create(model="tgi", messages=MESSAGES, temperature=0, max_tokens=30, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == answer.choices[0].message.content


# Completions ------------------------------------------------------------------------------------------------

PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


def test_completions(openai_client: Any) -> None:
    fields = {"model": "any", "prompt": PROMPT, "temperature": 0, "max_tokens": 20}
    answer = openai_client.completions.create(**fields, logprobs=2)
    (choice,) = answer.choices
    assert "Paris" in choice.text
    assert "".join(choice.logprobs.tokens).removesuffix("<|im_end|>") == choice.text  # which ended it, as in vLLM
    assert answer.usage.completion_tokens <= 20
    chunks = list(openai_client.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == choice.text
    echoed = openai_client.completions.create(**fields | {"prompt": [PROMPT, "1, 2, 3,"], "max_tokens": 4}, echo=True)
    starts = zip(echoed.choices, (PROMPT, "1, 2, 3,"), strict=True)
    assert all(each.text.startswith(start) for each, start in starts)
    several = openai_client.completions.create(**fields | {"temperature": 1.0, "seed": 3, "max_tokens": 8}, n=2)
    assert [each.index for each in several.choices] == [0, 1]


# Tools, formats, several choices ----------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools(openai_client: Any, choice: Any) -> None:
    fields = {"model": "tgi", "messages": MESSAGES, "tools": [TOOL], "temperature": 0, "max_tokens": 100}
    fields |= {"tool_choice": choice, "parallel_tool_calls": False}
    answer = openai_client.chat.completions.create(**fields).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    with openai_client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."}
    messages = [*MESSAGES, answer.message, result]
    told = openai_client.chat.completions.create(model="tgi", messages=messages, temperature=0, max_tokens=10)
    assert told.choices[0].message.content


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]


def test_json_schema(openai_client: Any) -> None:
    fields = {"model": "tgi", "messages": MESSAGES, "temperature": 0, "max_tokens": 60}
    wanted = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    answer = openai_client.chat.completions.create(**fields, response_format=wanted)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")
    parsed = openai_client.chat.completions.parse(**fields, response_format=Weather)
    assert parsed.choices[0].message.parsed.city in ("Paris", "Rome")


def test_several_choices(openai_client: Any) -> None:
    fields = {"model": "tgi", "messages": MESSAGES, "temperature": 1.0, "max_tokens": 8, "seed": 5}
    answer = openai_client.chat.completions.create(**fields, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    alone = [openai_client.chat.completions.create(**fields | {"seed": 5 + place}) for place in range(3)]
    assert [choice.message.content for choice in answer.choices] == [each.choices[0].message.content for each in alone]
    texts = ["", "", ""]
    for chunk in openai_client.chat.completions.create(**fields, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]


# Responses --------------------------------------------------------------------------------------------------


def test_responses(openai_client: Any) -> None:
    fields = {"model": "any", "temperature": 0, "max_output_tokens": 30}
    first = openai_client.responses.create(input=QUESTION, instructions="You know geography.", **fields)
    assert "Paris" in first.output_text
    assert first.status in ("completed", "incomplete")
    assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
    assert openai_client.responses.retrieve(first.id) == first
    second = openai_client.responses.create(input="And of Italy?", previous_response_id=first.id, **fields)
    items = openai_client.responses.input_items.list(second.id, order="asc")
    assert [item.role for item in items] == ["user", "assistant", "user"]
    with pytest.raises(openai.BadRequestError, match="background"):
        openai_client.responses.cancel(second.id)
    openai_client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve(first.id)
    counted = openai_client.responses.input_tokens.count(
        model="any", input=QUESTION, instructions="You know geography."
    )
    assert counted.input_tokens == first.usage.input_tokens


def test_responses_streamed(openai_client: Any) -> None:
    fields = {"model": "any", "input": QUESTION, "temperature": 0, "max_output_tokens": 40}
    whole = openai_client.responses.create(**fields)
    events = list(openai_client.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3, "it came in one piece"
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    with openai_client.responses.stream(**fields | {"max_output_tokens": 200}) as stream:
        final = stream.get_final_response()
    assert final.output_text.startswith(whole.output_text)


def test_responses_with_tools_and_formats(openai_client: Any) -> None:
    fields = {"model": "any", "input": QUESTION, "temperature": 0, "max_output_tokens": 100}
    tool: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
    answer = openai_client.responses.create(**fields, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    with openai_client.responses.stream(**fields, tools=[tool], tool_choice="required") as stream:
        streamed = stream.get_final_response()
    assert streamed.output[0].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    told = openai_client.responses.create(**fields | {"input": [result]}, previous_response_id=answer.id)
    assert told.output_text
    parsed = openai_client.responses.parse(**fields, text_format=Weather)
    assert parsed.output_parsed.city in ("Paris", "Rome")


def test_responses_with_logprobs(openai_client: Any) -> None:
    fields = {"model": "any", "input": QUESTION, "temperature": 0, "max_output_tokens": 5}
    answer = openai_client.responses.create(**fields, top_logprobs=2, include=["message.output_text.logprobs"])
    (text,) = answer.output[0].content
    assert "".join(entry.token for entry in text.logprobs) == text.text
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in text.logprobs)


async def test_responses_async(async_openai_client: Any) -> None:
    create = async_openai_client.responses.create
    answer = await create(model="any", input=QUESTION, temperature=0, max_output_tokens=30)
    stream = await create(model="any", input=QUESTION, temperature=0, max_output_tokens=30, stream=True)
    deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.output_text
