"""Parse and format batch sizes in TGI's form: `1,2,4`."""

from collections.abc import Iterable

MAX_ROWS = 4096
_MAX_DIGITS = 9


class BatchSizes(frozenset[int]):
    """A set of batch sizes, from text such as `1,2,4` or from numbers; `0` means none; `str` gives the text."""

    def __new__(cls, sizes: str | Iterable[int]) -> "BatchSizes":
        """Raise ValueError with the reason for text of another form."""
        return super().__new__(cls, _parse(sizes) if isinstance(sizes, str) else sizes)

    def __str__(self) -> str:
        return ",".join(map(str, sorted(self))) or "0"


def _parse(text: str) -> set[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and part.isascii() for part in parts):
        raise ValueError("is not a list of whole numbers with commas between, such as 1,2,4")
    if any(len(part) > _MAX_DIGITS or int(part) > MAX_ROWS for part in parts):
        raise ValueError(f"has a size above {MAX_ROWS}")
    return {int(part) for part in parts} - {0}
