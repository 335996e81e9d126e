"""Translate clients' grammars (JSON schema, regular expression) for llguidance, and compile them.

The router checks the grammars that shards compile. JSON has TGI's form: one line, at most one space where JSON allows
any. JSON Schema keywords that cannot be enforced token by token (`uniqueItems`, `not`, `if` and similar) are refused by
name, never ignored; equivalent forms are rewritten to keywords that llguidance knows.
"""

import json
import re
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from funitel.proto.errors import InvalidRequest, translating
from funitel.proto.grammar.json_schema import UNSUPPORTED, mixes_keys, rewritten
from funitel.proto.step import GrammarType

MAX_GRAMMAR_BYTES = 256 * 1024
# llguidance itself bounds the work per step. A lexer state takes about 2 kB.
LIMITS: Final = LLParserLimits(max_lexer_states=16_000, verbose_errors=False)
WHITESPACE = "[ ]?"
PLAIN_ESCAPES = 'nrbtf\\"'  # without \u, by which a declared key could be written once more


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
        schema = _schema(text)
        options: Any = {"whitespace_pattern": WHITESPACE}
        if mixes_keys(schema):
            options["json_allowed_escapes"] = PLAIN_ESCAPES
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    if kind is GrammarType.LARK:
        with translating(lambda error: InvalidRequest(f"grammar is not valid: {_reason(str(error))}", "grammar")):
            return LLMatcher.grammar_from_lark(any_to_lark(text))  # which raises bare Exception
    raise InvalidRequest("grammar needs a type: a JSON schema or a regular expression", "grammar")


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = rewritten(json.loads(text))
    except ValueError as error:
        raise InvalidRequest(f"grammar is not valid: the schema is no JSON: {error}", "grammar") from error
    except RecursionError:
        raise InvalidRequest("grammar is not valid: the schema is nested too deeply", "grammar") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequest("grammar is not valid: the schema must be an object", "grammar")
    return schema


def _reason(error: str) -> str:
    """The reason of llguidance in one line, without positions in its own notation."""
    if unkept := re.match(r"Unimplemented keys: \[(.*)\]$", error):
        return UNSUPPORTED.format(unkept[1])
    lines = [line.strip() for line in error.splitlines()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (reasons[-1] if reasons else next(filter(None, lines), "unknown"))[:200]
