"""Split shell text into simple commands, far enough to check those of this project."""

import io
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1([^\n]*)\n(.*?)^\s*\2$", re.MULTILINE | re.DOTALL)
_PREFIXES = ("time", "exec", "sudo", "nohup", "then", "do", "else", "!", "env")
_PUNCTUATION = "();<>|&\n"


@dataclass(frozen=True, slots=True)
class Command:
    """One simple command: its words without redirections, and the variables set before it."""

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)


class _Source(io.StringIO):
    """Text of which a comment does not end the line, as shlex would have it."""

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]  # of typeshed's own making
        line = super().readline()
        if line.endswith("\n"):
            self.seek(self.tell() - 1)
        return line


def commands_of(text: str) -> Iterator[Command]:
    """The simple commands of a script, in order; an assignment alone is a command without words.

    Raises:
        ValueError: a quote is not closed.
    """
    text = _HEREDOC.sub(r"\3", text.replace("\\\n", " "))
    lexer = shlex.shlex(_Source(text), posix=True, punctuation_chars=_PUNCTUATION)
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    words: list[str] = []
    is_target = False  # whether the next word is the file of a redirection
    for token in [*lexer, "\n"]:
        if not set(token) <= set(_PUNCTUATION):
            if not is_target:
                words.append(token)
            is_target = False
        elif set(token) <= set("<>&") and set(token) & set("<>"):
            is_target = True
            if words and words[-1].isdigit():
                words.pop()
        elif words:
            yield _command(words)
            words = []


def _command(words: list[str]) -> Command:
    variables: dict[str, str] = {}
    first = words[:1] if words[:1] == ["export"] else []
    rest = words[len(first) :]
    while rest and (rest[0] in _PREFIXES or _ASSIGNMENT.fullmatch(rest[0])):
        assignment = _ASSIGNMENT.fullmatch(rest.pop(0))
        if assignment is not None:
            variables[assignment[1]] = assignment[2]
    return Command((*first, *rest), variables)
