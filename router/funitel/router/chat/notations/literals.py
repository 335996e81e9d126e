"""Scan calls as Python writes them, `f(a=1, b="x")`, or as Gemma does, `call:f{a:1,b:<escape>x<escape>}`.

Values are literals: strings, numbers, truth values, nothing, lists and dictionaries. JSON's words are read as well.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from funitel.router.chat.notations.typed_values import arguments_text, json_text

MAX_DEPTH = 100  # of values within each other
SPACE = " \t\r\n"
MAX_HEAD = 256  # characters before the first bracket; more is no name

_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)")
_NAME = re.compile(r"[^\W\d][\w.\-]*")
_SPACES = re.compile(r"\s*")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|\n|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v", "\n": ""}
_ESCAPED |= {mark: mark for mark in "\\'\"/"}
_SURROGATES = re.compile("[\ud800-\udbff][\udc00-\udfff]|[\ud800-\udfff]")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


class _Literals:
    """One text of literals, read from a place on. Every method raises ValueError for what is none."""

    def __init__(self, text: str, quotes: Sequence[str] = ()) -> None:
        """`quotes`: what stands on both sides of a string that has no escapes."""
        self._text = text
        self._quotes = quotes
        self.place = 0

    def skip(self) -> None:
        found = _SPACES.match(self._text, self.place)
        self.place = found.end() if found else self.place

    @property
    def is_at_end(self) -> bool:
        return self.place >= len(self._text)

    def takes(self, text: str) -> bool:
        """Whether this comes next, after white space; it is skipped then."""
        self.skip()
        if not self._text.startswith(text, self.place):
            return False
        self.place += len(text)
        return True

    def expect(self, text: str) -> None:
        if not self.takes(text):
            raise ValueError(f"{text!r} is missing")

    def name(self) -> str:
        self.skip()
        found = _NAME.match(self._text, self.place)
        if found is None:
            raise ValueError("no name")
        self.place = found.end()
        return found[0]

    def items(self, end: str, take: Callable[[], None]) -> None:
        """Take items with commas between them, and maybe one behind the last, up to their end."""
        while not self.takes(end):
            take()
            if not self.takes(","):
                self.expect(end)
                return

    def value(self, depth: int = MAX_DEPTH) -> Any:
        self.skip()
        if not depth:
            raise ValueError("nested too deeply")
        for quote in self._quotes:
            if self.takes(quote):
                return self._up_to(quote)
        character = self._text[self.place : self.place + 1]
        if character in ("'", '"'):
            return self._string()
        if character in ("[", "("):
            self.place += 1
            values: list[Any] = []
            self.items(_CLOSERS[character], lambda: values.append(self.value(depth - 1)))
            return values
        if character == "{":
            self.place += 1
            return self._dictionary(depth - 1)
        return self._bare()

    def _dictionary(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def item() -> None:
            key = self.key()
            self.expect(":")
            found[key] = self.value(depth)

        self.items("}", item)
        return found

    def key(self) -> str:
        """A key: a string, or what stands before the colon as it is."""
        self.skip()
        quote = next((quote for quote in (*self._quotes, "'", '"') if self._text.startswith(quote, self.place)), None)
        if quote is not None:
            key = self.value()
            assert isinstance(key, str)
            return key
        end = self._text.find(":", self.place)
        if end < 0:
            raise ValueError("no key")
        key = self._text[self.place : end].strip()
        self.place = end
        return key

    def _up_to(self, end: str) -> str:
        stop = self._text.find(end, self.place)
        if stop < 0:
            raise ValueError("a string has no end")
        text, self.place = self._text[self.place : stop], stop + len(end)
        return text

    def _string(self) -> str:
        quote = self._text[self.place]
        if self._text.startswith(quote * 3, self.place):
            quote *= 3
        start = self.place = self.place + len(quote)
        while not self._text.startswith(quote, self.place):
            if self.is_at_end:
                raise ValueError("a string has no end")
            self.place += 2 if self._text[self.place] == "\\" else 1
        text = self._text[start : self.place]
        self.place += len(quote)
        return _SURROGATES.sub(_whole, _ESCAPE.sub(_unescaped, text))

    def _bare(self) -> Any:
        word = _NAME.match(self._text, self.place)
        if word is not None and word[0] in _WORDS:
            self.place = word.end()
            return _WORDS[word[0]]
        number = _NUMBER.match(self._text, self.place)
        if number is None:
            raise ValueError("no literal")
        self.place = number.end()
        digits = number[0].replace("_", "")
        return int(digits) if re.fullmatch(r"[+-]?\d+", digits) else float(digits)


def _unescaped(found: re.Match[str]) -> str:
    mark = found[1]
    if mark[0] in "xuU" and len(mark) > 1:
        code = int(mark[1:], 16)
        return chr(code) if code < 0x110000 else "\N{REPLACEMENT CHARACTER}"
    return _ESCAPED.get(mark, found[0])


def _whole(found: re.Match[str]) -> str:
    """The character that two halves are, as JSON spells it; a half alone is none."""
    return json.loads(f'"\\u{ord(found[0][0]):04x}\\u{ord(found[0][1]):04x}"') if len(found[0]) == 2 else "\ufffd"


def python_calls(text: str) -> list[tuple[str, str]]:
    """Return the calls of a text: names, and arguments as JSON text; a comma or a line ends each.

    Raises:
        ValueError: it is something else.
    """
    literals = _Literals(text)
    calls = []
    literals.skip()
    while not literals.is_at_end:
        name, arguments = literals.name(), dict[str, str]()

        def argument(arguments: dict[str, str] = arguments) -> None:
            key = literals.name()
            literals.expect("=")
            arguments[key] = json_text(literals.value())

        literals.expect("(")
        literals.items(")", argument)
        calls.append((name, arguments_text(arguments)))
        literals.takes(",") or literals.takes(";")
        literals.skip()
    return calls


def gemma_call(name: str, text: str, quotes: Sequence[str]) -> tuple[str, str]:
    """Return a call with its arguments as JSON text; raises ValueError where the text is no dictionary."""
    literals = _Literals(text, quotes)
    arguments = literals.value()
    if not isinstance(arguments, dict):
        raise ValueError("the arguments have no names")
    return name, json_text(arguments)


class _Brackets:
    """Follows the brackets and strings of a text, character by character."""

    def __init__(self, quotes: Sequence[str]) -> None:
        self.depth: list[str] = []  # what is to close each bracket that is open
        self._quotes = quotes
        self._longest = max(map(len, quotes))
        self._quote = ""
        self._recent = ""  # the latest characters, of a string or outside
        self._is_escaped = False
        self.is_broken = False

    @property
    def in_string(self) -> bool:
        return bool(self._quote)

    def feed(self, character: str) -> None:
        self._recent = (self._recent + character)[-self._longest :]
        if self._quote:
            self._in_string(character)
            return
        quote = next((quote for quote in self._quotes if self._recent.endswith(quote)), None)
        if quote is not None and any(self._may_become(other) for other in self._quotes if len(other) > len(quote)):
            return
        if quote is not None:
            self._quote, self._recent = quote, ""
        elif character in _CLOSERS:
            self.depth.append(_CLOSERS[character])
        elif character in ")]}":
            self.is_broken = not self.depth or self.depth.pop() != character

    def _may_become(self, quote: str) -> bool:
        """Whether the latest characters begin a quote, and more than one of them."""
        return any(self._recent.endswith(quote[:length]) for length in range(2, len(quote)))

    def _in_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped, self._recent = False, ""
        elif character == "\\" and len(self._quote) == 1:
            self._is_escaped = True
        elif self._recent.endswith(self._quote):
            self._quote, self._recent = "", ""


class PythonScanner:
    """Takes calls up to a text that ends them; `calls` has them, once done."""

    def __init__(self, end: str, *, accepts: Callable[[str], bool] | None = None) -> None:
        """`accepts`: whether a name is that of a tool; with any other this is no call."""
        self.is_done = False
        self.is_broken = False
        self.calls: list[tuple[str, str]] = []
        self._end = end
        self._accepts = accepts
        self._text: list[str] = []
        self._head: list[str] = []  # of the call that begins
        self._tail = ""  # the beginning of what ends the calls
        self._brackets = _Brackets(("'", '"'))

    def feed(self, character: str) -> None:
        """Take the next character; not called any more once done or broken."""
        brackets = self._brackets
        if self._tail or (not brackets.depth and not brackets.in_string and character == self._end[0]):
            self._tail += character
            if self._tail == self._end:
                self._finish()
            elif not self._end.startswith(self._tail):
                self.is_broken = True
            return
        self._text.append(character)
        if not brackets.depth and not self._may_be_head(character):
            self.is_broken = True
            return
        brackets.feed(character)
        self.is_broken = brackets.is_broken

    def _may_be_head(self, character: str) -> bool:
        """Whether a character may stand between calls, in the name of one, or behind it."""
        if character == "(":
            name = "".join(self._head).strip(SPACE + ",;")
            self._head = []
            return bool(_NAME.fullmatch(name)) and (self._accepts is None or self._accepts(name))
        self._head.append(character)
        return len(self._head) <= MAX_HEAD and (character.isalnum() or character in "_.-,;" + SPACE)

    def _finish(self) -> None:
        try:
            self.calls = python_calls("".join(self._text))
        except ValueError:
            self.calls = []
        self.is_done, self.is_broken = bool(self.calls), not self.calls


class GemmaScanner:
    """Takes one call, `call:NAME{KEY:VALUE,...}`; `calls` has it, once done."""

    HEAD = "call:"

    def __init__(self, quotes: Sequence[str]) -> None:
        """`quotes`: what stands on both sides of a string."""
        self.is_done = False
        self.is_broken = False
        self.calls: list[tuple[str, str]] = []
        self._quotes = (*quotes, '"')
        self._head: list[str] = []
        self._text: list[str] = []
        self._brackets = _Brackets(self._quotes)

    def feed(self, character: str) -> None:
        """Take the next character; not called any more once done or broken."""
        if not self._text and character != "{":
            self._head.append(character)
            self.is_broken = len(self._head) > MAX_HEAD or not self._may_be_head()
            return
        self._text.append(character)
        self._brackets.feed(character)
        self.is_broken = self._brackets.is_broken
        if not self._brackets.depth and not self._brackets.in_string:
            self._finish()

    def _may_be_head(self) -> bool:
        head = "".join(self._head).lstrip()
        return head.startswith(self.HEAD) or self.HEAD.startswith(head)

    def _finish(self) -> None:
        name = "".join(self._head).strip().removeprefix(self.HEAD).strip()
        try:
            self.calls = [gemma_call(name, "".join(self._text), self._quotes[:-1])]
        except ValueError:
            self.calls = []
        self.is_done = bool(self.calls) and bool(name)
        self.is_broken = not self.is_done
