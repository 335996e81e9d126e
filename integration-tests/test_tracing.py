"""One request as a collector sees it: one tree, across the router and two shards; and as log, top and metrics tell."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from funitel_testing.servers import Server, serving, wait_until
from funitel_testing.spans import Collector, GatheredSpan, collecting
from funitel_testing.tiny import VOCAB_SIZE, save_tiny

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OTHER_TRACE = "1" * 32
NUM_TOKENS, DECODE_TOKENS = 9, 4
ARRIVAL_SECONDS = 15.0
SECRET = "xyzzy"
SERVICE = "/generate.v3.TextGenerationService/"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model without a token that ends an answer early."""
    return save_tiny("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=512, eos_token_id=VOCAB_SIZE)


@pytest.fixture(scope="module")
def traced(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Collector]]:
    """A server of two shards whose spans a collector gathers."""
    flags: tuple[str, ...] = (
        "--model-id",
        str(model),
        "--dtype",
        "float32",
        "--num-shard",
        "2",
        "--max-batch-total-tokens",
        "4096",
    )
    flags += ("--otlp-decode-tokens", str(DECODE_TOKENS), "--json-output")
    flags += ("--hostname", "127.0.0.1", "--memory-bandwidth", "20")
    environ = {"OTEL_BSP_SCHEDULE_DELAY": "200"}
    with collecting() as (collector, place):
        more = ("--otlp-endpoint", f"http://{place}")
        with serving(tmp_path_factory.mktemp("server"), *flags, *more, environ=environ) as server:
            yield server, collector


def ask(server: Server, prompt: str, trace_id: str, flag: str = "01") -> httpx.Response:
    """One streamed request below a span of the client's."""
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "stream": True, "temperature": 0}
    headers = {"traceparent": f"00-{trace_id}-{SPAN}-{flag}", "tracestate": "vendor=1", "x-request-id": trace_id[:8]}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def tree(collector: Collector, trace_id: str, num_spans: int) -> list[GatheredSpan]:
    """All spans of a trace, once as many as expected have come."""
    wait_until(lambda: len(collector.of_trace(trace_id)) >= num_spans, ARRIVAL_SECONDS, "the spans did not come")
    return collector.of_trace(trace_id)


def below(spans: list[GatheredSpan], parent: GatheredSpan) -> list[GatheredSpan]:
    return [span for span in spans if span.parent_id == parent.span_id]


def test_one_request_is_one_tree_across_three_processes(traced: tuple[Server, Collector]) -> None:
    server, collector = traced
    ask(server, SECRET * 3, TRACE)
    # The request, queue, prefill, stream, two decodes of 8 tokens; and for prefill and decodes a call of each shard.
    spans = tree(collector, TRACE, 6 + 3 * 2)
    (request,) = [span for span in spans if span.name == "POST /v1/completions"]
    assert request.parent_id == SPAN
    assert {span.state for span in spans} == {"vendor=1"}
    router_spans = below(spans, request)
    assert sorted(span.name for span in router_spans) == ["decode", "decode", "prefill", "queue", "stream"]
    tokens = [span.attributes["funitel.tokens"] for span in router_spans if span.name == "decode"]
    assert tokens == [DECODE_TOKENS, DECODE_TOKENS]
    calls: list[GatheredSpan] = []
    for parent in router_spans:
        children = below(spans, parent)
        if parent.name in ("queue", "stream"):
            assert children == []
            continue
        rpc = SERVICE + ("Prefill" if parent.name == "prefill" else "Decode")
        assert {span.name for span in children} == {rpc}
        assert {span.resource["funitel.rank"] for span in children} == {0, 1}
        assert all(parent.begin <= span.begin <= span.end <= parent.end for span in children)
        calls += children
    assert len(spans) == 1 + len(router_spans) + len(calls), "a span has another parent"
    assert len({span.resource["process.pid"] for span in spans}) == 3
    services = {span.resource["service.name"] for span in spans}
    assert services == {"text-generation-inference.router", "text-generation-inference.server"}
    assert all(request.begin <= span.begin <= span.end <= request.end for span in router_spans)


def test_it_says_what_was_asked_and_what_it_took_and_no_word_of_the_prompt(
    traced: tuple[Server, Collector], model: Path
) -> None:
    _, collector = traced
    spans = tree(collector, TRACE, 12)
    (request,) = [span for span in spans if span.name == "POST /v1/completions"]
    facts = request.attributes
    assert facts["gen_ai.operation.name"] == "text_completion"
    assert facts["gen_ai.request.model"] == str(model)
    assert facts["gen_ai.request.max_tokens"] == NUM_TOKENS
    assert facts["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert facts["gen_ai.response.finish_reasons"] == ["length"]
    assert facts["gen_ai.response.id"].startswith("cmpl-")
    assert 0 < facts["gen_ai.server.time_to_first_token"] < facts["total_time"]
    assert SECRET not in repr(collector.spans)


def test_who_wants_no_trace_has_none(traced: tuple[Server, Collector]) -> None:
    server, collector = traced
    ask(server, "silent", OTHER_TRACE, "00")
    ask(server, "heard", TRACE[::-1])
    tree(collector, TRACE[::-1], 12)
    assert collector.of_trace(OTHER_TRACE) == []


def test_the_log_tells_of_a_request_under_its_id_and_trace(traced: tuple[Server, Collector]) -> None:
    server, _ = traced
    trace_id = "2" * 32
    assert ask(server, "told", trace_id).headers["x-request-id"] == trace_id[:8]

    def told() -> list[dict[str, object]]:
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line.get("request_id") == trace_id[:8]]

    wait_until(lambda: bool(told()), 5)
    (line,) = told()
    assert line["process"] == "router"
    facts = {"trace_id": trace_id, "route": "/v1/completions", "status": 200, "tokens": NUM_TOKENS, "cancelled": False}
    assert facts.items() <= line.items()
    assert SECRET not in server.log.read_text()


def test_top_shows_the_server_and_metrics_what_it_reads(traced: tuple[Server, Collector]) -> None:
    server, _ = traced
    ask(server, "shown", "3" * 32)
    command = [sys.executable, "-m", "funitel.launcher", "top", "--once", "--json", "--url", server.url]
    (model,) = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)["models"]
    (replica,) = model["scheduler"]
    assert (replica["ranks"], replica["num_running"]) == (2, 0)
    assert replica["steps"][-1]["kind"] == "decode"
    found = server.metrics()
    for rank in (0, 1):
        assert found[f'funitel_decode_read_bytes_total{{rank="{rank}"}}'] > 0
        assert 0 < found[f'funitel_decode_bandwidth_share{{rank="{rank}"}}'] < 1
        assert found[f'funitel_memory_bytes{{kind="peak",rank="{rank}"}}'] > 50e6
