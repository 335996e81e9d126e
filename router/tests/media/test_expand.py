"""Markers of a prompt are replaced in order, but for those in user text; placeholders become spans."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import MediaInput, MediaKind
from funitel.router.media.expand import insert, place
from funitel.router.media.interface import PreparedMedia

MARKERS = {MediaKind.IMAGE: "<image>", MediaKind.AUDIO: "<audio>"}
PLACEHOLDERS = {MediaKind.IMAGE: 100, MediaKind.AUDIO: 200}


def item(text: str, *runs: int, kind: MediaKind = MediaKind.IMAGE, key: bytes = b"k") -> PreparedMedia:
    made = MediaInput(key=key, kind=kind, shape=(1,), values=b"", num_features=sum(runs), grid=(1, 2, 3))
    return PreparedMedia(made, text, runs)


def test_markers_are_replaced_in_order_and_plain_spans_move() -> None:
    text = "a<image>bc<image>d"
    plain = [(0, 1), (8, 10), (17, 18)]
    found, moved = insert(text, plain, [item("ONE"), item("")], MARKERS)
    assert found == "aONEbcd"
    assert moved == [(0, 1), (4, 6), (6, 7)]
    assert [found[begin:end] for begin, end in moved] == ["a", "bc", "d"]


def test_markers_in_user_text_stay() -> None:
    text = "say <image> now <image>!"
    plain = [(0, 16)]
    assert insert(text, plain, [item("X")], MARKERS) == ("say <image> now X!", plain)
    assert insert("<image>", [(3, 4)], [], MARKERS) == ("<image>", [(3, 4)])


def test_kinds_have_markers_of_their_own() -> None:
    items = [item("I"), item("S", kind=MediaKind.AUDIO), item("J")]
    assert insert("<image> <audio> <image>", [], items, MARKERS)[0] == "I S J"


def test_a_text_that_has_the_marker_itself_is_not_replaced_again() -> None:
    assert insert("<image>", [], [item("<a><image><image></a>")], MARKERS)[0] == "<a><image><image></a>"


@pytest.mark.parametrize(("text", "count"), [("", 1), ("<image>", 0), ("<image><image>", 1), ("<image", 1)])
def test_markers_must_match_items(text: str, count: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        insert(text, [], [item("x")] * count, MARKERS, "prompt")
    assert caught.value.param == "prompt"
    assert f"has {count} images" in caught.value.message


def test_runs_are_repeated_and_spans_cover_them() -> None:
    items = [item("", 3, 2, key=b"a"), item("", 4, key=b"b")]
    ids, media = place([1, 100, 7, 100, 2, 100, 3], items, PLACEHOLDERS)
    assert ids == [1, 100, 100, 100, 7, 100, 100, 2, 100, 100, 100, 100, 3]
    assert [(each.span.key, each.span.position, each.span.length) for each in media] == [(b"a", 1, 6), (b"b", 8, 4)]
    assert media[0].span.grid == (1, 2, 3)


def test_spans_of_several_kinds_are_in_the_order_of_their_positions() -> None:
    items = [item("", 2), item("", 1, kind=MediaKind.AUDIO), item("", 1)]
    ids, media = place([200, 100, 100], items, PLACEHOLDERS)
    assert ids == [200, 100, 100, 100]
    assert [each.span.position for each in media] == [0, 1, 3]
    assert place([1, 2], [], PLACEHOLDERS) == ([1, 2], ())


@pytest.mark.parametrize("ids", [[], [100], [100, 100, 100], [100, 100, 200]])
def test_placeholders_must_match_runs(ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="places"):
        place(ids, [item("", 3, 2)], PLACEHOLDERS)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.lists(st.integers(1, 4), min_size=1, max_size=3))),
    st.lists(st.integers(0, 9), max_size=3),
)
def test_any_items_are_found_where_they_are(parts: list[tuple[list[int], list[int]]], end: list[int]) -> None:
    ids, expected, spans = [], [], []
    for before, runs in parts:
        ids += before
        expected += before
        begin = len(expected)
        for number, run in enumerate(runs):
            ids += [50] * bool(number) + [100]
            expected += [50] * bool(number) + [100] * run
        spans.append((begin, len(expected)))
    found, media = place(ids + end, [item("", *runs) for _, runs in parts], PLACEHOLDERS)
    assert found == expected + end
    assert [(each.span.position, each.span.end) for each in media] == spans
