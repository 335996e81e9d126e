"""Terminal input and output: a status line, messages typed by a user, messages read from a pipe."""

import shutil
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import BinaryIO, Self, TextIO

CLEAR_LINE = "\r\x1b[K"
BLOCK = '"""'  # delimits a message of several lines
PROMPT = ">>> "
MORE = "... "


class Status:
    """A status on stderr: one line that is overwritten on a terminal, else a line for each change."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._shown = ""

    def show(self, text: str) -> None:
        """Replace the status."""
        if text == self._shown:
            return
        self._shown = text
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(CLEAR_LINE + text[:width], end="", file=self._stream, flush=True)
        else:
            print(text, file=self._stream, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown and self._is_terminal:
            print(CLEAR_LINE, end="", file=self._stream, flush=True)


def is_interactive() -> bool:
    """Whether stdin and stdout are terminals."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def typed_messages() -> Iterator[str]:
    """Messages from a terminal, until Ctrl-D. Pasted lines stay together; Ctrl-C drops a message being typed."""
    _edit_lines()
    while True:
        try:
            yield _typed_message()
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)")
        except EOFError:
            print()
            return


def _typed_message() -> str:
    line = input(PROMPT)
    return _joined(line, lambda: input(MORE)) if line.startswith(BLOCK) else line


def _joined(first: str, read: Callable[[], str | None]) -> str:
    """The lines from one that opens a block to the one that closes it, or to the end."""
    text = first.removeprefix(BLOCK)
    while not text.endswith(BLOCK) and (line := read()) is not None:
        text += "\n" + line
    return text.removesuffix(BLOCK).strip("\n")


def _edit_lines() -> None:
    """Line editing, history, and pastes of several lines as one message, where the interpreter has readline."""
    try:
        import readline
    except ImportError:
        return
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")


def piped_messages(source: BinaryIO) -> Iterator[str]:
    """Messages from a pipe, one a line; lines between three double quotes are one."""

    def read() -> str | None:
        line = source.readline()
        return line.decode("utf-8", "replace").rstrip("\r\n") if line else None

    while (line := read()) is not None:
        yield _joined(line, read) if line.startswith(BLOCK) else line
