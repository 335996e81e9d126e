"""The spans of one sequence, moved on by hand."""

from collections.abc import Iterator

import pytest

from funitel.proto.errors import Cancelled, ShardFailed
from funitel.proto.tracing import spans as tracing
from funitel.router.core.request_trace import RequestTrace
from funitel_testing.spans import Recorded, facts_of, parent_of, recording


@pytest.fixture
def spans() -> Iterator[Recorded]:
    """What is recorded while the test runs."""
    with recording() as recorded:
        yield recorded


def begin() -> tuple[tracing.OpenSpan, RequestTrace]:
    request = tracing.begin("request", tracing.ROOT)
    return request, RequestTrace(request)


def decode(trace: RequestTrace, steps: int, decode_tokens: int = 3) -> None:
    for _ in range(steps):
        trace.send(1, decode_tokens)
        trace.deliver(1)


def test_queue_prefill_and_decodes_are_below_the_request(spans: Recorded) -> None:
    request, trace = begin()
    trace.enter(5, 16)
    first, second = trace.send(3, 3), trace.send(2, 3)
    trace.deliver(1)
    decode(trace, 7)
    trace.end()
    request.end()
    assert [span.name for span in spans.all] == ["queue", "prefill", "decode", "decode", "decode", "request"]
    above = spans.one("request").context.span_id
    assert {parent_of(span) for span in spans.all[:-1]} == {above}
    prefill = spans.one("prefill")
    assert facts_of(prefill) == {"funitel.tokens": 5, "funitel.cached_tokens": 16, "funitel.chunks": 2}
    assert [dict(event.attributes or {}) for event in prefill.events] == [{"funitel.tokens": 3}, {"funitel.tokens": 2}]
    assert [facts_of(span)["funitel.tokens"] for span in spans.named("decode")] == [3, 3, 1]
    assert first is not None
    assert second is first, "each chunk is told to the shards below the prefill"


def test_shards_are_told_of_the_first_step_of_a_decode_span(spans: Recorded) -> None:
    _, trace = begin()
    trace.enter(1, 0)
    trace.send(1, 2)
    trace.deliver(1)
    told = []
    for _ in range(5):
        told.append(trace.send(1, 2))
        trace.deliver(1)
    assert [span is not None for span in told] == [True, False, True, False, True]


def test_a_step_sent_ahead_belongs_to_the_span_it_was_sent_for(spans: Recorded) -> None:
    _, trace = begin()
    trace.enter(1, 0)
    trace.send(1, 2)
    for _ in range(6):  # always one ahead
        trace.send(1, 2)
        trace.deliver(1)
    trace.deliver(1)
    trace.end()
    assert [facts_of(span) for span in spans.named("decode")] == [{"funitel.tokens": 2, "funitel.steps": 2}] * 3


def test_steps_of_several_tokens_fill_a_span_sooner(spans: Recorded) -> None:
    _, trace = begin()
    trace.enter(1, 0)
    trace.send(1, 4)
    trace.deliver(1)
    for _ in range(3):
        trace.send(1, 4)
        trace.deliver(3)
    trace.end()
    assert [facts_of(span)["funitel.tokens"] for span in spans.named("decode")] == [6, 3]


@pytest.mark.parametrize("reason", ["preempted", "restarted", "moved"])
def test_one_that_waits_again_has_a_second_queue_and_prefill(spans: Recorded, reason: str) -> None:
    request, trace = begin()
    trace.enter(5, 0)
    trace.send(5, 3)
    trace.deliver(1)
    trace.send(1, 3)
    trace.wait_again(reason)
    trace.wait_again(reason)  # it waits already
    trace.enter(6, 0)
    trace.send(6, 3)
    trace.deliver(1)
    decode(trace, 2)
    trace.end()
    request.end()
    names = ["queue", "prefill", "decode", "queue", "prefill", "decode", "request"]
    assert [span.name for span in spans.all] == names
    assert [event.name for event in spans.one("request").events] == [reason]
    assert all(span.status.is_ok for span in spans.all)


def test_a_failure_ends_what_is_open_with_its_name(spans: Recorded) -> None:
    _, trace = begin()
    trace.enter(5, 0)
    trace.send(5, 3)
    trace.deliver(1)
    trace.send(1, 3)
    trace.end(ShardFailed("rank 1 died"))
    assert spans.one("prefill").status.is_ok
    failed = spans.one("decode")
    assert failed.status.description == "rank 1 died"
    assert facts_of(failed)["error.type"] == "ShardFailed"


def test_a_client_that_leaves_ends_what_is_open(spans: Recorded) -> None:
    request, trace = begin()
    trace.end(Cancelled("left"))
    request.end()
    assert spans.one("queue").status.is_ok
    assert [event.name for event in spans.one("request").events] == ["cancelled"]


def test_who_is_not_traced_has_none(spans: Recorded) -> None:
    assert RequestTrace.of_caller() is None
    with tracing.activate(tracing.begin("request", tracing.ROOT)):
        assert RequestTrace.of_caller() is not None
