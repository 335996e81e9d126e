"""Terminal input and output: a status, safe text, messages typed by a user, messages read from a pipe."""

import re
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import BinaryIO, Self, TextIO

from rich.console import Console
from rich.status import Status as Spinner
from rich.text import Text

from funitel.proto.printable import printable

BLOCK = '"""'  # delimits a message of several lines
PROMPT = ">>> "
MORE = "... "
PIPE_COLUMNS = 1000  # nothing that is written to a pipe or a file is cut
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def console_of(stream: TextIO) -> Console:
    """A console that takes text as text: no markup, no emoji codes, no colours of its own choice.

    `is_terminal` says whether the stream is one that can be drawn on; elsewhere nothing but text is written.
    """
    is_terminal = stream.isatty()
    console = Console(
        file=stream,
        force_terminal=is_terminal,
        width=None if is_terminal else PIPE_COLUMNS,
        markup=False,
        emoji=False,
        highlight=False,
    )
    if console.is_dumb_terminal:
        console = Console(file=stream, force_terminal=False, markup=False, emoji=False, highlight=False)
    return console


def without_controls(text: str) -> str:
    """A text that cannot control a terminal, in which line breaks and tabs remain."""
    return _CONTROLS.sub("?", text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """A text in one line, in which characters that cannot be printed are escaped."""
    return printable(" ".join(text.split()))


class Status:
    """A status on stderr: one that is replaced on a terminal, else a line for each change."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = console_of(stream or sys.stderr)
        self._spinner = Spinner("", console=self._console)
        self._shown = ""

    def show(self, text: str) -> None:
        """Replace the status."""
        if text == self._shown:
            return
        self._shown = text
        line = Text(one_line(text))
        if self._console.is_terminal:
            self._spinner.update(line)
            self._spinner.start()
        else:
            self._console.print(line, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spinner.stop()


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
