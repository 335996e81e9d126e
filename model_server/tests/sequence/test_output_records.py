"""Records of outputs: what they keep, what a sequence that comes again makes of them, and what is forgotten."""

import math
from collections.abc import Sequence

import pytest

from funitel.model_server.sequence.output_records import GENERATION_BYTES, RECORD_BYTES, OutputRecords, SequenceRecord
from funitel.proto.step import FinishReason, GeneratedText, Generation, SequenceStart, Tokens
from funitel.proto.takeover.state import SequenceOutputs, join_outputs
from funitel_testing.executors import start
from funitel_testing.outputs import on_wire


def plain(request_id: int, token_id: int) -> Generation:
    return Generation(request_id, Tokens((token_id,), (-0.1 * token_id,), (f"<{token_id}>",), (token_id == 3,)))


def span(request_id: int, *ids: int, is_last: bool = False) -> Generation:
    """A generation of several tokens."""
    count = len(ids)
    tokens = Tokens(ids, (math.nan,) * count, ("é",) * count, (False,) * count)
    finished = GeneratedText("text", 9, FinishReason.LENGTH) if is_last else None
    return Generation(request_id, tokens, finished=finished, num_accepted=count - 1)


def begun(records: OutputRecords, request_id: int = 1, key: str = "key", known: Sequence[int] = ()) -> SequenceRecord:
    record = records.begin(sequence(request_id, key, known), is_own=True)
    assert record is not None
    return record


def sequence(request_id: int, key: str, known: Sequence[int] = ()) -> SequenceStart:
    return start(request_id, [1], output_key=key, output_ids=tuple(known))


def ids_of(outputs: SequenceOutputs) -> list[int]:
    return [token_id for each in outputs.steps for token_id in each.generation.tokens.ids]


def joined(records: OutputRecords, key: str = "key") -> SequenceOutputs:
    return join_outputs(records.outputs())[key]


def test_generations_come_back_as_they_were_with_their_steps() -> None:
    records = OutputRecords()
    record = begun(records)
    brought = [plain(1, 3), span(1, 4, 5), plain(1, 6), span(1, 7, is_last=True)]
    for number, each in enumerate(brought):
        records.add(10 + number, [(record, each)])

    (found,) = records.outputs()
    assert (found.output_key, found.num_before, found.mirostat_mu) == ("key", 0, None)
    assert [each.step for each in found.steps] == [10, 11, 12, 13]
    assert on_wire(each.generation for each in found.steps) == on_wire(brought)


def test_sequences_without_a_key_or_of_another_rank_are_not_recorded() -> None:
    records = OutputRecords()

    assert records.begin(sequence(1, ""), is_own=True) is None
    assert records.begin(sequence(1, "key"), is_own=False) is None
    assert records.outputs() == []


def test_the_latest_state_of_mirostat_is_kept() -> None:
    records = OutputRecords()
    record, other = begun(records), begun(records, 2, "other")
    records.add(1, [(record, plain(1, 3)), (other, plain(2, 3))], [(1, 4.5), (7, 9.0)])
    records.add(2, [(record, plain(1, 4))], [(1, 4.25)])

    assert joined(records).mirostat_mu == 4.25
    assert joined(records, "other").mirostat_mu is None


def test_a_sequence_that_comes_again_with_all_its_tokens_goes_on() -> None:
    records = OutputRecords()
    record = begun(records)
    records.add(1, [(record, plain(1, 3))], [(1, 4.5)])
    again = begun(records, 2, known=[3])
    records.add(2, [(again, plain(2, 4))])

    assert (joined(records).num_before, ids_of(joined(records)), joined(records).mirostat_mu) == (0, [3, 4], 4.5)
    assert [each.generation.request_id for each in joined(records).steps] == [1, 2]


def test_a_step_of_the_time_before_adds_nothing_once_the_sequence_has_come_again() -> None:
    records = OutputRecords()
    record = begun(records)
    records.add(1, [(record, plain(1, 3))])
    again = begun(records, 2, known=[3])
    records.add(2, [(record, plain(1, 4))])
    records.add(3, [(again, plain(2, 4))])

    assert [(each.step, each.generation.tokens.ids) for each in joined(records).steps] == [(1, (3,)), (3, (4,))]


@pytest.mark.parametrize(
    ("known", "num_before", "left"),
    [
        ([], 0, []),
        ([3], 0, [3]),
        ([3, 4, 5], 0, [3, 4, 5]),
        ([3, 4], 2, []),  # in the middle of a generation
        ([9], 1, []),  # another token
        ([3, 4, 5, 6, 7], 5, []),  # more than was recorded: it was elsewhere meanwhile
    ],
)
def test_a_sequence_that_comes_again_with_other_tokens_keeps_those(
    known: list[int], num_before: int, left: list[int]
) -> None:
    records = OutputRecords()
    record = begun(records)
    for number, each in enumerate((plain(1, 3), span(1, 4, 5), plain(1, 6))):
        records.add(number, [(record, each)])
    again = begun(records, 2, known=known)

    assert (joined(records).num_before, ids_of(joined(records))) == (num_before, left)
    records.add(9, [(again, plain(2, 8))])
    assert ids_of(joined(records)) == [*left, 8]


def test_a_sequence_may_change_the_rank_that_records_it() -> None:
    here, there = OutputRecords(), OutputRecords()
    first = begun(here)
    assert there.begin(sequence(1, "key"), is_own=False) is None
    here.add(1, [(first, plain(1, 3))])
    second = begun(there, 2, known=[3])
    assert here.begin(sequence(2, "key", [3]), is_own=False) is None
    there.add(2, [(second, plain(2, 4))])
    third = begun(here, 3, known=[3, 4])
    assert there.begin(sequence(3, "key", [3, 4]), is_own=False) is None
    here.add(3, [(third, plain(3, 5))])

    found = join_outputs([*there.outputs(), *here.outputs()])["key"]
    assert (found.num_before, ids_of(found)) == (0, [3, 4, 5])


def test_released_sequences_are_forgotten_and_take_no_more() -> None:
    records = OutputRecords()
    record, other = begun(records), begun(records, 2, "other")
    records.release(["key", "unknown"])
    records.add(1, [(record, plain(1, 3)), (other, plain(2, 3))])

    assert [each.output_key for each in records.outputs()] == ["other"]
    assert records.num_bytes == RECORD_BYTES + GENERATION_BYTES
    records.clear()
    assert (len(records), records.num_bytes) == (0, 0)


def test_those_that_ended_first_are_forgotten_once_there_is_too_much(caplog: pytest.LogCaptureFixture) -> None:
    records = OutputRecords(max_bytes=3 * RECORD_BYTES + 8 * GENERATION_BYTES)
    running, one, two = (begun(records, i, key) for i, key in enumerate(("running", "one", "two")))
    for number, record in enumerate((running, two, one)):
        records.add(number, [(record, plain(0, 3))])
    records.add(4, [(two, span(0, is_last=True))])
    records.add(5, [(one, span(0, is_last=True))])
    for number in range(20):
        records.add(10 + number, [(running, plain(0, 3))])

    assert [each.output_key for each in records.outputs()] == ["running"]
    for number in range(20):
        records.add(40 + number, [(running, plain(0, 3))])
    assert (len(records), records.num_bytes) == (0, 0)
    messages = [each.getMessage() for each in caplog.records]
    assert messages == ["outputs of 1 sequences are forgotten: those kept for another router took more than 3776 bytes"]


def test_the_estimate_of_memory_is_that_of_what_is_left() -> None:
    records = OutputRecords()
    record = begun(records)
    records.add(1, [(record, plain(1, 3))])
    records.add(2, [(record, span(1, 4, 5))])
    assert records.num_bytes > RECORD_BYTES + 2 * GENERATION_BYTES
    begun(records, 2, known=[3])
    assert records.num_bytes == 2 * RECORD_BYTES + GENERATION_BYTES


def test_sequences_without_outputs_are_forgotten_too() -> None:
    records = OutputRecords(max_bytes=10 * RECORD_BYTES)
    for number in range(100):
        begun(records, number, f"key/{number}")

    assert [each.output_key for each in records.outputs()] == [f"key/{number}" for number in range(90, 100)]
