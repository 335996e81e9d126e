"""Outputs, held rows and numbered calls survive the wire, as bytes."""

import pytest

from funitel.proto import generate_pb2 as pb
from funitel.proto.step import FinishReason, GeneratedText, Generation, Tokens, WarmupResult
from funitel.proto.takeover import wire as takeover_wire
from funitel.proto.takeover.state import HeldBatch, HeldRow, NumberedCall, OutputStep, SequenceOutputs, TakeOverState

PLAIN = Generation(7, Tokens((3,), (-0.5,), ("a",), (False,)))
LAST = Generation(
    9,
    Tokens((3, 4), (-0.5, -1.0), ("a", ""), (False, True)),
    top_tokens=(Tokens((3,), (-0.5,), ("a",), (False,)), Tokens((5,), (-0.25,), ("b",), (False,))),
    finished=GeneratedText("aa", 3, FinishReason.EOS_TOKEN, seed=5),
    num_accepted=1,
)


def test_outputs_survive_the_wire() -> None:
    sent = (
        SequenceOutputs("key/0", 2, (OutputStep(11, PLAIN), OutputStep(2**40, LAST)), mirostat_mu=0.0),
        SequenceOutputs("key/1"),
    )
    message = pb.OutputsResponse.FromString(takeover_wire.encode_outputs(sent).SerializeToString())

    assert takeover_wire.decode_outputs(message, vocab_size=6) == sent
    assert (sent[0].num_tokens, sent[0].is_finished) == (3, True)
    assert (sent[1].num_tokens, sent[1].is_finished) == (0, False)


def test_outputs_with_a_token_that_is_not_in_the_vocabulary_are_refused() -> None:
    message = takeover_wire.encode_outputs([SequenceOutputs("key", 0, (OutputStep(1, PLAIN),))])

    with pytest.raises(ValueError, match="token 3 is not in the vocabulary of 3"):
        takeover_wire.decode_outputs(message, vocab_size=3)


def test_state_survives_the_wire() -> None:
    rows = (HeldRow(5, "key/0", (3, 1), 17, 18, 4, "adapter"), HeldRow(6, "", (), 0, 9))
    sent = TakeOverState(
        42,
        (NumberedCall(41, "FilterBatch", b"\x01"), NumberedCall(42, "Decode", b"")),
        WarmupResult(pool_tokens=64, max_input_tokens=63, max_total_tokens=64, kv_bytes=5),
        (HeldBatch(1, rows), HeldBatch(2, ())),
    )
    message = pb.TakeOverResponse.FromString(takeover_wire.encode_state(sent).SerializeToString())

    assert takeover_wire.decode_state(message) == sent
    assert takeover_wire.decode_state(takeover_wire.encode_state(TakeOverState(0))) == TakeOverState(0)


def test_take_over_call_has_the_warmup_and_the_missing_calls() -> None:
    warmup, calls = pb.WarmupRequest(max_prefill_tokens=5), (NumberedCall(3, "Prefill", b"abc"),)
    message = takeover_wire.encode_take_over(warmup, calls, only_looks=True)

    assert (message.warmup, message.only_looks) == (warmup, True)
    assert takeover_wire.decode_missing(message) == calls
    assert list(takeover_wire.encode_release(["a", "b"]).output_keys) == ["a", "b"]
