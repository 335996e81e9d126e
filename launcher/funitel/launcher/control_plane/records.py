"""The records of the control plane, with their JSON: models, replicas, launches, registrations, workers, events.

`to_json` and `from_json` are inverse. Times are Unix seconds, sizes bytes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from funitel.proto.record import Record

JSONObject = Mapping[str, Any]


class ModelState(StrEnum):
    """The state of a model, which is the stage of its launch too."""

    REGISTERED = "registered"  # known, not loaded
    QUEUED = "queued"
    DOWNLOADING = "downloading"
    CONVERTING = "converting"
    LOADING = "loading"
    WARMING_UP = "warming_up"
    READY = "ready"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_launching(self) -> bool:
        """Whether a launch or a load is under way."""
        return self in _LAUNCHING


_LAUNCHING = frozenset(
    (ModelState.QUEUED, ModelState.DOWNLOADING, ModelState.CONVERTING, ModelState.LOADING, ModelState.WARMING_UP)
)


class ReplicaStage(StrEnum):
    """The state of one replica. The router may use one that is `ready`."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    LOST = "lost"


class ModelType(StrEnum):
    """Xinference's types of models that can be served."""

    LLM = "LLM"
    EMBEDDING = "embedding"
    RERANK = "rerank"

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks, as an entry names them, of the models of the type."""
        return {"LLM": ("generate",), "embedding": ("embed",), "rerank": ("classify", "embed")}[self.value]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEntry(Record):
    """One replica of a model.

    Attributes:
        id: among the replicas of the model; it is used once.
        address: of rank 0, `unix:///path` or `tcp://host:port`; "" before it is known.
        state: where it is in its life.
        weight: of its share of the requests, beside those of the other replicas.
        worker: name of the machine; `local` for this one.
        pids: of its processes, on their machine.
        executor: that runs it: `local`, `worker` or `ray`.
        record: by which that executor adopts it; no part of the JSON.
    """

    id: int
    address: str = ""
    state: ReplicaStage = ReplicaStage.STARTING
    weight: float = 1.0
    worker: str = "local"
    pids: tuple[int, ...] = ()
    executor: str = "local"
    record: JSONObject = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the replica, without what its executor alone knows."""
        hidden = ("executor", "record")
        shown = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in hidden}
        return shown | {"state": str(self.state), "pids": list(self.pids)}

    @classmethod
    def from_json(cls, content: JSONObject) -> Self:
        """The replica of a JSON object, which may have the executor and its record too."""
        names = {each.name for each in fields(cls)}
        known = {name: value for name, value in content.items() if name in names}
        changes = {"state": ReplicaStage(content["state"]), "pids": tuple(content.get("pids", ()))}
        return cls(**(known | changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry(Record):
    """A model that the control plane knows.

    Attributes:
        name: what clients call it.
        model_id: catalogue name, hub repository or path.
        state: where it is in its life; `stage` of the JSON is the same.
        progress: of its launch, 0..1 over all stages.
        error: of the last launch, one line.
        task: `generate`, `embed` or `classify`; None before the model is known.
        is_default: whether it answers requests that name no model.
        is_static: whether it is the model of the command line, which cannot be terminated.
        pinned: whether it is never evicted.
        ttl: seconds without a request after which it is unloaded; None for never.
        last_used: instant of the last request.
        created: instant of the launch or of the registration.
        engine: `native`, `transformers` or `llama_cpp`.
        bytes: of memory, estimated or measured.
        load_seconds: of the last load.
        expected_load_seconds: of the next load.
        request_limit: requests that may run at once.
        retry_after: seconds after which a refused client may ask again.
        router: fields of the router's settings of this model.
        replicas: in the order of their ids.
    """

    name: str
    model_id: str
    state: ModelState
    created: float
    progress: float = 0.0
    error: str | None = None
    task: str | None = None
    is_default: bool = False
    is_static: bool = False
    pinned: bool = False
    ttl: float | None = None
    last_used: float | None = None
    engine: str = "native"
    bytes: int | None = None
    load_seconds: float | None = None
    expected_load_seconds: float | None = None
    request_limit: int | None = None
    retry_after: float | None = None
    router: JSONObject = field(default_factory=dict)
    replicas: tuple[ReplicaEntry, ...] = ()

    @property
    def stage(self) -> ModelState:
        """The state, by the name that it has in answers about progress."""
        return self.state

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the model, as a snapshot has it."""
        shown = {each.name: getattr(self, each.name) for each in fields(self)}
        changes = {"state": str(self.state), "stage": str(self.stage), "router": dict(self.router)}
        return shown | changes | {"replicas": [replica.to_json() for replica in self.replicas]}

    @classmethod
    def from_json(cls, content: JSONObject) -> Self:
        """The model of a JSON object."""
        names = {each.name for each in fields(cls)}
        known = {name: value for name, value in content.items() if name in names}
        replicas = tuple(ReplicaEntry.from_json(each) for each in content.get("replicas", ()))
        return cls(**(known | {"state": ModelState(content["state"]), "replicas": replicas}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(Record):
    """All models at one instant: a line of `GET /v1/fleet/watch`.

    Attributes:
        default: name of the default model.
        wait: whether requests for a model that is not loaded may wait.
        models: in the order of their launch.
    """

    default: str | None
    wait: bool
    models: tuple[ModelEntry, ...]

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the line."""
        return {"default": self.default, "wait": self.wait, "models": [model.to_json() for model in self.models]}

    @classmethod
    def from_json(cls, content: JSONObject) -> Self:
        """The snapshot of a line."""
        models = tuple(ModelEntry.from_json(each) for each in content["models"])
        return cls(default=content["default"], wait=content["wait"], models=models)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest(Record):
    """What a launch asks for; a field that is None is decided by the settings of the server.

    Attributes:
        model: catalogue name, hub repository, path, or name of a registration.
        name: what clients call it; that of the model when not given.
        replicas: number of replicas.
        num_shard: shards of each replica.
        quantize, dtype: as the flags of `serve`.
        ttl: seconds without a request after which it is unloaded.
        pinned: whether it is never evicted.
        engine: `native`, `transformers` or `llama_cpp`.
        executor: `local`, `worker` or `ray`.
        worker: name of the machine.
        partition, layers: how the shards divide the model.
        request_limit: requests that may run at once.
        weight: of each of its replicas.
        priority: place in the order of launches at a start of the control plane, highest first.
        retries: further attempts of a launch that fails.
        model_type: a `ModelType`, what the client says that it is; a model of another task is refused.
        variant: which variant of a registration: `format`, `size` and `quantization`, each of which can be left out.
        settings: further flags of `serve`, by the names of their fields in `LauncherSettings`, with values as JSON has
            them; `model_settings.settings_of` makes settings of them.
    """

    model: str
    name: str | None = None
    replicas: int = 1
    num_shard: int | None = None
    quantize: str | None = None
    dtype: str | None = None
    ttl: float | None = None
    pinned: bool = False
    engine: str | None = None
    executor: str | None = None
    worker: str | None = None
    partition: str | None = None
    layers: str | None = None
    request_limit: int | None = None
    weight: float = 1.0
    priority: int = 0
    retries: int = 0
    model_type: str | None = None
    variant: JSONObject = field(default_factory=dict)
    settings: JSONObject = field(default_factory=dict)

    @property
    def served_name(self) -> str:
        """What clients call the model: its name, or else its id, of a path the last part."""
        if self.name is not None:
            return self.name
        is_path = self.model.startswith(("/", "./", "../", "~")) or self.model in (".", "..")
        return Path(self.model).expanduser().absolute().name if is_path else self.model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChange(Record):
    """What PATCH changes of a model; None leaves a value as it is.

    Attributes:
        weights: of replicas, by id.
        ttl: seconds; `removes_ttl` takes it away.
        pinned: whether it is never evicted.
        priority: place in the order of launches at a start.
        is_default: whether it becomes the default, or is it no more.
    """

    weights: Mapping[int, float] = field(default_factory=dict)
    ttl: float | None = None
    removes_ttl: bool = False
    pinned: bool | None = None
    priority: int | None = None
    is_default: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration(Record):
    """A model that a user has described.

    Attributes:
        type: a `ModelType`.
        name: by which it is launched.
        model: folder, GGUF, or hub repository; of the first variant.
        variants: where there are several: each with `model`, `format`, `size`, `quantization` and `settings`.
        description: for readers.
        context_length: most tokens of a request; None for what the model has.
        chat_template: to use instead of the model's own.
        settings: flags of `serve`, as in `LaunchRequest`.
        spec: a model spec, as `--model-spec` takes it.
        persist: whether it outlives the control plane.
        definition: the JSON as it was given.
        created: instant of the registration.
    """

    type: str
    name: str
    model: str
    variants: tuple[JSONObject, ...] = ()
    description: str = ""
    context_length: int | None = None
    chat_template: str | None = None
    settings: JSONObject = field(default_factory=dict)
    spec: JSONObject | None = None
    persist: bool = True
    definition: JSONObject = field(default_factory=dict)
    created: float = 0.0

    @classmethod
    def from_json(cls, content: JSONObject) -> Self:
        """The registration of a JSON object."""
        names = {each.name for each in fields(cls)}
        known = {name: value for name, value in content.items() if name in names}
        return cls(**(known | {"variants": tuple(content.get("variants", ()))}))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEntry(Record):
    """A machine on which replicas run.

    Attributes:
        name: `local` for this machine.
        address: at which the control plane reaches it; "" for this machine.
        cores: usable ones.
        memory_bytes: of the machine or its cgroup.
        free_memory_bytes: not used by its replicas.
        gpus: each with `name` and `memory_bytes`.
        replicas: each with `model` and `replica`.
        last_seen: instant of its last sign of life.
        is_alive: whether that is recent.
    """

    name: str
    address: str = ""
    cores: int = 0
    memory_bytes: int | None = None
    free_memory_bytes: int | None = None
    gpus: tuple[JSONObject, ...] = ()
    replicas: tuple[JSONObject, ...] = ()
    last_seen: float | None = None
    is_alive: bool = True

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the worker."""
        shown = {each.name: getattr(self, each.name) for each in fields(self)}
        return shown | {"gpus": list(map(dict, self.gpus)), "replicas": list(map(dict, self.replicas))}

    @classmethod
    def from_json(cls, content: JSONObject) -> Self:
        """The worker of a JSON object."""
        names = {each.name for each in fields(cls)}
        known = {name: value for name, value in content.items() if name in names}
        lists = {name: tuple(content.get(name, ())) for name in ("gpus", "replicas")}
        return cls(**(known | lists))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEvent(Record):
    """A line of the history of a model: `stage` is the state that it entered, or in which `message` was said."""

    at: float
    stage: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchProgress(Record):
    """How far a launch is; `bytes` of `total_bytes` are downloaded, where a download tells."""

    progress: float
    stage: str
    bytes: int | None = None
    total_bytes: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity(Record):
    """What the router says of one model: running and waiting requests, seconds since the last, requests so far."""

    running: int
    waiting: int
    idle_s: float
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel(Record):
    """A model on the disk of this machine.

    Attributes:
        model_name: by which it is removed.
        path: of its folder.
        bytes: on the disk.
        in_use: whether a model that is loaded or loads uses it.
    """

    model_name: str
    path: str
    bytes: int
    in_use: bool = False


def as_json(records: Iterable[Record]) -> list[dict[str, Any]]:
    """The JSON objects of records."""
    return [record.to_json() for record in records]
