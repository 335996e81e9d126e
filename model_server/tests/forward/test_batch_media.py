"""What a batch gathers of its rows' media, positions and spans, and what parts of a row have of them."""

import numpy as np
import pytest
import torch

from funitel.model_server.forward.batch import ForwardBatch, RowMedia, RowSpan

CPU = torch.device("cpu")
TABLE = np.arange(1, 20, dtype=np.int32)


def features(count: int, first: float) -> torch.Tensor:
    return first + torch.arange(float(count))[:, None].expand(-1, 2)


def picture(begin: int, count: int, first: float, num_deep: int = 1) -> RowMedia:
    deep = tuple(features(count, first + 100 * (i + 1)) for i in range(num_deep))
    return RowMedia(np.arange(begin, begin + count), features(count, first), deep)


def axes(start: int, count: int) -> np.ndarray:
    """Positions of text from `start` on."""
    return np.tile(np.arange(start, start + count), (3, 1))


def test_rows_of_text_have_nothing_of_it() -> None:
    rows = [RowSpan([1], 7, TABLE), RowSpan([1, 2, 3], 0, TABLE, whole_spans=((3, 5),))]
    rows.append(RowSpan([4], 9, TABLE, whole_spans=((2, 9),)))
    batch = ForwardBatch.build(rows, 4, CPU)
    assert (batch.media, batch.rotary, batch.visible_ends) == (None, None, None)
    assert batch.rotary_positions is batch.positions


def test_features_lie_where_their_rows_do() -> None:
    rows = [
        RowSpan([9, 9, 9, 1, 9], 0, TABLE, media=(picture(0, 3, 10.0), picture(4, 1, 20.0))),
        RowSpan([5], 3, TABLE),
        RowSpan([9], 4, TABLE, media=(picture(0, 1, 30.0),)),  # one token, and yet of a picture
    ]
    batch = ForwardBatch.build(rows, 4, CPU)
    media = batch.media
    assert media is not None
    assert batch.input_ids.tolist() == [5, 9, 9, 9, 9, 1, 9]
    x = media.enter(torch.zeros(7, 2))
    assert x[:, 1].tolist() == [0.0, 30.0, 10.0, 11.0, 12.0, 0.0, 20.0]
    assert media.deepen(torch.zeros(7, 2), 0)[:, 0].tolist() == [0.0, 130.0, 110.0, 111.0, 112.0, 0.0, 120.0]
    assert media.deepen(x, 1) is x
    assert media.hide(batch.input_ids, 0).tolist() == [5, 0, 0, 0, 0, 1, 0]
    part = batch.of_rows(2, 3).media
    assert part is not None
    assert part.places.tolist() == [0, 1, 2, 4]
    assert batch.on(torch.device("meta")).media is not None


def test_positions_by_axis_are_one_line_where_axes_are_alike() -> None:
    decode = RowSpan([5], 9, TABLE, rotary=axes(4, 1))
    text = RowSpan([1, 2], 3, TABLE)
    batch = ForwardBatch.build([decode, text], 4, CPU)
    assert batch.rotary_positions.tolist() == [4, 3, 4]
    assert batch.positions.tolist() == [9, 3, 4]
    seen = RowSpan([9, 9], 0, TABLE, rotary=np.array([[0, 0], [0, 0], [0, 1]]))
    batch = ForwardBatch.build([text, decode, seen], 4, CPU)
    assert batch.rotary_positions.tolist() == [[4, 0, 0, 3, 4], [4, 0, 0, 3, 4], [4, 0, 1, 3, 4]]


@pytest.mark.parametrize(
    ("start", "count", "ends"),
    [
        (0, 12, [1, 2, 6, 6, 6, 6, 9, 9, 9, 10, 11, 12]),
        (3, 4, [6, 6, 6, 7]),  # the last tokens of one span; the other is cut where the step ends
        (6, 5, [9, 9, 9, 10, 11]),
    ],
)
def test_tokens_see_to_the_end_of_their_span(start: int, count: int, ends: list[int]) -> None:
    row = RowSpan([0] * count, start, TABLE, whole_spans=((2, 6), (6, 9)))
    batch = ForwardBatch.build([RowSpan([0, 0], 5, TABLE), row], 4, CPU)
    assert batch.visible_ends is not None
    flat = batch.visible_ends.tolist()
    assert sorted([flat[:2], flat[2:]], key=len) == [[6, 7], ends]


def test_a_part_of_a_row_has_its_own() -> None:
    row = RowSpan([1, 9, 9, 9, 2], 4, TABLE, media=(picture(1, 3, 10.0),), rotary=axes(2, 5), whole_spans=((5, 8),))
    part = row.part(2, 5)
    assert (part.tokens, part.start, part.end) == ([9, 9, 2], 6, 9)
    assert part.media[0].places.tolist() == [0, 1]
    assert part.media[0].features[:, 0].tolist() == [11.0, 12.0]
    assert part.media[0].deep[0][:, 0].tolist() == [111.0, 112.0]
    assert part.rotary is not None
    assert part.rotary.tolist() == axes(4, 3).tolist()
    assert row.part(4, 5).media == ()
    longer = row.followed_by([7, 8])
    assert (longer.tokens, longer.end) == ([1, 9, 9, 9, 2, 7, 8], 11)
    assert longer.rotary is not None
    assert longer.rotary.tolist() == axes(2, 7).tolist()
