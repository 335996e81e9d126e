"""Write grammars in llguidance's form of Lark, piece by piece: texts, JSON by a schema, text up to an end.

A marker may be a special token of the model or ordinary text; grammars name the former by their numbers.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from funitel.proto.grammar.json_schema import mixes_keys, rewritten

ANY = "(?s:.*)"
_PLAIN_ESCAPES = 'nrbtf\\"'
_JSON_SPACE = "[ ]?"


@dataclass(frozen=True, slots=True)
class Item:
    """One of several things with separators between them, and whether it must be there."""

    rule: str
    is_required: bool


class Lark:
    """Collects rules; methods return what stands for a piece in the body of another rule."""

    def __init__(self, special: Mapping[str, int]) -> None:
        """`special`: ids of the special tokens that markers are."""
        self._special = special
        texts = sorted(special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._rules: list[str] = []

    def grammar(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join(("%llguidance {}", f"start: {start}", *self._rules, ""))

    def rule(self, *parts: str, options: str = "") -> str:
        """Name what is made of some parts, one after the other."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {' '.join(filter(None, parts))}")
        return name

    def any_of(self, cases: Iterable[str]) -> str:
        """Name a choice."""
        return self.rule(" | ".join(cases))

    def text(self, text: str) -> str:
        """Exactly this text."""
        return " ".join(self._token(part) if part in self._special else _quoted(part) for part in self._parts(text))

    def free(self) -> str:
        """Any text without special tokens."""
        return self.rule(f"/{ANY}/")

    def up_to(self, end: str, *, body: str = ANY, before: str = "") -> str:
        """Text of a pattern up to an end, be that a token or spelled in letters; `before`: what is just before it."""
        is_free = body == ANY and not before  # the first end found ends it
        without = "" if is_free else end
        spelled = self.rule(self._pattern_of(body, before + end, without), options="[lazy]")
        parts = self._parts(end)
        number = next((number for number, part in enumerate(parts) if part in self._special), None)
        if number is None:
            return spelled
        text = self._pattern_of(body, before + "".join(parts[:number]), without)
        return self.any_of((self.rule(text, self.text("".join(parts[number:]))), spelled))

    def _pattern_of(self, body: str, tail: str, without: str) -> str:
        """A pattern and a text behind it, in which another text comes at the end at most."""
        pattern = f"/{body}{_escaped(tail)}/"
        if not without:
            return pattern
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {pattern} & ~/{ANY}{_escaped(without)}(?s:.+)/")
        return name

    def limited(self, end: str, max_tokens: int) -> str:
        """Text of at most so many tokens, and this end.

        An end that is no token comes twice where it came by itself: a grammar cannot tell whether it did.
        """
        options = f"max_tokens={max_tokens}"
        if end in self._special:
            return self.rule(self.rule(f"/{ANY}/", options=f"[{options}]"), self.text(end))
        return self.rule(self.rule(f"/{ANY}{_escaped(end)}/", options=f"[lazy, {options}]"), self.text(end))

    def json(self, schema: Any) -> str:
        """JSON by a schema.

        Raises:
            InvalidRequest: the schema cannot be kept.
        """
        written = rewritten(schema)
        guidance: dict[str, Any] = {"whitespace_pattern": _JSON_SPACE}
        if written is True:
            written = {}
        if mixes_keys(written):
            guidance["json_allowed_escapes"] = _PLAIN_ESCAPES
        return f"%json {json.dumps(written | {'x-guidance': guidance})}"

    def listed(self, items: Sequence[Item], separator: str) -> str:
        """Items in their order, those that must be there and maybe others, with separators between them."""
        if not items:
            return ""
        tails = [""] * len(items)  # what may follow each item
        following = ""
        for place in range(len(items) - 1, -1, -1):
            tails[place] = following
            item = items[place]
            part = self.rule(separator, item.rule)
            following = self.rule(part if item.is_required else f"{part}?", following)
        cases = []
        for place, item in enumerate(items):
            cases.append(self.rule(item.rule, tails[place]))
            if item.is_required:
                return self.any_of(cases)
        return f"{self.any_of(cases)}?"

    def repeated(self, one: str, separator: str, most: int) -> str:
        """One or more of a rule."""
        if most == 1:
            return one
        return self.rule(one, f"({separator} {one}){{0,{most - 1}}}")

    def _parts(self, text: str) -> list[str]:
        """A text divided into special tokens and what is between them."""
        parts, place = [], 0
        for found in self._pattern.finditer(text):
            parts += [text[place : found.start()], found[0]]
            place = found.end()
        return list(filter(None, (*parts, text[place:])))

    def _token(self, text: str) -> str:
        return f"<[{self._special[text]}]>"


def _quoted(text: str) -> str:
    return json.dumps(text)


def _escaped(text: str) -> str:
    """A pattern of just this text: what is no ASCII letter or digit is written by its number."""
    return re.sub(r"[^0-9A-Za-z]", lambda found: f"\\x{{{ord(found[0]):x}}}", text)
