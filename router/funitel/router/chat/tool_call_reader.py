"""Read tool calls written as JSON, character by character, so that arguments stream as they are generated.

Only the structure is followed, not every rule of JSON: what a model wrote as arguments is passed on as it wrote it.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from funitel.router.chat.output_parser import CallArguments, CallStart, Piece

SPACE = " \t\r\n"
NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")
WRAPPER_KEY = "function"  # `{"type": "function", "function": {"name": ...}}`
NO_ARGUMENTS = "{}"

_SURROGATE = re.compile("[\ud800-\udfff]")

Accepts = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class CallKeys:
    """The two keys of a call, where it has just these."""

    name: str = NAME_KEYS[0]
    arguments: str = ARGUMENT_KEYS[0]


class Reader(Protocol):
    """Takes characters until it is done or broken; pieces come out as they are known."""

    is_done: bool
    is_broken: bool

    def feed(self, character: str) -> None:
        """Take the next character; not called any more once done or broken."""

    def take(self) -> list[Piece]:
        """Return what is known since the last time."""


class _Value:
    """One JSON value as it comes, and where it ends."""

    def __init__(self) -> None:
        self.text = ""
        self.is_done = False
        self.is_broken = False
        self._closers: list[str] = []
        self._in_string = False
        self._is_escaped = False

    def ends_before(self, character: str) -> bool:
        """Whether it is a number or a word that this character does not belong to."""
        return self.text[:1] not in ('"', "{", "[", "") and character in SPACE + ",}]"

    def feed(self, character: str) -> None:
        self.text += character
        if self._in_string:
            self._feed_string(character)
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._closers.append("}" if character == "{" else "]")
        elif character in "}]":
            if not self._closers or self._closers.pop() != character:
                self.is_broken = True
            self.is_done = not self._closers

    def _feed_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._in_string = False
            self.is_done = not self._closers


class CallReader:
    """`{"name": NAME, "arguments": {...}}` with its keys in any order, or wrapped as OpenAI writes it."""

    def __init__(self, accepts: Accepts) -> None:
        """`accepts` says whether a name is that of a tool; with any other this is no call."""
        self.is_done = False
        self.is_broken = False
        self._accepts = accepts
        self._state: Callable[[str], None] = self._open
        self._key = ""
        self._value = _Value()
        self._depth = 0
        self._name: str | None = None
        self._kept = ""  # arguments that came before the name
        self._has_arguments = False
        self._out: list[Piece] = []

    def feed(self, character: str) -> None:
        """Take the next character."""
        self._state(character)

    def take(self) -> list[Piece]:
        """Return what is known since the last time."""
        pieces, self._out = self._out, []
        return pieces

    def _open(self, character: str) -> None:
        self._expect(character, {"{": self._before_key})

    def _before_key(self, character: str) -> None:
        if character == '"':
            self._value = _Value()
            self._value.feed(character)
            self._state = self._in_key
        elif character == "}":
            self._close()
        elif character not in SPACE:
            self.is_broken = True

    def _in_key(self, character: str) -> None:
        self._value.feed(character)
        if self._value.is_done:
            self._key = _decoded(self._value.text) or ""
            self._state = self._colon

    def _colon(self, character: str) -> None:
        self._expect(character, {":": self._before_value})

    def _before_value(self, character: str) -> None:
        if character in SPACE:
            return
        if character == "{" and self._key == WRAPPER_KEY:
            self._depth += 1
            self._state = self._before_key
            return
        self._value = _Value()
        self._state = self._in_value
        self._in_value(character)

    def _in_value(self, character: str) -> None:
        if self._value.ends_before(character):
            self._end_value()
            self._after_value(character)
            return
        self._value.feed(character)
        if self._value.is_broken:
            self.is_broken = True
            return
        if self._key in ARGUMENT_KEYS and self._value.text[0] == "{":
            self._pass_on(character)
        if self._value.is_done:
            self._end_value()

    def _end_value(self) -> None:
        self._state = self._after_value
        text = self._value.text
        if self._key in NAME_KEYS and text[0] == '"' and self._name is None:
            self._take_name(_decoded(text))
        elif self._key in ARGUMENT_KEYS and not self._has_arguments:
            if text[0] != "{":
                decoded = NO_ARGUMENTS if text == "null" else _decoded(text) if text[0] == '"' else text
                self._pass_on(decoded or NO_ARGUMENTS)
            self._has_arguments = True

    def _after_value(self, character: str) -> None:
        if self.is_broken:
            return
        if character == "}":
            self._close()
        else:
            self._expect(character, {",": self._before_key})

    def _close(self) -> None:
        if self._depth:
            self._depth -= 1
            self._state = self._after_value
        elif self._name is None:
            self.is_broken = True
        else:
            self.is_done = True
            if not self._has_arguments:
                self._out.append(CallArguments(NO_ARGUMENTS))

    def _expect(self, character: str, states: dict[str, Callable[[str], None]]) -> None:
        if character in states:
            self._state = states[character]
        elif character not in SPACE:
            self.is_broken = True

    def _take_name(self, name: str | None) -> None:
        if not name or not self._accepts(name):
            self.is_broken = True
            return
        self._name = name
        self._out.append(CallStart(name))
        if self._kept:
            self._out.append(CallArguments(self._kept))

    def _pass_on(self, arguments: str) -> None:
        if self._has_arguments:  # only the first of `arguments` and `parameters` counts
            return
        if self._name is None:
            self._kept += arguments
        else:
            self._out.append(CallArguments(arguments))


class ExactCallReader(CallReader):
    """A call that is a name and then an object of arguments; anything else may be an answer of another form."""

    def __init__(self, accepts: Accepts, keys: CallKeys) -> None:
        super().__init__(accepts)
        self._keys = keys

    def _before_value(self, character: str) -> None:
        if character in SPACE:
            return
        expected = (self._keys.name, '"') if self._name is None else (self._keys.arguments, "{")
        if self._has_arguments or (self._key, character) != expected:
            self.is_broken = True
            return
        if self._name is not None:
            self._out.append(CallStart(self._name))
        self._value = _Value()
        self._state = self._in_value
        self._in_value(character)

    def _take_name(self, name: str | None) -> None:
        if name and self._accepts(name):
            self._name = name
        else:
            self.is_broken = True

    def _close(self) -> None:
        self.is_broken = not self._has_arguments
        self.is_done = self._has_arguments


class CallListReader:
    """One call, or an array of them, each read by a reader that `make` makes."""

    def __init__(self, accepts: Accepts, make: Callable[[Accepts], CallReader] = CallReader) -> None:
        self.is_done = False
        self.is_broken = False
        self._accepts = accepts
        self._make = make
        self._is_array = False
        self._call: CallReader | None = None
        self._num_calls = 0
        self._out: list[Piece] = []

    def feed(self, character: str) -> None:
        """Take the next character."""
        if self._call is not None:
            self._feed_call(self._call, character)
        elif character == "{":
            self._call = self._make(self._accepts)
            self._feed_call(self._call, character)
        elif character == "[" and not self._is_array:
            self._is_array = True
        elif character == "]" and self._is_array and self._num_calls:
            self.is_done = True
        elif character not in SPACE and not (character == "," and self._num_calls):
            self.is_broken = True

    def _feed_call(self, call: CallReader, character: str) -> None:
        call.feed(character)
        self._out += call.take()
        self.is_broken = call.is_broken
        if call.is_done:
            self._call = None
            self._num_calls += 1
            self.is_done = not self._is_array

    def take(self) -> list[Piece]:
        """Return what is known since the last time."""
        pieces, self._out = self._out, []
        return pieces


def mistral_name(head: str) -> str:
    """The name in `NAME[ARGS]`, `NAME` or `NAME[CALL_ID]ID[ARGS]`."""
    return head.partition("[ARGS]")[0].partition("[CALL_ID]")[0]


def deepseek_name(head: str) -> str:
    """The name in `function<separator>NAME` before a fence, as of DeepSeek V3, or in `NAME<separator>` as of V3.1."""
    before, _, after = head.partition("<\uff5ctool\u2581sep\uff5c>")
    return after.partition("```")[0].strip() or before


def kimi_name(head: str) -> str:
    """The name in `functions.NAME:NUMBER<|tool_call_argument_begin|>`."""
    name = head.partition("<|tool_call_argument_begin|>")[0].strip()
    return re.sub(r":\d+$", "", name).removeprefix("functions.")


class NamedCallReader:
    """`NAME{...}`, as many models write; `name_of` finds the name in what stands before the arguments."""

    MAX_HEAD = 256  # characters; a longer one is no name

    def __init__(self, accepts: Accepts, name_of: Callable[[str], str] = mistral_name) -> None:
        self.is_done = False
        self.is_broken = False
        self._accepts = accepts
        self._name_of = name_of
        self._head = ""
        self._value: _Value | None = None
        self._out: list[Piece] = []

    def feed(self, character: str) -> None:
        """Take the next character."""
        if self._value is None and character != "{":
            self._head += character
            self.is_broken = len(self._head) > self.MAX_HEAD
            return
        if self._value is None:
            name = self._name_of(self._head).strip()
            if not name or any(space in name for space in SPACE) or not self._accepts(name):
                self.is_broken = True
                return
            self._out.append(CallStart(name))
            self._value = _Value()
        self._value.feed(character)
        self._out.append(CallArguments(character))
        self.is_done, self.is_broken = self._value.is_done, self._value.is_broken

    def take(self) -> list[Piece]:
        """Return what is known since the last time."""
        pieces, self._out = self._out, []
        return pieces


class Scanner(Protocol):
    """Takes the characters of calls that can be read only once they are whole."""

    is_done: bool
    is_broken: bool
    calls: list[tuple[str, str]]  # once done: names, and arguments as JSON text

    def feed(self, character: str) -> None:
        """Take the next character; not called any more once done or broken."""


class ScannedReader:
    """Reads what a scanner scans; there are no pieces before its end."""

    def __init__(self, scanner: Scanner) -> None:
        self.is_done = False
        self.is_broken = False
        self._scanner = scanner

    def feed(self, character: str) -> None:
        """Take the next character."""
        self._scanner.feed(character)
        self.is_done, self.is_broken = self._scanner.is_done, self._scanner.is_broken

    def take(self) -> list[Piece]:
        """Return every call, once the scanner is done."""
        if not self.is_done:
            return []
        return [
            piece for name, arguments in self._scanner.calls for piece in (CallStart(name), CallArguments(arguments))
        ]


def _decoded(text: str) -> str | None:
    """The value of a JSON string without the halves of characters that JSON can spell, or None when it is not valid."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value) if isinstance(value, str) else None
