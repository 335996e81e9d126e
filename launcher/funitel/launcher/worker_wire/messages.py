"""What a worker and the control plane tell each other, as JSON objects.

Fields that are not known are ignored, so that a later release can add some; `PROTOCOL` counts the changes that older
releases would misunderstand.
"""

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PROTOCOL = 1
MAX_RANKS = 1024

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
LOCAL = "local"  # the name of the control plane's own machine
_WORKER_NAME = re.compile(rf"(?!{LOCAL}$){_NAME}")

Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=0)]
Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
Ranks = Annotated[tuple[Rank, ...], Field(min_length=1, max_length=MAX_RANKS)]


def check_worker_name(name: str) -> str:
    """Return a valid name of a worker; raises ValueError for any other text."""
    if not _WORKER_NAME.fullmatch(name):
        raise ValueError(f"must match {_NAME} and not be {LOCAL!r}. Given: {name!r}")
    return name


class WireMessage(BaseModel):
    """Base of all objects."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Machine(WireMessage):
    """What a worker offers.

    Attributes:
        cores: that its shards may use.
        memory_bytes: that it offers.
        free_bytes: of those, neither promised to a job nor used by anything else.
        gpus: as CUDA names them.
        free_gpus: of those, not given to a job.
    """

    cores: Annotated[int, Field(ge=1)]
    memory_bytes: Count
    free_bytes: Count
    gpus: tuple[str, ...] = ()
    free_gpus: Count = 0


class RankState(WireMessage):
    """One rank of a job: `ended` is the reason, once it has."""

    rank: Rank
    pid: Count
    port: Port
    ended: str | None = None


class JobState(WireMessage):
    """The ranks of one replica on one worker; `id` is made by the control plane for each start."""

    id: str
    model: str
    replica: int
    ranks: tuple[RankState, ...] = ()


class Hello(WireMessage):
    """The first words of a worker.

    Attributes:
        name: unique among the workers of a control plane.
        instance: of the process; one that connects again keeps it.
        version: of funitel.
        protocol: see `PROTOCOL`.
        address: host under which the router and other workers reach its shards.
        machine: what it offers.
        jobs: what it runs already.
    """

    name: str
    instance: str
    version: str
    protocol: int
    address: str
    machine: Machine
    jobs: tuple[JobState, ...] = ()


class Prepare(WireMessage):
    """Make room for ranks of a replica: the model's folder, ports, GPUs.

    Attributes:
        job: id of the start.
        model: name of the model.
        replica: its number.
        model_id: as given: a catalogue name, a hub repository or a path.
        is_path: whether `model_id` is a path, which must be the same on every machine.
        revision: of the hub.
        device: as given.
        ranks: to start there.
        ports: wanted for them, in this order; 0 or none for any.
        rank_bytes: memory of each rank; 0 where it is unknown.
    """

    job: str
    model: str
    replica: int
    model_id: str
    is_path: bool
    revision: str | None = None
    device: str = "auto"
    ranks: Ranks
    ports: tuple[Port, ...] = ()
    rank_bytes: Count = 0


class Prepared(WireMessage):
    """What was found for them; `master_port` is for rank 0 of torch.distributed, if it is among them."""

    version: str
    address: str
    folder: str
    ports: tuple[Port, ...]
    master_port: Port


class Start(WireMessage):
    """Start the ranks of a prepared job.

    Attributes:
        job: its id.
        flags: of `funitel-server serve`, for each rank.
        world_size: of the replica.
        master_addr: host of rank 0.
        master_port: its port for torch.distributed.
    """

    job: str
    flags: tuple[tuple[str, ...], ...]
    world_size: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    master_addr: str
    master_port: Port


class Stop(WireMessage):
    """Stop the ranks of a job, by force after `grace_seconds`, and forget it."""

    job: str
    grace_seconds: Annotated[float, Field(ge=0)]


class Stopped(WireMessage):
    """The ranks of a job have ended."""


METHODS: dict[str, tuple[type[WireMessage], type[WireMessage]]] = {
    "prepare": (Prepare, Prepared),
    "start": (Start, JobState),
    "stop": (Stop, Stopped),
}
"""The calls of the control plane, with what they take and answer."""
