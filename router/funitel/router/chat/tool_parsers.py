"""Parse tool calls in a model's output, by the format it was trained to write them in."""

from collections.abc import Callable

from funitel.router.chat.output_parser import Parser, decided_length, find_first, may_begin
from funitel.router.chat.tool_call_reader import SPACE, Accepts, CallListReader, CallReader, NamedCallReader, Reader


class CallParser(Parser):
    """What the formats have in common: a reader runs over the buffer; what turns out to be no call is text.

    White space around calls is dropped.
    """

    def __init__(self, accepts: Accepts) -> None:
        """`accepts` says whether a name is that of a tool."""
        super().__init__()
        self._accepts = accepts
        self._reader: Reader = CallListReader(accepts)
        self._num_read = 0  # characters of the buffer the reader has seen
        self._is_call = False  # the reader has found a name: nothing of it will be text
        self._after_call = False  # nothing but white space since a call

    def _start_reading(self, reader: Reader, num_read: int) -> None:
        """Read from the buffer; its first `num_read` characters are what marks the call."""
        self._reader, self._num_read, self._is_call = reader, num_read, False
        self._state = self._read

    def _read(self) -> bool:
        reader = self._reader
        while self._num_read < len(self._buffer):
            reader.feed(self._buffer[self._num_read])
            if reader.is_broken and not self._is_call:
                self._no_call()
                return True
            self._num_read += not reader.is_broken
            pieces = reader.take()
            self._is_call = self._is_call or bool(pieces)
            self._out += pieces
            if reader.is_done or reader.is_broken:
                self._drop(self._num_read)
                self._after_call = True
                self._state = self._broken_call if reader.is_broken else self._between
                return True
        if self._is_call:
            self._drop(self._num_read)
            self._num_read = 0
        return False

    def _between(self) -> bool:
        raise NotImplementedError

    def _broken_call(self) -> bool:
        """By default nothing after a broken call is understood."""
        self._drop(len(self._buffer))
        return False

    def _no_call(self) -> None:
        """Show what was taken for a call."""
        raise NotImplementedError

    def _show(self, count: int) -> None:
        if self._after_call:
            space = len(self._buffer[:count]) - len(self._buffer[:count].lstrip())
            self._drop(space)
            count -= space
            self._after_call = count == 0
        super()._show(count)

    def _end(self) -> None:
        if self._state == self._broken_call or (self._state == self._read and self._is_call):
            self._drop(len(self._buffer))
        self._show(len(self._buffer))


class MarkedParser(CallParser):
    """Calls that follow an opening marker anywhere in the text, with or without a closing one."""

    def __init__(self, accepts: Accepts, opening: str, closing: str | None = None) -> None:
        super().__init__(accepts)
        self._opening = opening
        self._closing = closing
        self._closings = () if closing is None else (closing,)
        self._state = self._text

    def _text(self) -> bool:
        return self._text_up_to((self._opening,))

    def _between(self) -> bool:
        return self._text_up_to((self._opening, *self._closings))

    def _text_up_to(self, markers: tuple[str, ...]) -> bool:
        found = find_first(self._buffer, markers)
        if found is None:
            self._show(decided_length(self._buffer, markers))
            return False
        place, marker = found
        self._show(len(self._buffer[:place].rstrip()))
        self._drop(self._buffer.find(marker))
        if marker == self._opening:
            self._state = self._opened
            self._num_read = len(marker)
        else:
            self._drop(len(marker))
            self._state = self._text
        return True

    def _opened(self) -> bool:
        self._start_reading(CallListReader(self._accepts), self._num_read)
        return True

    def _broken_call(self) -> bool:
        """Skip to where the next begins, or to where this one is said to end."""
        markers = (self._opening, *self._closings)
        found = find_first(self._buffer, markers)
        if found is None:
            self._drop(decided_length(self._buffer, markers))
            return False
        self._drop(found[0])
        self._state = self._between
        return True

    def _no_call(self) -> None:
        self._show(len(self._opening))
        self._state = self._text


class MistralParser(MarkedParser):
    """`[TOOL_CALLS]` before an array of calls, or before each call's name."""

    def __init__(self, accepts: Accepts) -> None:
        super().__init__(accepts, "[TOOL_CALLS]")

    def _opened(self) -> bool:
        body = self._buffer[self._num_read :].lstrip()
        if not body:
            return False
        kind: Callable[[Accepts], Reader] = CallListReader if body[0] in "[{" else NamedCallReader
        self._start_reading(kind(self._accepts), self._num_read)
        return True


class BareJsonParser(CallParser):
    """An answer that is nothing but calls as JSON, one after the other, in a fence or after a tag if at all."""

    FENCES = ("```json\n", "```\n")
    SEPARATORS = SPACE + ";,"

    def __init__(
        self, accepts: Accepts, tag: str | None = None, make: Callable[[Accepts], CallReader] = CallReader
    ) -> None:
        """`tag` may come before calls, each of which is read by a reader that `make` makes."""
        super().__init__(accepts)
        self._make = make
        self._prefixes = self.FENCES if tag is None else (tag, *self.FENCES)
        self._is_fenced = False
        self._state = self._begin

    def _begin(self) -> bool:
        text = self._buffer.lstrip(self.SEPARATORS if self._after_call else SPACE)
        if not text or any(may_begin(text, prefix) for prefix in self._prefixes):
            return False
        prefix = next((prefix for prefix in self._prefixes if text.startswith(prefix)), "")
        body = text[len(prefix) :].lstrip()
        if prefix and not body:
            return False
        if not body or body[0] not in "[{":
            self._state = self._plain
            return True
        self._is_fenced = self._is_fenced or prefix in self.FENCES
        self._start_reading(CallListReader(self._accepts, self._make), len(self._buffer) - len(body))
        return True

    def _between(self) -> bool:
        if not self._is_fenced:
            self._state = self._begin
            return True
        text = self._buffer.lstrip()
        if not text or may_begin(text, "```"):
            return False
        if text.startswith("```"):
            self._drop_space()
            self._drop(3)
        self._is_fenced = False
        self._state = self._begin
        return True

    def _no_call(self) -> None:
        self._state = self._plain

    def _end(self) -> None:
        if self._after_call and not self._buffer.strip(self.SEPARATORS):
            self._drop(len(self._buffer))
        super()._end()
