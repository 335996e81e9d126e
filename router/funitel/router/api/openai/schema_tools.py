"""Request records of tools and response formats in OpenAI's chats, in OpenAI's shapes and TGI's."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from funitel.proto.errors import InvalidRequest, ToolError
from funitel.proto.step import GrammarType
from funitel.router.api.common.schema_base import Body
from funitel.router.chat.call import Tool, ToolChoice, ToolMode
from funitel.router.core.grammar import Grammar

ANY_OBJECT = '{"type": "object"}'


class FunctionDefinition(Body):
    """A function the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema of the arguments, an object.")
    arguments: dict[str, Any] | None = Field(default=None, description="TGI's name of `parameters`.")
    strict: bool | None = Field(default=None, description="Calls follow the schema; forced ones do in any case.")

    @property
    def tool(self) -> Tool:
        """The function in the words of the chat core."""
        parameters = self.arguments if self.parameters is None else self.parameters
        return Tool(name=self.name, description=self.description, parameters=parameters, strict=bool(self.strict))


class ToolDefinition(Body):
    """A tool; functions are the only kind."""

    type: str = "function"
    function: FunctionDefinition

    @field_validator("type")
    @classmethod
    def _is_function(cls, value: str) -> str:
        if value != "function":
            raise ValueError(f"a tool of type `{value}` is not supported, only `function`")
        return value

    @property
    def tool(self) -> Tool:
        """The tool in the words of the chat core."""
        return self.function.tool


class FunctionName(Body):
    """A function by its name."""

    name: str


class NamedTool(Body):
    """A tool by its name."""

    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(Body):
    """Which tools may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class ToolChoiceObject(Body):
    """One function that must be called, or the tools that may be."""

    type: Literal["function", "allowed_tools"] = "function"
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> "ToolChoiceObject":
        needed = "function" if self.type == "function" else "allowed_tools"
        if getattr(self, needed) is None:
            raise ValueError(f"needs `{needed}`")
        return self


def tools_and_choice(
    definitions: list[ToolDefinition] | None, choice: str | ToolChoiceObject | None
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Both in the words of the chat core.

    Raises:
        ToolError: an allowed tool is not there.
    """
    tools = tuple(definition.tool for definition in definitions or ())
    if choice is None:
        return tools, ToolChoice()
    if isinstance(choice, str):
        modes = {mode.value: ToolChoice(mode) for mode in ToolMode}
        return tools, modes.get(choice) or ToolChoice.named(choice)  # a bare name is TGI's
    if choice.allowed_tools is None:
        assert choice.function is not None
        return tools, ToolChoice.named(choice.function.name)
    allowed = [named.function.name for named in choice.allowed_tools.tools]
    unknown = next((name for name in allowed if name not in {tool.name for tool in tools}), None)
    if unknown is not None:
        raise ToolError(f"no tool is named `{unknown}`", "tool_choice")
    return tuple(tool for tool in tools if tool.name in allowed), ToolChoice(ToolMode(choice.allowed_tools.mode))


def functions_and_choice(
    definitions: list[FunctionDefinition], choice: Literal["none", "auto"] | FunctionName | None
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Both in the words of the chat core, of the form that was before tools.

    Raises:
        ToolError: the function that must be called is not there.
    """
    tools = tuple(definition.tool for definition in definitions)
    if isinstance(choice, FunctionName):
        if choice.name not in {tool.name for tool in tools}:
            raise ToolError(f"no function is named `{choice.name}`", "function_call")
        return tools, ToolChoice.named(choice.name)
    return tools, ToolChoice(ToolMode(choice or "auto"))


class JsonSchemaFormat(Body):
    """A JSON schema with a name; the text always follows it, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the text must follow: OpenAI's shapes, or TGI's with `value`."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: JsonSchemaFormat | None = Field(default=None, description="OpenAI's, of type `json_schema`.")
    value: Any = Field(default=None, description="TGI's: a schema, an object with one, or a regular expression.")

    def grammar(self) -> Grammar | None:
        """The same as a grammar; None when any text will do.

        Raises:
            InvalidRequest: what the type needs is missing or of another shape.
        """
        match self.type:
            case "text":
                return None
            case "regex":
                if not isinstance(self.value, str):
                    raise _wrong("`value` must be a regular expression", "value")
                return Grammar.regex(self.value)
            case "json_schema":
                return Grammar(GrammarType.JSON, schema_text(self._named_schema()))
            case _:
                if self.value is None and self.type == "json":
                    raise _wrong("`value` must be a JSON schema", "value")
                return Grammar(GrammarType.JSON, ANY_OBJECT if self.value is None else schema_text(self.value))

    def _named_schema(self) -> Any:
        if self.json_schema is not None:
            if self.json_schema.schema_ is None:
                raise _wrong("`json_schema` needs a `schema`", "json_schema.schema")
            return self.json_schema.schema_
        if not isinstance(self.value, dict) or "schema" not in self.value:
            raise _wrong("`json_schema` must be an object with a `schema`", "json_schema")
        return self.value["schema"]


def schema_text(schema: Any, field: str = "response_format.value") -> str:
    """The text of a schema, which may be sent as an object or as the JSON text of one; raises InvalidRequest."""
    values = schema
    if isinstance(schema, str):
        try:
            values = json.loads(schema)
        except (ValueError, RecursionError):
            values = None
    if not isinstance(values, dict):
        raise InvalidRequest(f"`{field}`: the schema must be an object", field)
    try:
        return json.dumps(values, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest(f"`{field}`: the schema is nested too deeply", field) from None


def _wrong(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"`response_format`: {message}", f"response_format.{param}")
