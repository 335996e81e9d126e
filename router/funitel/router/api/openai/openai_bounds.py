"""The bounds of OpenAI's fields that are narrower than ours; checked with `--openai-errors`."""

from pydantic import BaseModel

from funitel.proto.errors import InvalidRequest
from funitel.router.api.common.error_codes import bound_code

MAXIMA = {"temperature": 2, "top_logprobs": 20, "logprobs": 5, "best_of": 20}
MAX_STOPS = 4


def check_openai_bounds(body: BaseModel) -> None:
    """Raise InvalidRequest for the first value that OpenAI refuses and we would take."""
    for name, maximum in MAXIMA.items():
        value = getattr(body, name, None)
        if isinstance(value, int | float) and value > maximum:
            code = bound_code(value, "above_max_value")
            raise InvalidRequest(f"{name}: must be less than or equal to {maximum}. Given: {value}", name, code)
    num_stops = len(getattr(body, "stop", ()))
    if num_stops > MAX_STOPS:
        message = f"stop: must have at most {MAX_STOPS} items. Given: {num_stops}"
        raise InvalidRequest(message, "stop", "array_above_max_length")
