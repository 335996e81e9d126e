"""Convert the types of a takeover to protobuf messages and back: Outputs, ReleaseOutputs and TakeOver calls."""

from collections.abc import Iterable

from funitel.proto import generate_pb2 as pb
from funitel.proto import wire
from funitel.proto.same_names import from_message, to_message
from funitel.proto.takeover.state import HeldBatch, HeldRow, NumberedCall, OutputStep, SequenceOutputs, TakeOverState


def encode_outputs(sequences: Iterable[SequenceOutputs]) -> pb.OutputsResponse:
    """Build the OutputsResponse."""
    return pb.OutputsResponse(sequences=map(_encode_sequence, sequences))


def decode_outputs(response: pb.OutputsResponse, vocab_size: int = 0) -> tuple[SequenceOutputs, ...]:
    """Read an OutputsResponse of one rank; of `vocab_size` 0 tokens are not held against it.

    Raises:
        ValueError: see `wire.decode_generation`.
    """
    return tuple([_decode_sequence(message, vocab_size) for message in response.sequences])


def _encode_sequence(outputs: SequenceOutputs) -> pb.SequenceOutputs:
    steps = [
        pb.OutputStep(step=each.step, generation=wire.encode_generation(each.generation)) for each in outputs.steps
    ]
    return to_message(pb.SequenceOutputs, outputs, steps=steps)


def _decode_sequence(message: pb.SequenceOutputs, vocab_size: int) -> SequenceOutputs:
    steps = [OutputStep(each.step, wire.decode_generation(each.generation, vocab_size)) for each in message.steps]
    return from_message(SequenceOutputs, message, steps=tuple(steps))


def encode_release(output_keys: Iterable[str]) -> pb.ReleaseOutputsRequest:
    """Build the ReleaseOutputs call."""
    return pb.ReleaseOutputsRequest(output_keys=output_keys)


def encode_take_over(
    warmup: pb.WarmupRequest, missing: Iterable[NumberedCall] = (), *, only_looks: bool = False
) -> pb.TakeOverRequest:
    """Build the TakeOver call. `warmup` is the Warmup call in place of which it comes, see `wire.encode_warmup`."""
    return pb.TakeOverRequest(warmup=warmup, missing=map(_encode_call, missing), only_looks=only_looks)


def decode_missing(request: pb.TakeOverRequest) -> tuple[NumberedCall, ...]:
    """Read the calls that a TakeOver call brings, in order."""
    return _decode_calls(request.missing)


def encode_state(state: TakeOverState) -> pb.TakeOverResponse:
    """Build the TakeOverResponse."""
    return pb.TakeOverResponse(
        last_step_seq=state.last_step_seq,
        latest=map(_encode_call, state.latest),
        warmup=None if state.warmup is None else wire.encode_warmup_result(state.warmup),
        batches=map(_encode_batch, state.batches),
    )


def decode_state(response: pb.TakeOverResponse) -> TakeOverState:
    """Read a TakeOverResponse of one rank."""
    return TakeOverState(
        response.last_step_seq,
        _decode_calls(response.latest),
        wire.decode_warmup_result(response.warmup) if response.HasField("warmup") else None,
        tuple([HeldBatch(each.id, tuple(map(_decode_row, each.rows))) for each in response.batches]),
    )


def _encode_call(call: NumberedCall) -> pb.NumberedCall:
    return to_message(pb.NumberedCall, call)


def _decode_calls(messages: Iterable[pb.NumberedCall]) -> tuple[NumberedCall, ...]:
    return tuple([from_message(NumberedCall, message) for message in messages])


def _encode_batch(batch: HeldBatch) -> pb.HeldBatch:
    return pb.HeldBatch(id=batch.id, rows=[to_message(pb.HeldRow, row) for row in batch.rows])


def _decode_row(message: pb.HeldRow) -> HeldRow:
    return from_message(HeldRow, message)
