"""Records of the routes of models, as the control plane reads and writes them. The router checks none of them."""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from funitel.router.api.common.schema_base import ApiModel, ApiRootModel, Body, is_none
from funitel.router.api.common.schema_models import STATES, ModelRecord, ModelReplica


class WaitQuery(ApiModel):
    """Whether the answer comes once the model is ready."""

    wait_ready: bool = Field(default=True, description="False answers 202 at once.")


class LaunchModel(Body):
    """A model to launch, in our words or in Xinference's."""

    model: str | None = Field(default=None, description="Catalogue name, hub repository, path, or a registration.")
    name: str | None = Field(default=None, description="What clients put into `model`; that of the model if absent.")
    replicas: int | None = None
    num_shard: int | None = Field(default=None, description="Shards of each replica.")
    quantize: str | None = None
    dtype: str | None = None
    ttl: float | None = Field(default=None, description="Seconds without a request after which it is unloaded.")
    pinned: bool | None = Field(default=None, description="Whether it is never evicted.")
    engine: Literal["native", "transformers", "llama_cpp"] | None = None
    executor: Literal["local", "worker", "ray"] | None = None
    worker: str | None = Field(default=None, description="The machine it is to run on.")
    partition: str | None = None
    layers: str | None = None
    request_limit: int | None = Field(default=None, description="Maximum of its requests in flight; more get 429.")
    weight: float | None = None
    priority: int | None = Field(default=None, description="The order of launches at a start, highest first.")
    retries: int | None = Field(default=None, description="Further attempts of a launch that fails.")
    settings: dict[str, Any] | None = Field(default=None, description="Further flags of `serve`, by their names.")
    model_name: str | None = Field(default=None, description="Xinference: the model.")
    model_uid: str | None = Field(default=None, description="Xinference: its name.")
    model_type: str | None = Field(default=None, description="Xinference: LLM, embedding or rerank.")
    model_engine: str | None = None
    model_format: str | None = None
    model_size_in_billions: int | str | None = None
    quantization: str | None = None
    replica: int | None = None
    n_gpu: int | str | None = None
    request_limits: int | None = None
    worker_ip: str | None = None
    model_path: str | None = None


class LaunchedModel(ApiModel):
    """The model that is launched."""

    model_uid: str = Field(description="Its name.")
    model: ModelRecord | None = Field(default=None, exclude_if=is_none)


class LaunchProgressAnswer(ApiModel):
    """How far a launch is."""

    progress: float = Field(description="0..1 over all stages.")
    stage: str = Field(description=STATES)
    bytes: int | None = Field(default=None, description="That were fetched.")
    total_bytes: int | None = None
    error: str | None = None


class FleetEvent(ApiModel):
    """What happened to a model."""

    at: float = Field(description="Unix time.")
    stage: str
    message: str


class EventList(ApiModel):
    """The history of a model, oldest first."""

    events: list[FleetEvent]


class ReplicaList(ApiModel):
    """The replicas of a model."""

    replicas: list[ModelReplica]


class ModelInstance(ModelReplica):
    """A replica, with the name of its model."""

    model_name: str


class Instances(ApiModel):
    """The replicas of all models."""

    instances: list[ModelInstance]


class ModelNameAnswer(ApiModel):
    """The name of the model that it was about."""

    name: str


class AddReplicas(Body):
    """Replicas to add."""

    count: int = 1
    weight: float | None = None


class ChangeModel(Body):
    """What to change; what is absent stays."""

    weights: dict[str, float] | None = Field(default=None, description="Of replicas, by their ids.")
    ttl: float | None = None
    pinned: bool | None = None
    priority: int | None = None
    is_default: bool | None = None


class RegisterModel(Body):
    """A model to register."""

    model: str | dict[str, Any] = Field(description="The registration, as JSON or as its text.")
    persist: bool = True


class RegistrationRecord(ApiModel):
    """A model that is registered."""

    model_name: str
    model_type: str = Field(description="LLM, embedding or rerank.")
    is_builtin: bool
    persist: bool
    model: str = Field(description="What is loaded: catalogue name, hub repository or path.")
    model_description: str


class RegistrationList(ApiRootModel[list[RegistrationRecord]]):
    """The models of a type that are registered."""


class RegistrationDefinition(ApiModel):
    """A registration as it was given, with these fields."""

    model_config = ConfigDict(extra="allow")

    model_name: str
    model_type: str
    is_builtin: bool


class EngineOption(ApiModel):
    """One way to serve a model."""

    engine: str
    format: str
    quantize: str | None
    dtype: str | None
    device: str
    usable: bool
    reason: str
    bytes: int | None = Field(description="Of weights and KV memory.")
    fits: bool


class EngineOptions(ApiModel):
    """The ways to serve a model, with reasons."""

    model: str
    suggested: dict[str, Any] | None = Field(description="The option to take; null where none can be used.")
    options: list[EngineOption]


class CachedModelRecord(ApiModel):
    """A model on the disk."""

    model_name: str
    path: str
    bytes: int
    in_use: bool


class CachedModelList(ApiModel):
    """The models on the disk."""

    list: list[CachedModelRecord]


class CacheQuery(ApiModel):
    """Which model to delete from the disk."""

    model_name: str
    check: bool = Field(default=False, description="Whether to say only what would go.")


class WorkerRecord(ApiModel):
    """A machine."""

    name: str
    address: str = Field(description="At which the control plane reaches it; empty for its own machine.")
    cores: int
    memory_bytes: int | None
    free_memory_bytes: int | None = Field(description="That its replicas leave.")
    gpus: list[dict[str, Any]] = Field(description="Each with its name and memory_bytes.")
    replicas: list[dict[str, Any]] = Field(description="Each with its model and number.")
    last_seen: float | None = Field(description="Unix time.")
    is_alive: bool


class WorkerList(ApiModel):
    """The machines on which replicas run."""

    workers: list[WorkerRecord]


class ClusterSupervisor(ApiModel):
    """The machine of the control plane, in Xinference's shape."""

    node_type: Literal["Supervisor"]
    ip_address: str
    gpu_count: int
    gpu_vram_total: int = Field(description="Bytes.")


class ClusterWorker(ApiModel):
    """A machine on which replicas run, in Xinference's shape; memory is in bytes."""

    node_type: Literal["Worker"]
    ip_address: str
    gpu_count: int
    gpu_vram_total: int
    cpu_count: int
    mem_total: int
    mem_available: int
    mem_used: int


class ClusterInfo(ApiRootModel[list[ClusterSupervisor | ClusterWorker]]):
    """The machines on which replicas run, the supervisor first."""
