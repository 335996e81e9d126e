"""The numbers a setting may be, and what is said of others."""

import math
from dataclasses import dataclass

import pytest

from funitel.proto.errors import SettingsError
from funitel.proto.settings.bounds import ANY, AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, SHARE, Bounds
from funitel.proto.settings.fields import check_bounds, setting


@pytest.mark.parametrize(
    ("bounds", "within", "beyond", "text"),
    [
        (POSITIVE, (1, 0.1, math.inf), (0, -1, math.nan), "> 0"),
        (NOT_NEGATIVE, (0, 3), (-1, math.nan), ">= 0"),
        (AT_LEAST_ONE, (1,), (0,), ">= 1"),
        (SHARE, (0.5, 1), (0, 1.01, math.nan), "> 0 and <= 1"),
        (Bounds(minimum=0, maximum=9), (0, 9), (-1, 10), "within 0..9"),
    ],
)
def test_a_range_holds_its_numbers_and_says_which(
    bounds: Bounds, within: tuple[float, ...], beyond: tuple[float, ...], text: str
) -> None:
    assert all(number in bounds for number in within)
    assert not any(number in bounds for number in beyond)
    assert str(bounds) == text


@dataclass(frozen=True)
class _Hotel:
    num_rooms: int = setting(3, "Rooms.", bounds=POSITIVE)
    num_stars: int | None = setting(None, "Stars.", bounds=Bounds(minimum=1, maximum=5))
    name: str = "Ritz"


def test_settings_are_held_to_their_bounds() -> None:
    check_bounds(_Hotel())
    check_bounds(_Hotel(num_stars=5))
    with pytest.raises(SettingsError, match=r"^--num-rooms must be > 0, given 0$"):
        check_bounds(_Hotel(num_rooms=0))
    with pytest.raises(SettingsError, match=r"^--num-stars must be within 1\.\.5, given 6$"):
        check_bounds(_Hotel(num_stars=6))


def test_what_is_no_number_is_in_no_range() -> None:
    assert math.nan not in ANY
