"""Weighted choice: which weight the next sequence goes to, so that the shares follow the weights. Pure.

Replicas of one weight are one group; its share is the sum of their weights. The choice is Tijdeman's rule for the
chairman assignment problem: of the groups that are far enough below their share, the one that is due first. In any run
of choices the count of each group differs from its share by less than one.
"""

from collections.abc import Sequence

# What else is counted, such as batches of many texts, leaves at most so much to be made up for.
MAX_DEBT = 64.0


class WeightedChoice:
    """Counts of the groups since the weights changed last."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Begin with the weights of all replicas, of which those with 0 get nothing."""
        total = sum(weights) or 1.0
        self._shares = {weight: weight * weights.count(weight) / total for weight in weights if weight}
        self._owed = dict.fromkeys(self._shares, 0.0)  # by weight: what is missing to the share so far

    @property
    def is_needed(self) -> bool:
        """Whether there is more than one weight above 0."""
        return len(self._shares) > 1

    def lead_of(self, weight: float) -> float:
        """Return what the replicas of a weight have got above their share."""
        return -self._owed[weight]

    def next_weight(self) -> float:
        """Return the weight of the replicas that are to get the next one; nothing is counted."""
        slack = 1 / (2 * len(self._shares) - 2) if self.is_needed else 0.0
        owed = {weight: self._owed[weight] + share for weight, share in self._shares.items()}
        eligible = [weight for weight in owed if owed[weight] >= slack] or [max(owed, key=owed.__getitem__)]
        return min(eligible, key=lambda weight: (1 - slack - owed[weight]) / self._shares[weight])

    def count(self, weight: float, amount: float = 1.0) -> None:
        """Count one that went to a replica of some weight."""
        if weight not in self._shares:
            return
        for each, share in self._shares.items():
            owed = self._owed[each] + share * amount - (amount if each == weight else 0.0)
            self._owed[each] = min(max(owed, -MAX_DEBT), MAX_DEBT)
