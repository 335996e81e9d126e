"""Parse tool calls in a model's output, by the format it was trained to write them in."""

from collections.abc import Callable, Collection

from funitel.router.chat.notations.literals import PythonScanner
from funitel.router.chat.output_parser import Parser, decided_length, find_first, may_begin
from funitel.router.chat.tool_call_reader import (
    SPACE,
    Accepts,
    CallListReader,
    CallReader,
    NamedCallReader,
    Reader,
    ScannedReader,
)


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
    """Calls that follow an opening marker anywhere in the text, with or without closing ones."""

    def __init__(
        self,
        accepts: Accepts,
        opening: str | tuple[str, ...],
        *closings: str,
        make: Callable[[], Reader] | None = None,
        bare: Callable[[], Reader] | None = None,
    ) -> None:
        """Begin.

        Args:
            accepts: whether a name is that of a tool.
            opening: the marker, or several.
            closings: markers that are dropped behind a call.
            make: makes what reads behind the opening: by default, a reader of JSON.
            bare: where a call may come without its marker, makes what reads it then, from the last opening on.
        """
        super().__init__(accepts)
        self._openings = (opening,) if isinstance(opening, str) else opening
        self._bare = bare
        self._closings = closings
        self._make = make or (lambda: CallListReader(accepts))
        self._num_marking = 0  # characters of the buffer that mark a call
        self._state = self._text

    def _text(self) -> bool:
        return self._text_up_to(self._openings)

    def _between(self) -> bool:
        return self._text_up_to((*self._openings, *self._closings))

    def _text_up_to(self, markers: tuple[str, ...]) -> bool:
        marker, count = self._found(markers)
        if marker in self._openings:
            self._state = self._opened
            self._num_read = self._num_marking = count
        elif marker:
            self._drop(count)
            self._state = self._text
        return bool(marker)

    def _found(self, markers: tuple[str, ...]) -> tuple[str, int]:
        """Show the text before the first of some markers; return it, and its length with white space before it."""
        found = find_first(self._buffer, markers)
        if found is None:
            self._show(decided_length(self._buffer, markers))
            return "", 0
        place, marker = found
        length = len(self._buffer[:place].rstrip())
        self._show(length)
        return marker, place - length + len(marker)

    def _opened(self) -> bool:
        last = self._openings[-1]
        if self._bare is not None and self._buffer[: self._num_marking].endswith(last):
            self._start_reading(self._bare(), self._num_marking - len(last))
        else:
            self._start_reading(self._make(), self._num_read)
        return True

    def _broken_call(self) -> bool:
        """Skip to where the next begins, or to where this one is said to end."""
        markers = (*self._openings, *self._closings)
        found = find_first(self._buffer, markers)
        if found is None:
            self._drop(decided_length(self._buffer, markers))
            return False
        self._drop(found[0])
        self._state = self._between
        return True

    def _no_call(self) -> None:
        # All that was scanned, so that no text is scanned twice.
        is_scanned = isinstance(self._reader, ScannedReader)
        count = len(self._buffer[: self._num_read].rstrip()) if is_scanned else 0
        self._show(max(count, self._num_marking))
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


class SectionParser(MarkedParser):
    """Calls in a section with markers around it; each call has an opening marker, and may have closing ones."""

    def __init__(
        self,
        accepts: Accepts,
        section: tuple[str, str],
        opening: str,
        *closings: str,
        make: Callable[[], Reader] | None = None,
        keeps_opening: bool = False,
    ) -> None:
        """`keeps_opening`: the reader is given the opening marker, too."""
        super().__init__(accepts, opening, *closings, make=make)
        self._section, self._section_end = section
        self._keeps_opening = keeps_opening
        self._is_damaged = False  # what was taken for the latest call is text

    def _text(self) -> bool:
        marker, count = self._found((self._section,))
        if not marker:
            return False
        self._num_marking = count
        self._state = self._first
        return True

    def _first(self) -> bool:
        """What follows the section's opening marker must be a call's."""
        body = self._buffer[self._num_marking :].lstrip()
        opening = self._openings[0]
        if not body or may_begin(body, opening):
            return False
        if body.startswith(opening):
            self._open(len(self._buffer) - len(body) + len(opening))
        else:
            self._show(self._num_marking)
            self._state = self._text
        return True

    def _between(self) -> bool:
        marker, count = self._found((*self._openings, *self._closings, self._section, self._section_end))
        if marker in self._openings:
            self._open(count)
        elif marker:
            (self._show if self._is_damaged else self._drop)(count)
            self._state = self._text if marker == self._section_end else self._between
        return bool(marker)

    def _open(self, count: int) -> None:
        self._is_damaged = False
        self._num_marking = count
        kept = len(self._openings[0]) if self._keeps_opening else 0
        self._start_reading(self._make(), count - kept)

    def _broken_call(self) -> bool:
        markers = (*self._openings, *self._closings, self._section, self._section_end)
        found = find_first(self._buffer, markers)
        self._drop(decided_length(self._buffer, markers) if found is None else found[0])
        if found is not None:
            self._state = self._between
        return found is not None

    def _no_call(self) -> None:
        super()._no_call()
        self._is_damaged = True
        self._state = self._between


class PythonicParser(MarkedParser):
    """A list of calls as Python writes them, anywhere in the text; or as JSON, at its beginning or after a tag."""

    TAG, END = "<|python_start|>", "<|python_end|>"

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names.__contains__, self.TAG, self.END)
        self._openings = (self.TAG, "[")
        self._heads = tuple(f"{name}(" for name in names)
        self._state = self._begin

    def _begin(self) -> bool:
        text = self._buffer.lstrip()
        if not text:
            return False
        self._state = self._text
        if text[0] == "{":
            self._num_marking = len(self._buffer) - len(text) + 1
            self._start_reading(CallListReader(self._accepts), self._num_marking - 1)
        return True

    def _opened(self) -> bool:
        tagged = self._buffer[: self._num_marking].endswith(self.TAG)
        body = self._buffer[self._num_marking if tagged else self._num_marking - 1 :].lstrip()
        inner = body[1:].lstrip() if body.startswith("[") else ""
        if not body or (body.startswith("[") and not inner):
            return False
        place = len(self._buffer) - len(body)
        if body[0] == "{" or inner.startswith("{"):
            self._start_reading(CallListReader(self._accepts), place)
        elif any(may_begin(inner, head) for head in self._heads):
            return False
        elif inner.startswith(self._heads):
            self._start_reading(ScannedReader(PythonScanner("]", accepts=self._accepts)), place + 1)
        else:
            self._reader = CallListReader(self._accepts)  # nothing was scanned
            self._no_call()
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
