"""The `grammar` of a request, in TGI's shapes: an object of a type and a value."""

from typing import Annotated, Any, Literal

from pydantic import Field

from funitel.router.schema_types import NativeBody


class JsonGrammar(NativeBody):
    """A JSON schema, as an object or as text that is one."""

    type: Literal["json", "json_object"]
    value: Any = Field(description="A JSON schema, or text that is one.")


class RegexGrammar(NativeBody):
    """A regular expression that the whole text matches."""

    type: Literal["regex"]
    value: str


class NamedSchema(NativeBody):
    """A JSON schema with a name."""

    schema_: Any = Field(alias="schema", description="The JSON schema.")
    name: str | None = None


class JsonSchemaGrammar(NativeBody):
    """A JSON schema with a name, as OpenAI writes it."""

    type: Literal["json_schema"]
    value: NamedSchema


GrammarType = Annotated[JsonGrammar | RegexGrammar | JsonSchemaGrammar, Field(discriminator="type")]
