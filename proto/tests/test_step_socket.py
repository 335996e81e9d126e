"""Frames of the step socket survive however the bytes are cut."""

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from funitel.proto.step_socket import MAX_BYTES, Frame, FrameProtocol, Method, decode_context, encode_context

FRAMES = st.lists(
    st.builds(
        Frame,
        call_id=st.integers(0, 2**64 - 1),
        code=st.integers(0, 255),
        payload=st.binary(max_size=40),
        context=st.binary(max_size=10),
    ),
    max_size=5,
)


class Recorded(FrameProtocol):
    """An end that keeps what comes; what it sends is kept as bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.taken: list[Frame] = []
        self.is_aborted = False
        self.connection_made(self)  # type: ignore[arg-type]

    def write(self, data: bytes) -> None:
        self.sent += data

    def take(self, frame: Frame) -> None:
        self.taken.append(frame)

    def abort(self) -> None:
        self.is_aborted = True


@settings(max_examples=50, deadline=None)
@given(FRAMES, st.integers(1, 100))
def test_frames_arrive_whole_however_they_are_cut(frames: list[Frame], size: int) -> None:
    sender, receiver = Recorded(), Recorded()
    for frame in frames:
        sender.send(frame)
    for begin in range(0, len(sender.sent), size):
        receiver.data_received(bytes(sender.sent[begin : begin + size]))
    assert receiver.taken == frames


@pytest.mark.parametrize("headers", [{}, {"traceparent": "00-a-b-01", "tracestate": "é=1"}])
def test_the_context_of_a_trace_is_carried(headers: dict[str, Any]) -> None:
    assert decode_context(encode_context(headers)) == headers


def test_methods_are_grpcs() -> None:
    assert [method.rpc for method in Method] == ["Prefill", "Decode", "FilterBatch", "ClearCache"]


def test_a_frame_that_claims_to_be_huge_ends_the_connection_and_takes_no_memory() -> None:
    receiver = Recorded()
    receiver.data_received(struct.pack("<IIQB", MAX_BYTES, 1, 1, 1) + b"x" * 100)
    assert receiver.is_aborted
    assert receiver.taken == []
    assert not receiver._buffer
