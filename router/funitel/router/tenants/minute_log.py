"""What keys and users have used within the last minute, in a file that survives kill -9 of the router.

Each event is one line, written to the page cache by one call before the request goes on: no disk is waited for. A line
has the absolute number of tokens that are reserved, so that the last line of a pair of user and key counts. What is
reserved in the last line counts as used: the end of its request is not known.
"""

import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from funitel.router.auth.rate_limit import MINUTE

logger = logging.getLogger(__name__)

OLDER = ".older"  # suffix of the file with the minute before


@dataclass(frozen=True, slots=True)
class MinuteUse:
    """What was used at an instant.

    Attributes:
        at: Unix seconds.
        user: name of the user.
        key: id of the key; 0 for sessions.
        requests: that began.
        tokens: of prompts and completions.
    """

    at: float
    user: str
    key: int
    requests: int
    tokens: int


class MinuteLog:
    """The file of one router. Event loop only.

    Args:
        path: of the file; a second one beside it has the minute before.
        clock: Unix seconds.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._older = path.with_name(path.name + OLDER)
        self._clock = clock
        self._reserved: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._file: int | None = None
        self._begun = 0.0
        self._is_lost = False

    def start(self) -> list[MinuteUse]:
        """What was used within the last minute by routers before this one; opens the file."""
        now = self._clock()
        uses = sorted((each for each in self._read(now) if now - MINUTE - 1 < each.at <= now), key=lambda each: each.at)
        self._open(now, uses)
        return uses

    def count_request(self, user: str, key: int) -> None:
        """A request began."""
        self._write(MinuteUse(self._clock(), user, key, 1, 0))

    def reserve(self, user: str, key: int, num_tokens: int) -> None:
        """Tokens were reserved."""
        self._reserved[user, key] += num_tokens
        self._write(MinuteUse(self._clock(), user, key, 0, 0))

    def settle(self, user: str, key: int, num_reserved: int, num_used: int) -> None:
        """A reservation has ended."""
        self._reserved[user, key] -= num_reserved
        self._write(MinuteUse(self._clock(), user, key, 0, num_used))
        if not self._reserved[user, key]:
            del self._reserved[user, key]

    def close(self) -> None:
        """Remove the files: what a router has counted that ends in order is not kept."""
        file, self._file = self._file, None
        if file is None:
            return
        with suppress(OSError):
            if os.fstat(file).st_ino == self._path.stat().st_ino:  # else they are those of a router after this one
                self._path.unlink()
                self._older.unlink(missing_ok=True)
        os.close(file)

    def _read(self, now: float) -> Iterator[MinuteUse]:
        """The events of both files, then what was reserved last."""
        reserved: dict[tuple[str, int], int] = {}
        for path in (self._older, self._path):
            for line in _lines(path):
                try:
                    at, user, key, requests, tokens, held = json.loads(line)
                    use = MinuteUse(float(at), str(user), int(key), int(requests), int(tokens))
                    reserved[use.user, use.key] = int(held)
                except (ValueError, TypeError):
                    continue  # cut off by a full disk
                yield use
        yield from (MinuteUse(now, user, key, 0, held) for (user, key), held in reserved.items() if held > 0)

    def _write(self, use: MinuteUse) -> None:
        if self._file is None:
            return
        try:
            if use.at - self._begun > MINUTE + 1:
                self._open(use.at, [MinuteUse(use.at, user, key, 0, 0) for user, key in self._reserved])
            os.write(self._file, self._line(use))
        except OSError as error:
            self._lose(error)

    def _line(self, use: MinuteUse) -> bytes:
        held = self._reserved.get((use.user, use.key), 0)
        return f"{json.dumps([use.at, use.user, use.key, use.requests, use.tokens, held])}\n".encode()

    def _lose(self, error: OSError) -> None:
        if not self._is_lost:
            logger.error("what is used within a minute is not kept for the next router: %s", error)
        self._is_lost = True

    def _open(self, now: float, uses: list[MinuteUse]) -> None:
        """Begin a file that has `uses`; the one before it stays as the older one. Where that fails it goes on.

        The first one of a router has all that is in the older one, too, which is removed.
        """
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.write(file, b"".join(self._line(use) for use in uses))
            if self._file is None:
                new.replace(self._path)
                self._older.unlink(missing_ok=True)
            else:
                with suppress(FileNotFoundError):
                    self._path.replace(self._older)
                new.replace(self._path)
        except OSError as error:
            self._lose(error)
            return
        if self._file is not None:
            os.close(self._file)
        self._file, self._begun = file, now


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except OSError:
        return []
