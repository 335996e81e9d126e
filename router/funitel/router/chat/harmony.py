"""Parse the harmony format of gpt-oss: messages on channels, of which one thinks, one calls tools and one answers.

A message is a header, `<|message|>` and a text up to `<|end|>`, `<|call|>` or `<|return|>`. The header names the
channel behind `<|channel|>`, and behind `to=` the recipient: `functions.NAME` is a call. Text without a header is the
answer's.
"""

import re
from collections.abc import Callable, Collection

from funitel.router.chat.output_parser import (
    CallArguments,
    CallStart,
    Parser,
    Thought,
    decided_length,
    find_first,
    may_begin,
)

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
FINAL = f"{CHANNEL}final{MESSAGE}"  # begins the answer itself
MAX_HEADER = 512  # characters; a longer one is text

_BEFORE_BODY = (START, CHANNEL, *ENDS)  # each also ends a message that has no end of its own
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NO_ARGUMENTS = "{}"


class HarmonyParser(Parser):
    """Split the messages of an answer into thoughts, calls and text; white space around each belongs to none."""

    def __init__(self, names: Collection[str]) -> None:
        """`names`: of the tools that may be called; without any, no message is a call."""
        super().__init__()
        self._names = names
        self._call_length: int | None = None  # characters of the arguments of the call that is read
        self._state = self._begin

    def _begin(self) -> bool:
        """The answer may begin within a header, for the prompt has written `<|start|>assistant`."""
        text = self._buffer.lstrip()
        if not text or any(may_begin(text, marker) for marker in ("to=", *MARKERS)):
            return False
        is_header = text.startswith(("to=", *MARKERS))
        if is_header:
            self._drop_space()
        self._state = self._header if is_header else self._text
        return True

    def _header(self) -> bool:
        """Read up to `<|message|>`; what is no header is text."""
        if self._skip_ends():
            return True
        end = self._buffer.find(MESSAGE, 0, MAX_HEADER)
        begins = find_first(self._buffer[1 : MAX_HEADER if end < 0 else end], (START, *ENDS))
        if begins is not None:  # another message: this one has no text
            self._show(len(self._buffer[: begins[0] + 1].rstrip()))
            self._state = self._between
            return True
        if end >= 0:
            self._begin_body(self._take(end + len(MESSAGE))[0])
            return True
        if len(self._buffer) < MAX_HEADER:
            return False
        self._show(1)
        self._state = self._text
        return True

    def _skip_ends(self) -> bool:
        """Whether a message ended that has nothing in it."""
        end = next((end for end in ENDS if self._buffer.startswith(end)), None)
        if end is None:
            return False
        self._drop(len(end))
        self._state = self._between
        return True

    def _begin_body(self, header: str) -> None:
        channel = header.partition(CHANNEL)[2].split()
        found = _RECIPIENT.search(header)
        recipient = "" if found is None else found[1]
        name = recipient.removeprefix("functions.")
        if name and self._names and (name in self._names or name != recipient):
            self._out.append(CallStart(name))
            self._call_length = 0
            self._state = self._first_argument
        else:
            is_thought = bool(channel) and channel[0].partition("<")[0] == "analysis"
            self._state = self._first_thought if is_thought else self._first_text

    # Bodies

    def _first_argument(self) -> bool:
        return self._after_space(self._arguments)

    def _first_thought(self) -> bool:
        return self._after_space(self._thought)

    def _first_text(self) -> bool:
        return self._after_space(self._text)

    def _after_space(self, state: Callable[[], bool]) -> bool:
        self._drop_space()
        if self._buffer:
            self._state = state
        return bool(self._buffer)

    def _arguments(self) -> bool:
        return self._body(self._pass_on)

    def _thought(self) -> bool:
        return self._body(self._think)

    def _text(self) -> bool:
        return self._body(self._show)

    def _body(self, take: Callable[[int], None]) -> bool:
        found = find_first(self._buffer, _BEFORE_BODY)
        if found is None:
            take(decided_length(self._buffer, _BEFORE_BODY))
            return False
        take(len(self._buffer[: found[0]].rstrip()))
        self._drop_space()
        self._end_call()
        if found[1] in ENDS:
            self._drop(len(found[1]))
        self._state = self._between
        return True

    def _between(self) -> bool:
        """After a message: another header, or text without one."""
        text = self._buffer.lstrip()
        if not text or any(may_begin(text, marker) for marker in MARKERS):
            return False
        self._drop_space()
        self._state = self._header if text.startswith(MARKERS) else self._text
        return True

    def _think(self, count: int) -> None:
        text, start = self._take(count)
        if text:
            self._out.append(Thought(text, start))

    def _pass_on(self, count: int) -> None:
        text, _ = self._take(count)
        if text:
            self._out.append(CallArguments(text))
            self._call_length = (self._call_length or 0) + len(text)

    def _end_call(self) -> None:
        if self._call_length == 0:
            self._out.append(CallArguments(_NO_ARGUMENTS))
        self._call_length = None

    def _end(self) -> None:
        text = self._buffer
        if self._state == self._thought:
            self._think(len(text.rstrip()))
        elif self._state == self._arguments:
            self._pass_on(len(text.rstrip()))
        elif self._state in (self._first_argument, self._first_thought, self._first_text, self._between):
            self._drop_space()
        self._show(len(self._buffer))
