"""Answers as each family of models writes them, made by chance: thoughts, text, calls; and what is read of them."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from funitel.router.chat.call import Tool
from funitel.router.chat.choice import _parsed, _parsers
from funitel.router.chat.output_parser import CallArguments, CallStart, TextPiece, Thought
from funitel.router.chat.prompt import ChatPrompt
from funitel.router.chat.reasoning_parser import REASONING_FORMATS
from funitel.router.chat.tool_formats import BY_NAME

Arguments = dict[str, Any]
Call = tuple[str, Arguments]

STRINGS = (
    *(
        "",
        "Paris",
        'say "hi"',
        "it's",
        "two\nlines\n\nmore",
        " padded ",
        "naïve ☃ 😀 日本語",
        "a\\b\\n",
        "{x: [1]}",
        "</a> <b>",
    ),
    *("1", "true", "null", "[f(a=1)]", "a, b=c", "```x```", "\ttab", "<|x|>", "call:f{}", "})]", "http://a/b?c=d&e"),
)
WORDS = (
    "Let me look.",
    "Sure — ☃!",
    "a < b",
    "One\n\ntwo",
    "It's [1] and {2}.",
    'He said "no".',
    "`code`",
    "1. x\n2. y",
)


@dataclass(frozen=True)
class Transcript:
    """An answer, and what is in it."""

    text: str
    reasoning: str
    content: str
    calls: list[Call]
    tools: tuple[Tool, ...]


# How each family writes its calls


def _json_call(name: str, arguments: Arguments, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_json_call(*call)}\n</tool_call>" for call in calls)


def _qwen(calls: Sequence[Call]) -> str:
    def parameters(arguments: Arguments) -> str:
        return "".join(f"<parameter={key}>\n{_raw(value)}\n</parameter>\n" for key, value in arguments.items())

    return "\n".join(f"<tool_call>\n<function={name}>\n{parameters(a)}</function>\n</tool_call>" for name, a in calls)


def _glm(calls: Sequence[Call]) -> str:
    def parameters(arguments: Arguments) -> str:
        return "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_raw(value)}</arg_value>\n" for key, value in arguments.items()
        )

    return "\n".join(f"<tool_call>{name}\n{parameters(arguments)}</tool_call>" for name, arguments in calls)


def _minimax(calls: Sequence[Call]) -> str:
    def invoke(name: str, arguments: Arguments) -> str:
        inner = "".join(f'<parameter name="{key}">{_raw(value)}</parameter>\n' for key, value in arguments.items())
        return f'<invoke name="{name}">\n{inner}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(invoke(*call) for call in calls)}</minimax:tool_call>"


def _dsml(calls: Sequence[Call]) -> str:
    def invoke(name: str, arguments: Arguments) -> str:
        inner = "".join(
            f'<｜DSML｜parameter name="{key}" string="{json.dumps(isinstance(value, str))}">{_raw(value)}'
            "</｜DSML｜parameter>\n"
            for key, value in arguments.items()
        )
        return f'<｜DSML｜invoke name="{name}">\n{inner}</｜DSML｜invoke>\n'

    return f"<｜DSML｜function_calls>\n{''.join(invoke(*call) for call in calls)}</｜DSML｜function_calls>"


def _deepseek_v3(calls: Sequence[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_raw(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_raw(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _kimi(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>{_raw(arguments)}<|tool_call_end|>"
        for place, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def _granite(calls: Sequence[Call]) -> str:
    return f"<|tool_call|>[{', '.join(_json_call(*call) for call in calls)}]"


def _mistral(calls: Sequence[Call]) -> str:
    return f"[TOOL_CALLS] [{', '.join(_json_call(*call) for call in calls)}]"


def _mistral_args(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_raw(arguments)}" for name, arguments in calls)


def _llama(calls: Sequence[Call]) -> str:
    return "; ".join(_json_call(*call, key="parameters") for call in calls)


def _json(calls: Sequence[Call]) -> str:
    return f"[{', '.join(_json_call(*call) for call in calls)}]"


def _python_call(name: str, arguments: Arguments) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _pythonic(calls: Sequence[Call]) -> str:
    return f"[{', '.join(_python_call(*call) for call in calls)}]"


def _gemma_value(value: Any, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            return "{" + ",".join(f"{key}:{_gemma_value(inner, quote)}" for key, inner in value.items()) + "}"
        case list():
            return "[" + ",".join(_gemma_value(inner, quote) for inner in value) + "]"
        case _:
            return json.dumps(value)


def _gemma4(calls: Sequence[Call]) -> str:
    quote = '<|"|>'
    return "".join(f"<|tool_call>call:{name}{_gemma_value(args, quote)}<tool_call|>" for name, args in calls)


def _functiongemma(calls: Sequence[Call]) -> str:
    return "".join(
        f"<start_function_call>call:{name}{_gemma_value(args, '<escape>')}<end_function_call>" for name, args in calls
    )


def harmony(reasoning: str, before: str, calls: Sequence[Call], after: str) -> str:
    """Messages in the order in which gpt-oss writes them."""
    messages = []
    if reasoning:
        messages.append(f"<|channel|>analysis<|message|>{reasoning}<|end|>")
    if before:
        messages.append(f"<|channel|>commentary<|message|>{before}<|end|>")
    for place, (name, arguments) in enumerate(calls):
        headers = (
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
            f" to=functions.{name}<|channel|>commentary json<|message|>",
        )
        messages.append(f"{headers[place % 2]}{_raw(arguments)}<|call|>")
    if after:
        messages.append(f"<|channel|>final<|message|>{after}<|return|>")
    return "<|start|>assistant".join(messages)


@dataclass(frozen=True)
class Family:
    """How a family writes calls, and where text may stand."""

    write: Callable[[Sequence[Call]], str]
    thinks: str | None = "think"
    has_text_before: bool = True
    has_text_after: bool = True


FAMILIES: dict[str, Family] = {
    "hermes": Family(_hermes),
    "qwen3_coder": Family(_qwen),
    "glm45": Family(_glm),
    "minimax_m2": Family(_minimax),
    "deepseek_v32": Family(_dsml),
    "deepseek_v3": Family(_deepseek_v3),
    "deepseek_v31": Family(_deepseek_v31),
    "kimi_k2": Family(_kimi),
    "granite": Family(_granite),
    "mistral": Family(_mistral, "mistral"),
    "mistral:args": Family(_mistral_args, "mistral"),
    "llama3_json": Family(_llama, None, has_text_before=False),
    "json": Family(_json, has_text_before=False),
    "pythonic": Family(_pythonic),
    "pythonic:tagged": Family(lambda calls: f"<|python_start|>{_pythonic(calls)}<|python_end|>"),
    "lfm2": Family(lambda calls: f"<|tool_call_start|>{_pythonic(calls)}<|tool_call_end|>"),
    "olmo3": Family(
        lambda calls: f"<function_calls>\n{chr(10).join(_python_call(*c) for c in calls)}\n</function_calls>"
    ),
    "gemma_code": Family(lambda calls: f"```tool_code\n{chr(10).join(_python_call(*c) for c in calls)}\n```"),
    "gemma4": Family(_gemma4, "gemma4"),
    "functiongemma": Family(_functiongemma, None),
    "harmony": Family(_hermes, "harmony"),  # written by `harmony`
}


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(8 if depth else 5)
    match kind:
        case 0 | 1:
            return rng.choice(STRINGS)
        case 2:
            return rng.choice([0, -7, 12345678901234567890, 3.5, -1e-7])
        case 3:
            return rng.choice([True, False, None])
        case 4:
            return "".join(rng.choice("aé😀\"'\\\n {}[],:=()") for _ in range(rng.randrange(8)))
        case 5 | 6:
            return {rng.choice("abcdef") + str(place): _value(rng, depth - 1) for place in range(rng.randrange(3))}
        case _:
            return [_value(rng, depth - 1) for _ in range(rng.randrange(3))]


def _schema(value: Any) -> dict[str, Any]:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return {"type": kinds.get(type(value), "null")}


def transcript(name: str, seed: int) -> Transcript:
    """One answer of a family."""
    rng = random.Random(f"{name}{seed}")
    family = FAMILIES[name]
    calls, tools = [], []
    for place in range(rng.choice([0, 1, 1, 2, 3])):
        function = "".join(rng.choice("abcdefgh_") for _ in range(rng.randrange(1, 9))) + f"x{place}"
        keys = {rng.choice("abcde") + f"_{number}" for number in range(rng.randrange(4))}
        arguments = {key: _value(rng, 2) for key in sorted(keys)}
        properties = {key: _schema(value) for key, value in arguments.items()}
        tools.append(Tool(name=function, parameters={"type": "object", "properties": properties}))
        calls.append((function, arguments))
    before = rng.choice(WORDS) if family.has_text_before and rng.random() < 0.5 else ""
    after = rng.choice(WORDS) if family.has_text_after and rng.random() < 0.4 else ""
    reasoning = rng.choice(["", "", "Hm, well.\n\nYes", "a {b} [c] ☃", "I could call <x>"]) if family.thinks else ""
    tools.append(Tool(name="other"))
    if not calls:
        before, after = before or after, ""
    if name == "harmony":
        text = harmony(reasoning, before, calls, after)
    else:
        text = "\n\n".join(filter(None, (before, family.write(calls) if calls else "", after)))
        if reasoning:
            opening, closing = _block(family.thinks or "")
            text = f"{opening}\n{reasoning}\n{closing}\n\n{text}"
    return Transcript(text, reasoning, before + after, calls, tuple(tools))


def _block(name: str) -> tuple[str, str]:
    return REASONING_FORMATS[name].opening, REASONING_FORMATS[name].closing


def prompt_of(name: str, tools: tuple[Tool, ...]) -> ChatPrompt:
    thinks = FAMILIES[name].thinks
    reasoning = None if thinks is None else REASONING_FORMATS[thinks]
    return ChatPrompt("", tools=tools, tool_format=BY_NAME[name.partition(":")[0]], reasoning=reasoning)


Found = tuple[str, str, list[tuple[str, str]]]


def parsed(prompt: ChatPrompt, portions: Sequence[str]) -> Found:
    """Thoughts, text and calls of an answer that comes in portions."""
    outer, inner = _parsers(prompt)
    thoughts, text, start = "", "", 0
    calls: list[tuple[str, str]] = []
    for place, portion in enumerate(portions):
        pieces = _parsed(outer, [TextPiece(portion, start)] if portion else [], place == len(portions) - 1)
        for piece in _parsed(inner, pieces, place == len(portions) - 1):
            match piece:
                case TextPiece():
                    text += piece.text
                case Thought():
                    thoughts += piece.text
                case CallStart():
                    calls.append((piece.name, ""))
                case CallArguments():
                    calls[-1] = (calls[-1][0], calls[-1][1] + piece.delta)
        start += len(portion)
    return thoughts, text, calls
