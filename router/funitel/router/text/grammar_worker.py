"""Compile grammars in a sandbox process for `grammar.GrammarChecker`: the setup is a tokenizer's file.

An answer is what is wrong with the grammar, or null.
"""

import json
from functools import partial
from typing import Any

from llguidance import LLTokenizer

from funitel.proto.errors import InvalidRequest
from funitel.proto.grammar.compiler import compile_grammar
from funitel.proto.step import GrammarType
from funitel.router.sandbox.worker import Answer, serve

# A native schema describes an object; one of these says how, or where it is said.
_OBJECT_KEYWORDS = ("properties", "$ref", "allOf", "anyOf", "oneOf")


def prepare(tokenizer_path: str) -> Answer:
    """Read the tokenizer; raises InvalidRequest where grammars cannot be kept with it."""
    try:
        tokenizer = LLTokenizer(tokenizer_path, eos_token=0)  # which token ends a text does not matter here
    except ValueError as error:
        raise InvalidRequest(f"the model's tokenizer cannot be used: {error}") from error
    return partial(_fault, tokenizer)


def _fault(tokenizer: LLTokenizer, question: dict[str, Any]) -> str | None:
    """What is wrong with a grammar, None if nothing is."""
    try:
        compile_grammar(GrammarType(question["kind"]), question["text"], tokenizer)
        if question["is_native"] and not _says_what_the_object_is(question["text"]):
            return "grammar is not valid: the schema must have `properties`"
    except InvalidRequest as error:
        return error.message
    return None


def _says_what_the_object_is(text: str) -> bool:
    schema = json.loads(text)
    return isinstance(schema, dict) and any(keyword in schema for keyword in _OBJECT_KEYWORDS)


if __name__ == "__main__":
    serve(prepare)
