"""Encode texts: the shortest at once, short ones in threads, long ones in processes that may be killed.

The encoding of a few words costs less than the way to a thread and back. Threads encode without the interpreter's lock,
but cannot be stopped. Processes have limits of time and memory and a lower priority, so that long texts delay no other
request. Threads and processes alternate between API keys. Event loop only.
"""

import asyncio
import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from funitel.proto.errors import InvalidRequest, Overloaded, translating
from funitel.router.core import request_context
from funitel.router.sandbox.fair_semaphore import FairSemaphore
from funitel.router.sandbox.pool import Killed, SandboxPool, WorkerUnavailable
from funitel.router.text.encode import EncodeCalls

logger = logging.getLogger(__name__)

BRIEF_CHARACTERS = 1024  # encoded on the event loop; in less than half a millisecond
SHORT_CHARACTERS = 16_384  # encoded in a thread; in milliseconds
SHORT_LISTED_CHARACTERS = 2048  # where offsets are wanted: the library computes them with the interpreter's lock
CPU_LIMIT_SECONDS = 10.0  # for one text; two million characters take 0.5 to 3
TIME_LIMIT_SECONDS = 60.0  # of any kind: the machine may be busy with the model
MEMORY_LIMIT_BYTES = 2 << 30
MAX_ANSWER_BYTES = 1 << 26
NICENESS = 10
MAX_WAITING_CHARACTERS = 32 << 20  # of long texts that wait or are encoded, for each key
CHARACTERS_PER_TOKEN = 4  # usual; where the number of tokens is not known


class EncodePool:
    """Runs the functions of `encode.CALLS` for one tokenizer.

    Args:
        calls: for threads.
        path: of the tokenizer.json, for processes.
        workers: threads, and processes at most.
        has_several_keys: whether one key must leave a thread and a process to others.
    """

    def __init__(self, calls: EncodeCalls, path: Path, workers: int, *, has_several_keys: bool = False) -> None:
        of_a_key = max(1, workers - 1) if has_several_keys else workers
        self.tokenizer = calls.tokenizer
        self._calls = calls
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tokenizer")
        self._thread_semaphore = FairSemaphore(workers, of_a_key)
        self._waiting_characters: Counter[bytes] = Counter()  # of long texts, by key
        self._processes = SandboxPool(
            "funitel.router.text.encode_worker",
            {"path": str(path), "control": asdict(calls.control)},
            most=workers,
            time_limit=TIME_LIMIT_SECONDS,
            cpu_limit=CPU_LIMIT_SECONDS,
            memory_limit=MEMORY_LIMIT_BYTES,
            max_answer_bytes=MAX_ANSWER_BYTES,
            niceness=NICENESS,
            has_several_keys=has_several_keys,
            readable=[str(path.resolve())],
        )

    def check_room(self) -> None:
        """Raise Overloaded where no further long text of the current request's key may wait.

        Not for a request that another router has admitted.
        """
        context = request_context.current()
        if self._waiting_characters[context.owner] >= MAX_WAITING_CHARACTERS and not context.journal.is_replayed:
            raise Overloaded(": long texts of this client wait to be tokenized", reason="tokenizing")

    async def run(
        self, call: str, num_characters: int, field: str, *, short: int = SHORT_CHARACTERS, **arguments: Any
    ) -> Any:
        """Run a function on texts of so many characters, in a thread or here where these are at most `short`.

        Raises:
            InvalidRequest: the tokenizer cannot represent the text of a `field`, or it takes too much time or memory.
            Overloaded: too many long texts of the key wait, or no process can be started.
        """
        if num_characters <= min(short, BRIEF_CHARACTERS):
            with translating(partial(cannot_tokenize, field)):
                return self._calls.run(call, arguments)
        if num_characters <= short:
            async with self._thread_semaphore.acquired(request_context.current().owner):
                try:
                    answer = self.in_thread(self._calls.run, call, arguments)
                except RuntimeError as problem:  # the text is not to blame
                    logger.warning("a text cannot be tokenized: %s", problem)
                    raise Overloaded(": no thread can be started to tokenize a text", reason="tokenizing") from None
                with translating(partial(cannot_tokenize, field)):
                    return await answer
        context = request_context.current()
        estimate = num_characters // CHARACTERS_PER_TOKEN
        context.encoded_tokens += estimate  # also if it fails, or the client leaves
        try:
            encoded = await self._in_process(call, num_characters, field, arguments)
        except Overloaded:
            context.encoded_tokens -= estimate
            raise
        context.encoded_tokens -= estimate
        if encoded is None:
            raise InvalidRequest(f"`{field}` cannot be tokenized", field)
        return encoded[0]

    def in_thread(self, function: Any, *arguments: Any) -> asyncio.Future[Any]:
        """Run a short function in a thread. Raises RuntimeError where none can be started."""
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def _in_process(self, call: str, num_characters: int, field: str, arguments: dict[str, Any]) -> Any:
        self.check_room()
        owner = request_context.current().owner
        self._waiting_characters[owner] += num_characters
        try:
            return await self._processes.run({"call": call, "arguments": arguments}, owner)
        except Killed as limit:
            raise InvalidRequest(f"`{field}` cannot be tokenized: {limit}", field) from None
        except WorkerUnavailable as problem:
            logger.warning("a long text cannot be tokenized: %s", problem)
            raise Overloaded(": no process can be started to tokenize a long text", reason="tokenizing") from None
        finally:
            self._waiting_characters[owner] -= num_characters
            self._waiting_characters = +self._waiting_characters

    async def close(self) -> None:
        """Let the threads end, and end the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._processes.close()


def cannot_tokenize(field: str, error: Exception) -> InvalidRequest:
    """The error for the text of a field at which the library failed, which raises bare Exception."""
    logger.debug("the tokenizer failed: %s", error)
    return InvalidRequest(f"`{field}` cannot be tokenized", field)
