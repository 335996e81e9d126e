"""Convert the types of encoders and media to protobuf messages and back, for `wire`, Encode and EncodeMedia calls."""

from collections.abc import Sequence

from funitel.proto import generate_pb2 as pb
from funitel.proto.same_names import from_message, to_message
from funitel.proto.step import (
    EncoderFacts,
    EncoderInput,
    EncoderResult,
    EncoderTask,
    MediaFacts,
    MediaInput,
    MediaKind,
    MediaSpan,
)


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


def encode_media_facts(facts: MediaFacts) -> pb.MediaFacts:
    """Build the MediaFacts of an InfoResponse."""
    return to_message(pb.MediaFacts, facts, kinds=[f"MEDIA_KIND_{kind.name}" for kind in sorted(facts.kinds)])


def decode_media_facts(message: pb.MediaFacts) -> MediaFacts:
    """Read the MediaFacts of an InfoResponse; unknown kinds are left out."""
    known = {int(kind) for kind in MediaKind}
    kinds = frozenset(MediaKind(int(kind)) for kind in message.kinds if int(kind) in known)
    return from_message(MediaFacts, message, kinds=kinds)


def encode_media(media: MediaInput) -> pb.EncodeMediaRequest:
    """Build the EncodeMedia call."""
    return to_message(pb.EncodeMediaRequest, media, kind=f"MEDIA_KIND_{media.kind.name}")


def decode_media(message: pb.EncodeMediaRequest) -> MediaInput:
    """Read an EncodeMedia call. Raises: `ValueError`: its kind is unknown."""
    return from_message(MediaInput, message, kind=MediaKind(int(message.kind)))


def encode_span(span: MediaSpan) -> pb.MediaSpan:
    """Build the MediaSpan of a Request."""
    return to_message(pb.MediaSpan, span)


def decode_span(message: pb.MediaSpan) -> MediaSpan:
    """Read a MediaSpan of a Request."""
    return from_message(MediaSpan, message)
