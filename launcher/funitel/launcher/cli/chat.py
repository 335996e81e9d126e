"""`funitel chat`: converse with a model; answers are streamed, and earlier messages are the context."""

import re
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from funitel.launcher.cli.server import connected, model_of
from funitel.launcher.cli.settings import ChatSettings
from funitel.launcher.terminal_ui.http_client import Api
from funitel.launcher.terminal_ui.terminal import (
    console_of,
    is_interactive,
    piped_messages,
    typed_messages,
    without_controls,
)
from funitel.proto.errors import FunitelError, Incomplete

HELP = '''/reset          forget the conversation
/system TEXT    set the system prompt and forget the conversation; without TEXT there is none
/exit           leave, as Ctrl-D does
Ctrl-C stops an answer. Lines between """ and """ are one message, and so are lines pasted together.'''

_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of an answer, or of the reasoning before it."""

    text: str
    is_thought: bool = False


class Conversation:
    """The messages so far, and the parameters of requests for answers."""

    def __init__(self, api: Api, settings: ChatSettings) -> None:
        self._api = api
        self._system = settings.system
        self._messages: list[dict[str, str]] = []
        asked = {"temperature": settings.temperature, "top_p": settings.top_p, "seed": settings.seed}
        self._parameters = {name: value for name, value in asked.items() if value is not None}
        self._parameters["max_tokens"] = settings.max_tokens
        self._finish_reason: str | None = None  # of the last answer

    @property
    def is_cut(self) -> bool:
        """Whether the last answer ended with `max_tokens`."""
        return self._finish_reason == "length"

    def reset(self) -> None:
        """Forget the messages."""
        self._messages.clear()

    def set_system(self, text: str | None) -> None:
        """Forget the messages, and set another system prompt or none."""
        self._system = text
        self.reset()

    def answer(self, message: str) -> Generator[Piece, None, None]:
        """Yield an answer in pieces; a partial answer is kept if the caller stops, and dropped if the server fails."""
        head = [] if self._system is None else [{"role": "system", "content": self._system}]
        asked = [*self._messages, {"role": "user", "content": message}]
        said: list[str] = []
        is_kept = False
        self._finish_reason = None
        try:
            with closing(self._api.stream("/v1/chat/completions", self._body(head + asked))) as events:
                for event in events:
                    for piece in self._pieces(event):
                        if not piece.is_thought:
                            said.append(piece.text)
                            is_kept = True
                        yield piece
            if self._finish_reason is None:
                raise Incomplete("the server ended the answer without a finish reason")
            is_kept = True
        except FunitelError:
            is_kept = False
            raise
        finally:
            if is_kept:
                self._messages = [*asked, {"role": "assistant", "content": "".join(said)}]

    def _body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        return {"messages": messages, "stream": True, **self._parameters}

    def _pieces(self, event: Any) -> Iterator[Piece]:
        for choice in event.get("choices", ()):
            self._finish_reason = choice.get("finish_reason")
            delta = choice.get("delta", {})
            if delta.get("reasoning_content"):
                yield Piece(delta["reasoning_content"], is_thought=True)
            if delta.get("content"):
                yield Piece(delta["content"])


def chat(settings: ChatSettings) -> None:
    """Run until the input ends or /exit.

    Raises:
        FunitelError: no server answers; or, reading from a pipe, an answer failed.
    """
    with connected(settings) as api:
        conversation = Conversation(api, settings)
        if not is_interactive():
            _converse(conversation, piped_messages(sys.stdin.buffer), is_typed=False)
            return
        print(f"{model_of(api)} at {api.url}. /help lists commands.")
        _converse(conversation, typed_messages(), is_typed=True)


def _converse(conversation: Conversation, messages: Iterable[str], *, is_typed: bool) -> None:
    for message in messages:
        command = _COMMAND.fullmatch(message.strip())
        if command is not None:
            if not _run_command(conversation, command[1], command[2]):
                return
        elif message.strip():
            _show_answer(conversation, message, is_typed=is_typed)


def _run_command(conversation: Conversation, name: str, text: str | None) -> bool:
    """Run a command; return False for the one that exits."""
    match name:
        case "exit" | "quit" | "bye":
            return False
        case "reset":
            conversation.reset()
        case "system":
            conversation.set_system(text)
        case "help":
            print(HELP)
        case _:
            print(f"unknown command /{name}: /help lists them", file=sys.stderr)
    return True


def _show_answer(conversation: Conversation, message: str, *, is_typed: bool) -> None:
    """Stream an answer to stdout; on a terminal, Ctrl-C and failures end only this answer."""
    screen = console_of(sys.stdout)
    try:
        with closing(conversation.answer(message)) as pieces:
            for piece in pieces:
                if is_typed:
                    shown = Text(without_controls(piece.text), "dim" if piece.is_thought else "")
                    screen.print(shown, end="", soft_wrap=True)
                elif not piece.is_thought:
                    print(piece.text, end="", flush=True)
        print(flush=True)
    except KeyboardInterrupt:
        if not is_typed:
            raise
        print("\n(interrupted)")
    except FunitelError as error:
        if not is_typed:
            raise
        print(f"error: {error.message}", file=sys.stderr)
    else:
        if conversation.is_cut and is_typed:
            print("(cut at --max-tokens)")
