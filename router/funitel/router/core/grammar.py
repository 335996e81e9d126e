"""The grammar that a completion must follow: a JSON schema, a regular expression or a choice. Pure."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import GrammarType


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a completion shall look like. `is_native`: TGI's rules for schemas hold, too."""

    kind: GrammarType
    text: str
    is_native: bool = False

    @classmethod
    def json(cls, schema: Any, *, is_native: bool = False) -> "Grammar":
        """JSON text that a schema describes; the schema may be text itself.

        Raises:
            InvalidRequest: it is nested too deeply.
        """
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
        except RecursionError:
            raise InvalidRequest("grammar is not valid: the schema is nested too deeply", "grammar") from None
        return cls(GrammarType.JSON, text, is_native)

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Text that matches a regular expression from its beginning to its end."""
        return cls(GrammarType.REGEX, pattern or "(?:)")  # no text at all would be no grammar

    @classmethod
    def choice(cls, choices: Sequence[str]) -> "Grammar":
        """One of a few texts."""
        return cls(GrammarType.REGEX, "|".join(map(_escape, choices)))

    @classmethod
    def context_free(cls, text: str) -> "Grammar":
        """Text that a context-free grammar describes, in the form of Lark or of GBNF."""
        return cls(GrammarType.LARK, text)

    @property
    def digest(self) -> bytes:
        """A short name that no other grammar has."""
        head = f"{self.kind}{self.is_native}:"
        return hashlib.sha256(head.encode() + self.text.encode(errors="surrogatepass")).digest()


def _escape(text: str) -> str:
    """A pattern that matches this text only; what is no ASCII letter or digit is written by its number."""
    return re.sub(r"[^0-9A-Za-z]", lambda match: f"\\x{{{ord(match[0]):x}}}", text)
