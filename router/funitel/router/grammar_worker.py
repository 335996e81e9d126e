"""The process that compiles grammars for `grammar.GrammarChecker`: it may be killed at any moment.

Reads frames from stdin, each a length in four bytes and as many bytes of JSON, and answers each with a frame: what is
wrong with the grammar, or null. The first frame it writes says whether it can work at all. Ends with its stdin.
"""

import json
import resource
import sys
from typing import Any, BinaryIO

from llguidance import LLTokenizer

from funitel.proto.errors import InvalidRequest
from funitel.proto.grammar import compile_grammar
from funitel.proto.step import GrammarType

# A native schema describes an object; one of these says how, or where it is said.
_OBJECT_KEYWORDS = ("properties", "$ref", "allOf", "anyOf", "oneOf")


def serve(tokenizer_path: str, memory_limit: int, questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the questions end."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    try:
        tokenizer = LLTokenizer(tokenizer_path, eos_token=0)  # which token ends a text does not matter here
    except ValueError as error:
        _write(answers, f"the model's tokenizer cannot be used: {error}")
        return
    _write(answers, None)
    while head := questions.read(4):
        question = json.loads(questions.read(int.from_bytes(head, "big")))
        _write(answers, _fault(question, tokenizer))


def _write(answers: BinaryIO, answer: str | None) -> None:
    payload = json.dumps(answer).encode()
    answers.write(len(payload).to_bytes(4, "big") + payload)
    answers.flush()


def _fault(question: dict[str, Any], tokenizer: LLTokenizer) -> str | None:
    """What is wrong with a grammar, None if nothing is."""
    try:
        compile_grammar(GrammarType(question["kind"]), question["text"], tokenizer)
        if question["is_native"] and not _says_what_the_object_is(question["text"]):
            return "grammar is not valid: the schema must have `properties`"
    except InvalidRequest as error:
        return error.message
    except MemoryError:
        return "grammar is not valid: it takes too much memory to compile"
    return None


def _says_what_the_object_is(text: str) -> bool:
    schema = json.loads(text)
    return isinstance(schema, dict) and any(keyword in schema for keyword in _OBJECT_KEYWORDS)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.stdin.buffer, sys.stdout.buffer)
