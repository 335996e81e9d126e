"""The table of formats that models write tool calls in: a new format is a row, and a parser if none fits."""

from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import partial

from funitel.router.chat.output_parser import Parser
from funitel.router.chat.tool_call_reader import CallKeys, ExactCallReader
from funitel.router.chat.tool_parsers import BareJsonParser, MarkedParser, MistralParser

PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written.

    `signature` is what a template of the family contains. `markers` must reach the parser even where they are
    special tokens. `parser` makes a parser for one answer, given the names of the request's tools.
    """

    name: str
    signature: str | None
    markers: tuple[str, ...]
    parser: Callable[[Set[str]], Parser]


def _anything(name: str) -> bool:
    """Where a marker says that this is a call, an unknown name is for the client to see."""
    return True


TOOL_FORMATS = (
    ToolFormat(
        "hermes",
        "<tool_call>",
        ("<tool_call>", "</tool_call>"),
        lambda names: MarkedParser(_anything, "<tool_call>", "</tool_call>"),
    ),
    ToolFormat(
        "mistral", "[TOOL_CALLS]", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), lambda names: MistralParser(_anything)
    ),
    ToolFormat("llama3_json", PYTHON_TAG, (PYTHON_TAG,), lambda names: BareJsonParser(names.__contains__, PYTHON_TAG)),
    ToolFormat("json", None, (), lambda names: BareJsonParser(names.__contains__)),
)
BY_NAME = {format.name: format for format in TOOL_FORMATS}


def call_or_answer(keys: CallKeys) -> ToolFormat:
    """Return the format of `tool_grammar.calls_or_answer`: what is not exactly a call is the answer."""
    make = partial(ExactCallReader, keys=keys)
    return ToolFormat("call_or_answer", None, (), lambda names: BareJsonParser(names.__contains__, make=make))


def detect_tool_format(template_source: str) -> ToolFormat:
    """Return the format a template writes earlier calls in, or bare JSON."""
    for format in TOOL_FORMATS:
        if format.signature is not None and format.signature in template_source:
            return format
    return BY_NAME["json"]
