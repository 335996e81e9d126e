"""The headers by which a client asks for a stream that can be resumed, and resumes it."""

import re
from collections.abc import Mapping

from funitel.proto.errors import InvalidRequest

RESUME, LAST_EVENT = "x-resume-seconds", "last-event-id"


def resume_seconds(headers: Mapping[str, str], max_seconds: int) -> int | None:
    """Read for how many seconds a stream shall go on without its client; None where it is not asked for.

    Raises:
        InvalidRequest: it is no integer within 1..max_seconds, or none may be asked for.
    """
    value = headers.get(RESUME)
    if value is None:
        return None
    if not max_seconds:
        raise InvalidRequest(f"header {RESUME}: no stream is kept, --max-resume-seconds is 0. Given: {value!r}", RESUME)
    seconds = int(value) if re.fullmatch(r"[0-9]{1,9}", value) else 0
    if not 1 <= seconds <= max_seconds:
        message = f"header {RESUME}: must be an integer >= 1 and <= {max_seconds} (--max-resume-seconds)"
        raise InvalidRequest(f"{message}. Given: {value!r}", RESUME)
    return seconds


def last_event(headers: Mapping[str, str]) -> int | None:
    """Read the number of the last event that a client has; None where it is not given, or empty.

    Raises:
        InvalidRequest: it is no number of an event.
    """
    value = headers.get(LAST_EVENT)
    if not value:
        return None
    if not re.fullmatch(r"[0-9]{1,15}", value):
        raise InvalidRequest(f"header {LAST_EVENT}: must be an integer >= 0. Given: {value!r}", LAST_EVENT)
    return int(value)
