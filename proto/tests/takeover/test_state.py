"""Outputs of one sequence, kept by several ranks, are joined in the order of its tokens."""

from funitel.proto.step import Generation, Tokens
from funitel.proto.takeover.state import OutputStep, SequenceOutputs, join_outputs


def part(num_before: int, *ids: int, mu: float | None = None) -> SequenceOutputs:
    steps = (OutputStep(i, Generation(7, Tokens((i,), (-0.5,), ("a",), (False,)))) for i in ids)
    return SequenceOutputs("key", num_before, tuple(steps), mu)


def test_parts_are_joined_whatever_rank_has_kept_them() -> None:
    other = SequenceOutputs("other")
    joined = join_outputs([part(2, 3), part(3), other, part(0, 1, 2, mu=4.0)])

    assert joined == {"key": part(0, 1, 2, 3, mu=4.0), "other": other}


def test_an_empty_part_keeps_the_state_of_mirostat() -> None:
    assert join_outputs([part(1), part(0, 1, mu=4.0)]) == {"key": part(0, 1, mu=4.0)}


def test_parts_before_a_missing_one_are_left_out() -> None:
    assert join_outputs([part(0, 1), part(2, 3), part(3, 4)]) == {"key": part(2, 3, 4)}


def test_a_part_takes_the_place_of_what_was_not_known_when_it_began() -> None:
    assert join_outputs([part(0, 1, 2, 3), part(1, 5)]) == {"key": part(0, 1, 5)}
    assert join_outputs([part(0, 1, 2), part(0, 1, 2, 3)]) == {"key": part(0, 1, 2, 3)}


def test_a_part_in_the_middle_of_a_generation_stands_alone() -> None:
    several = OutputStep(1, Generation(7, Tokens((1, 2), (-0.5, -0.5), ("a", "b"), (False, False))))
    assert join_outputs([SequenceOutputs("key", 0, (several,)), part(1, 2)]) == {"key": part(1, 2)}
