"""What a completion shall look like, and whether the shards can keep it to that: found out in a process that can be
killed, before a request is queued. A bomb costs its sender a refusal, and nobody else anything. Event loop only.
"""

import asyncio
import hashlib
import json
import re
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import GrammarType

TIME_LIMIT_SECONDS = 5.0  # reasonable grammars take milliseconds
START_LIMIT_SECONDS = 60.0
MEMORY_LIMIT_BYTES = 2**31
MAX_GRAMMAR_BYTES = 256 * 1024
NUM_WORKERS = 2  # so that one bomb does not make others wait for its end
MOST_DEATHS = 3  # of workers in a row that somebody else killed, until the grammar is thought to be the reason
NUM_VERDICTS = 1024
LIMIT_VERDICT_SECONDS = 60.0  # a busy machine may be what made a grammar slow


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a completion shall look like. `is_native`: TGI's rules for schemas hold, too."""

    kind: GrammarType
    text: str
    is_native: bool = False

    @classmethod
    def json(cls, schema: Any, *, is_native: bool = False) -> "Grammar":
        """JSON text that a schema describes; the schema may be text itself.

        Raises:
            InvalidRequest: it is nested too deeply.
        """
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
        except RecursionError:
            raise InvalidRequest("grammar is not valid: the schema is nested too deeply", "grammar") from None
        return cls(GrammarType.JSON, text, is_native)

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Text that matches a regular expression from its beginning to its end."""
        return cls(GrammarType.REGEX, pattern or "(?:)")  # no text at all would be no grammar

    @classmethod
    def choice(cls, choices: Sequence[str]) -> "Grammar":
        """One of a few texts."""
        return cls(GrammarType.REGEX, "|".join(map(_escape, choices)))

    @property
    def digest(self) -> bytes:
        """A short name that no other grammar has."""
        head = f"{self.kind}{self.is_native}:"
        return hashlib.sha256(head.encode() + self.text.encode(errors="surrogatepass")).digest()


def _escape(text: str) -> str:
    """A pattern that matches this text only; what is no ASCII letter or digit is written by its number."""
    return re.sub(r"[^0-9A-Za-z]", lambda match: f"\\x{{{ord(match[0]):x}}}", text)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Why a grammar is refused, None if it is not; and until when that holds, on the monotonic clock."""

    error: str | None
    until: float = float("inf")


class GrammarChecker:
    """Compiles grammars in worker processes, to see whether they can be kept, and remembers what it found."""

    def __init__(
        self,
        tokenizer_path: Path,
        *,
        time_limit: float = TIME_LIMIT_SECONDS,
        memory_limit: int = MEMORY_LIMIT_BYTES,
    ) -> None:
        self._tokenizer_path = tokenizer_path
        self._time_limit = time_limit
        self._memory_limit = memory_limit
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._pending: dict[bytes, asyncio.Task[_Verdict]] = {}
        self._idle: list[_Worker] = []
        self._slots = asyncio.Semaphore(NUM_WORKERS)

    async def check(self, grammar: Grammar) -> None:
        """Raise InvalidRequest, saying why, unless the grammar can be kept; the loop never waits for it."""
        size = len(grammar.text.encode(errors="surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"grammar must have at most {MAX_GRAMMAR_BYTES} bytes, given {size}", "grammar")
        verdict = self._known(grammar.digest) or await self._find_out(grammar)
        if verdict.error is not None:
            raise InvalidRequest(verdict.error, "grammar")

    def _known(self, digest: bytes) -> _Verdict | None:
        verdict = self._verdicts.get(digest)
        if verdict is None or verdict.until < time.monotonic():
            return None
        self._verdicts.move_to_end(digest)
        return verdict

    async def _find_out(self, grammar: Grammar) -> _Verdict:
        """Compile once however many ask at the same time, and also when the first of them leaves."""
        digest = grammar.digest
        if digest not in self._pending:
            task = asyncio.create_task(self._judge(grammar))
            self._pending[digest] = task
            task.add_done_callback(lambda _: self._pending.pop(digest))
        return await asyncio.shield(self._pending[digest])

    async def _judge(self, grammar: Grammar) -> _Verdict:
        for _ in range(MOST_DEATHS):
            async with self._worker() as worker:
                verdict = await self._ask(worker, grammar)
            if not worker.was_killed:
                break
        self._verdicts[grammar.digest] = verdict
        if len(self._verdicts) > NUM_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def _ask(self, worker: "_Worker", grammar: Grammar) -> _Verdict:
        try:
            async with asyncio.timeout(self._time_limit):
                return _Verdict(await worker.ask(grammar))
        except TimeoutError:
            reason = f"it takes more than {self._time_limit:g} s to compile"
        except (OSError, EOFError):
            reason = f"it takes more than {self._memory_limit >> 20} MiB to compile"
            await worker.mourn()
        await worker.kill()
        return _Verdict(f"grammar is not valid: {reason}", time.monotonic() + LIMIT_VERDICT_SECONDS)

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator["_Worker"]:
        """Lend a worker, a fresh one if need be; it is kept unless it was killed."""
        async with self._slots:
            self._idle = [worker for worker in self._idle if worker.is_alive]
            worker = self._idle.pop() if self._idle else await _Worker.start(self._tokenizer_path, self._memory_limit)
            try:
                yield worker
            except BaseException:
                await worker.kill()
                raise
            if worker.is_alive:
                self._idle.append(worker)

    async def close(self) -> None:
        """End the workers."""
        for task in list(self._pending.values()):
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        while self._idle:
            await self._idle.pop().kill()


class _Worker:
    """One `grammar_worker` process and the frames to and from it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.was_killed = False  # by somebody else, which says nothing about the grammar it was asked of

    @classmethod
    async def start(cls, tokenizer_path: Path, memory_limit: int) -> "_Worker":
        """Start a process and wait until it has read the tokenizer.

        Raises:
            InvalidRequest: it cannot read it.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "funitel.router.grammar_worker", str(tokenizer_path), str(memory_limit)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        worker = cls(process)
        try:
            async with asyncio.timeout(START_LIMIT_SECONDS):
                error = await worker._read()
        except (TimeoutError, OSError, EOFError):
            error = "the process that checks grammars does not start"
        except BaseException:
            await worker.kill()
            raise
        if error is not None:
            await worker.kill()
            raise InvalidRequest(f"grammar is not supported: {error}", "grammar")
        return worker

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.returncode is None

    async def ask(self, grammar: Grammar) -> str | None:
        """Have a grammar compiled; return what is wrong with it. Raises OSError or EOFError when the process dies."""
        assert self._process.stdin is not None
        question = {"kind": grammar.kind, "text": grammar.text, "is_native": grammar.is_native}
        payload = json.dumps(question).encode()
        self._process.stdin.write(len(payload).to_bytes(4, "big") + payload)
        await self._process.stdin.drain()
        return await self._read()

    async def _read(self) -> str | None:
        assert self._process.stdout is not None
        size = int.from_bytes(await self._process.stdout.readexactly(4), "big")
        answer: str | None = json.loads(await self._process.stdout.readexactly(size))
        return answer

    async def mourn(self) -> None:
        """Find out how the process died; it has hung up."""
        self.was_killed = await self._process.wait() == -signal.SIGKILL

    async def kill(self) -> None:
        """End the process, whatever it does."""
        if self.is_alive:
            self._process.kill()
        await self._process.wait()
