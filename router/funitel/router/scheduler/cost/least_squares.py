"""Least squares for costs that are never negative, learnt one measurement at a time. Pure.

Two memories: a long one knows how the costs divide among the features, a short one how far they have drifted lately.
What the short memory cannot tell, for all recent points look alike, it takes from the long one.
"""

from collections.abc import Sequence

LONG_MEMORY = 0.998  # weight of a point against the next: some 500 points count
SHORT_MEMORY = 0.9  # some 10
# Against points of a feature about 1: too small to be seen where there are points, decides where there are none.
RIDGE = 1e-4
# What is farther from its prediction than this many usual deviations counts as that far only: a page touched for the
# first time, a neighbour that took the core. A lasting change widens the usual deviation and is followed soon.
MAX_DEVIATIONS = 3.0
MIN_DEVIATION = 0.05  # of the prediction, so that a perfectly regular past makes no outlier of a small change
DEVIATION_MEMORY = 0.9
FIRST = 32  # measurements that each change much


class LeastSquares:
    """Predicts a quantity as a sum of features times costs >= 0; features near 1 are learnt best."""

    def __init__(self, num_features: int, solve_every: int = 1) -> None:
        """`solve_every`: measurements after which costs are solved for anew, once there were `FIRST`."""
        self.num_observed = 0
        self._solve_every = solve_every
        self._long = _Memory(num_features, LONG_MEMORY)
        self._short = _Memory(num_features, SHORT_MEMORY)
        self._costs: list[float] | None = None
        self._deviation = 0.0

    @property
    def costs(self) -> list[float]:
        """Cost of each feature; zeros before anything was observed."""
        if self._costs is None:
            self._costs = self._short.solve(self._long.solve([0.0] * self._long.size))
        return self._costs

    def predict(self, features: Sequence[float]) -> float:
        """What these features cost."""
        return sum(cost * feature for cost, feature in zip(self.costs, features, strict=True))

    def observe(self, features: Sequence[float], value: float, rest: float = 0.0) -> bool:
        """Take a measurement into account, or as much of it as is believable; return whether it was not too much.

        `rest`: what `value` was measured together with. Its noise is in `value` too.
        """
        believed = value
        if self.num_observed:
            believed = self._believable(self.predict(features), value, rest)
        else:
            self._deviation = max(abs(value), rest)  # a first point tells too little to doubt the next ones
        self.num_observed += 1
        self._add(features, believed)
        return value <= believed

    def _add(self, features: Sequence[float], value: float) -> None:
        self._long.add(features, value)
        self._short.add(features, value)
        if self.num_observed <= FIRST or self.num_observed % self._solve_every == 0:
            self._costs = None

    def _believable(self, predicted: float, value: float, rest: float) -> float:
        reach = MAX_DEVIATIONS * max(self._deviation, MIN_DEVIATION * max(predicted, rest))
        clipped = min(max(value, predicted - reach), predicted + reach)
        self._deviation = DEVIATION_MEMORY * self._deviation + (1 - DEVIATION_MEMORY) * abs(clipped - predicted)
        return clipped


class _Memory:
    """Decayed sums of products of features, and of features times values."""

    def __init__(self, size: int, decay: float) -> None:
        self.size = size
        self._decay = decay
        self._products = [[0.0] * size for _ in range(size)]
        self._values = [0.0] * size

    def add(self, features: Sequence[float], value: float) -> None:
        """Add a point; older ones weigh less."""
        for row, feature in zip(self._products, features, strict=True):
            for j, other in enumerate(features):
                row[j] = self._decay * row[j] + feature * other
        self._values = [
            self._decay * old + feature * value for old, feature in zip(self._values, features, strict=True)
        ]

    def solve(self, prior: Sequence[float]) -> list[float]:
        """Costs nearest to `prior` among those that fit the points; what would be negative is 0."""
        kept = list(range(self.size))
        while True:
            costs = self._solve(kept, prior)
            negative = [i for i in kept if costs[i] < 0.0]
            if not negative:
                return costs
            kept = [i for i in kept if i not in negative]

    def _solve(self, kept: Sequence[int], prior: Sequence[float]) -> list[float]:
        """Solve the normal equations of the features in `kept`, the others costing nothing, by elimination."""
        rows = [
            [self._products[i][j] + (RIDGE if i == j else 0.0) for j in kept] + [self._values[i] + RIDGE * prior[i]]
            for i in kept
        ]
        for at in range(len(kept)):  # positive definite: no pivot is 0
            for row in rows[at + 1 :]:
                share = row[at] / rows[at][at]
                for j in range(at, len(kept) + 1):
                    row[j] -= share * rows[at][j]
        costs = [0.0] * self.size
        for at in reversed(range(len(kept))):
            known = sum(rows[at][j] * costs[kept[j]] for j in range(at + 1, len(kept)))
            costs[kept[at]] = (rows[at][-1] - known) / rows[at][at]
        return costs
