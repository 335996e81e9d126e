"""Which replica a sequence goes to. Pure: what the replicas have is passed in."""

from collections.abc import Sequence
from dataclasses import dataclass

# A token found computed outweighs so many that a replica has more to hold than another: the one is computed anew
# elsewhere, of the others most are computed already and only make every step a little longer.
TOKENS_PER_CACHED_TOKEN = 4


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """How a replica stands towards one sequence.

    `load_tokens` are the tokens known of every sequence that waits or runs there; `cached_tokens` those at the
    beginning of the one sequence that are computed there.
    """

    load_tokens: int
    cached_tokens: int


def choose_replica(standings: Sequence[ReplicaLoad]) -> int:
    """Say which of the replicas gets the sequence: the one with its longest computed beginning that is not overloaded.

    A replica is overloaded when it has so many more tokens than the least loaded one that the beginning does not make
    up for them. Among equals the least loaded is taken, then the first.
    """
    least = min(standing.load_tokens for standing in standings)
    return min(
        (choose_replica for choose_replica, standing in enumerate(standings) if not _is_overloaded(standing, least)),
        key=lambda choose_replica: (-standings[choose_replica].cached_tokens, standings[choose_replica].load_tokens),
    )


def _is_overloaded(standing: ReplicaLoad, least_tokens: int) -> bool:
    return standing.load_tokens - least_tokens > TOKENS_PER_CACHED_TOKEN * standing.cached_tokens
