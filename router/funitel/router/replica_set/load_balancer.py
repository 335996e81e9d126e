"""Load balancing: which replica a sequence goes to, by its cached prefix, its adapter and the load. Pure."""

from collections.abc import Sequence

from funitel.router.engine.interface import ReplicaLoad

# A cached token outweighs this many tokens of load above another replica's: the cached one is computed anew elsewhere,
# of the load most is computed already and only makes every step a little longer.
TOKENS_PER_CACHED_TOKEN = 4
# An adapter in memory outweighs this many, which a CPU computes in about the time that it takes to load one; a guess.
TOKENS_PER_ADAPTER = 512


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


def _is_overloaded(load: ReplicaLoad, least_tokens: int) -> bool:
    worth = TOKENS_PER_CACHED_TOKEN * load.cached_tokens + TOKENS_PER_ADAPTER * load.has_adapter
    return load.load_tokens - least_tokens > worth
