"""Type of `--memory-budget`: a number of bytes, with a unit or without."""

import re

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}{unit}": 1000**power for power, letter in enumerate("kMGT", 1) for unit in ("", "B")}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}
_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


class MemorySize(int):
    """A number of bytes; `16GiB`, `16GB` and `17179869184` are ones."""

    METAVAR = "BYTES|GiB"

    def __new__(cls, text: str) -> "MemorySize":
        """Raise ValueError with the reason for any other text."""
        found = _TEXT.fullmatch(text.strip())
        if found is None or found[2] not in _UNITS:
            raise ValueError("is no size such as 16GiB, 16GB or a number of bytes")
        return super().__new__(cls, int(float(found[1]) * _UNITS[found[2]]))

    def __str__(self) -> str:
        return int.__repr__(self)

    __repr__ = __str__
