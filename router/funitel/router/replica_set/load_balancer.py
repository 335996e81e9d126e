"""Load balancing: which replica a sequence goes to, by its cached prefix and the load. Pure."""

from collections.abc import Sequence

from funitel.router.engine.interface import ReplicaLoad

# A cached token outweighs this many tokens of load above another replica's: the cached one is computed anew elsewhere,
# of the load most is computed already and only makes every step a little longer.
TOKENS_PER_CACHED_TOKEN = 4


def choose_replica(loads: Sequence[ReplicaLoad]) -> int:
    """Return the index of the replica with the longest cached prefix of the sequence that is not overloaded.

    A replica is overloaded when it has so many more tokens than the least loaded one that the cached prefix does not
    make up for them. Among equals the least loaded is taken, then the first.
    """
    least = min(load.load_tokens for load in loads)
    return min(
        (index for index, load in enumerate(loads) if not _is_overloaded(load, least)),
        key=lambda index: (-loads[index].cached_tokens, loads[index].load_tokens),
    )


def _is_overloaded(load: ReplicaLoad, least_tokens: int) -> bool:
    return load.load_tokens - least_tokens > TOKENS_PER_CACHED_TOKEN * load.cached_tokens
