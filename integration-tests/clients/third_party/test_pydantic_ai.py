"""pydantic-ai: text, tools, the kinds of output and streams, over OpenAI's two APIs and Anthropic's."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import pytest
from anthropic import AsyncAnthropic
from blame import Calls, of_the_model
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import (
    Agent,
    ModelSettings,
    NativeOutput,
    PromptedOutput,
    Tool,
    ToolOutput,
    UnexpectedModelBehavior,
    UsageLimitExceeded,
    UsageLimits,
)
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is the weather in Paris?"
FEW = UsageLimits(request_limit=4)
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "anthropic": "/v1/messages"}
OF_TEXT = (UnexpectedModelBehavior, UsageLimitExceeded)  # the model's where no call was refused


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Rome"]
    is_sunny: bool


@pytest.fixture(params=list(PATHS))
def kind(request: pytest.FixtureRequest) -> str:
    """One of the APIs."""
    return str(request.param)


def ask(url: str, kind: str, do: Callable[[Any], Awaitable[Any]]) -> Any:
    """What `do` makes of a model, with a client that lives in one event loop."""

    async def asking() -> Any:
        if kind == "anthropic":
            async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as anthropic:
                return await do(
                    AnthropicModel("claude-sonnet-4-5", provider=AnthropicProvider(anthropic_client=anthropic))
                )
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai:
            model = OpenAIChatModel if kind == "chat" else OpenAIResponsesModel
            return await do(model("any", provider=OpenAIProvider(openai_client=openai)))

    return asyncio.run(asking())


def agent(model: Any, *tools: Any, **wishes: Any) -> Agent[None, Any]:
    """An agent with a bound on its answers."""
    settings = ModelSettings(max_tokens=150, temperature=0)
    return Agent(model, instructions="You know the weather.", model_settings=settings, tools=tools, **wishes)


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather in a city."""
    return f"The weather in {city} is sunny."


async def prepare_once(context: Any, definition: Any) -> Any:
    """Offer a tool for the first request of a run only."""
    return definition if context.run_step <= 1 else None


WEATHER_ONCE = Tool(get_weather, prepare=prepare_once)


def test_text(kind: str, url: str, calls: Calls) -> None:
    result = ask(url, kind, lambda model: agent(model).run(QUESTION))
    calls.check(PATHS[kind])
    assert result.output
    assert result.usage.output_tokens > 0


def test_streamed_text(kind: str, url: str, calls: Calls) -> None:
    async def stream(model: Any) -> tuple[list[str], str]:
        async with agent(model).run_stream(QUESTION) as result:
            pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
            return pieces, await result.get_output()

    pieces, output = ask(url, kind, stream)
    calls.check(PATHS[kind])
    assert len(pieces) > 3
    assert "".join(pieces) == output


def test_a_conversation(kind: str, url: str, calls: Calls) -> None:
    async def talk(model: Any) -> Any:
        first = await agent(model).run(QUESTION)
        return await agent(model).run("And in Rome?", message_history=first.all_messages())

    assert ask(url, kind, talk).output
    calls.check(PATHS[kind])


def test_a_tool_that_may_be_called(kind: str, url: str, calls: Calls) -> None:
    with calls.model_may(*OF_TEXT):
        result = ask(url, kind, lambda model: agent(model, get_weather).run(QUESTION, usage_limits=FEW))
    calls.check(PATHS[kind])
    of_the_model(bool(result.output), "no text")


def test_a_tool_and_an_output_type(kind: str, url: str, calls: Calls) -> None:
    with calls.model_may(*OF_TEXT):  # it may call the tool again and again
        result = ask(
            url, kind, lambda model: agent(model, WEATHER_ONCE, output_type=Weather).run(QUESTION, usage_limits=FEW)
        )
    calls.check(PATHS[kind])
    assert isinstance(result.output, Weather)


def test_output_by_a_tool(kind: str, url: str, calls: Calls) -> None:
    result = ask(url, kind, lambda model: agent(model, output_type=ToolOutput(Weather)).run(QUESTION))
    calls.check(PATHS[kind])
    assert isinstance(result.output, Weather)


def test_output_by_a_schema(kind: str, url: str, calls: Calls) -> None:
    result = ask(url, kind, lambda model: agent(model, output_type=NativeOutput(Weather, strict=True)).run(QUESTION))
    calls.check(PATHS[kind])
    assert isinstance(result.output, Weather)


def test_output_by_a_prompt(kind: str, url: str, calls: Calls) -> None:
    with calls.model_may(*OF_TEXT):
        result = ask(url, kind, lambda model: agent(model, output_type=PromptedOutput(Weather)).run(QUESTION))
    calls.check(PATHS[kind])
    assert isinstance(result.output, Weather)


def test_output_of_several_types(kind: str, url: str, calls: Calls) -> None:
    class Refusal(BaseModel):
        reason: Literal["unknown city", "no weather"]

    wanted: list[Any] = [Weather, Refusal]
    result = ask(url, kind, lambda model: agent(model, output_type=wanted).run(QUESTION))
    calls.check(PATHS[kind])
    assert isinstance(result.output, Weather | Refusal)


def test_a_schema_and_a_tool(kind: str, url: str, calls: Calls) -> None:
    with calls.model_may(*OF_TEXT):  # it may call the tool again and again
        wanted = NativeOutput(Weather)
        result = ask(
            url, kind, lambda model: agent(model, WEATHER_ONCE, output_type=wanted).run(QUESTION, usage_limits=FEW)
        )
    calls.check(PATHS[kind])
    assert isinstance(result.output, Weather)


@pytest.mark.parametrize("by", [ToolOutput, NativeOutput])
def test_streamed_output(by: Any, kind: str, url: str, calls: Calls) -> None:
    async def stream(model: Any) -> tuple[int, Any]:
        async with agent(model, output_type=by(Weather)).run_stream(QUESTION) as result:
            parts = [part async for part in result.stream_output(debounce_by=None)]
            return len(parts), await result.get_output()

    count, output = ask(url, kind, stream)
    calls.check(PATHS[kind])
    assert count > 0
    assert isinstance(output, Weather)
