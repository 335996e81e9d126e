"""Which ranks another router can take over, and the calls that they lack."""

from dataclasses import replace
from typing import Any

import pytest

from funitel.proto.step import Capability, ShardInfo
from funitel.proto.takeover.state import NumberedCall, TakeOverState
from funitel.router.shard_client.capabilities import is_repeatable
from funitel.router.shard_client.takeover import missing_calls, takes_over

INFO = ShardInfo(device_type="cpu", capabilities=frozenset({Capability.TAKE_OVER}))


def call(step_seq: int) -> NumberedCall:
    return NumberedCall(step_seq, "Decode", b"%d" % step_seq)


def test_ranks_get_the_calls_that_others_have_begun() -> None:
    looks = [
        TakeOverState(5, (call(4), call(5))),
        TakeOverState(7, (call(6), call(7))),
        TakeOverState(6, (call(5), call(6))),
    ]
    assert missing_calls(looks) == [[call(6), call(7)], [], [call(7)]]
    assert missing_calls([TakeOverState(0), TakeOverState(0)]) == [[], []]


@pytest.mark.parametrize(
    "other",
    [
        {"capabilities": frozenset()},
        {"capabilities": INFO.capabilities | {Capability.STATE_SLOTS}},
        {"num_stages": 2},
    ],
    ids=["nothing", "states", "stages"],
)
def test_ranks_of_which_more_must_be_known_are_not_taken_over(other: dict[str, Any]) -> None:
    assert takes_over([INFO, INFO])
    assert not takes_over([INFO, replace(INFO, **other)])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"dtype": "0-9=cpu:int8,10-29=cpu:bfloat16"}, True),
        ({"dtype": "0-9=cpu:int8,10-29=cuda:bfloat16"}, False),
        ({"device_type": "cuda"}, False),
        ({"attention_impl": "llama.cpp"}, False),
    ],
)
def test_a_cpu_computes_the_same_again(fields: dict[str, Any], expected: bool) -> None:
    assert is_repeatable(replace(INFO, **fields)) is expected
