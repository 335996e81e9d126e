"""Sizes of batches as text and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funitel.proto.settings.batch_sizes import MAX_ROWS, BatchSizes


@pytest.mark.parametrize(
    ("text", "sizes", "again"),
    [("1,2,4", {1, 2, 4}, "1,2,4"), ("8, 2,2", {2, 8}, "2,8"), ("0", set(), "0"), ("0,4", {4}, "4")],
)
def test_text_is_read_as_tgi_writes_it(text: str, sizes: set[int], again: str) -> None:
    assert BatchSizes(text) == sizes
    assert str(BatchSizes(text)) == again


@given(st.frozensets(st.integers(1, MAX_ROWS)))
def test_what_is_written_is_read_again(sizes: frozenset[int]) -> None:
    assert BatchSizes(str(BatchSizes(sizes))) == sizes


@pytest.mark.parametrize("text", ["", "a", "1,,2", "-1", "1.5", "1;2", "²"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of whole numbers with commas between, such as 1,2,4"):
        BatchSizes(text)


@pytest.mark.parametrize("text", ["4097", "1,99999", "9" * 5000])
def test_a_batch_nobody_computes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="has a size above 4096"):
        BatchSizes(text)
