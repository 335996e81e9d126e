"""`funitel chat`: messages in, answers out as they come, with the conversation so far as context."""

import re
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from funitel.launcher.cli.server import connected, model_of
from funitel.launcher.cli.settings import ChatSettings
from funitel.launcher.terminal_ui.http_client import Api
from funitel.launcher.terminal_ui.terminal import is_interactive, piped_messages, typed_messages
from funitel.proto.errors import FunitelError, Incomplete

HELP = '''/reset          forget the conversation
/system TEXT    set the system prompt and forget the conversation; without TEXT there is none
/exit           leave, as Ctrl-D does
Ctrl-C stops an answer. Lines between """ and """ are one message, and so are lines pasted together.'''

_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)


DIM, PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of an answer, or of what the model thinks before it."""

    text: str
    is_thought: bool = False


class Conversation:
    """The messages so far, and how answers to them are asked for."""

    def __init__(self, api: Api, settings: ChatSettings) -> None:
        self._api = api
        self._system = settings.system
        self._messages: list[dict[str, str]] = []
        asked = {"temperature": settings.temperature, "top_p": settings.top_p, "seed": settings.seed}
        self._wishes = {name: value for name, value in asked.items() if value is not None}
        self._wishes["max_tokens"] = settings.max_tokens
        self._finish_reason: str | None = None  # of the last answer

    @property
    def is_cut(self) -> bool:
        """Whether the last answer ended with `max_tokens`."""
        return self._finish_reason == "length"

    def reset(self) -> None:
        """Forget what was said."""
        self._messages.clear()

    def set_system(self, text: str | None) -> None:
        """Begin anew with another system prompt, or none."""
        self._system = text
        self.reset()

    def answer(self, message: str) -> Generator[Piece, None, None]:
        """Yield an answer in pieces. One that is left early is kept as far as it came, one that fails is forgotten."""
        head = [] if self._system is None else [{"role": "system", "content": self._system}]
        asked = [*self._messages, {"role": "user", "content": message}]
        said: list[str] = []
        self._finish_reason = None
        try:
            with closing(self._api.stream("/v1/chat/completions", self._body(head + asked))) as events:
                for event in events:
                    for piece in self._pieces(event):
                        if not piece.is_thought:
                            said.append(piece.text)
                        yield piece
            if self._finish_reason is None:
                raise Incomplete("the server ended the answer without saying why")
        except FunitelError:
            raise
        except BaseException:
            if said:
                self._keep(asked, said)
            raise
        self._keep(asked, said)

    def _body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        return {"messages": messages, "stream": True, **self._wishes}

    def _pieces(self, event: Any) -> Iterator[Piece]:
        for choice in event.get("choices", ()):
            self._finish_reason = choice.get("finish_reason")
            delta = choice.get("delta", {})
            if delta.get("reasoning_content"):
                yield Piece(delta["reasoning_content"], is_thought=True)
            if delta.get("content"):
                yield Piece(delta["content"])

    def _keep(self, asked: list[dict[str, str]], said: list[str]) -> None:
        self._messages = [*asked, {"role": "assistant", "content": "".join(said)}]


def chat(settings: ChatSettings) -> None:
    """Run until the input ends or /exit.

    Raises:
        FunitelError: no server can be asked; or, reading from a pipe, an answer failed.
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
            if not _obey(conversation, command[1], command[2]):
                return
        elif message.strip():
            _show_answer(conversation, message, is_typed=is_typed)


def _obey(conversation: Conversation, name: str, text: str | None) -> bool:
    """Do what a command says; False for the one that leaves."""
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
    """Print an answer as it comes. At a terminal neither Ctrl-C nor a failure ends more than the answer."""
    try:
        with closing(conversation.answer(message)) as pieces:
            for piece in pieces:
                if not piece.is_thought:
                    print(piece.text, end="", flush=True)
                elif is_typed:
                    print(f"{DIM}{piece.text}{PLAIN}", end="", flush=True)
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
