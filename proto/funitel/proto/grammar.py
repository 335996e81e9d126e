"""Translate clients' grammars (JSON schema, regular expression) for llguidance, and compile them.

The router checks the grammars that shards compile. JSON has TGI's form: one line, at most one space where JSON allows
any. JSON Schema keywords that cannot be enforced token by token (`uniqueItems`, `not`, `if` and similar) are refused by
name, never ignored; equivalent forms are rewritten to keywords that llguidance knows.
"""

import json
import re
from collections.abc import Callable
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import GrammarType

MAX_GRAMMAR_BYTES = 256 * 1024
# llguidance itself bounds the work per step. A lexer state takes about 2 kB.
LIMITS: Final = LLParserLimits(max_lexer_states=16_000, verbose_errors=False)
WHITESPACE = "[ ]?"
# Formats of llguidance; an unknown format does not constrain the value, as in JSON Schema.
FORMATS = frozenset(
    ("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)

_SCHEMA_KEYWORDS = (
    "items",
    "additionalItems",
    "additionalProperties",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_DESCRIPTIONS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
# Keywords beside which a property may be evaluated elsewhere.
_EVALUATORS = frozenset(("allOf", "anyOf", "oneOf", "if", "$ref", "$dynamicRef", "dependentSchemas"))
MAX_REFERENCES = 8  # chained, to the names of a map

_LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def compile_grammar(kind: GrammarType, text: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile a grammar over a tokenizer, and compute its first mask, so that lazy costs occur here.

    Raises:
        InvalidRequest: the grammar is malformed, cannot be enforced, allows nothing, or exceeds a limit.
    """
    matcher = LLMatcher(tokenizer, engine_grammar(kind, text), log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise InvalidRequest(f"grammar is not valid: {_reason(matcher.get_error())}", "grammar")
    trial = matcher.deep_copy()
    allowed = trial.compute_bitmask()
    if trial.is_error():
        raise InvalidRequest(f"grammar is not valid: {_reason(trial.get_error())}", "grammar")
    if not any(allowed):
        raise InvalidRequest("grammar is not valid: no token can begin what it allows", "grammar")
    return matcher


def engine_grammar(kind: GrammarType, text: str) -> str:
    """Write a grammar in llguidance's form.

    Raises:
        InvalidRequest: its kind is unknown, it is too long, or a schema is not JSON.
    """
    size = len(text.encode(errors="replace"))
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"grammar must have at most {MAX_GRAMMAR_BYTES} bytes, given {size}", "grammar")
    try:
        return _engine_grammar(kind, text)
    except ValueError as error:  # of llguidance, such as invalid Unicode
        raise InvalidRequest(f"grammar is not valid: {_reason(str(error))}", "grammar") from error


def _engine_grammar(kind: GrammarType, text: str) -> str:
    if kind is GrammarType.REGEX:
        # As in ECMAScript and TGI's shards, \d, \w and \s mean ASCII.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, 'dws')}/")
    if kind is GrammarType.JSON:
        options: Any = {"whitespace_pattern": WHITESPACE}
        return LLMatcher.grammar_from_json_schema(json.dumps(_schema(text)), overrides=options)
    raise InvalidRequest("grammar needs a type: a JSON schema or a regular expression", "grammar")


def _schema(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
        schema = _rewritten(given, given)
    except ValueError as error:
        raise InvalidRequest(f"grammar is not valid: the schema is no JSON: {error}", "grammar") from error
    except RecursionError:
        raise InvalidRequest("grammar is not valid: the schema is nested too deeply", "grammar") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequest("grammar is not valid: the schema must be an object", "grammar")
    return schema


def _rewritten(schema: Any, root: Any) -> Any:
    """An equivalent schema without annotations and keywords that llguidance would refuse or misread.

    `root` is the complete schema, from which references are resolved.
    """
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if not _is_annotation(key, value)}
    kept = _with_named_properties(_with_evaluated_properties(kept), root)
    for key in _SCHEMA_KEYWORDS:
        if isinstance(kept.get(key), dict):
            kept[key] = _rewritten(kept[key], root)
    for key in _LIST_KEYWORDS:
        if isinstance(kept.get(key), list):
            kept[key] = [_rewritten(part, root) for part in kept[key]]
    for key in _MAP_KEYWORDS:
        if isinstance(kept.get(key), dict):
            kept[key] = {name: _rewritten(part, root) for name, part in kept[key].items()}
    return kept


def _with_evaluated_properties(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace unevaluatedProperties by additionalProperties where nothing else evaluates properties."""
    if "unevaluatedProperties" not in schema or _EVALUATORS & schema.keys():
        return schema
    rest = {key: value for key, value in schema.items() if key != "unevaluatedProperties"}
    return {"additionalProperties": schema["unevaluatedProperties"]} | rest


def _with_named_properties(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """Rewrite `propertyNames` with a list or pattern, as pydantic writes it, to keywords that llguidance supports."""
    if "propertyNames" not in schema or {"properties", "patternProperties"} & schema.keys():
        return schema
    names = _resolved(schema["propertyNames"], root)
    values = schema.get("additionalProperties", True)
    rest = {key: value for key, value in schema.items() if key not in ("propertyNames", "additionalProperties")}
    match {key: value for key, value in names.items() if key not in _DESCRIPTIONS}:
        case {"const": str(name), **others} if not others.keys() - {"type"}:
            return rest | {"properties": {name: values}, "additionalProperties": False}
        case {"enum": list(listed), **others} if not others.keys() - {"type"}:
            named = {name: values for name in listed if isinstance(name, str)}
            return rest | {"properties": named, "additionalProperties": False}
        case {"pattern": str(pattern), **others} if not others.keys() - {"type"}:
            return rest | {"patternProperties": {pattern: values}, "additionalProperties": False}
        case {"type": "string", **others} if not others:
            return rest | {"additionalProperties": values}
    return schema


def _resolved(schema: Any, root: Any) -> dict[str, Any]:
    """The target of a schema that is only a `$ref` within the root; an empty schema if there is none."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/") or schema.keys() - {"$ref"} - _DESCRIPTIONS:
            return schema
        schema = root
        for step in reference[2:].split("/"):
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return {}


_IS_TRIVIAL: dict[str, Callable[[Any], bool]] = {
    "x-guidance": lambda value: True,  # options of llguidance are not for clients
    "format": lambda value: isinstance(value, str) and value not in FORMATS,
    "uniqueItems": lambda value: value is False,
    "minProperties": lambda value: value == 0 and value is not False,
}


def _is_annotation(key: str, value: Any) -> bool:
    return key in _IS_TRIVIAL and _IS_TRIVIAL[key](value)


def _reason(error: str) -> str:
    """The reason of llguidance in one line, without positions in its own notation."""
    if unkept := re.match(r"Unimplemented keys: \[(.*)\]$", error):
        return f"the schema has keywords that cannot be kept: {unkept[1]}"
    if error.startswith("oneOf constraints are not supported"):
        return "the schema has `oneOf` with cases that overlap: use `anyOf`"
    lines = [line.strip() for line in error.splitlines()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (reasons[-1] if reasons else next(filter(None, lines), "unknown"))[:200]
