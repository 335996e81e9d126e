"""Load balancing: which replica a sequence goes to, by its cached prefix, its adapter, load and weights. Pure."""

from collections.abc import Sequence

from funitel.router.engine.interface import ReplicaLoad
from funitel.router.replica_set.weighted_choice import WeightedChoice

# A cached token outweighs this many tokens of load above another replica's: the cached one is computed anew elsewhere,
# of the load most is computed already and only makes every step a little longer.
TOKENS_PER_CACHED_TOKEN = 4
# An adapter in memory outweighs this many, which a CPU computes in about the time that it takes to load one; a guess.
TOKENS_PER_ADAPTER = 512
# Sequences that the replicas of one weight may get above their share for the prefixes that are cached there. Else a
# prefix that all prompts share would keep a new replica of a small weight from ever getting one.
MAX_LEAD = 16.0


def choose_replica(loads: Sequence[ReplicaLoad]) -> int:
    """Return the index of the replica with the longest cached prefix of the sequence that is not overloaded.

    A replica is overloaded when it has so many more tokens than the least loaded one that the cached prefix and the
    adapter in memory do not make up for them. Among equals one with the adapter is taken, then the least loaded, then
    the first.
    """
    least = min(load.load_tokens for load in loads)
    return min(
        (index for index, load in enumerate(loads) if not _is_overloaded(load, least)),
        key=lambda index: (-loads[index].cached_tokens, not loads[index].has_adapter, loads[index].load_tokens),
    )


class LoadBalancer:
    """Chooses among replicas of some weights, by what it has counted since the weights changed last."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Begin with the weights of the replicas that serve, in their order."""
        self._weights = tuple(weights)
        self._choice = WeightedChoice(weights)
        self.is_weighted = self._choice.is_needed  # weights differ, so that sequences are to be counted

    def choose(self, loads: Sequence[ReplicaLoad]) -> int:
        """Return the index of the replica for a sequence, as `choose_replica` does among replicas of equal weights.

        Of replicas with different weights, the one with the longest cached prefix is taken if it has more of it than
        those of any other weight; if not, the weight that is due decides. Replicas of weight 0 are for when there are
        no others. Nothing is counted.

        Args:
            loads: of the replicas, in their order.
        """
        weights = self._weights
        candidates = [index for index, weight in enumerate(weights) if weight] or list(range(len(weights)))
        best = _chosen_of(candidates, loads)
        if not self.is_weighted:
            return best
        elsewhere = max(loads[index].cached_tokens for index in candidates if weights[index] != weights[best])
        if loads[best].cached_tokens > elsewhere and self._choice.lead_of(weights[best]) < MAX_LEAD:
            return best
        due = self._choice.next_weight()
        return _chosen_of([index for index in candidates if weights[index] == due], loads)

    def count(self, index: int) -> None:
        """Count a sequence that went to a replica."""
        self._choice.count(self._weights[index])


def _chosen_of(candidates: Sequence[int], loads: Sequence[ReplicaLoad]) -> int:
    return candidates[choose_replica([loads[index] for index in candidates])]


def _is_overloaded(load: ReplicaLoad, least_tokens: int) -> bool:
    worth = TOKENS_PER_CACHED_TOKEN * load.cached_tokens + TOKENS_PER_ADAPTER * load.has_adapter
    return load.load_tokens - least_tokens > worth
