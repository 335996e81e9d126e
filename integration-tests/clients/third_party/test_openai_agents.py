"""openai-agents: text, tools, output types, both together, handoffs and streams, over both of OpenAI's APIs."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import agents
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, RunConfig, Runner
from blame import Calls, of_the_model
from openai import AsyncOpenAI
from pydantic import BaseModel

agents.set_tracing_disabled(True)
QUESTION = "What is the weather in Paris?"
EASY = "What is the capital of France?"  # of which the answer is short
RUN = RunConfig(tracing_disabled=True)
# Turns without an end, and text that is not JSON by its schema: the model's where no call was refused.
OF_TEXT = (agents.ModelBehaviorError, agents.MaxTurnsExceeded)
KINDS = {
    "chat": (OpenAIChatCompletionsModel, "/v1/chat/completions"),
    "responses": (OpenAIResponsesModel, "/v1/responses"),
}


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Rome"]
    is_sunny: bool


asked_for: list[str] = []


@agents.function_tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather in a city."""
    asked_for.append(city)
    return f"The weather in {city} is sunny."


@agents.function_tool(name_override="get_weather", is_enabled=lambda *_: not asked_for)
def get_weather_once(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather in a city."""
    asked_for.append(city)
    return f"The weather in {city} is sunny."


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    """One of OpenAI's APIs."""
    asked_for.clear()
    return str(request.param)


def ask(url: str, kind: str, do: Callable[[Any], Awaitable[Any]]) -> Any:
    """What `do` makes of a model, with a client that lives in one event loop."""

    async def asking() -> Any:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            return await do(KINDS[kind][0](model="any", openai_client=client))

    return asyncio.run(asking())


def agent(model: Any, *, tool_choice: Any = None, **wishes: Any) -> Agent[Any]:
    """An agent with a bound on its answers."""
    settings = ModelSettings(max_tokens=120, temperature=0, tool_choice=tool_choice)
    return Agent(name="assistant", instructions="Be brief.", model=model, model_settings=settings, **wishes)


def test_text(kind: str, url: str, calls: Calls) -> None:
    result = ask(url, kind, lambda model: Runner.run(agent(model), EASY, run_config=RUN))
    calls.check(KINDS[kind][1])
    assert result.final_output
    assert result.context_wrapper.usage.output_tokens > 0


def test_streamed_text(kind: str, url: str, calls: Calls) -> None:
    async def stream(model: Any) -> tuple[list[str], Any]:
        result = Runner.run_streamed(agent(model), EASY, run_config=RUN)
        types = [
            event.data.type if event.type == "raw_response_event" else event.type
            async for event in result.stream_events()
        ]
        return types, result.final_output

    types, output = ask(url, kind, stream)
    calls.check(KINDS[kind][1])
    assert output
    assert types.count("response.output_text.delta") > 3
    assert "response.completed" in types


def test_a_tool(kind: str, url: str, calls: Calls) -> None:
    def run(model: Any) -> Awaitable[Any]:
        return Runner.run(agent(model, tools=[get_weather], tool_choice="required"), QUESTION, run_config=RUN)

    result = ask(url, kind, run)
    calls.check(KINDS[kind][1])
    assert asked_for
    assert set(asked_for) <= {"Paris", "Rome"}
    assert result.final_output
    assert len(calls.all) >= 2, "the result of the tool was not sent"


def test_a_tool_that_may_be_called(kind: str, url: str, calls: Calls) -> None:
    def run(model: Any) -> Awaitable[Any]:
        return Runner.run(agent(model, tools=[get_weather]), QUESTION, run_config=RUN, max_turns=4)

    with calls.model_may(*OF_TEXT):
        result = ask(url, kind, run)
    calls.check(KINDS[kind][1])
    of_the_model(bool(result.final_output), "no text")


def test_a_streamed_tool(kind: str, url: str, calls: Calls) -> None:
    async def stream(model: Any) -> tuple[list[str], Any]:
        result = Runner.run_streamed(
            agent(model, tools=[get_weather], tool_choice="required"), QUESTION, run_config=RUN, max_turns=4
        )
        names = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
        return names, result.final_output

    names, output = ask(url, kind, stream)
    calls.check(KINDS[kind][1])
    assert {"tool_called", "tool_output", "message_output_created"} <= set(names)
    assert output
    assert asked_for


def test_an_output_type(kind: str, url: str, calls: Calls) -> None:
    result = ask(url, kind, lambda model: Runner.run(agent(model, output_type=Weather), QUESTION, run_config=RUN))
    calls.check(KINDS[kind][1])
    assert isinstance(result.final_output, Weather)


def test_a_tool_and_an_output_type(kind: str, url: str, calls: Calls) -> None:
    def run(model: Any) -> Awaitable[Any]:
        wishes = {"tools": [get_weather_once], "output_type": Weather}
        return Runner.run(agent(model, **wishes, tool_choice="required"), QUESTION, run_config=RUN, max_turns=4)

    result = ask(url, kind, run)
    calls.check(KINDS[kind][1])
    assert asked_for
    assert isinstance(result.final_output, Weather)


def test_a_tool_that_may_be_called_and_an_output_type(kind: str, url: str, calls: Calls) -> None:
    def run(model: Any) -> Awaitable[Any]:
        return Runner.run(agent(model, tools=[get_weather], output_type=Weather), QUESTION, run_config=RUN, max_turns=4)

    with calls.model_may(agents.MaxTurnsExceeded):
        result = ask(url, kind, run)
    calls.check(KINDS[kind][1])
    assert isinstance(result.final_output, Weather)


def test_a_streamed_output_type(kind: str, url: str, calls: Calls) -> None:
    async def stream(model: Any) -> Any:
        wishes: dict[str, Any] = {"tools": [get_weather_once], "output_type": Weather, "tool_choice": "required"}
        result = Runner.run_streamed(agent(model, **wishes), QUESTION, run_config=RUN, max_turns=4)
        async for _ in result.stream_events():
            pass
        return result.final_output

    assert isinstance(ask(url, kind, stream), Weather)
    calls.check(KINDS[kind][1])


def test_a_handoff(kind: str, url: str, calls: Calls) -> None:
    def run(model: Any) -> Awaitable[Any]:
        expert = agent(model, handoff_description="Knows Paris.")
        expert.name = "expert"
        return Runner.run(
            agent(model, handoffs=[expert], tool_choice="required"), QUESTION, run_config=RUN, max_turns=4
        )

    with calls.model_may(*OF_TEXT):
        result = ask(url, kind, run)
    calls.check(KINDS[kind][1])
    assert result.last_agent.name == "expert"


def test_a_conversation(kind: str, url: str, calls: Calls) -> None:
    async def talk(model: Any) -> Any:
        first = await Runner.run(agent(model, tools=[get_weather], tool_choice="required"), QUESTION, run_config=RUN)
        asked = [*first.to_input_list(), {"role": "user", "content": "And in Rome?"}]
        return await Runner.run(agent(model), asked, run_config=RUN)

    assert ask(url, kind, talk).final_output
    calls.check(KINDS[kind][1])


def test_previous_responses(url: str, calls: Calls) -> None:
    async def talk(model: Any) -> Any:
        first = await Runner.run(agent(model), EASY, run_config=RUN)
        return await Runner.run(agent(model), EASY, run_config=RUN, previous_response_id=first.last_response_id)

    assert ask(url, "responses", talk).final_output
    calls.check("/v1/responses")
