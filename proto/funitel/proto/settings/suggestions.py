"""Suggest the known word that an unknown one was probably meant to be."""

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

_TOLERANCE = 0.08  # of similarity, below the best suggestion


def nearest(word: str, words: Iterable[str]) -> list[str]:
    """At most three known words that are similar to `word`, the most similar first."""
    known = sorted(set(words))
    close = get_close_matches(word.lower(), known, n=3, cutoff=0.6)
    close = close or [each for each in known if len(word) > 2 and each.startswith(word.lower())][:3]
    best = max((_similarity(word, each) for each in close), default=0.0)
    return [each for each in close if _similarity(word, each) >= best - _TOLERANCE]


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """`: did you mean a or b?`, or nothing where no known word is similar."""
    close = nearest(word, words)
    return f": did you mean {' or '.join(close)}?" if close else ""


def _similarity(word: str, other: str) -> float:
    return SequenceMatcher(None, other, word.lower()).ratio()
