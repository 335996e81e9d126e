"""litellm: a server by each of the names it has for one such as this, and by those of the APIs."""

import asyncio
import json
import os
from typing import Any

import litellm
import pytest
from blame import ENCODER_URL, Calls

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet for prices
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}}
# The name of a provider, and what is put behind the server's address.
CHATS = {"openai": "/v1", "hosted_vllm": "/v1", "custom_openai": "/v1", "anthropic": "", "litellm_proxy": "/v1"}


@pytest.fixture(params=list(CHATS))
def chat(request: pytest.FixtureRequest, url: str) -> dict[str, Any]:
    """The arguments of a chat by one provider."""
    base = url + CHATS[request.param]
    return {
        "model": f"{request.param}/smollm2-135m-instruct",
        "api_base": base,
        "api_key": "none",
        "messages": QUESTION,
        "max_tokens": 30,
        "temperature": 0,
        "num_retries": 0,
    }


def test_chat(chat: dict[str, Any], calls: Calls) -> None:
    answer = litellm.completion(**chat)
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0
    assert not calls.refused, calls.words()


def test_streamed_chat(chat: dict[str, Any], calls: Calls) -> None:
    chunks = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert len(chunks) > 3
    assert not calls.refused, calls.words()


def test_tools(chat: dict[str, Any], calls: Calls) -> None:
    answer = litellm.completion(**chat | {"max_tokens": 100}, tools=[TOOL], tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    messages = [
        *QUESTION,
        answer.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny."},
    ]
    assert litellm.completion(**chat | {"messages": messages}, tools=[TOOL]).choices
    assert not calls.refused, calls.words()


def test_a_schema(chat: dict[str, Any], calls: Calls) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    answer = litellm.completion(**chat | {"max_tokens": 100}, response_format=wanted)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")
    assert not calls.refused, calls.words()


def test_many_parameters(url: str, calls: Calls) -> None:
    answer = litellm.completion(
        model="openai/any",
        api_base=f"{url}/v1",
        api_key="none",
        messages=QUESTION,
        max_completion_tokens=8,
        n=2,
        seed=1,
        top_p=0.9,
        stop=["zzz"],
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"5": 1},
        logprobs=True,
        top_logprobs=2,
        user="someone",
    )
    assert len(answer.choices) == 2
    assert not calls.refused, calls.words()


def test_text_completion(url: str, calls: Calls) -> None:
    wishes = {"model": "text-completion-openai/any", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 5}
    assert litellm.text_completion(prompt="The capital of France is", **wishes).choices[0].text
    assert len(list(litellm.text_completion(prompt="The capital", stream=True, **wishes))) > 3
    assert not calls.refused, calls.words()


def test_tgi(url: str, calls: Calls) -> None:
    wishes = {"model": "huggingface/any", "api_base": f"{url}/v1", "api_key": "none", "messages": QUESTION}
    answer = litellm.completion(**wishes, max_tokens=20, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert not calls.refused, calls.words()


def test_responses(url: str, calls: Calls) -> None:
    wishes = {"model": "openai/any", "api_base": f"{url}/v1", "api_key": "none", "input": QUESTION[0]["content"]}
    answer = litellm.responses(**wishes, max_output_tokens=20, temperature=0)
    assert "Paris" in answer.output[0].content[0].text
    types = [event.type for event in litellm.responses(**wishes, max_output_tokens=20, stream=True)]
    assert types[-1] in ("response.completed", "response.incomplete")
    assert not calls.refused, calls.words()


def test_messages(url: str, calls: Calls) -> None:
    answer: Any = asyncio.run(
        litellm.anthropic.messages.acreate(
            model="anthropic/any", api_base=url, api_key="none", messages=QUESTION, max_tokens=20
        )
    )
    assert answer["content"][0]["type"] == "text"
    assert not calls.refused, calls.words()


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_embeddings(provider: str, calls: Calls) -> None:
    base = f"{ENCODER_URL}/v1"
    answer = litellm.embedding(model=f"{provider}/any", api_base=base, api_key="none", input=["The sea.", "Birds."])
    assert [len(row["embedding"]) for row in answer.data] == [384, 384]
    assert not calls.refused, calls.words()


@pytest.mark.parametrize("provider", ["hosted_vllm", "jina_ai", "cohere"])
def test_reranks(provider: str, calls: Calls) -> None:
    answer = litellm.rerank(
        model=f"{provider}/any",
        api_base=ENCODER_URL if provider != "jina_ai" else f"{ENCODER_URL}/v1/rerank",
        api_key="none",
        query="What swims in the sea?",
        documents=["Birds fly.", "Fish swim in the sea."],
        top_n=1,
    )
    assert answer.results[0]["index"] == 1
    assert not calls.refused, calls.words()
