"""The `grammar` of a request, in TGI's shapes: an object of a type and a value."""

from typing import Annotated, Any, Literal

from pydantic import Field

from funitel.router.api.common.schema_base import Body
from funitel.router.core.grammar import Grammar


class JsonGrammar(Body):
    """A JSON schema, as an object or as text that is one."""

    type: Literal["json", "json_object"]
    value: Any = Field(description="A JSON schema, or text that is one.")


class RegexGrammar(Body):
    """A regular expression that the whole text matches."""

    type: Literal["regex"]
    value: str


class NamedSchema(Body):
    """A JSON schema with a name."""

    schema_: Any = Field(alias="schema", description="The JSON schema.")
    name: str | None = None


class JsonSchemaGrammar(Body):
    """A JSON schema with a name, as OpenAI writes it."""

    type: Literal["json_schema"]
    value: NamedSchema


class ChoiceGrammar(Body):
    """One of a few texts."""

    type: Literal["choice"]
    value: list[str] = Field(min_length=1)


GrammarType = Annotated[JsonGrammar | RegexGrammar | JsonSchemaGrammar | ChoiceGrammar, Field(discriminator="type")]


def grammar_of(body: JsonGrammar | RegexGrammar | JsonSchemaGrammar | ChoiceGrammar) -> Grammar:
    """The grammar a native body asks for."""
    match body:
        case JsonGrammar():
            return Grammar.json(body.value, is_native=True)
        case JsonSchemaGrammar():
            return Grammar.json(body.value.schema_, is_native=True)
        case RegexGrammar():
            return Grammar.regex(body.value)
        case ChoiceGrammar():
            return Grammar.choice(body.value)
