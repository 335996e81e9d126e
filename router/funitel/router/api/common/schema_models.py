"""Records of a model that the control plane knows, and of its replicas."""

from typing import Any

from pydantic import Field

from funitel.router.api.common.schema_base import ApiModel
from funitel.router.fleet.snapshot import FleetModel

STATES = (
    "registered, queued, downloading, converting, loading, warming_up, ready, draining, sleeping, failed or cancelled"
)


class ModelReplica(ApiModel):
    """One replica of a model."""

    id: int
    state: str = Field(description="starting, ready, draining, sleeping or lost")
    weight: float = Field(description="Its share of the requests, relative to that of the others.")
    worker: str = Field(description="The machine it runs on; `local` for this one.")
    pids: list[int] = Field(description="Of its processes, on their machine.")


class ModelRecord(ApiModel):
    """A model that the control plane knows, with its state."""

    name: str = Field(description="What clients put into `model`.")
    model_id: str
    state: str = Field(description=STATES)
    stage: str = Field(description="The same.")
    progress: float = Field(description="Of its launch, 0..1 over all stages.")
    error: str | None
    task: str | None = Field(description="generate, embed or classify; null before it is known.")
    is_default: bool
    is_static: bool = Field(description="Whether it is the model of the command line, which cannot be terminated.")
    pinned: bool = Field(description="Whether it is never evicted.")
    ttl: float | None = Field(description="Seconds without a request after which it is unloaded.")
    last_used: float | None = Field(description="Unix time of its last request.")
    engine: str
    bytes: int | None = Field(description="Of memory, measured or estimated.")
    load_seconds: float | None = Field(description="Of the last load.")
    expected_load_seconds: float | None = None
    request_limit: int | None
    replicas: list[ModelReplica]

    @classmethod
    def fields_of(cls, entry: FleetModel) -> dict[str, Any]:
        """What is public of an entry: neither where replicas listen, nor the router's settings."""
        hidden: dict[str, Any] = {"router": True, "retry_after": True, "created": True}
        content = entry.model_dump(exclude=hidden | {"replicas": {"__all__": {"address"}}})
        return content | {"stage": entry.stage or entry.state}
