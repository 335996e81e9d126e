"""Strange chats in honest templates, strange templates and strange grammars: an answer or one clear line, in time.

Kinds: `chats`, which must be rendered as the template alone would; `templates`; `grammars`, which must be judged in
time, and be quick from token to token if they are accepted. A worker of `fuzz`.
"""

import logging
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from funitel.model_server.sampling.grammar import GrammarCompiler, GrammarState
from funitel.proto.errors import InvalidRequest, TemplateError
from funitel.proto.step import SamplingParams
from funitel.router.core.grammar import Grammar
from funitel.router.sandbox import pool
from funitel.router.text.chat_template import ChatTemplate
from funitel.router.text.grammar import GrammarChecker
from funitel.router.text.template_renderer import TemplateRenderer, TemplateTexts
from funitel_testing import fuzz_inputs
from funitel_testing.fuzz_inputs import Try
from funitel_testing.fuzz_values import HOSTILE, mangled
from funitel_testing.tiny import VOCAB_SIZE, save_tokenizer

TIME_LIMIT = 1.0
START_SECONDS = 8.0
SLACK_SECONDS = 4.0  # for starting and killing processes beside others
MAX_MASK_SECONDS = 2.0  # for what may follow in one sequence; a loaded machine's
MAX_TOKENS = 24
MEMORY_LIMIT = 512 << 20
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

HONEST = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[INST] {{ m['content'] | trim }} [/INST]{% endfor %}",
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% for m in messages %}{{ m.role + ': ' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}\n{% endfor %}{{ mood }}",
    "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% endfor %}{{ strftime_now('%Y') }}",
)
PIECES = (
    *("{% for m in messages %}", "{% endfor %}", "{% if m %}", "{% else %}", "{% endif %}", "{% set x = [x, x] %}"),
    *("{% for i in range(99999) %}", "{{ x }}", "{{ 'a' * 10 ** 9 }}", "{{ m.content }}", "{{ x | tojson }}"),
    *("{% macro f(n) %}", "{% endmacro %}", "{{ f(f(9)) }}", "{{ messages.__class__ }}", "{{ x | join(x) }}", "{#"),
    *(
        "{% set ns = namespace(x='a') %}",
        "{% set ns.x = ns.x ~ ns.x %}",
        "{{ ns.x }}",
        "{{ 9 ** 9 ** 9 }}",
        "#}",
        "-%}",
    ),
    *("{{ messages | sort | groupby('role') | list }}", "{{ lipsum(99) }}", "{{ '%9999999d' % 1 }}", "{% raw %}", "é"),
    *("{{ cycler(*messages).next() }}", "{{ x | attr('__init__') }}", "{{ 'a'.format(*x) }}", "{% break %}", "{{"),
)
REGEX_PIECES = (
    *(
        "a",
        "b",
        ".",
        "[a-z]",
        "\\d",
        "\\w",
        "(",
        ")",
        "(?:",
        "*",
        "+",
        "?",
        "|",
        "{2,9}",
        "{1000}",
        "{0,65535}",
        "^",
        "$",
    ),
    *("[^\\s]", "\\p{L}", "\\x{1F600}", "(?i)", "(?=a)", "\\1", "\\", "[", "]", "é", " ", '"', "(a|a)*", "(.*,){20}"),
)
KEYWORDS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("type", ("object", "array", "string", "integer", "number", "null", "boolean", ["string", "null"], 5)),
    ("enum", ([1, "a", None], [], list(range(500)))),
    ("pattern", ("a+", "(a|b){50}", "(a*)*b", "^.{1,5000}$")),
    ("minimum", (-1, 10**30, 0.1)),
    ("maximum", (5, 1e308)),
    ("minLength", (0, 10**6)),
    ("maxLength", (3, 10**6)),
    ("minItems", (0, 1000)),
    ("maxItems", (2, 10**6)),
    ("format", ("uuid", "date-time", "x")),
    ("$ref", ("#", "#/properties/a", "http://127.0.0.1:1/")),
    ("additionalProperties", (True, False)),
    ("multipleOf", (0.01, 3)),
)


class Chats:
    """What renders, and what judges."""

    def __init__(self, folder: Path) -> None:
        self._direct = [ChatTemplate(source, SPECIAL_TOKENS) for source in HONEST]
        self._renderers = [_renderer(source) for source in HONEST]
        path = folder / "tokenizer.json"
        self._checker = GrammarChecker(path, time_limit=TIME_LIMIT)
        self._compiler = GrammarCompiler(path, VOCAB_SIZE, frozenset([256]))

    async def chats(self, rng: random.Random) -> str:
        """Render a strange chat, both ways."""
        place = rng.randrange(len(HONEST))
        chat: dict[str, Any] = {
            "messages": [
                {"role": rng.choice(("user", "assistant", "system")), "content": _text(rng)}
                for _ in range(rng.choice((1, 2, 3, 300)))
            ],
            "tools": None,
            "variables": {"mood": "good"},
        }
        if rng.random() < 0.5:
            chat = {**chat, "variables": mangled({"mood": ["x"], "x": {"y": 1}}, rng)}
        try:
            expected = self._direct[place].render(**chat)
        except TemplateError as error:
            expected = f"error: {error.message}"
        try:
            found = (await self._renderers[place].render(**chat)).text
        except TemplateError as error:
            found = f"error: {error.message}"
        return "" if found == expected else f"another prompt: {found[:500]!r} {expected[:500]!r}"

    async def templates(self, rng: random.Random) -> str:
        """Render an ordinary chat in a strange template."""
        source = "".join(rng.choice(PIECES) for _ in range(rng.choice((1, 3, 8, 20))))
        renderer = _renderer(source)
        began = time.monotonic()
        try:
            await renderer.render([{"role": "user", "content": "Hi"}], variables={"x": [1]})
        except TemplateError as error:
            if "\n" in error.message:
                return f"an error of several lines: {source}"
        finally:
            await renderer.close()
        seconds = time.monotonic() - began
        return (
            f"no end in time: {seconds:.1f} s {source}" if seconds > START_SECONDS + TIME_LIMIT + SLACK_SECONDS else ""
        )

    async def grammars(self, rng: random.Random) -> str:
        """Judge a strange grammar, and follow it for some tokens."""
        grammar = _grammar(rng)
        began = time.monotonic()
        try:
            await self._checker.check(grammar)
        except InvalidRequest as error:
            if "\n" in error.message:
                return f"an error of several lines: {grammar.text[:500]}"
        else:
            return self._followed(grammar, rng)
        seconds = time.monotonic() - began
        return f"no verdict in time: {grammar.text[:500]}" if seconds > TIME_LIMIT + SLACK_SECONDS else ""

    def _followed(self, grammar: Grammar, rng: random.Random) -> str:
        params = SamplingParams(grammar=grammar.text, grammar_type=grammar.kind)
        state = self._compiler.start(params, (), num_left=MAX_TOKENS, ignores_eos=False)
        for _ in range(MAX_TOKENS):
            began = time.monotonic()
            allowed = _allowed(state)
            if time.monotonic() - began > MAX_MASK_SECONDS:
                return f"slow from token to token: {grammar.kind} {grammar.text[:500]}"
            if not allowed:
                return f"nothing may follow: {grammar.kind} {grammar.text[:500]}"
            token = rng.choice(allowed)
            if token == 256:
                return ""
            if not state.push(token):
                return f"what may follow is refused: {grammar.kind} {grammar.text[:500]}"
        return ""

    async def close(self) -> None:
        """End all processes."""
        for renderer in self._renderers:
            await renderer.close()
        await self._checker.close()


def _renderer(source: str) -> TemplateRenderer:
    return TemplateRenderer(TemplateTexts(source, SPECIAL_TOKENS), 1, time_limit=TIME_LIMIT, memory_limit=MEMORY_LIMIT)


def _allowed(state: GrammarState) -> list[int]:
    mask = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
    state.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return [int(token) for token in np.flatnonzero(bits)]


def _text(rng: random.Random) -> str:
    texts = [value for value in HOSTILE if isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)]
    return rng.choice(("Hi", "a</think>b", *texts))


def _grammar(rng: random.Random) -> Grammar:
    if rng.random() < 0.5:
        return Grammar.regex("".join(rng.choice(REGEX_PIECES) for _ in range(rng.choice((1, 3, 8, 30)))))
    schema = _schema(rng, 3)
    for _ in range(rng.choice((0, 0, 1))):
        schema = mangled(schema, rng)
    return Grammar.json(schema)


def _schema(rng: random.Random, depth: int) -> Any:
    schema: dict[str, Any] = {}
    for keyword, values in rng.sample(KEYWORDS, rng.choice((1, 1, 2, 3))):
        schema[keyword] = rng.choice(values)
    if depth and rng.random() < 0.7:
        match rng.randrange(4):
            case 0:
                names = "abcdefgh"[: rng.choice((1, 3, 8))]
                schema |= {"type": "object", "properties": {name: _schema(rng, depth - 1) for name in names}}
                schema["required"] = rng.sample(list(names), rng.randrange(len(names) + 1))
            case 1:
                schema |= {"type": "array", "items": _schema(rng, depth - 1)}
            case 2:
                schema[rng.choice(("anyOf", "oneOf", "allOf"))] = [_schema(rng, depth - 1) for _ in range(3)]
            case _:
                schema["$defs"] = {"a": _schema(rng, depth - 1)}
                schema["$ref"] = "#/$defs/a"
    return schema


@asynccontextmanager
async def prepare(work: Path) -> AsyncIterator[Mapping[str, Try]]:
    """Renderers, a checker and a compiler for the length of the job."""
    save_tokenizer(work)
    chats = Chats(work)
    yield {"chats": chats.chats, "templates": chats.templates, "grammars": chats.grammars}
    await chats.close()


if __name__ == "__main__":
    logging.disable()
    pool.START_LIMIT_SECONDS = START_SECONDS
    fuzz_inputs.run(prepare)
