"""How the context of a trace crosses a process, and what spans say of failures."""

from collections.abc import Iterator

import pytest
from opentelemetry import trace

from funitel.proto.errors import FunitelError, InvalidRequest, ShardFailed, StepFailed
from funitel.proto.tracing import spans as tracing
from funitel_testing.spans import Recorded, facts_of, parent_of, recording

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def spans() -> Iterator[Recorded]:
    """What is recorded while the test runs."""
    with recording() as recorded:
        yield recorded


def test_a_span_goes_on_below_the_one_that_is_named(spans: Recorded) -> None:
    place = tracing.extract({"traceparent": TRACEPARENT, "tracestate": "a=1,b=2"})
    tracing.begin("here", place).end(count=3)
    span = spans.one("here")
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{parent_of(span):016x}" == SPAN
    assert span.context.trace_state.to_header() == "a=1,b=2"
    assert facts_of(span) == {"count": 3}


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "nonsense",
        f"00-{TRACE}-{SPAN}",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        TRACEPARENT + "-" + "x" * 600,
    ],
)
def test_what_is_malformed_begins_a_trace_of_its_own(spans: Recorded, parent: str) -> None:
    tracing.begin("here", tracing.extract({"traceparent": parent})).end()
    assert parent_of(spans.one("here")) == 0


def test_a_tracestate_too_long_is_left_and_its_parent_kept(spans: Recorded) -> None:
    headers = {"traceparent": TRACEPARENT, "tracestate": ",".join(f"k{n}={'x' * 40}" for n in range(20))}
    tracing.begin("here", tracing.extract(headers)).end()
    span = spans.one("here")
    assert f"{parent_of(span):016x}" == SPAN
    assert not span.context.trace_state


def test_a_client_that_samples_nothing_is_not_recorded(spans: Recorded) -> None:
    span = tracing.begin("here", tracing.extract({"traceparent": TRACEPARENT[:-1] + "0"}))
    with tracing.activate(span):
        assert tracing.current() is None
        assert tracing.inject()["traceparent"].endswith("-00")
    span.end()
    assert spans.all == ()


def test_without_a_tracer_nothing_is_recorded_nor_sent() -> None:
    span = tracing.begin("here", tracing.ROOT)
    with tracing.activate(span), tracing.propagate_to([span]):
        assert tracing.inject() == {}
        assert tracing.current() is None
    span.event("x")
    span.fail(StepFailed("y"))


def test_a_call_made_for_several_tells_of_each(spans: Recorded) -> None:
    places = [tracing.extract({"traceparent": f"00-{n:032x}-{SPAN}-01", "tracestate": f"v={n}"}) for n in (1, 2, 3)]
    begun = [tracing.begin("step", place) for place in places]
    with tracing.propagate_to(begun):
        headers = tracing.inject()
    assert tracing.inject() == {}
    for span, place in zip(begun, tracing.extract_all(headers), strict=True):
        told = trace.get_current_span(place).get_span_context()
        assert told.span_id == span.span.get_span_context().span_id
        assert told.trace_state.to_header() == span.span.get_span_context().trace_state.to_header()


def test_however_many_it_is_made_for_its_headers_stay_within_grpcs_bound(spans: Recorded) -> None:
    state = ",".join(f"k{n}={'x' * 12}" for n in range(30))
    place = tracing.extract({"traceparent": TRACEPARENT, "tracestate": state})
    with tracing.propagate_to([tracing.begin("step", place) for _ in range(300)]):
        headers = tracing.inject()
    assert 1 < len(tracing.extract_all(headers)) < 300
    assert sum(len(name) + len(value) + 32 for name, value in headers.items()) <= tracing.MAX_CONTEXT_BYTES


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ShardFailed("rank 1 died"), "rank 1 died"),
        (StepFailed("no memory"), "no memory"),
        (InvalidRequest("`stop` is 'my secret'"), "InvalidRequest"),
        (ValueError("my secret"), "ValueError"),
        (FunitelError("internal error"), "internal error"),
    ],
)
def test_a_failure_is_named_and_quotes_no_client(spans: Recorded, error: Exception, words: str) -> None:
    tracing.begin("here", tracing.ROOT).fail(error, tokens=1)
    span = spans.one("here")
    assert not span.status.is_ok
    assert span.status.description == words
    assert facts_of(span) == {"error.type": type(error).__name__, "tokens": 1}
    assert not span.events


def test_what_has_ended_takes_no_notice(spans: Recorded) -> None:
    span = tracing.begin("here", tracing.ROOT)
    span.end(a=1)
    span.set_attributes(b=2)
    span.event("late")
    span.fail(StepFailed("late"))
    assert facts_of(spans.one("here")) == {"a": 1}
    assert spans.one("here").status.is_ok
