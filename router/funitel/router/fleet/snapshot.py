"""The records of the control plane as the router reads them: a line of watch is one snapshot of all models."""

from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from funitel.proto.settings.adapter_list import AdapterList

GENERATE = "generate"
READY, DRAINING, SLEEPING = "ready", "draining", "sleeping"  # states of a replica, and of a model
FAILED = "failed"
UNLOADED = frozenset({"registered", "sleeping", "cancelled"})  # states of a model that is not being loaded
_DETACHED = frozenset({DRAINING, SLEEPING})  # of replicas


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class FleetReplica(_Record):
    """One replica of a model, by its number among them."""

    id: int
    address: str = ""  # of rank 0, as the router connects
    state: str
    weight: float = 1.0
    worker: str = "local"
    pids: tuple[int, ...] = ()

    @property
    def is_ready(self) -> bool:
        """Whether it may serve."""
        return self.state == READY and bool(self.address)

    @property
    def may_stay(self) -> bool:
        """Whether it goes on to serve where it does: one that is lost is started again at the same address."""
        return self.state not in _DETACHED


class FleetModel(_Record):
    """One model that the control plane knows, with its state; sizes in bytes, times in seconds."""

    name: str
    model_id: str
    state: str
    stage: str = ""
    progress: float = 0.0
    error: str | None = None
    task: str | None = None
    is_default: bool = False
    is_static: bool = False
    pinned: bool = False
    ttl: float | None = None
    last_used: float | None = None
    created: float = 0.0
    engine: str = "native"
    bytes: int | None = None
    load_seconds: float | None = None
    expected_load_seconds: float | None = None
    request_limit: int | None = None
    retry_after: float | None = None
    router: dict[str, Any] = Field(default_factory=dict)
    replicas: tuple[FleetReplica, ...] = ()

    @cached_property
    def listed_adapters(self) -> tuple[str, ...]:
        """The names of the adapters that its settings list, which are loaded with it."""
        listed = self.router.get("lora_adapters")
        try:
            return tuple(source.name for source in AdapterList(listed)) if isinstance(listed, str) else ()
        except ValueError:
            return ()  # it says so when it is attached


class FleetSnapshot(_Record):
    """All models at one instant, in the order of their launch."""

    default: str | None = None
    wait: bool = True  # whether requests may wait for a model that is not loaded
    models: tuple[FleetModel, ...] = ()
