"""Make the grammar of free answers: any text, thoughts up to a budget, and calls that fit the schemas of strict tools.

Calls are in the model's own format. Whatever opens a call in it leads to a call of a tool; arguments of a tool that is
not strict are any object.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from funitel.proto.errors import InvalidRequest, ToolError
from funitel.router.chat.call import Tool
from funitel.router.chat.harmony import CHANNEL, CONSTRAIN, MESSAGE, START
from funitel.router.chat.notations.lark import ANY, Item, Lark
from funitel.router.chat.notations.tags import DSML, GLM, MINIMAX, QWEN, TagStyle
from funitel.router.chat.notations.typed_values import Schema, kinds_of, resolved
from funitel.router.chat.reasoning_parser import ReasoningFormat
from funitel.router.chat.tool_call_reader import CallKeys
from funitel.router.chat.tool_formats import (
    ARGUMENT_BEGIN,
    DEEPSEEK,
    DEEPSEEK_CALL,
    DSML_SECTION,
    KIMI,
    KIMI_CALL,
    MINIMAX_SECTION,
    PYTHON_TAG,
    SEPARATOR,
    ToolFormat,
)
from funitel.router.chat.tool_grammar import MAX_CALLS, forced_calls
from funitel.router.core.grammar import Grammar

_SPACE = "/[ \\n]{0,2}/"
_BLANK = "[ \\n]{0,8}"
_OBJECT = {"type": "object"}
# What the parameters of a tool may say where its arguments are not written as one JSON object.
_DECLARING = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_DESCRIBING = {"title", "description", "$schema", "$id", "$comment", "examples", "default"}
_LENGTHS = {"minLength", "maxLength"}


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The thoughts of an answer: `is_open` if the prompt has begun them, `budget` in tokens."""

    format: ReasoningFormat
    is_open: bool
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of an answer."""

    format: ToolFormat
    tools: tuple[Tool, ...]
    is_parallel: bool
    template: str = ""  # of the model, where a format has variants


def supports_strict(format: ToolFormat) -> bool:
    """Whether calls in a format can be kept to their schemas while text is free."""
    return format.name in _WRITERS or format.has_channels or format.name in _BARE


def auto_grammar(calls: Calls | None, thoughts: Thoughts | None, special: Mapping[str, int]) -> Grammar:
    """Return the grammar of an answer; `special` are the ids of the markers that are special tokens.

    Raises:
        ToolError: the parameters of a strict tool cannot be kept.
    """
    lark = Lark(special)
    try:
        if calls is not None:
            calls = replace(calls, tools=tuple(_bound(tool) for tool in calls.tools))
        return Grammar.context_free(lark.grammar(_start(lark, calls, thoughts)))
    except InvalidRequest as error:
        if isinstance(error, ToolError):
            raise
        raise ToolError(f"the `parameters` of `tools`: {error.message}", "tools") from error


def _bound(tool: Tool) -> Tool:
    return tool if tool.strict else replace(tool, parameters=_OBJECT)


def _start(lark: Lark, calls: Calls | None, thoughts: Thoughts | None) -> str:
    if (calls is not None and calls.format.has_channels) or (thoughts is not None and thoughts.format.has_channels):
        return _channels(lark, calls, thoughts)
    head = "" if thoughts is None else _thoughts(lark, thoughts)
    if calls is None:
        return f"{head} {lark.free()}"
    if calls.format.name in _BARE:
        return f"{head} {_bare(lark, calls)}"
    units = lark.any_of(_WRITERS[calls.format.name](lark, calls))
    return f"{head} {units}* {lark.free()}"


def _thoughts(lark: Lark, thoughts: Thoughts) -> str:
    """Thoughts, and what closes them: within them nothing opens a call."""
    known = thoughts.format
    closed = lark.up_to(known.closing) if thoughts.budget is None else lark.limited(known.closing, thoughts.budget)
    if thoughts.is_open:
        return closed
    opened = lark.rule(lark.up_to(known.opening, body=_BLANK), closed)
    return f"{opened}?"


# Formats with a marker before each call or section


def _json_calls(trigger: str, end: str, lark: Lark, calls: Calls, *, is_list: bool = False) -> Iterator[str]:
    """Calls as JSON behind a marker: one, or an array of them."""
    schema = json.loads(forced_calls(calls.tools, parallel=False).text)
    if is_list:
        most = MAX_CALLS if calls.is_parallel else 1
        definitions = schema.pop("$defs", {}) | {"one": {key: schema[key] for key in schema if key != "$defs"}}
        items = {"$ref": "#/$defs/one"}
        schema = {"type": "array", "items": items, "minItems": 1, "maxItems": most, "$defs": definitions}
    yield lark.rule(lark.up_to(trigger), _SPACE, lark.json(schema), *((_SPACE, lark.text(end)) if end else ()))


def _granite(lark: Lark, calls: Calls) -> Iterator[str]:
    for trigger in ("<|tool_call|>", "<tool_call>"):
        yield from _json_calls(trigger, "", lark, calls, is_list=True)


def _named_calls(
    section: tuple[str, str], before: str, between: str, after: str, lark: Lark, calls: Calls
) -> Iterator[str]:
    """Sections of calls that are a name and then JSON; `between` may have a number, as `#`."""
    inner = [
        lark.rule(
            lark.text(before + tool.name), _numbered(lark, between), lark.json(_parameters(tool)), lark.text(after)
        )
        for tool in calls.tools
    ]
    several = lark.repeated(lark.any_of(inner), _SPACE, MAX_CALLS if calls.is_parallel else 1)
    yield lark.rule(lark.up_to(section[0]), _SPACE, several, _SPACE, lark.text(section[1]))


def _numbered(lark: Lark, text: str) -> str:
    before, number, after = text.partition("#")
    return " ".join(filter(None, (lark.text(before), "/[0-9]{1,2}/" if number else "", lark.text(after))))


def _mistral(lark: Lark, calls: Calls) -> Iterator[str]:
    if "[ARGS]" not in calls.template:
        yield from _json_calls("[TOOL_CALLS]", "", lark, calls, is_list=True)
        return
    cases = [lark.rule(lark.text(f"{tool.name}[ARGS]"), lark.json(_parameters(tool))) for tool in calls.tools]
    yield lark.rule(lark.up_to("[TOOL_CALLS]"), lark.any_of(cases))


def _parameters(tool: Tool) -> Any:
    """The schema of a tool's arguments, an object."""
    if not tool.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    _check_object(tool)
    return _OBJECT | dict(tool.parameters)


def _check_object(tool: Tool) -> None:
    given = (tool.parameters or {}).get("type", "object")
    if given != "object":
        rule = f"`parameters` of `{tool.name}` must be a schema of type `object`. Given: {json.dumps(given)}"
        raise ToolError(rule, "tools")


# Formats with tags around each argument


def _tagged_calls(
    style: TagStyle, trigger: str, end: str, lark: Lark, calls: Calls, *, is_section: bool = False
) -> Iterator[str]:
    bare = [
        lark.rule(
            lark.text(f"{tool.name}{style.after_name}"),
            lark.text("\n"),
            *_tagged_arguments(style, lark, tool),
            lark.text(style.end),
        )
        for tool in calls.tools
    ]
    cases = [lark.rule(lark.text(style.before_name), case) for case in bare] if style.before_name else bare
    several = lark.repeated(lark.any_of(cases), _SPACE, MAX_CALLS if calls.is_parallel and is_section else 1)
    yield lark.rule(lark.up_to(trigger), _SPACE, several, *((_SPACE, lark.text(end)) if end else ()))
    if style.before_name and not is_section:  # the parser reads a call without tags around it, too
        yield lark.rule(lark.up_to(style.before_name), lark.any_of(bare))


def _tagged_arguments(style: TagStyle, lark: Lark, tool: Tool) -> Iterator[str]:
    for key, schema, is_required in _declared(tool):
        rule = lark.rule(
            lark.text(f"{style.before_key}{key}{style.after_key}"),
            _tagged_value(style, lark, tool, schema),
            lark.text("\n"),
        )
        yield rule if is_required else f"{rule}?"


def _tagged_value(style: TagStyle, lark: Lark, tool: Tool, schema: Any) -> str:
    line = "\n" if style.pads_values else ""
    as_text = _text_value(lark, tool, schema, style.after_value, line)
    forms = {is_string: text for text, is_string in style.before_value.items()}
    before = {
        is_string: lark.text(("\n" if text == "<arg_value>" else "") + text + line) for is_string, text in forms.items()
    }
    if as_text is not None:
        return lark.rule(before.get(True, before.get(None, "")), as_text)
    value = lark.rule(lark.json(schema), lark.text(line + style.after_value))
    return lark.rule(before.get(False, before.get(None, "")), value)


def _text_value(lark: Lark, tool: Tool, schema: Any, end: str, line: str = "") -> str | None:
    """A string without quotes and escapes, up to `line` and its end; None where the schema is of another type."""
    root = tool.parameters or {}
    kinds = kinds_of(schema, root)
    if "string" not in kinds:
        return None
    schema = resolved(schema, root)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        return lark.any_of(lark.text(text + line + end) for text in texts)
    cases = schema.get("anyOf", [])
    stated = {key for case in cases for key in resolved(case, root)} | schema.keys()
    allowed = _DESCRIBING | {"type", "anyOf"} | (set() if cases else _LENGTHS)
    unkept = sorted(stated - allowed - ({"$defs", "definitions"} & root.keys()))
    if unkept or (kinds != {"string"} and len(kinds - {"string", "null"})):
        reason = ", ".join(f'"{key}"' for key in unkept) or "several types beside strings"
        raise ToolError(f"`parameters` of `{tool.name}` cannot be kept in the model's format: {reason}", "tools")
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    body = f"(?s:.{{{least},{most}}})" if _LENGTHS & schema.keys() else ANY
    return lark.up_to(end, body=body, before=line)


def _declared(tool: Tool) -> Iterator[tuple[str, Any, bool]]:
    """Key, schema and whether it is required of each argument; a schema has the definitions of all."""
    root = _parameters(tool)
    unkept = sorted(root.keys() - _DECLARING - _DESCRIBING)
    if unkept:
        words = ", ".join(f'"{key}"' for key in unkept)
        raise ToolError(f"`parameters` of `{tool.name}` cannot be kept in the model's format: {words}", "tools")
    shared: Schema = {key: root[key] for key in ("$defs", "definitions") if key in root}
    required = root.get("required", ())
    for key, schema in root.get("properties", {}).items():
        yield key, _closed(schema, shared), key in required


def _closed(schema: Any, shared: Schema) -> Any:
    """A schema with the definitions that it may refer to."""
    return {**schema, **shared} if isinstance(schema, Mapping) and "$ref" in json.dumps(schema) else schema


# Formats that write calls as Python or Gemma do


def _python_calls(opening: str, before: str, separator: str, end: str, lark: Lark, calls: Calls) -> Iterator[str]:
    inner = [
        lark.rule(lark.text(f"{tool.name}("), _python_arguments(lark, tool), lark.text(")")) for tool in calls.tools
    ]
    several = lark.repeated(lark.any_of(inner), lark.text(separator), MAX_CALLS if calls.is_parallel else 1)
    yield lark.rule(lark.up_to(opening), lark.text(before), several, lark.text(end))


def _python_list(lark: Lark, calls: Calls) -> Iterator[str]:
    """Lists of calls without a marker: the name of a tool in one opens it."""
    cases = {tool.name: lark.rule(_python_arguments(lark, tool), lark.text(")")) for tool in calls.tools}
    more = lark.any_of(lark.rule(lark.text(f", {name}("), rest) for name, rest in cases.items())
    count = MAX_CALLS - 1 if calls.is_parallel else 0
    for name, rest in cases.items():
        yield lark.rule(lark.up_to(f"[{name}("), rest, f"{more}{{0,{count}}}" if count else "", lark.text("]"))


def _python_arguments(lark: Lark, tool: Tool) -> str:
    items = [
        Item(lark.rule(lark.text(f"{key}="), lark.json(schema)), is_required)
        for key, schema, is_required in _declared(tool)
    ]
    return lark.listed(items, lark.text(", "))


def _gemma_calls(trigger: str, end: str, quote: str, lark: Lark, calls: Calls) -> Iterator[str]:
    cases = [
        lark.rule(lark.text(f"call:{tool.name}{{"), _gemma_arguments(quote, lark, tool), lark.text("}"))
        for tool in calls.tools
    ]
    yield lark.rule(lark.up_to(trigger), lark.any_of(cases), lark.text(end))


def _gemma_arguments(quote: str, lark: Lark, tool: Tool) -> str:
    items = []
    for key, schema, is_required in _declared(tool):
        is_string = kinds_of(schema, tool.parameters or {}) == {"string"}
        text = _text_value(lark, tool, schema, quote) if is_string else None
        value = lark.json(schema) if text is None else lark.rule(lark.text(quote), text)
        items.append(Item(lark.rule(lark.text(f"{key}:"), value), is_required))
    return lark.listed(items, lark.text(","))


# Answers that are nothing but calls, or text


_BARE = {"llama3_json": (PYTHON_TAG, CallKeys(arguments="parameters")), "json": ("", CallKeys())}


def _bare(lark: Lark, calls: Calls) -> str:
    """Calls as JSON, or text that does not begin as they do."""
    tag, keys = _BARE[calls.format.name]
    is_list = calls.is_parallel and not tag
    schema = json.loads(forced_calls(calls.tools, parallel=is_list, keys=keys).text)
    one = lark.rule(lark.json(schema))
    several = lark.repeated(one, '"; "', MAX_CALLS if calls.is_parallel and tag else 1)
    found = lark.rule(_SPACE, f"{lark.text(tag)}?" if tag else "", several)
    plain = lark.rule(f"/(\\s*[^\\s\\{{\\[`{tag[:1]}](?s:.*))?/")
    return lark.any_of((found, plain))


# Harmony


def _channels(lark: Lark, calls: Calls | None, thoughts: Thoughts | None) -> str:
    """Messages of thoughts and text, and at the end maybe a call; with a budget, the first alone are thoughts."""
    limit = "" if thoughts is None or thoughts.budget is None else f"[max_tokens={thoughts.budget}]"
    analysis = lark.rule(lark.text(f"{CHANNEL}analysis{MESSAGE}"), lark.rule(f"/{ANY}/", options=limit))
    spoken = lark.rule(
        lark.any_of((lark.text(f"{CHANNEL}final{MESSAGE}"), lark.text(f"{CHANNEL}commentary{MESSAGE}"))), lark.free()
    )
    message = spoken if limit else lark.any_of((analysis, spoken))
    last = message if calls is None else lark.any_of((message, *_channel_calls(lark, calls)))
    again = lark.text(f"<|end|>{START}assistant")
    return f"{f'({analysis} {again})?' if limit else ''} ({message} {again})* {last}"


def _channel_calls(lark: Lark, calls: Calls) -> Iterator[str]:
    kind = lark.any_of((lark.text(f" {CONSTRAIN}json{MESSAGE}"), lark.text(f" json{MESSAGE}"), lark.text(MESSAGE)))
    for tool in calls.tools:
        to = f" to=functions.{tool.name}"
        heads = lark.any_of((lark.text(f"{CHANNEL}commentary{to}"), lark.text(f"{to}{CHANNEL}commentary")))
        yield lark.rule(heads, kind, lark.json(_parameters(tool)), f"({lark.text('<|call|>')})?")


_Writer = Callable[[Lark, Calls], Iterator[str]]
_WRITERS: dict[str, _Writer] = {
    "hermes": partial(_json_calls, "<tool_call>", "</tool_call>"),
    "granite": _granite,
    "mistral": _mistral,
    "deepseek_v3": partial(
        _named_calls, DEEPSEEK, f"{DEEPSEEK_CALL[0]}function{SEPARATOR}", "\n```json\n", f"\n```{DEEPSEEK_CALL[1]}"
    ),
    "deepseek_v31": partial(_named_calls, DEEPSEEK, DEEPSEEK_CALL[0], SEPARATOR, DEEPSEEK_CALL[1]),
    "kimi_k2": partial(_named_calls, KIMI, f"{KIMI_CALL[0]}functions.", f":#{ARGUMENT_BEGIN}", KIMI_CALL[1]),
    "qwen3_coder": partial(_tagged_calls, QWEN, "<tool_call>", "</tool_call>"),
    "glm45": partial(_tagged_calls, GLM, "<tool_call>", ""),
    "minimax_m2": partial(_tagged_calls, MINIMAX, *MINIMAX_SECTION, is_section=True),
    "deepseek_v32": partial(_tagged_calls, DSML, *DSML_SECTION, is_section=True),
    "lfm2": partial(_python_calls, "<|tool_call_start|>", "[", ", ", "]<|tool_call_end|>"),
    "olmo3": partial(_python_calls, "<function_calls>", "\n", "\n", "\n</function_calls>"),
    "gemma_code": partial(_python_calls, "```tool_code", "\n", "\n", "\n```"),
    "pythonic": _python_list,
    "gemma4": partial(_gemma_calls, "<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": partial(_gemma_calls, "<start_function_call>", "<end_function_call>", "<escape>"),
}
