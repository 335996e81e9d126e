"""The memory budget of a server: what each model takes of it, and which idle model is evicted for another."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from funitel.proto.errors import DoesNotFit

POLL_SECONDS = 1.0  # between two looks at what has become idle


class Tenant(Protocol):
    """A model, as the budget sees it.

    Attributes:
        name: of the model.
        is_fixed: whether it is never evicted: pinned, or the model of the command line.
        is_idle: whether it is loaded, no request is in it, and nothing else happens to it.
        last_used: instant of its last request, or of its load.
    """

    @property
    def name(self) -> str: ...

    @property
    def is_fixed(self) -> bool: ...

    @property
    def is_idle(self) -> bool: ...

    @property
    def last_used(self) -> float: ...

    async def evict(self, reason: str) -> None:
        """Drain it and free its memory."""


class ModelMemory:
    """Bytes that the models of a server may take together, with what each of them has."""

    def __init__(self, total: int, tenants: Callable[[], Sequence[Tenant]]) -> None:
        """Share out `total` bytes; `tenants` are all models."""
        self.total = total
        self.held = 0  # by the model of the command line
        self._tenants = tenants
        self._taken: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._claiming = asyncio.Lock()  # one claim at a time: two must not evict for the same bytes

    @property
    def free(self) -> int:
        """Bytes that no model has."""
        return self.total - self.held - sum(self._taken.values())

    def put(self, name: str, num_bytes: int) -> None:
        """Note what a model has."""
        self._taken[name] = num_bytes
        self.changed()

    def give_back(self, name: str) -> None:
        """Note that a model has nothing any more."""
        if self._taken.pop(name, None) is not None:
            self.changed()

    def changed(self) -> None:
        """Have claims look again, such as when a model has become idle."""
        self._changed.set()

    def most_for(self, name: str) -> int:
        """Bytes that a model could have if all that may be evicted were."""
        fixed = {tenant.name for tenant in self._tenants() if tenant.is_fixed}
        others = sum(size for owner, size in self._taken.items() if owner in fixed and owner != name)
        return self.total - self.held - others

    def check(self, name: str, num_bytes: int, advice: str = "") -> None:
        """Raise DoesNotFit where no eviction could make room for a model."""
        most = self.most_for(name)
        if num_bytes > most:
            pinned = f"; {shown_bytes(self.total - most)} of it are pinned" if most < self.total else ""
            raise DoesNotFit(
                f"{name} needs {shown_bytes(num_bytes)} of memory, --memory-budget is {shown_bytes(self.total)}{pinned}"
                + (f"; {advice}" if advice else "")
            )

    async def claim(self, name: str, num_bytes: int, seconds: float, on_wait: Callable[[str], None]) -> None:
        """Have bytes for a model; idle ones are evicted for it, least recently used first.

        Args:
            name: of the model.
            num_bytes: that it needs in all.
            seconds: that it waits for a model to become idle.
            on_wait: called with a line before it waits.

        Raises:
            DoesNotFit: no eviction makes room, or none did in time.
        """
        self.check(name, num_bytes)
        deadline = time.monotonic() + seconds
        async with self._claiming:
            has_told = False
            while num_bytes > self.free + self._taken.get(name, 0):
                tenant = self._least_recently_used(name)
                if tenant is not None:
                    await tenant.evict(f"evicted for {name}, which needs {shown_bytes(num_bytes)}")
                    continue
                self.check(name, num_bytes)
                if not has_told:
                    has_told = True
                    on_wait(f"waits for {shown_bytes(num_bytes)} of memory: every other model is busy or pinned")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DoesNotFit(
                        f"{name} needs {shown_bytes(num_bytes)} of memory, {shown_bytes(self.free)} are free, and no "
                        f"model that may be evicted became idle within {seconds:g} s"
                    )
                self._changed.clear()
                try:
                    await asyncio.wait_for(self._changed.wait(), min(left, POLL_SECONDS))
                except TimeoutError:
                    continue
            self.put(name, num_bytes)

    def _least_recently_used(self, name: str) -> Tenant | None:
        idle = [
            tenant
            for tenant in self._tenants()
            if tenant.name != name and tenant.is_idle and not tenant.is_fixed and self._taken.get(tenant.name)
        ]
        return min(idle, key=lambda tenant: tenant.last_used, default=None)


def shown_bytes(num_bytes: int) -> str:
    """Bytes in the unit that people would use."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
