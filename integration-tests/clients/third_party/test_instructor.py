"""instructor in each of its modes that a server with OpenAI's or Anthropic's routes can serve."""

import asyncio
import warnings
from collections.abc import Iterable
from typing import Any, Literal

import anthropic
import instructor
import openai
import pytest
from blame import Calls, of_the_model
from instructor import Mode
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel, Field, ValidationError

warnings.simplefilter("ignore", DeprecationWarning)  # the modes that instructor replaces by others itself

OPENAI = (
    Mode.FUNCTIONS,
    Mode.TOOLS,
    Mode.TOOLS_STRICT,
    Mode.JSON,
    Mode.JSON_O1,
    Mode.MD_JSON,
    Mode.JSON_SCHEMA,
    Mode.RESPONSES_TOOLS,
    Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS,
)
ANTHROPIC = (Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_JSON, Mode.ANTHROPIC_REASONING_TOOLS)
MESSAGES: Any = [{"role": "user", "content": "Paris is the capital of France. It has 2 million inhabitants."}]
# What instructor makes of text that is not as it should be; the server is not to blame unless it refused a call.
OF_TEXT = (InstructorRetryException, IncompleteOutputException, ValidationError)
FREE = {
    Mode.JSON,
    Mode.MD_JSON,
    Mode.ANTHROPIC_JSON,
    Mode.ANTHROPIC_REASONING_TOOLS,
}  # the schema is in the prompt only


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    is_capital: bool


class Country(BaseModel):
    """A country with cities."""

    name: Literal["France", "Italy"]
    cities: list[City] = Field(min_length=1, max_length=2)


def client_of(mode: Mode, url: str) -> Any:
    """A client of the API that a mode is for."""
    if mode.name.startswith("ANTHROPIC"):
        return instructor.from_anthropic(anthropic.Anthropic(base_url=url, api_key="none", max_retries=0), mode=mode)
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)


def asked(mode: Mode, **wishes: Any) -> dict[str, Any]:
    """The arguments of a call."""
    limit = "max_output_tokens" if mode.name.startswith("RESPONSES") else "max_tokens"
    return {"model": "any", "messages": MESSAGES, limit: 200, "max_retries": 0, **wishes}


@pytest.mark.parametrize("mode", OPENAI + ANTHROPIC, ids=lambda mode: mode.name)
def test_create(mode: Mode, url: str, calls: Calls) -> None:
    with calls.model_may(*OF_TEXT, when=lambda: mode in FREE):
        city = client_of(mode, url).chat.completions.create(**asked(mode, response_model=City))
    assert isinstance(city, City)


@pytest.mark.parametrize("mode", OPENAI + ANTHROPIC, ids=lambda mode: mode.name)
def test_nested(mode: Mode, url: str, calls: Calls) -> None:
    with calls.model_may(*OF_TEXT, when=lambda: mode in FREE):
        country = client_of(mode, url).chat.completions.create(**asked(mode, response_model=Country))
    assert isinstance(country, Country)


@pytest.mark.parametrize("mode", OPENAI + ANTHROPIC, ids=lambda mode: mode.name)
def test_partial(mode: Mode, url: str, calls: Calls) -> None:
    with calls.model_may(*OF_TEXT, when=lambda: mode in FREE):
        parts = list(client_of(mode, url).chat.completions.create_partial(**asked(mode, response_model=City)))
    of_the_model(bool(parts) or mode not in FREE, "the stream had no object")
    assert parts
    of_the_model(parts[-1].name in ("Paris", "Rome") or mode not in FREE, f"the object is {parts[-1]}")
    assert parts[-1].name in ("Paris", "Rome")


@pytest.mark.parametrize("mode", OPENAI + ANTHROPIC, ids=lambda mode: mode.name)
def test_iterable(mode: Mode, url: str, calls: Calls) -> None:
    with calls.model_may(*OF_TEXT):
        cities = list(client_of(mode, url).chat.completions.create_iterable(**asked(mode, response_model=City)))
    assert all(isinstance(city, City) for city in cities)
    assert not calls.refused, calls.words()


@pytest.mark.parametrize("mode", [Mode.PARALLEL_TOOLS, Mode.ANTHROPIC_PARALLEL_TOOLS], ids=lambda mode: mode.name)
def test_parallel_tools(mode: Mode, url: str, calls: Calls) -> None:
    with calls.model_may(*OF_TEXT, TypeError):
        found = list(client_of(mode, url).chat.completions.create(**asked(mode, response_model=Iterable[City])))
    of_the_model(bool(found), "the model called no tool")
    assert all(isinstance(each, City) for each in found)


@pytest.mark.parametrize("mode", OPENAI, ids=lambda mode: mode.name)
def test_async(mode: Mode, url: str, calls: Calls) -> None:
    async def ask() -> City:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        found: City = await instructor.from_openai(client, mode=mode).chat.completions.create(
            **asked(mode, response_model=City)
        )
        return found

    with calls.model_may(*OF_TEXT, when=lambda: mode in FREE):
        assert isinstance(asyncio.run(ask()), City)


def test_from_provider(url: str, calls: Calls) -> None:
    client = instructor.from_provider("openai/any", base_url=f"{url}/v1", api_key="none")
    city = client.chat.completions.create(messages=MESSAGES, response_model=City, max_tokens=200, max_retries=0)
    assert isinstance(city, City)
