"""Base of the output parsers: the pieces that an answer's text is split into, and the buffer they come from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text for the client; `start` is where it begins in the transcript."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of a reasoning block."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of the latest call's arguments."""

    delta: str


Piece = TextPiece | Thought | CallStart | CallArguments


class Parser:
    """Feed a text in any portions; get its pieces. What they add up to does not depend on the portions.

    A subclass is a state machine with methods as states: each looks at `_buffer`, takes what is decided, may change
    `_state`, and returns whether it got further. What a state decides about some text it must not decide otherwise when
    more text follows.
    """

    def __init__(self) -> None:
        self._buffer = ""  # text that is not decided yet
        self._base: int | None = None  # where it begins in the transcript
        self._out: list[Piece] = []
        self._state: Callable[[], bool] = self._plain

    def feed(self, text: str, start: int) -> list[Piece]:
        """Take the next portion, which begins at character `start`; return what is decided."""
        if self._base is None:
            self._base = start
        self._buffer += text
        while self._buffer and self._state():
            pass
        return self._taken()

    def finish(self) -> list[Piece]:
        """Return what is left when nothing more comes."""
        self._end()
        return self._taken()

    def _end(self) -> None:
        self._show(len(self._buffer))

    def _plain(self) -> bool:
        self._show(len(self._buffer))
        return False

    def _taken(self) -> list[Piece]:
        pieces, self._out = _joined(self._out), []
        return pieces

    def _take(self, count: int) -> tuple[str, int]:
        """Cut the buffer's beginning off; return it and where it begins."""
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        start = self._base or 0
        self._base = start + count
        return taken, start

    def _drop(self, count: int) -> None:
        self._take(count)

    def _drop_space(self) -> None:
        self._drop(len(self._buffer) - len(self._buffer.lstrip()))

    def _show(self, count: int) -> None:
        text, start = self._take(count)
        if text:
            self._out.append(TextPiece(text, start))


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of a kind become one, where nothing was dropped between."""
    joined: list[Piece] = []
    for piece in pieces:
        match joined[-1] if joined else None, piece:
            case CallArguments(before), CallArguments(after):
                joined[-1] = CallArguments(before + after)
            case TextPiece(before, start), TextPiece(after, place) if start + len(before) == place:
                joined[-1] = TextPiece(before + after, start)
            case Thought(before, start), Thought(after, place) if start + len(before) == place:
                joined[-1] = Thought(before + after, start)
            case _:
                joined.append(piece)
    return joined


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Return where the first of some markers begins and which it is."""
    found = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
    return min(found, default=None)


def decided_length(text: str, markers: Sequence[str]) -> int:
    """Return how much of a text without markers can be taken: not its end that may begin one, nor white space there."""
    undecided = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), undecided, -1):
            if text.endswith(marker[:length]):
                undecided = length
                break
    return len(text[: len(text) - undecided].rstrip())


def may_begin(text: str, marker: str) -> bool:
    """Whether a text is a proper beginning of a marker."""
    return len(text) < len(marker) and marker.startswith(text)
