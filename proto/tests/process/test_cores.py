"""Sets of cores as text and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funitel.proto.process.cores import Cores


@pytest.mark.parametrize(
    ("text", "cores", "again"),
    [("0", [0], "0"), ("0-3,8", [0, 1, 2, 3, 8], "0-3,8"), ("5,4,9", [4, 5, 9], "4-5,9"), (" 1-2\n", [1, 2], "1-2")],
)
def test_text_is_read_as_the_kernel_writes_it(text: str, cores: list[int], again: str) -> None:
    assert Cores(text) == frozenset(cores)
    assert str(Cores(text)) == again


@given(st.frozensets(st.integers(0, 300), min_size=1))
def test_what_is_written_is_read_again(cores: frozenset[int]) -> None:
    assert Cores(str(Cores(cores))) == cores


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-1", "1-2-3", "0-3,x"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a set of cores such as 0-3,8"):
        Cores(text)
