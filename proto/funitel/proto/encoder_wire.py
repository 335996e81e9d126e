"""Convert the types of encoders to protobuf messages and back, for `wire` and Encode calls."""

from collections.abc import Sequence

from funitel.proto import generate_pb2 as pb
from funitel.proto.same_names import from_message, to_message
from funitel.proto.step import EncoderFacts, EncoderInput, EncoderResult, EncoderTask


def encode_facts(facts: EncoderFacts) -> pb.EncoderFacts:
    """Build the EncoderFacts of an InfoResponse."""
    return to_message(pb.EncoderFacts, facts, tasks=[f"ENCODER_TASK_{task.name}" for task in sorted(facts.tasks)])


def decode_facts(message: pb.EncoderFacts) -> EncoderFacts:
    """Read the EncoderFacts of an InfoResponse; unknown tasks are left out."""
    known = {int(task) for task in EncoderTask}
    tasks = frozenset(EncoderTask(int(task)) for task in message.tasks if int(task) in known)
    return from_message(EncoderFacts, message, tasks=tasks)


def encode_inputs(task: EncoderTask, inputs: Sequence[EncoderInput]) -> pb.EncodeRequest:
    """Build the Encode call."""
    return pb.EncodeRequest(
        task=f"ENCODER_TASK_{task.name}", inputs=[to_message(pb.EncoderInput, text) for text in inputs]
    )


def decode_inputs(message: pb.EncodeRequest) -> tuple[EncoderTask, list[EncoderInput]]:
    """Read an Encode call."""
    inputs = [from_message(EncoderInput, text) for text in message.inputs]
    return EncoderTask(message.task), inputs


def encode_rows(result: EncoderResult) -> pb.EncodeResponse:
    """Build the EncodeResponse."""
    return to_message(pb.EncodeResponse, result)


def decode_rows(message: pb.EncodeResponse) -> EncoderResult:
    """Read an EncodeResponse."""
    return from_message(EncoderResult, message)
