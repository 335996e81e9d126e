"""Check grammars before requests are queued: compile each in a sandbox process, and remember what was found.

A grammar that takes too much time or memory is refused, and delays no other request. Event loop only.
"""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from funitel.proto.errors import InvalidRequest
from funitel.router.core import request_context
from funitel.router.core.grammar import Grammar
from funitel.router.sandbox.pool import Killed, SandboxPool, WorkerUnavailable

TIME_LIMIT_SECONDS = 5.0  # reasonable grammars take milliseconds
MEMORY_LIMIT_BYTES = 2**31
MAX_GRAMMAR_BYTES = 256 * 1024
NUM_WORKERS = 2  # so that one expensive grammar does not delay others
NUM_VERDICTS = 1024
LIMIT_VERDICT_SECONDS = 60.0  # a busy machine may be what made a grammar slow


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
        has_several_keys: bool = False,
    ) -> None:
        """Start nothing yet; with several API keys, one leaves a process to others."""
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()  # by owner, which learns of no other, and digest
        self._pending: dict[bytes, asyncio.Task[_Verdict]] = {}
        self._pool = SandboxPool(
            "funitel.router.text.grammar_worker",
            str(tokenizer_path),
            most=NUM_WORKERS,
            time_limit=time_limit,
            memory_limit=memory_limit,
            readable=[str(tokenizer_path)],
            has_several_keys=has_several_keys,
        )

    async def check(self, grammar: Grammar, field: str = "grammar") -> None:
        """Raise InvalidRequest for a `field`, saying why, unless the grammar can be kept; never blocks the loop."""
        size = len(grammar.text.encode(errors="surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"grammar must have at most {MAX_GRAMMAR_BYTES} bytes, given {size}", field)
        owner = request_context.current().owner
        verdict = self._known(owner + grammar.digest) or await self._find_out(grammar, owner)
        if verdict.error is not None:
            raise InvalidRequest(verdict.error, field)

    def _known(self, place: bytes) -> _Verdict | None:
        verdict = self._verdicts.get(place)
        if verdict is None or verdict.until < time.monotonic():
            return None
        self._verdicts.move_to_end(place)
        return verdict

    async def _find_out(self, grammar: Grammar, owner: bytes) -> _Verdict:
        """Compile once for all concurrent requests of a key, also when the first of them is cancelled."""
        place = owner + grammar.digest
        if place not in self._pending:
            task = asyncio.create_task(self._judge(grammar, owner))
            self._pending[place] = task
            task.add_done_callback(lambda _: self._pending.pop(place))
        return await asyncio.shield(self._pending[place])

    async def _judge(self, grammar: Grammar, owner: bytes) -> _Verdict:
        verdict = await self._ask(grammar, owner)
        self._verdicts[owner + grammar.digest] = verdict
        if len(self._verdicts) > NUM_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def _ask(self, grammar: Grammar, owner: bytes) -> _Verdict:
        try:
            question = {"kind": grammar.kind, "text": grammar.text, "is_native": grammar.is_native}
            return _Verdict(await self._pool.run(question, owner))
        except Killed as limit:
            error = f"grammar is not valid: {limit} to compile"
            return _Verdict(error, time.monotonic() + LIMIT_VERDICT_SECONDS)
        except WorkerUnavailable as problem:
            return _Verdict(f"grammar is not supported: {problem}", until=0.0)

    async def close(self) -> None:
        """End the workers."""
        for task in list(self._pending.values()):
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        await self._pool.close()
