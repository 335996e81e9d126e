"""Bans of addresses that try wrong API keys. Pure: instants are seconds of a monotonic clock.

A ban refuses right keys too: else a guess would be told apart from the others.
"""

import logging
from dataclasses import dataclass

from funitel.proto.errors import RateLimited

logger = logging.getLogger(__name__)

MAX_ADDRESSES = 4096  # that are counted at once; of more the one that tried longest ago is forgotten


@dataclass(slots=True)
class _Tries:
    """Wrong keys of an address: how many, and until when they count; too many of them ban it until then."""

    number: int
    until: float


class WrongKeys:
    """Counts wrong keys of each address, and bans an address that has tried too many.

    Args:
        most: wrong keys of one address that ban it; 0: no address is ever banned.
        seconds: length of a ban, and the time in which the keys of an address are counted together.

    Attributes:
        tries: of each address that has tried a wrong key lately; while there are none, nothing needs a check.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self.tries: dict[str, _Tries] = {}

    def check(self, address: str, now: float) -> None:
        """Raise RateLimited, with the time that is left, where an address is banned."""
        tries = self.tries.get(address)
        if tries is not None and tries.number >= self._most and now < tries.until:
            raise RateLimited("too many wrong API keys came from this address", tries.until - now)

    def count(self, address: str, now: float) -> None:
        """Note that a wrong key came from an address; the last that it may try bans it."""
        if not self._most:
            return
        tries = self.tries.pop(address, None)
        if tries is None or now >= tries.until:
            tries = _Tries(0, now + self._seconds)
        tries.number += 1
        if tries.number == self._most:
            tries.until = now + self._seconds
            logger.warning("%s is banned for %g s: %d wrong API keys", address, self._seconds, self._most)
        self.tries[address] = tries
        if len(self.tries) > MAX_ADDRESSES:
            del self.tries[next(iter(self.tries))]
