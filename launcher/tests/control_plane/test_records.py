"""The JSON of records: as the contract of the control socket has it, and inverse."""

import json

import pytest

from funitel.launcher.control_plane.records import (
    LaunchRequest,
    ModelEntry,
    ModelEvent,
    ModelState,
    Record,
    Registration,
    ReplicaEntry,
    ReplicaStage,
    Snapshot,
    WorkerEntry,
)

REPLICA = ReplicaEntry(
    id=3, address="unix:///run/x-0", state=ReplicaStage.READY, weight=0.5, pids=(7, 8), record={"pid": 7}
)
MODEL = ModelEntry(
    name="smol",
    model_id="smollm2-135m-instruct",
    state=ModelState.READY,
    created=12.5,
    router={"tokenizer_name": "/m"},
    replicas=(REPLICA,),
)


@pytest.mark.parametrize(
    "record",
    [
        MODEL,
        Snapshot(default="smol", wait=True, models=(MODEL,)),
        LaunchRequest(model="x", settings={"max_batch_size": 4}),
        Registration(type="LLM", name="x", model="/m", spec={"num_layers": 2}),
        WorkerEntry(name="w", gpus=({"name": "H100", "memory_bytes": 1},), replicas=({"model": "x", "replica": 0},)),
        ModelEvent(at=1.0, stage="ready", message="hi"),
    ],
    ids=lambda record: type(record).__name__,
)
def test_json_is_inverse(record: Record) -> None:
    text = json.dumps(record.to_json())
    again = type(record).from_json(json.loads(text))
    assert json.dumps(again.to_json()) == text


def test_a_snapshot_has_what_the_router_reads() -> None:
    content = Snapshot(default="smol", wait=True, models=(MODEL,)).to_json()
    entry = content["models"][0]
    assert set(entry) == {
        *("name", "model_id", "state", "stage", "progress", "error", "task", "is_default", "is_static", "pinned"),
        *("ttl", "last_used", "created", "engine", "bytes", "load_seconds", "expected_load_seconds", "request_limit"),
        *("retry_after", "router", "replicas"),
    }
    assert entry["stage"] == entry["state"] == "ready"
    assert entry["replicas"] == [
        {"id": 3, "address": "unix:///run/x-0", "state": "ready", "weight": 0.5, "worker": "local", "pids": [7, 8]}
    ]


def test_properties_of_a_later_version_are_left_out() -> None:
    assert ModelEntry.from_json(MODEL.to_json() | {"colour": "red"}).name == "smol"
    assert ReplicaEntry.from_json(REPLICA.to_json() | {"colour": "red"}).id == 3
