"""What may be shown of a text that could be cut."""

from hypothesis import given
from hypothesis import strategies as st

from funitel.proto.step import FinishReason, GeneratedText
from funitel.router.text.stop_holdback import StopHoldback, stop_start

few_letters = st.text("ab", max_size=40)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def ended(text: str, stops: list[str]) -> GeneratedText:
    """The text as a shard settles it: up to the end of the stop found first."""
    found = [(text.find(stop), len(stop), index) for index, stop in enumerate(stops) if stop in text]
    if not found:
        return GeneratedText(text, 0, FinishReason.EOS_TOKEN)
    start, length, index = min(found)
    return GeneratedText(text[: start + length], 0, FinishReason.STOP_SEQUENCE, stop_index=index, stop_start=start)


def held(text: str, stops: list[str]) -> int:
    """The length of the longest end of `text` that begins a stop and is not all of it."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@given(few_letters, stop_lists)
def test_exactly_the_longest_possible_beginning_is_held(text: str, stops: list[str]) -> None:
    holdback = StopHoldback(stops)
    shown = "".join(holdback.feed(character) for character in text)
    assert shown == text[: len(text) - held(text, stops)]


@given(few_letters, stop_lists, st.data())
def test_the_result_is_independent_of_the_pieces(text: str, stops: list[str], data: st.DataObject) -> None:
    finished = ended(text, stops)
    holdback = StopHoldback(stops)
    shown, rest = "", finished.text
    while rest:
        size = data.draw(st.integers(1, 5))
        piece, rest = rest[:size], rest[size:]
        if rest:
            shown += holdback.feed(piece)
    shown += holdback.finish(finished)
    assert shown == finished.text[: finished.stop_start]
    assert holdback.num_shown == len(shown)


def test_text_flows_freely_without_stops() -> None:
    assert StopHoldback([]).feed("anything") == "anything"


def test_a_huge_stop_is_matched_in_linear_time() -> None:
    holdback = StopHoldback(["a" * 1_000_000 + "b"])
    assert "".join(holdback.feed("a") for _ in range(5_000)) == ""
    assert holdback.feed("c") == "a" * 5_000 + "c"


def test_a_shard_that_does_not_say_where_stops_at_the_end() -> None:
    finished = GeneratedText("one two", 2, FinishReason.STOP_SEQUENCE)
    assert stop_start(finished, ["two", " two", "x"]) == 3
    assert stop_start(finished, []) == stop_start(finished, ["x"]) == 7
    assert stop_start(GeneratedText("one two", 2, FinishReason.LENGTH), ["two"]) == 7
    holdback = StopHoldback(["x", "two"])
    assert holdback.feed("one t") == "one "
    assert holdback.finish(finished) == ""
    assert holdback.num_shown == 4
