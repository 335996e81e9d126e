"""Whether a server is sound behind hostile requests: its answers, its log, its memory, and its next answer."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from funitel_testing.fuzz_inputs import rss_mib
from funitel_testing.servers import PLAIN, Server, descendants

MAX_ERROR_BYTES = 16_384
INTERVAL = 0.05  # seconds between two looks at the memory


def refusal_of(response: httpx.Response) -> str:
    """Field and message of a refusal, in one line; fails where it is none as documented."""
    text = response.text
    assert 400 <= response.status_code < 500, f"{response.status_code}: {text[:500]}"
    assert len(response.content) <= MAX_ERROR_BYTES, text[:500]
    assert response.headers["content-type"].startswith("application/json"), text[:500]
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    field = "" if isinstance(error, str) else error.get("param") or ""
    assert isinstance(message, str), text[:500]
    assert message.strip(), text[:500]
    assert "\n" not in message, message
    assert "Traceback" not in text, text[:500]
    return f"{field}: {message}"


def problem_of(response: httpx.Response, field: str) -> str:
    """What is wrong with an answer to a hostile request: a 200 is right, or a refusal that `field` matches."""
    if response.status_code == 200:
        return ""
    try:
        line = refusal_of(response)
    except (AssertionError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "" if re.search(field, line) else f"names no field: {line}"


class Memory:
    """Memory of a server's processes, looked at all the time."""

    def __init__(self, server: Server) -> None:
        self._pid = server.process.pid
        self._is_over = threading.Event()
        self.before = self.now()
        self.most = self.before
        self._thread = threading.Thread(target=self._watch)

    def now(self) -> int:
        """MiB, now; pages that processes share count in each."""
        total = 0
        for pid in descendants(self._pid):
            try:
                total += rss_mib(pid)
            except (OSError, IndexError):  # it has just ended
                continue
        return total

    def _watch(self) -> None:
        while not self._is_over.wait(INTERVAL):
            self.most = max(self.most, self.now())

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_over.set()
        self._thread.join()


@contextmanager
def staying_sound(
    server: Server,
    answers: Callable[[], None],
    *,
    peak_mib: int = 1500,
    left_mib: int = 500,
    seconds: float = 10,
) -> Iterator[None]:
    """What is done inside leaves the server as it was.

    Its log has no traceback; `answers`, a normal request, is answered within `seconds`; its processes never took
    `peak_mib` more than before, and take no `left_mib` more at the end; the shards are those that it had.
    """
    answers()  # what is loaded once is not to be blamed on what comes
    logged = server.log.stat().st_size
    shards = server.shard_pids()
    with Memory(server) as memory:
        yield
    began = time.monotonic()
    answers()
    assert time.monotonic() - began < seconds
    assert server.shard_pids() == shards, server.tail()
    assert httpx.get(f"{server.url}/health", timeout=seconds, verify=PLAIN).status_code == 200
    with server.log.open("rb") as log:
        log.seek(logged)
        news = log.read().decode(errors="replace")
    assert "Traceback" not in news, news[-3000:]
    assert memory.most - memory.before < peak_mib, f"{memory.before} MiB, then {memory.most}"
    deadline = time.monotonic() + 10
    while memory.now() - memory.before >= left_mib and time.monotonic() < deadline:
        time.sleep(0.2)
    assert memory.now() - memory.before < left_mib, f"{memory.before} MiB, and at the end {memory.now()}"
