"""The interface of an engine to handlers and to load balancing: `Admits`, `Inference` and `ReplicaLoad`."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from funitel.proto.errors import FunitelError
from funitel.router.core.request import Adapter, Limits, Request
from funitel.router.core.stream import TokenStream
from funitel.router.engine.paused import PausedRequests
from funitel.router.engine.snapshot import EngineView
from funitel.router.scheduler.admission import Reservation


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The load of a replica, and what it has of one sequence.

    `load_tokens` are the tokens known of every sequence that waits or runs there; `cached_tokens` those of the cached
    prefix of the one sequence; `has_adapter` says whether its adapter, if it has one, is in memory there.
    """

    load_tokens: int
    cached_tokens: int
    has_adapter: bool = False


class Admits(Protocol):
    """What admits requests."""

    def check_room(self, incoming: Request) -> None:
        """Raise Overloaded, or another FunitelError, if a request would be refused."""

    def reserve(self, incoming: Request) -> Reservation:
        """Hold a place for a request until it is submitted; raises as `check_room`, for want of places only."""


class Inference(Admits, Protocol):
    """What turns requests into tokens."""

    @property
    def limits(self) -> Limits:
        """The limits of one request."""

    @property
    def compute_type(self) -> str:
        """Shards and device, such as `2-cpu`; sent as `x-compute-type`."""

    @property
    def views(self) -> dict[int, EngineView]:
        """What the state of each replica that serves is read from, by its index."""

    @property
    def paused(self) -> PausedRequests:
        """What pauses and resumes requests, by their streams."""

    def submit(self, request: Request) -> TokenStream:
        """Queue a request, or raise Overloaded or NotReady."""

    def replays_begun(self, journals: Collection[str]) -> None:
        """Requests of these journals are replayed from now on; nothing else of an earlier router is needed."""

    def replay_ended(self, journal: str) -> None:
        """A replayed request has ended; what it has not claimed is not needed."""

    def release_outputs(self, keys: Iterable[str]) -> None:
        """Let shards forget the outputs of sequences, by their keys: clients have the answers."""

    async def health(self) -> None:
        """Raise FunitelError when a shard does not answer."""

    @property
    def layer_parts(self) -> str | None:
        """Where layers are and in which precision, such as `0-9=cpu:int8,10-29=cuda:bfloat16`; None: all alike."""

    @property
    def takes_adapters(self) -> bool:
        """Whether adapters can be loaded."""

    async def load_adapter(self, adapter: Adapter, *, is_pinned: bool = False) -> None:
        """Load an adapter on every replica that serves; a pinned one is never evicted.

        Raises:
            InvalidRequest: it cannot be served.
            FunitelError: loading it failed.
        """

    def retire_adapter(self, adapter: Adapter) -> None:
        """Unload an adapter everywhere once no request uses it or waits for it."""

    def fail_all(self, error: FunitelError) -> None:
        """End every request; clients get the error."""

    async def close(self) -> None:
        """Refuse new requests and let running ones finish."""
