"""OpenAI's codes of errors in a body, by pydantic's type of the error."""

from typing import Any

from pydantic_core import ErrorDetails

INVALID_VALUE = "invalid_value"

_BOUNDS = {
    "greater_than": "below_min_value",
    "greater_than_equal": "below_min_value",
    "less_than": "above_max_value",
    "less_than_equal": "above_max_value",
}
_CODES = {
    "missing": "missing_required_parameter",
    "too_short": "array_below_min_length",
    "too_long": "array_above_max_length",
    "string_too_short": "string_below_min_length",
    "string_too_long": "string_above_max_length",
    "string_pattern_mismatch": "invalid_value",
}


def openai_code(detail: ErrorDetails) -> str:
    """The code of one error of a body."""
    kind, context = detail["type"], detail.get("ctx", {})
    if "code" in context:
        return str(context["code"])
    if kind in _BOUNDS:
        return bound_code(detail["input"], _BOUNDS[kind])
    return _CODES.get(kind) or ("invalid_type" if kind.endswith(("_type", "_parsing")) else INVALID_VALUE)


def bound_code(value: Any, broken: str) -> str:
    """The code of a number beyond a bound: `below_min_value` or `above_max_value`."""
    return f"{'integer' if isinstance(value, int) else 'decimal'}_{broken}"
