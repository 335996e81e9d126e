"""Rows of routes, statuses, framing, headers, keys, health and facts: contract 5.1, 5.7 to 5.12 and 10."""

from typing import Any

from funitel_testing.conformance.native import MAX_INPUT, MAX_TOTAL, given
from funitel_testing.conformance.rows import ABSENT, Absent, Matches, Row

KEY = {"authorization": "Bearer secret"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
VERTEX = {"instances": [{"inputs": "Hi", "parameters": {"max_new_tokens": 2}}]}
INFER_PATH = "/v2/models/any/versions/1/infer"
INFER = {
    "id": "1",
    "parameters": {"max_new_tokens": 2},
    "inputs": [{"name": "a", "shape": [2], "datatype": "BYTES", "data": list(b"Hi")}],
    "outputs": [{"name": "b"}],
}

# Every route that needs a key, with a body it takes.
PROTECTED: tuple[tuple[str, Any], ...] = (
    ("/", given()),
    ("/generate", given()),
    ("/generate_stream", given()),
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}),
    ("/vertex", VERTEX),
    ("/invocations", given()),
    ("/tokenize", given()),
)
PROTECTED_HERE: tuple[tuple[str, Any], ...] = (("/chat_tokenize", CHAT), (INFER_PATH, INFER))
OPEN = ("/", "/health", "/ping", "/info", "/metrics", "/v1/models", "/docs", "/api-doc/openapi.json")
KSERVE_OPEN = ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/a/versions/1", "/v2/models/a/versions/1/ready")
_KEY_HERE = "TGI leaves this route open"


def _refused_key(path: str, body: Any, claim: str, headers: dict[str, str], differs: str | None = None) -> Row:
    differs = differs or (_OPENAI_401 if path.startswith("/v1/") else None)
    return Row(
        section="5.10",
        claim=claim,
        path=path,
        body=body,
        headers=headers,
        status=401,
        sends={"content-length": r"\d+" if path.startswith("/v1/") else "0"},
        server="guarded",
        differs=differs,
    )


_OPENAI_401 = "TGI's 401 has no body; clients of OpenAI's routes read an error object"

ROUTES = (
    *(Row(section="5.1", claim="is a route", path=path, body=body) for path, body in PROTECTED + PROTECTED_HERE),
    *(Row(section="5.1", claim="is a route", path=path) for path in OPEN + KSERVE_OPEN),
    *(
        Row(section="5.1", claim="takes the key", path=path, body=body, headers=KEY, server="guarded")
        for path, body in PROTECTED + PROTECTED_HERE
    ),
    *(Row(section="5.1", claim="needs no key", path=path, server="guarded") for path in OPEN + KSERVE_OPEN),
    *(_refused_key(path, body, "needs a key", {}) for path, body in PROTECTED),
    *(_refused_key(path, body, "needs a key", {}, _KEY_HERE) for path, body in PROTECTED_HERE),
    *(
        _refused_key("/generate", given(), claim, {"authorization": value})
        for claim, value in (
            ("another key", "Bearer other"),
            ("no scheme", "secret"),
            ("another scheme", "Basic secret"),
        )
    ),
    _refused_key(
        "/generate",
        given(),
        "a key in other letters is another key",
        {"authorization": "Bearer SECRET"},
        "TGI compares keys without regard to case",
    ),
    Row(section="5.1", claim="Vertex AI's own path", path="/predict", body=VERTEX, headers=KEY, server="guarded"),
    _refused_key("/predict", VERTEX, "Vertex AI's own path needs a key", {}, _KEY_HERE),
    Row(section="5.1", claim="Vertex AI's own health path", path="/alive", server="guarded"),
    Row(
        section="5.1",
        claim="unknown path",
        path="/nowhere",
        status=404,
        error_type="not_found",
        differs="TGI's has no body",
    ),
    Row(
        section="5.1",
        claim="unknown method",
        path="/generate",
        status=405,
        error_type="method_not_allowed",
        sends={"allow": "POST"},
        differs="TGI's has no body",
    ),
)

_IN_JSON = "TGI's router answers in plain text before its own code runs"


def _unreadable(
    claim: str, status: int, body: bytes, content_type: str = "application/json", server: str = "open"
) -> Row:
    return Row(
        section="5.7",
        claim=claim,
        path="/generate",
        body=body,
        headers={"content-type": content_type} | (KEY if server == "guarded" else {}),
        status=status,
        error_type="validation",
        server=server,
        differs=_IN_JSON,
    )


STATUSES = (
    _unreadable("not JSON", 400, b'{"inputs": '),
    _unreadable("no body", 400, b""),
    _unreadable("another shape", 422, b"[]"),
    _unreadable("no inputs", 422, b"{}"),
    _unreadable("another content type", 415, b'{"inputs": "a"}', "text/plain"),
    _unreadable("over --payload-limit", 413, b'{"inputs": "' + b"a" * 5000 + b'"}', server="guarded"),
    Row(
        section="5.10",
        claim="best_of 2 takes two permits; with one it is overloaded",
        path="/generate",
        body=given(best_of=2, do_sample=True),
        headers=KEY,
        status=429,
        error_type="overloaded",
        says=("Model is overloaded",),
        sends={"retry-after": r"\d+"},
        server="guarded",
    ),
    Row(
        section="5.7",
        claim="Vertex AI: overloaded",
        path="/vertex",
        body={"instances": VERTEX["instances"] * 2},
        headers=KEY,
        status=429,
        error_type="overloaded",
        server="guarded",
        differs="TGI answers 500 Incomplete generation and hides the cause",
    ),
    Row(
        section="5.8",
        claim="a refused stream",
        path="/generate_stream",
        body=given(temperature=0),
        status=422,
        error_type="validation",
        differs="TGI's status is 200 with an event of the error (its issue 1896)",
    ),
    Row(
        section="5.7",
        claim="Vertex AI: no instances",
        path="/vertex",
        body={"instances": []},
        status=422,
        error_type="Input validation error",
    ),
    Row(
        section="5.7",
        claim="Vertex AI: a wrong instance",
        path="/vertex",
        body={"instances": [{"inputs": ""}]},
        status=422,
        error_type="validation",
        says=("`inputs` cannot be empty",),
        differs="TGI answers 500 Incomplete generation and hides the cause",
    ),
    Row(
        section="5.7",
        claim="KServe: bytes that are no text",
        path=INFER_PATH,
        body=INFER | {"inputs": [{"name": "a", "shape": [1], "datatype": "BYTES", "data": [255]}]},
        status=422,
        error_type="utf8",
    ),
    Row(
        section="5.7",
        claim="KServe: another number of outputs",
        path=INFER_PATH,
        body=INFER | {"outputs": []},
        status=422,
        error_type="length mismatch",
    ),
)

_EVENT_STREAM: dict[str, str | Absent] = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
    "x-compute-type": "1-cpu",
    "x-compute-characters": r"\d+",
    "x-compute-time": ABSENT,
    "x-total-time": ABSENT,
}
_WHOLE: dict[str, str | Absent] = {
    "content-type": "application/json",
    "x-compute-type": "1-cpu",
    "x-compute-time": r"\d+\.\d+",
    "x-compute-characters": r"\d+",
    "x-total-time": r"\d+",
    "x-validation-time": r"\d+",
    "x-queue-time": r"\d+",
    "x-inference-time": r"\d+",
    "x-time-per-token": r"\d+",
    "x-prompt-tokens": r"\d+",
    "x-generated-tokens": r"\d+",
    "x-accel-buffering": ABSENT,
}
_SUMMED = {name: value for name, value in _WHOLE.items() if name != "x-compute-time"}

HEADERS = (
    *(
        Row(section="5.9", claim="headers of a whole answer", path=path, body=body, sends=_WHOLE)
        for path, body in (
            ("/", given()),
            ("/generate", given()),
            ("/invocations", given()),
            ("/v1/chat/completions", CHAT),
        )
    ),
    Row(
        section="5.9",
        claim="characters, not bytes",
        path="/generate",
        body=given("Hé"),
        sends={"x-compute-characters": "2"},
    ),
    Row(
        section="5.9",
        claim="tokens of prompt and completion",
        path="/generate",
        body=given(ignore_eos_token=True),
        sends={"x-prompt-tokens": "5", "x-generated-tokens": "3"},
    ),
    Row(
        section="5.9",
        claim="completions sum over prompts",
        path="/v1/completions",
        body={"prompt": ["Hi", "Hello"], "max_tokens": 2},
        sends=_SUMMED | {"x-compute-time": ABSENT, "x-prompt-tokens": "7", "x-compute-characters": "7"},
    ),
    *(
        Row(section="5.9", claim="headers of a stream", path=path, body=body | {"stream": True}, sends=_EVENT_STREAM)
        for path, body in (
            ("/", given()),
            ("/generate_stream", given()),
            ("/invocations", given()),
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}),
        )
    ),
    Row(section="5.8", claim="no [DONE] on native routes", path="/generate_stream", body=given(), answer={"-1": dict}),
    *(
        Row(
            section="5.8",
            claim="[DONE] ends OpenAI's streams",
            path=path,
            body=body | {"stream": True},
            answer={"-1": "[DONE]"},
        )
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}))
    ),
)

_PREFLIGHT = {"origin": "http://page", "access-control-request-method": "POST"}

CORS = (
    Row(
        section="5.10",
        claim="any origin by default",
        path="/generate",
        body=given(),
        headers={"origin": "http://page"},
        sends={"access-control-allow-origin": r"\*", "access-control-allow-credentials": ABSENT},
    ),
    Row(
        section="5.10",
        claim="a preflight",
        path="/generate",
        method="OPTIONS",
        headers=_PREFLIGHT | {"access-control-request-headers": "content-type"},
        sends={"access-control-allow-methods": "GET, POST.*"},
    ),
    Row(
        section="5.10",
        claim="a browser may send a key",
        path="/generate",
        method="OPTIONS",
        headers=_PREFLIGHT | {"access-control-request-headers": "authorization"},
        sends={"access-control-allow-headers": r"(?i).*authorization.*"},
        differs="TGI allows content-type alone, so that browsers cannot send Authorization",
    ),
    Row(
        section="5.10",
        claim="--cors-allow-origin",
        path="/health",
        headers={"origin": "http://mine"},
        sends={"access-control-allow-origin": "http://mine"},
        server="guarded",
    ),
    Row(
        section="5.10",
        claim="another origin",
        path="/health",
        headers={"origin": "http://other"},
        sends={"access-control-allow-origin": ABSENT},
        server="guarded",
    ),
)

_LIVE = "TGI has one probe for liveness and readiness (its issue 3241)"

FACTS = (
    *(
        Row(section="5.11", claim="healthy, with an empty body", path=path, sends={"content-length": "0"})
        for path in ("/", "/health", "/ping")
    ),
    *(
        Row(section="5.11", claim="separate probes", path=path, differs=_LIVE)
        for path in ("/health/live", "/health/ready")
    ),
    Row(
        section="5.12",
        claim="Info",
        path="/info",
        answer={
            "model_id": str,
            "model_sha": None,
            "model_pipeline_tag": None,
            "max_concurrent_requests": 128,
            "max_best_of": 2,
            "max_stop_sequences": 4,
            "max_input_tokens": MAX_INPUT,
            "max_total_tokens": MAX_TOTAL,
            "validation_workers": 2,
            "max_client_batch_size": 4,
            "router": "text-generation-router",
            "version": Matches(r"\d+\.\d+.*"),
            "sha": None,
            "docker_label": None,
        },
    ),
    Row(
        section="5.12",
        claim="the list of models",
        path="/v1/models",
        answer={
            "object": "list",
            "data.0.object": "model",
            "data.0.id": str,
            "data.0.owned_by": str,
            "data.0.created": int,
        },
    ),
    Row(
        section="5.12",
        claim="tokens with their places in bytes",
        path="/tokenize",
        body={"inputs": "éa"},
        answer={
            "": lambda tokens: len(tokens) == 3,
            "0.start": 0,
            "0.stop": 2,
            "2": {"id": 64, "text": "a", "start": 2, "stop": 3},
        },
    ),
    Row(
        section="5.12",
        claim="truncate is ignored",
        path="/tokenize",
        body=given("abc", truncate=1),
        answer={"": lambda t: len(t) == 3},
    ),
    Row(section="5.12", claim="no inputs", path="/tokenize", body={}, status=422, error_type="validation"),
    Row(
        section="5.12",
        claim="prompt and tokens of a chat",
        path="/chat_tokenize",
        body=CHAT,
        answer={"templated_text": "[user] Hi\n[assistant]", "tokenize_response": lambda tokens: len(tokens) == 21},
    ),
    Row(
        section="5.12",
        claim="inputs: as /",
        path="/invocations",
        body=given(),
        answer={"0.generated_text": Matches("Hello.*")},
    ),
    Row(
        section="5.12",
        claim="messages: as a chat",
        path="/invocations",
        body=CHAT,
        answer={"object": "chat.completion"},
    ),
    Row(
        section="5.12",
        claim="prompt: as a completion",
        path="/invocations",
        body={"prompt": "Hi", "max_tokens": 2},
        answer={"object": "text_completion"},
    ),
    Row(
        section="5.12",
        claim="none of them",
        path="/invocations",
        body={"input": "a"},
        status=422,
        error_type="validation",
    ),
    Row(section="5.12", claim="predictions are texts", path="/vertex", body=VERTEX, answer={"predictions.0": str}),
    Row(
        section="5.12",
        claim="a chat is an instance, too",
        path="/vertex",
        body={"instances": [CHAT, *VERTEX["instances"]]},
        answer={"predictions": lambda texts: len(texts) == 2},
    ),
    Row(
        section="5.12",
        claim="all parameters count",
        path="/vertex",
        body={"instances": [given(return_full_text=True, stop=["zz"])]},
        answer={"predictions.0": Matches("Hello.*")},
        differs="TGI reads max_new_tokens and seed alone",
    ),
    Row(
        section="5.12",
        claim="the server",
        path="/v2",
        answer={"name": "text-generation-inference", "version": str, "extensions": ["health", "models", "metrics"]},
    ),
    Row(
        section="5.12",
        claim="the model",
        path="/v2/models/m/versions/3",
        answer={"name": "m", "version": "3", "extensions": ["infer", "ready"]},
    ),
    Row(section="5.12", claim="live", path="/v2/health/live", answer={"live": True}),
    Row(section="5.12", claim="ready", path="/v2/models/m/versions/3/ready", answer={"live": True}),
    Row(
        section="5.12",
        claim="bytes in, bytes out",
        path=INFER_PATH,
        body=INFER,
        answer={
            "id": "1",
            "outputs.0.name": "b",
            "outputs.0.datatype": "BYTES",
            "outputs.0.shape": lambda shape: shape[0] == 1,
            "outputs.0.data": lambda data: all(isinstance(byte, int) for byte in data),
        },
    ),
)

COUNTER, GAUGE, HISTOGRAM, SUMMARY = "counter", "gauge", "histogram", "summary"

# Name, type, labels seen once requests were answered.
METRICS: tuple[tuple[str, str, str], ...] = (
    ("tgi_request_count", COUNTER, ""),
    ("tgi_request_success", COUNTER, ""),
    ("tgi_request_failure", COUNTER, 'err="validation"'),
    ("tgi_request_duration", HISTOGRAM, ""),
    ("tgi_request_validation_duration", HISTOGRAM, ""),
    ("tgi_request_queue_duration", HISTOGRAM, ""),
    ("tgi_request_inference_duration", HISTOGRAM, ""),
    ("tgi_request_mean_time_per_token_duration", HISTOGRAM, ""),
    ("tgi_request_generated_tokens", HISTOGRAM, ""),
    ("tgi_request_input_length", HISTOGRAM, ""),
    ("tgi_request_max_new_tokens", HISTOGRAM, ""),
    ("tgi_request_skipped_tokens", SUMMARY, ""),
    ("tgi_queue_size", GAUGE, ""),
    ("tgi_batch_current_size", GAUGE, ""),
    ("tgi_batch_current_max_tokens", GAUGE, ""),
    ("tgi_batch_next_size", HISTOGRAM, ""),
    ("tgi_batch_concat", COUNTER, ""),
    ("tgi_batch_concat_duration", HISTOGRAM, ""),
    ("tgi_batch_inference_count", COUNTER, 'method="prefill"'),
    ("tgi_batch_inference_success", COUNTER, 'method="decode"'),
    ("tgi_batch_inference_failure", COUNTER, ""),
    ("tgi_batch_inference_duration", HISTOGRAM, 'method="decode"'),
    ("tgi_batch_forward_duration", HISTOGRAM, 'method="prefill"'),
    ("tgi_batch_decode_duration", HISTOGRAM, 'method="decode"'),
    ("tgi_batch_filter_duration", HISTOGRAM, ""),
    ("tgi_batch_max_total_tokens", GAUGE, ""),
)
_SAMPLE = {COUNTER: "", GAUGE: "", HISTOGRAM: "_count", SUMMARY: "_count"}


def _metric(name: str, kind: str, labels: str) -> Row:
    begin = f"\n{name}{_SAMPLE[kind]}{{{labels}" if labels else f"# TYPE {name} {kind}\n"
    return Row(section="10.1", claim=f"{name} {labels}", path="/metrics", says=(f"# TYPE {name} {kind}\n", begin))


METRIC_ROWS = (
    *(_metric(*metric) for metric in METRICS),
    Row(
        section="10.1",
        claim="buckets of durations",
        path="/metrics",
        says=('tgi_request_duration_bucket{le="0.00015', 'le="145.'),
    ),
    Row(
        section="10.1",
        claim="buckets of prompt lengths",
        path="/metrics",
        says=(f'tgi_request_input_length_bucket{{le="{MAX_INPUT:.1f}"}}',),
    ),
    Row(
        section="10.1",
        claim="buckets of completion lengths",
        path="/metrics",
        says=(f'tgi_request_generated_tokens_bucket{{le="{MAX_TOTAL:.1f}"}}',),
    ),
    Row(
        section="10.1",
        claim="buckets of batch sizes",
        path="/metrics",
        says=('tgi_batch_next_size_bucket{le="1024.0"}',),
        differs="powers of two instead of 1024 buckets for one metric",
    ),
    *(
        Row(
            section="13",
            claim=f"{name} is exposed",
            path="/metrics",
            says=(f"# TYPE {name} ",),
            differs="TGI has none (its issue 2227)",
        )
        for name in (
            "funitel_time_to_first_token_seconds",
            "funitel_inter_token_latency_seconds",
            "funitel_sequences",
            "funitel_blocks",
            "funitel_cancelled_total",
            "funitel_responses_total",
        )
    ),
)

ROUTE_ROWS = ROUTES + STATUSES + HEADERS + CORS + FACTS + METRIC_ROWS
