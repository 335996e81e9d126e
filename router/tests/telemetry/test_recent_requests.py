"""Ended requests: the parts of their time, the newest first, those of one key, and a bounded number."""

import pytest

from funitel.proto.errors import InvalidRequest
from funitel.router.core.request_context import RequestContext
from funitel.router.core.stream import Timings
from funitel.router.telemetry.recent_requests import MAX_REQUESTS, EndedRequest, RecentRequests


def ended(owner: bytes = b"", **facts: object) -> EndedRequest:
    context = RequestContext("id", owner=owner, **facts)  # type: ignore[arg-type]
    return EndedRequest.of("/generate", 200, context, 2.0)


def test_its_parts_follow_each_other() -> None:
    timings = Timings(submitted=10.0, started=10.5, first_token=11.0, latest=11.8, finished=11.75)
    request = ended(
        timings=timings, validation_seconds=0.25, prompt_tokens=3, tokens=4, finish_reasons=("stop", "length")
    )
    parts = (request.arrival_seconds, request.queue_seconds, request.prefill_seconds, request.decode_seconds)
    assert parts == (0.25, 0.5, 0.5, 0.75)
    assert request.first_token_seconds == pytest.approx(1.25)
    assert (request.finish, request.prompt_tokens, request.tokens) == ("stop,length", 3, 4)


@pytest.mark.parametrize("timings", [None, Timings(submitted=1.0), Timings(submitted=1.0, started=2.0)])
def test_what_was_not_reached_is_none(timings: Timings | None) -> None:
    request = ended(timings=timings, error=InvalidRequest("no"))
    assert (request.prefill_seconds, request.decode_seconds, request.first_token_seconds) == (None, None, None)
    assert request.error == "InvalidRequest"


def test_the_newest_come_first_and_the_oldest_go() -> None:
    recent = RecentRequests()
    for i in range(MAX_REQUESTS + 5):
        recent.add(ended(b"even" if i % 2 == 0 else b"odd", prompt_tokens=i))
    every = [request.prompt_tokens for request in recent.of(None)]
    assert every == list(range(MAX_REQUESTS + 4, 4, -1))
    assert all(request.owner == b"odd" for request in recent.of({b"odd"}))
    assert list(recent.of({b"none"})) == []
    assert len({request.serial for request in recent.of(None)}) == MAX_REQUESTS
