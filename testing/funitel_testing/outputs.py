"""Outputs that an executor has recorded, beside those that its steps have brought."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from funitel.model_server.executor.executor import Executor
from funitel.proto import wire
from funitel.proto.step import Generation, SequenceStart
from funitel.proto.takeover.state import SequenceOutputs, join_outputs


def keyed(start: SequenceStart) -> SequenceStart:
    """A sequence with an output key of its own."""
    return replace(start, output_key=key_of(start.request_id))


def key_of(request_id: int) -> str:
    """The output key of a keyed sequence."""
    return f"key/{request_id}"


def on_wire(generations: Iterable[Generation]) -> list[bytes]:
    """Generations as bytes, in which NaN is equal to itself and log-probabilities have single precision."""
    return [wire.encode_generation(each).SerializeToString() for each in generations]


def recorded(executors: Sequence[Executor]) -> dict[str, SequenceOutputs]:
    """What all ranks have recorded, by output key."""
    return join_outputs(each for executor in executors for each in executor.output.records.outputs())


def assert_recorded(executors: Sequence[Executor], brought: dict[int, list[Generation]]) -> None:
    """Every generation of keyed sequences is recorded, in order, and nothing else."""
    found = recorded(executors)
    assert {key for key, outputs in found.items() if outputs.steps} == set(map(key_of, brought))
    for request_id, generations in brought.items():
        steps = found[key_of(request_id)].steps
        assert on_wire(each.generation for each in steps) == on_wire(generations)
        numbers = [each.step for each in steps]
        assert numbers == sorted(set(numbers))
