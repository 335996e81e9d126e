"""Convert the types of encoders to protobuf messages and back, for `wire` and Encode calls."""

from collections.abc import Sequence

from funitel.proto import generate_pb2 as pb
from funitel.proto.step import EncoderFacts, EncoderInput, EncoderResult, EncoderTask


def encode_facts(facts: EncoderFacts) -> pb.EncoderFacts:
    """Build the EncoderFacts of an InfoResponse."""
    return pb.EncoderFacts(
        tasks=[f"ENCODER_TASK_{task.name}" for task in sorted(facts.tasks)],
        width=facts.width,
        max_tokens=facts.max_tokens,
        usual_tokens=facts.usual_tokens,
        labels=facts.labels,
        is_multi_label=facts.is_multi_label,
        pooling=facts.pooling,
    )


def decode_facts(message: pb.EncoderFacts) -> EncoderFacts:
    """Read the EncoderFacts of an InfoResponse; unknown tasks are left out."""
    known = {int(task) for task in EncoderTask}
    return EncoderFacts(
        tasks=frozenset(EncoderTask(int(task)) for task in message.tasks if int(task) in known),
        width=message.width,
        max_tokens=message.max_tokens,
        usual_tokens=message.usual_tokens,
        labels=tuple(message.labels),
        is_multi_label=message.is_multi_label,
        pooling=message.pooling,
    )


def encode_inputs(task: EncoderTask, inputs: Sequence[EncoderInput]) -> pb.EncodeRequest:
    """Build the Encode call."""
    return pb.EncodeRequest(
        task=f"ENCODER_TASK_{task.name}",
        inputs=[
            pb.EncoderInput(
                input_ids=text.input_ids,
                type_ids=text.type_ids,
                dimensions=text.dimensions,
                is_normalized=text.is_normalized,
                mask_place=text.mask_place,
                top_n=text.top_n,
            )
            for text in inputs
        ],
    )


def decode_inputs(message: pb.EncodeRequest) -> tuple[EncoderTask, list[EncoderInput]]:
    """Read an Encode call."""
    inputs = [
        EncoderInput(
            input_ids=tuple(text.input_ids),
            type_ids=tuple(text.type_ids),
            dimensions=text.dimensions,
            is_normalized=text.is_normalized,
            mask_place=text.mask_place,
            top_n=text.top_n,
        )
        for text in message.inputs
    ]
    return EncoderTask(message.task), inputs


def encode_rows(result: EncoderResult) -> pb.EncodeResponse:
    """Build the EncodeResponse."""
    return pb.EncodeResponse(
        width=result.width, values=result.values, ids=result.ids, broken=result.broken, total_ns=result.total_ns
    )


def decode_rows(message: pb.EncodeResponse) -> EncoderResult:
    """Read an EncodeResponse."""
    return EncoderResult(message.width, message.values, tuple(message.ids), tuple(message.broken), message.total_ns)
