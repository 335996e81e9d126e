"""The numbers that a setting may be."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """A range of numbers; None leaves a side open.

    Args:
        above: every number is greater.
        least: the least number.
        most: the greatest number.
    """

    above: float | None = None
    least: float | None = None
    most: float | None = None

    def __contains__(self, number: float) -> bool:
        """Whether a number is in the range; what is not a number (NaN) is in none."""
        return (
            number == number
            and (self.above is None or number > self.above)
            and (self.least is None or number >= self.least)
            and (self.most is None or number <= self.most)
        )

    def __str__(self) -> str:
        """What a number must be: `> 0`, `within 0..65535`."""
        if self.least is not None and self.most is not None:
            return f"within {self.least}..{self.most}"
        sides = ((">", self.above), (">=", self.least), ("<=", self.most))
        return " and ".join(f"{sign} {bound}" for sign, bound in sides if bound is not None)


ANY = Bounds()
POSITIVE = Bounds(above=0)
NOT_NEGATIVE = Bounds(least=0)
AT_LEAST_ONE = Bounds(least=1)
SHARE = Bounds(above=0, most=1)
