"""Parse and format sets of CPU cores in the kernel's notation: `0-3,8`."""

from collections.abc import Iterable
from itertools import groupby


class Cores(frozenset[int]):
    """A set of logical processors, from text such as `0-3,8` or from numbers; `str` gives the text."""

    def __new__(cls, cores: str | Iterable[int]) -> "Cores":
        """Raise ValueError with the reason for text of another form."""
        return super().__new__(cls, _parse(cores) if isinstance(cores, str) else cores)

    def __str__(self) -> str:
        runs = (list(run) for _, run in groupby(enumerate(sorted(self)), lambda pair: pair[1] - pair[0]))
        ends = ((run[0][1], run[-1][1]) for run in runs)
        return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def _parse(text: str) -> list[int]:
    cores: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        try:
            run = range(int(first), int(last or first) + 1)
        except ValueError:
            run = range(0)
        if not run or run[0] < 0:
            raise ValueError("is not a set of cores such as 0-3,8")
        cores += run
    return cores
