"""Bounds of numeric settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """A range of numbers; None leaves a side open.

    Args:
        above: every number is greater.
        minimum: the least number.
        maximum: the greatest number.
    """

    above: float | None = None
    minimum: float | None = None
    maximum: float | None = None

    def __contains__(self, number: float) -> bool:
        """Whether a number is in the range; NaN is in none."""
        return (
            number == number
            and (self.above is None or number > self.above)
            and (self.minimum is None or number >= self.minimum)
            and (self.maximum is None or number <= self.maximum)
        )

    def __str__(self) -> str:
        """The bounds as text: `> 0`, `within 0..65535`."""
        if self.minimum is not None and self.maximum is not None:
            return f"within {self.minimum}..{self.maximum}"
        sides = ((">", self.above), (">=", self.minimum), ("<=", self.maximum))
        return " and ".join(f"{sign} {bound}" for sign, bound in sides if bound is not None)


ANY = Bounds()
POSITIVE = Bounds(above=0)
NOT_NEGATIVE = Bounds(minimum=0)
AT_LEAST_ONE = Bounds(minimum=1)
SHARE = Bounds(above=0, maximum=1)
