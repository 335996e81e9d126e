"""Which replica a sequence goes to. Pure: what the replicas have is passed in."""

from collections.abc import Sequence
from dataclasses import dataclass

# A token found computed outweighs so many that a replica has more to hold than another: the one is computed anew
# elsewhere, of the others most are computed already and only make every step a little longer.
TOKENS_PER_CACHED_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Standing:
    """How a replica stands towards one sequence.

    `load_tokens` are the tokens known of every sequence that waits or runs there; `cached_tokens` those at the
    beginning of the one sequence that are computed there.
    """

    load_tokens: int
    cached_tokens: int


def place(standings: Sequence[Standing]) -> int:
    """Say which of the replicas gets the sequence: the one with its longest computed beginning that is not overloaded.

    A replica is overloaded when it has so many more tokens than the least loaded one that the beginning does not make
    up for them. Among equals the least loaded is taken, then the first.
    """
    least = min(standing.load_tokens for standing in standings)
    return min(
        (place for place, standing in enumerate(standings) if not _is_overloaded(standing, least)),
        key=lambda place: (-standings[place].cached_tokens, standings[place].load_tokens),
    )


def _is_overloaded(standing: Standing, least_tokens: int) -> bool:
    return standing.load_tokens - least_tokens > TOKENS_PER_CACHED_TOKEN * standing.cached_tokens
