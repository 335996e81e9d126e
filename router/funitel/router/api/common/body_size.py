"""Bound the number of values of a JSON body, on which the time of checking and converting it depends."""

from typing import Any

from funitel.proto.errors import InvalidRequest

MAX_VALUES = 16_384
NUMBERS_PER_VALUE = 16  # numbers in lists and objects, such as token ids, cost this much less
_NUMBERS = {int, float}


def count_values(content: Any) -> int:
    """Return how many values the lists and objects of a body have together.

    Raises:
        InvalidRequest: there are more than `MAX_VALUES`.
    """
    count, left = 0, [content]
    while left:
        value = left.pop()
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        is_numeric = bool(items) and set(map(type, items)) <= _NUMBERS
        count += len(items) // NUMBERS_PER_VALUE if is_numeric else len(items)
        if count > MAX_VALUES:
            raise InvalidRequest(
                f"the body must have at most {MAX_VALUES} values, of which {NUMBERS_PER_VALUE} numbers count as one"
            )
        if not is_numeric:
            left.extend(item for item in items if isinstance(item, dict | list))
    return count
