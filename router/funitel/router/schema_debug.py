"""What `/debug/scheduler` shows: numbers and names, never a word of a prompt or an answer."""

from pydantic import BaseModel


class WaitingRequest(BaseModel):
    """A sequence that waits to enter, or to be resumed."""

    id: int
    request_id: str
    key: str | None
    position: int
    age_seconds: float
    estimated_wait_seconds: float
    prompt_tokens: int
    tokens: int
    priority: int
    was_started: bool


class RunningRequest(BaseModel):
    """A sequence that runs; `gap_seconds` since its last token, or since it came."""

    id: int
    request_id: str
    key: str | None
    age_seconds: float
    gap_seconds: float
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    tokens: int
    max_new_tokens: int
    blocks: int
    priority: int


class Pool(BaseModel):
    """The KV pool in blocks; `cached` ones are among the free."""

    blocks: int
    block_size: int
    used: int
    free: int
    cached: int
    evicted: int
    preempted: int


class Step(BaseModel):
    """A step that was answered; what it was predicted to take is 0 where nothing was known."""

    kind: str
    ago_seconds: float
    rows: int
    prompt_tokens: int
    tokens: int
    seconds: float
    predicted_seconds: float


class ReplicaState(BaseModel):
    """One model copy; of lists that are cut, the counts tell how long they are."""

    index: int
    ranks: int
    tokens_per_second: float
    num_waiting: int
    num_queued_tokens: int
    num_running: int
    waiting: list[WaitingRequest]
    running: list[RunningRequest]
    pool: Pool
    steps: list[Step]


class SchedulerState(BaseModel):
    """All replicas, at one instant."""

    model_id: str
    version: str
    time: float
    replicas: list[ReplicaState]
