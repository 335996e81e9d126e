"""Scan calls with tags around name and arguments, such as `<function=f><parameter=a>1</parameter></function>`.

Values are text as it is, without escapes; the tool's schema says what they are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from funitel.router.chat.notations.typed_values import (
    Schema,
    argument_schema,
    arguments_text,
    json_or_string,
    json_text,
    typed_json,
)

MAX_NAME = 256  # characters; a longer one is no name
SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class TagStyle:
    """How a family of models writes a call; white space may stand between tags.

    `after_name` empty: the name ends with its line, or where the next tag begins. `before_value` tells how to read a
    value by what stands between key and value: by the schema (None), as a string (True) or as JSON (False).
    `pads_values`: each value stands on lines of its own.
    """

    before_name: str
    after_name: str
    before_key: str
    after_key: str
    before_value: Mapping[str, bool | None]
    after_value: str
    end: str
    pads_values: bool = False


QWEN = TagStyle("<function=", ">", "<parameter=", ">", {"": None}, "</parameter>", "</function>", pads_values=True)
GLM = TagStyle("", "", "<arg_key>", "</arg_key>", {"<arg_value>": None}, "</arg_value>", "</tool_call>")
MINIMAX = TagStyle('<invoke name="', '">', '<parameter name="', '">', {"": None}, "</parameter>", "</invoke>")
DSML_TAG = "\uff5cDSML\uff5c"
DSML = TagStyle(
    f'<{DSML_TAG}invoke name="',
    '">',
    f'<{DSML_TAG}parameter name="',
    '" string="',
    {'true">': True, 'false">': False},
    f"</{DSML_TAG}parameter>",
    f"</{DSML_TAG}invoke>",
)


class TagScanner:
    """Takes the characters of one call; `calls` has it, once done."""

    def __init__(
        self,
        style: TagStyle,
        schemas: Mapping[str, Schema | None],
        accepts: Callable[[str], bool] | None = None,
    ) -> None:
        """`schemas`: of the parameters of each tool; `accepts`: whether a name is that of a tool, if it must be."""
        self.is_done = False
        self.is_broken = False
        self.calls: list[tuple[str, str]] = []
        self._style = style
        self._accepts = accepts
        self._schemas = schemas
        self._name = ""
        self._key = ""
        self._is_string: bool | None = None
        self._arguments: dict[str, str] = {}
        self._seen: list[str] = []
        self._literals: dict[str, Callable[[], None]] = {}
        self._state = self._before_name
        if style.before_name:
            self._expect({style.before_name: self._begin_name})

    def feed(self, character: str) -> None:
        """Take the next character; not called any more once done or broken."""
        self._state(character)

    def _expect(self, literals: dict[str, Callable[[], None]]) -> None:
        """Wait for one of some texts, after white space; none is the beginning of another."""
        self._literals, self._seen = literals, []
        self._state = self._literal

    def _literal(self, character: str) -> None:
        if not self._seen and character in SPACE:
            return
        self._seen.append(character)
        seen = "".join(self._seen)
        if seen in self._literals:
            self._literals[seen]()
        elif not any(literal.startswith(seen) for literal in self._literals):
            self.is_broken = True

    # The name

    def _before_name(self, character: str) -> None:
        if character not in SPACE:
            self._begin_name()
            self._state(character)

    def _begin_name(self) -> None:
        self._seen = []
        self._state = self._in_name

    def _in_name(self, character: str) -> None:
        after = self._style.after_name
        if not after and character in "\n<":
            self._end_name("".join(self._seen))
            if character == "<" and not self.is_broken:
                self._state(character)
            return
        self._seen.append(character)
        if after and self._ends_with(after):
            self._end_name("".join(self._seen[: -len(after)]))
        elif character in "\n<{[" or len(self._seen) > MAX_NAME:
            self.is_broken = True

    def _end_name(self, name: str) -> None:
        self._name = name.strip()
        self.is_broken = not self._name or not (self._accepts is None or self._accepts(self._name))
        self._expect_argument()

    # Arguments

    def _expect_argument(self) -> None:
        self._expect({self._style.before_key: self._begin_key, self._style.end: self._end})

    def _begin_key(self) -> None:
        self._seen = []
        self._state = self._in_key

    def _in_key(self, character: str) -> None:
        self._seen.append(character)
        if self._ends_with(self._style.after_key):
            self._key = "".join(self._seen[: -len(self._style.after_key)])
            self._before_value()
        elif len(self._seen) > MAX_NAME:
            self.is_broken = True

    def _before_value(self) -> None:
        forms = self._style.before_value
        if "" in forms:
            self._begin_value(forms[""])
            return
        self._expect({text: partial(self._begin_value, is_string) for text, is_string in forms.items()})

    def _begin_value(self, is_string: bool | None) -> None:
        self._is_string = is_string
        self._seen = []
        self._state = self._in_value

    def _in_value(self, character: str) -> None:
        self._seen.append(character)
        if self._ends_with(self._style.after_value):
            text = "".join(self._seen[: -len(self._style.after_value)])
            self._arguments[self._key] = self._value(_unpadded(text) if self._style.pads_values else text)
            self._state = self._literal
            self._expect_argument()

    def _value(self, text: str) -> str:
        if self._is_string is not None:
            return json_text(text) if self._is_string else json_or_string(text)
        parameters = self._schemas.get(self._name)
        return typed_json(text, argument_schema(parameters, self._key), parameters)

    def _ends_with(self, text: str) -> bool:
        return self._seen[-1] == text[-1] and "".join(self._seen[-len(text) :]) == text

    def _end(self) -> None:
        self.calls = [(self._name, arguments_text(self._arguments))]
        self.is_done = True


def _unpadded(text: str) -> str:
    """A value without the ends of line around it, one on each side."""
    return text.removeprefix("\n").removesuffix("\n")
