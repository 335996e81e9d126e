"""Answer records of the console's routes."""

from pydantic import ConfigDict, Field

from funitel.router.api.common.schema_base import ApiModel
from funitel.router.api.requests.schema import RequestRecord
from funitel.router.engine.snapshot import ReplicaState


class LiveQuery(ApiModel):
    """Which samples are wanted."""

    since: float = Field(default=0.0, description="Unix time; only later samples are sent.")
    requests: bool = Field(default=False, description="Whether the requests that run are sent, too.")
    scheduler: bool = Field(default=False, description="Whether queue, batch, pool and last steps are sent, too.")


class ModelNumbers(ApiModel):
    """Counts of a model since the router began, and what it does now."""

    model_config = ConfigDict(from_attributes=True)

    requests: int
    running: int
    waiting: int
    queried_tokens: int = Field(description="Of the prompts of new sequences.")
    cached_tokens: int = Field(description="Of those, found in the prefix cache.")
    generated_tokens: int
    steps: int
    step_seconds: float = Field(description="That the calls of all steps took.")
    kv_utilisation: float = Field(description="Share of the KV blocks that sequences hold, 0 to 1.")


class ModelSample(ModelNumbers):
    """The same, as it was."""

    time: float = Field(description="Unix time.")


class ReplicaNow(ApiModel):
    """A replica."""

    replica_id: int
    is_up: bool
    running: int
    waiting: int
    kv_utilisation: float
    generated_tokens: int
    losses: int


class LiveModel(ApiModel):
    """A model that is loaded."""

    name: str
    model_id: str
    now: ModelNumbers
    samples: list[ModelSample] = Field(description="One every five seconds, of the last hour at most, oldest first.")
    replicas: list[ReplicaNow]
    scheduler: list[ReplicaState] | None = Field(
        default=None,
        description="Each replica that serves, with the sequences of the key; null where it is not asked for.",
    )


class LiveState(ApiModel):
    """All models that are loaded."""

    version: str = Field(description="Of funitel.")
    time: float = Field(description="Unix time.")
    models: list[LiveModel]
    requests: list[RequestRecord] | None = Field(default=None, description="Null where they are not asked for.")


class EndedRequestRecord(ApiModel):
    """A request that has ended, without a word of its prompt or answer."""

    model_config = ConfigDict(from_attributes=True)

    serial: int
    id: str
    route: str
    status: int
    ended: float = Field(description="Unix time.")
    model: str | None
    key: str | None = Field(description="The name of its API key.")
    error: str | None
    finish: str | None = Field(description="Its finish reasons.")
    prompt_tokens: int | None
    cached_tokens: int
    tokens: int
    total_seconds: float
    arrival_seconds: float = Field(description="Until it was tokenized and validated.")
    queue_seconds: float | None
    prefill_seconds: float | None = Field(description="From its first step to its first token.")
    decode_seconds: float | None = Field(description="From its first token to its last.")
    first_token_seconds: float | None


class EndedRequestList(ApiModel):
    """Requests that have ended, the newest first."""

    requests: list[EndedRequestRecord]
