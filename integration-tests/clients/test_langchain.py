"""LangChain's client of OpenAI's routes, as it is."""

import os
from typing import Any

import pytest

from funitel_testing.servers import Server

os.environ.setdefault("LANGSMITH_TRACING", "false")
langchain_openai = pytest.importorskip("langchain_openai", reason="install the extra `clients`")

QUESTION = "What is the capital of France?"
SCHEMA = {
    "title": "get_weather",
    "description": "The weather in a city.",
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"], "description": "The city."}},
    "required": ["city"],
    "additionalProperties": False,
}


def _chat(server: Server, *, responses: bool) -> Any:
    fields = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0, "model": "any"}
    return langchain_openai.ChatOpenAI(**fields, temperature=0, max_tokens=60, use_responses_api=responses)


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def chat(server: Server, request: pytest.FixtureRequest) -> Any:
    """A chat model over each of the two routes that LangChain knows."""
    return _chat(server, responses=request.param)


def test_invoke(chat: Any) -> None:
    answer = chat.invoke(QUESTION)
    assert "Paris" in answer.text
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_stream(chat: Any) -> None:
    chunks = list(chat.stream(QUESTION))
    assert len(chunks) > 3, "it came in one piece"
    assert "".join(chunk.text for chunk in chunks) == chat.invoke(QUESTION).text


def test_messages(chat: Any) -> None:
    answer = chat.invoke([("system", "You know geography."), ("human", "Hi"), ("ai", "Hello!"), ("human", QUESTION)])
    assert "Paris" in answer.text


def test_tools(chat: Any) -> None:
    bound = chat.bind_tools([SCHEMA], tool_choice="get_weather", parallel_tool_calls=False)
    answer = bound.invoke("What is the weather in Paris?")
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather"
    assert call["args"]["city"] in ("Paris", "Rome")
    chunks = list(bound.stream("What is the weather in Paris?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert [(found["name"], found["args"]) for found in whole.tool_calls] == [(call["name"], call["args"])]


def test_structured_output(chat: Any) -> None:
    answer = chat.with_structured_output(SCHEMA, method="json_schema").invoke("What is the weather in Paris?")
    assert answer["city"] in ("Paris", "Rome")


async def test_async(server: Server) -> None:
    for chat in (_chat(server, responses=False), _chat(server, responses=True)):
        assert "Paris" in (await chat.ainvoke(QUESTION)).text
        assert len([chunk async for chunk in chat.astream(QUESTION)]) > 3
