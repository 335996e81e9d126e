"""Wait until a server has ended: `python -m funitel.launcher.wait_for_drain URL SECONDS`, the preStop of its shards.

Where shards run in containers of their own, all of them are told to stop at once. This keeps a shard alive while the
router finishes requests with it. It imports the standard library alone.
"""

import http.client
import math
import sys
import time
from collections.abc import Callable
from urllib.parse import urlsplit

ANSWER_SECONDS = 2.0
PAUSE_SECONDS = 0.5
MAX_FAILURES = 3  # in a row: a name or a connection may fail once


def is_alive(host: str, port: int) -> bool:
    """Whether a server answers `GET /health/live`, with whatever status."""
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", "/health/live", headers={"Host": "localhost"})
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


def wait(answers: Callable[[], bool], seconds: float, pause_seconds: float = PAUSE_SECONDS) -> bool:
    """Return True once a server has not answered for a few times in a row, False after so many seconds."""
    end, failures = time.monotonic() + seconds, 0
    while failures < MAX_FAILURES:
        if time.monotonic() >= end:
            return False
        failures = 0 if answers() else failures + 1
        time.sleep(pause_seconds)
    return True


def main(arguments: list[str]) -> int:
    """Print one line; return 0 where the server has ended, 1 where the time is up, 2 for a wrong command line."""
    try:
        url, seconds = arguments
        parts, limit = urlsplit(url), float(seconds)
        host, port = parts.hostname, parts.port
        if parts.scheme != "http" or host is None or port is None or not (math.isfinite(limit) and limit >= 0):
            raise ValueError
    except ValueError:
        print("error: give http://HOST:PORT of the server, and seconds", file=sys.stderr)
        return 2
    has_ended = wait(lambda: is_alive(host, port), limit)
    print(f"{url} has ended" if has_ended else f"{url} answers after {seconds} seconds still")
    return 0 if has_ended else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
