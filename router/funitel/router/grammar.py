"""Grammars: what a request wants its text to follow."""

from dataclasses import dataclass

from funitel.proto.step import GrammarType


@dataclass(frozen=True, slots=True)
class Grammar:
    """The text of a JSON schema or of a regular expression."""

    kind: GrammarType
    text: str
