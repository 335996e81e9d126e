"""What a completion shall look like, and whether the shards can keep it to that: found out in a process that can be
killed, before a request is queued. A bomb costs its sender a refusal, and nobody else anything. Event loop only.
"""

import asyncio
import hashlib
import json
import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import GrammarType
from funitel.router.sandbox.pool import Killed, SandboxPool, WorkerUnavailable

TIME_LIMIT_SECONDS = 5.0  # reasonable grammars take milliseconds
MEMORY_LIMIT_BYTES = 2**31
MAX_GRAMMAR_BYTES = 256 * 1024
NUM_WORKERS = 2  # so that one bomb does not make others wait for its end
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
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._pending: dict[bytes, asyncio.Task[_Verdict]] = {}
        self._pool = SandboxPool(
            "funitel.router.text.grammar_worker",
            str(tokenizer_path),
            most=NUM_WORKERS,
            time_limit=time_limit,
            memory_limit=memory_limit,
        )

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
        verdict = await self._ask(grammar)
        self._verdicts[grammar.digest] = verdict
        if len(self._verdicts) > NUM_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def _ask(self, grammar: Grammar) -> _Verdict:
        try:
            question = {"kind": grammar.kind, "text": grammar.text, "is_native": grammar.is_native}
            return _Verdict(await self._pool.ask(question))
        except Killed as limit:
            error = f"grammar is not valid: {limit} to compile"
            return _Verdict(error, time.monotonic() + LIMIT_VERDICT_SECONDS)
        except WorkerUnavailable as problem:
            raise InvalidRequest(f"grammar is not supported: {problem}", "grammar") from None

    async def close(self) -> None:
        """End the workers."""
        for task in list(self._pending.values()):
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        await self._pool.close()
