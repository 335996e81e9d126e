"""The table of formats that models write tool calls in: a new format is a row, and a parser if none fits."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from funitel.router.chat.harmony import MARKERS as HARMONY_MARKERS
from funitel.router.chat.harmony import HarmonyParser
from funitel.router.chat.notations.literals import GemmaScanner, PythonScanner
from funitel.router.chat.notations.tags import DSML, DSML_TAG, GLM, MINIMAX, QWEN, TagScanner, TagStyle
from funitel.router.chat.notations.typed_values import Schema
from funitel.router.chat.output_parser import Parser
from funitel.router.chat.tool_call_reader import (
    CallKeys,
    ExactCallReader,
    NamedCallReader,
    ScannedReader,
    deepseek_name,
    kimi_name,
)
from funitel.router.chat.tool_parsers import (
    BareJsonParser,
    MarkedParser,
    MistralParser,
    PythonicParser,
    SectionParser,
)

PYTHON_TAG = "<|python_tag|>"
Names = Collection[str]  # of the request's tools; where it is a mapping, to the schemas of their parameters


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written.

    `signature` are texts that a template of the family contains, all of them. `markers` must reach the parser even
    where they are special tokens. `parser` makes a parser for one answer, given the tools. `has_channels`: the
    markers divide messages, and the parser finds thoughts too.
    """

    name: str
    signature: tuple[str, ...]
    markers: tuple[str, ...]
    parser: Callable[[Names], Parser]
    has_channels: bool = False


def _anything(name: str) -> bool:
    """Where a marker says that this is a call, an unknown name is for the client to see."""
    return True


def _marked(opening: str | tuple[str, ...], *closings: str) -> Callable[[Names], Parser]:
    """Calls as JSON between markers."""
    return lambda names: MarkedParser(_anything, opening, *closings)


def _scanned(
    opening: str, *closings: str, make: Callable[[], PythonScanner | GemmaScanner]
) -> Callable[[Names], Parser]:
    """Calls that a scanner reads behind a marker."""
    return lambda names: MarkedParser(_anything, opening, *closings, make=lambda: ScannedReader(make()))


def _tagged(style: TagStyle, opening: str, closing: str) -> Callable[[Names], Parser]:
    """A call between tags, with tags around its arguments; of a tool, it may lack those around all of it."""

    def parser(names: Names) -> Parser:
        schemas = _schemas(names)
        bare = style.before_name
        return MarkedParser(
            names.__contains__,
            (opening, bare) if bare else opening,
            closing,
            make=lambda: ScannedReader(TagScanner(style, schemas)),
            bare=(lambda: ScannedReader(TagScanner(style, schemas, names.__contains__))) if bare else None,
        )

    return parser


def _tagged_section(style: TagStyle, section: tuple[str, str]) -> Callable[[Names], Parser]:
    """Calls as tags between two tags around all of them."""

    def parser(names: Names) -> Parser:
        schemas = _schemas(names)
        return SectionParser(
            _anything,
            section,
            style.before_name,
            make=lambda: ScannedReader(TagScanner(style, schemas)),
            keeps_opening=True,
        )

    return parser


def _named_section(
    section: tuple[str, str], opening: str, *closings: str, name_of: Callable[[str], str]
) -> Callable[[Names], Parser]:
    """A name and arguments in JSON for each call, between markers around all of them."""
    make = partial(NamedCallReader, _anything, name_of)
    return lambda names: SectionParser(_anything, section, opening, *closings, make=make)


def _schemas(names: Names) -> Mapping[str, Schema | None]:
    return names if isinstance(names, Mapping) else {}


SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"  # of a name, as DeepSeek writes it
ARGUMENT_BEGIN = "<|tool_call_argument_begin|>"  # as Kimi writes it
DEEPSEEK = ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>")
DEEPSEEK_CALL = ("<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>")
_DEEPSEEK_MARKERS = (*DEEPSEEK, *DEEPSEEK_CALL, SEPARATOR)
_deepseek = _named_section(
    DEEPSEEK, DEEPSEEK_CALL[0], f"```{DEEPSEEK_CALL[1]}", DEEPSEEK_CALL[1], name_of=deepseek_name
)
DSML_SECTION = (f"<{DSML_TAG}function_calls>", f"</{DSML_TAG}function_calls>")
KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
KIMI_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
MINIMAX_SECTION = ("<minimax:tool_call>", "</minimax:tool_call>")
_FUNCTION_GEMMA = ("<start_function_call>", "<end_function_call>")
_GEMMA4 = ("<|tool_call>", "<tool_call|>")
_LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
_GRANITE = ("<|tool_call|>", "<|/tool_call|>")
_CALL = ("<tool_call>", "</tool_call>")

# In the order in which templates are searched for them: a signature that others contain comes after them.
TOOL_FORMATS = (
    ToolFormat("harmony", ("<|channel|>", "<|message|>"), HARMONY_MARKERS, HarmonyParser, has_channels=True),
    ToolFormat(
        "deepseek_v32",
        (DSML_TAG,),
        (DSML_TAG, *DSML_SECTION),
        _tagged_section(DSML, DSML_SECTION),
    ),
    ToolFormat("deepseek_v3", (DEEPSEEK[0], "```json"), _DEEPSEEK_MARKERS, _deepseek),
    ToolFormat("deepseek_v31", (DEEPSEEK[0],), _DEEPSEEK_MARKERS, _deepseek),
    ToolFormat(
        "kimi_k2",
        (KIMI[0],),
        (*KIMI, *KIMI_CALL, ARGUMENT_BEGIN),
        _named_section(KIMI, *KIMI_CALL, name_of=kimi_name),
    ),
    ToolFormat("minimax_m2", (MINIMAX_SECTION[0],), MINIMAX_SECTION, _tagged_section(MINIMAX, MINIMAX_SECTION)),
    ToolFormat("qwen3_coder", ("<function=", "<parameter="), _CALL, _tagged(QWEN, *_CALL)),
    ToolFormat(
        "glm45",
        ("<arg_key>",),
        (*_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        _tagged(GLM, *_CALL),
    ),
    ToolFormat(
        "gemma4",
        (_GEMMA4[0],),
        (*_GEMMA4, '<|"|>'),
        _scanned(*_GEMMA4, make=lambda: GemmaScanner(('<|"|>',))),
    ),
    ToolFormat(
        "functiongemma",
        (_FUNCTION_GEMMA[0],),
        (*_FUNCTION_GEMMA, "<escape>"),
        _scanned(*_FUNCTION_GEMMA, make=lambda: GemmaScanner(("<escape>",))),
    ),
    ToolFormat("granite", (_GRANITE[0],), (*_GRANITE, *_CALL), _marked((_GRANITE[0], _CALL[0]), _GRANITE[1], _CALL[1])),
    ToolFormat("hermes", (_CALL[0],), _CALL, _marked(*_CALL)),
    ToolFormat(
        "mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), lambda names: MistralParser(_anything)
    ),
    ToolFormat(
        "lfm2", (_LFM2[0],), _LFM2, _scanned(f"{_LFM2[0]}[", _LFM2[1], make=lambda: PythonScanner(f"]{_LFM2[1]}"))
    ),
    ToolFormat(
        "olmo3",
        ("<function_calls>",),
        ("<function_calls>", "</function_calls>"),
        _scanned("<function_calls>", make=lambda: PythonScanner("</function_calls>")),
    ),
    ToolFormat("pythonic", ("<|python_start|>",), ("<|python_start|>", "<|python_end|>"), PythonicParser),
    ToolFormat(
        "llama3_json", (PYTHON_TAG,), (PYTHON_TAG,), lambda names: BareJsonParser(names.__contains__, PYTHON_TAG)
    ),
    ToolFormat("gemma_code", ("```tool_code",), (), _scanned("```tool_code", make=lambda: PythonScanner("```"))),
    ToolFormat("json", (), (), lambda names: BareJsonParser(names.__contains__)),
)
BY_NAME = {format.name: format for format in TOOL_FORMATS}


def call_or_answer(keys: CallKeys) -> ToolFormat:
    """Return the format of `tool_grammar.calls_or_answer`: what is not exactly a call is the answer."""
    make = partial(ExactCallReader, keys=keys)
    return ToolFormat("call_or_answer", (), (), lambda names: BareJsonParser(names.__contains__, make=make))


def detect_tool_format(template_source: str) -> ToolFormat:
    """Return the format a template writes earlier calls in, or bare JSON."""
    for format in TOOL_FORMATS:
        if format.signature and all(text in template_source for text in format.signature):
            return format
    return BY_NAME["json"]
