"""Releases of outputs: shards forget those of answers that clients have, some at once, beside the steps.

Event loop only.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from funitel.proto.errors import FunitelError
from funitel.router.replica_set.table import Member, Slot

RELEASE_SECONDS = 0.25  # between two calls
MAX_UNRELEASED = 100_000  # keys that are kept for a replica that does not answer


class OutputReleases:
    """Collects output keys and sends them to all replicas; those that do not answer get them with later ones.

    Args:
        members: replicas that serve or drain.
        slots: of all replicas.
    """

    def __init__(self, members: Callable[[], Sequence[Member]], slots: Callable[[], Iterable[Slot]]) -> None:
        self._members = members
        self._slots = slots
        self._keys: list[str] = []
        self._unreleased: dict[Slot, list[str]] = {}
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def add(self, keys: Iterable[str] = ()) -> None:
        """Release outputs soon, and those that a replica has not released before."""
        self._keys += keys
        is_due = bool(self._keys or self._unreleased) and not self._is_closed
        if is_due and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await asyncio.sleep(RELEASE_SECONDS)
        await self.flush()
        while self._keys:
            await asyncio.sleep(RELEASE_SECONDS)
            await self.flush()

    async def flush(self) -> None:
        """Release what was added, and what was not released before."""
        keys, self._keys = self._keys, []
        slots = set(self._slots())
        due = {slot: self._unreleased.get(slot, []) + keys for slot in slots}
        members = [member for member in self._members() if due.get(member.slot)]
        answers = await asyncio.gather(
            *(member.shards.release_outputs(due[member.slot]) for member in members), return_exceptions=True
        )
        for member, answer in zip(members, answers, strict=True):
            if answer is None:
                del due[member.slot]
            elif not isinstance(answer, FunitelError):
                raise answer
        self._unreleased = {slot: left[-MAX_UNRELEASED:] for slot, left in due.items() if left}

    async def close(self) -> None:
        """Release what was added; nothing is released from now on."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._keys:
            await self.flush()
