"""Every API renders the same bytes again from the journal of a request: another router goes on where one was killed.

Each case runs on two routers: the second one has the facts of the first, another clock, other ids and seeds to draw, an
engine of another speed, and another number of cached tokens. Facts, and what is none:

- drawn in the handlers: ids (`chatcmpl-`, `cmpl-`, `msg_`, `resp_`, `rerank-`, items, `call_`, `req_`), creation times,
  the name of the model and the fingerprint (an upgrade changes the version), timings in bodies, `time_cost` of
  Inferflow, `completed_at`, the items of stored responses, which go with a router;
- drawn before: the seed (siblings count up from it), the instant of templates and what they make of chance, the id of
  the request where its client gives none, the instant of its arrival, which its deadline counts from;
- drawn at the first token: cached tokens, also by tier; at an error within a stream: its place and its frame;
- drawn by the server (`transport`): headers, whole answers, where keep-alive comments lie;
- drawn for accounts: the id of what is charged, and whether it was reserved and settled;
- none: the monotonic clock for limits, logs and metrics, the secret names of control tokens (they are no token's text),
  salts of owners, validity of keys, bans, ids of batches and files, which no keeper knows.
"""

import ast
import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from encoders import CLASSES, EMBEDS, RANKS, FakeEncoder
from fakes import FakeEngine, Serve, eventually, write_model
from scripted_chat import CALL, HERMES, WIDE
from starlette.types import ASGIApp, Message, Scope

import funitel.router.api
from funitel.proto.errors import ShardFailed
from funitel.router.core.journal import KEY
from funitel.router.encoder.engine import start_encoder
from funitel.router.replica_set.table import ReplicaAddress
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics
from funitel.router.transport.kept_answer import WHOLE
from funitel.router.transport.kept_connection import ANSWER, HEAD, AnswerJournal, KeptTransport
from funitel.router.transport.memory_budget import CLIENT
from funitel.router.transport.sse import FAILURE
from funitel.router.transport.stream_writer import DirectSend
from funitel_testing.words import word_tokenizer

LATER_SECONDS = 1_000_000.0  # on the clock of the second router
THINKING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
)
DATED = "{{ strftime_now('%d %H:%M:%S') }}{{ range(99999) | random }}{{ lipsum(1, False, 5, 9) }}" + HERMES
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
OWN_TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
ANTHROPIC_TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {}}}
TWO_CALLS = f"Let me look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"
THOUGHTS = "Hm, well.\n</think>\n\nYes, indeed."
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
MESSAGES = CHAT | {"model": "m", "max_tokens": 500}
SPEEDS = (  # headers that tell how fast a whole answer was made: they go out with its body, from one router
    b"x-compute-time",
    b"x-total-time",
    b"x-validation-time",
    b"x-queue-time",
    b"x-inference-time",
    b"x-time-per-token",
    b"x-time-to-first-token",
    b"x-tokens-per-second",
    b"x-tokenization-time",
)


class KeptClient:
    """A client with a kept connection, of one request; `facts` are those that a keeper has of it."""

    is_kept = True

    def __init__(self, facts: dict[str, Any] | None = None) -> None:
        self.facts: dict[str, Any] = json.loads(json.dumps(facts or {}))
        self.num_puts = 0
        self.is_unkept = False
        self._transport = KeptTransport(cast(asyncio.Transport, None), 0, 0)
        self.reason = ""  # why it was disconnected

    def facts_of(self, scope: Scope) -> dict[str, Any]:
        return dict(self.facts)

    def keep(self, scope: Scope) -> AnswerJournal:
        del scope[WHOLE]
        is_replayed = KEY in self.facts
        self.facts.setdefault(KEY, "the-key")
        return AnswerJournal(self.facts[KEY], dict(self.facts), self._put, self._transport, is_replayed=is_replayed)

    def _put(self, facts: dict[str, Any]) -> None:
        self.num_puts += 1
        self.facts |= json.loads(json.dumps(facts))

    def begin_unkept(self, scope: Scope) -> bool:
        self.is_unkept = True
        return True

    def note_interim(self, num_bytes: int) -> None:
        raise AssertionError("no client here waits for 100 Continue")

    def disconnect(self, reason: str) -> None:
        self.reason = reason

    def keep_unread(self, num_bytes: int) -> None:
        pass

    def keep_body(self, num_bytes: int) -> None:
        pass


@dataclass
class Exchange:
    """What a client has got; each chunk of a stream by itself."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)

    def without(self, *names: bytes) -> list[tuple[bytes, bytes]]:
        return [(name, value) for name, value in self.headers if name not in names]


@dataclass
class Case:
    """A request, and the model that answers it."""

    path: str
    body: dict[str, Any]
    text: str = "Hello world, says the model."
    template: str = HERMES
    engine: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.path} {json.dumps(self.body)[:60]}"


async def exchanged(
    app: ASGIApp, path: str, body: dict[str, Any], client: KeptClient, *headers: tuple[bytes, bytes]
) -> Exchange:
    """Ask an application over a connection that outlives it."""
    content, found, leaves = json.dumps(body).encode(), Exchange(), asyncio.Event()
    given = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), *given, *headers],
        "server": ("localhost", 80),
        "client": ("127.0.0.1", 1),
        CLIENT: client,
        WHOLE: (content, len(content)),
    }
    asked = iter([{"type": "http.request", "body": content, "more_body": False}])

    async def receive() -> Message:
        if (message := next(asked, None)) is not None:
            return message
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            found.status, found.headers = message["status"], list(message["headers"])
        elif message["body"]:
            found.chunks.append(message["body"])

    await DirectSend(app)(scope, receive, send)
    return found


def app_of(client: Any) -> ASGIApp:
    return cast(ASGIApp, client._transport.app)


def writes(text: str, **fields: Any) -> FakeEngine:
    """An engine whose model writes a text, three characters a token."""
    return FakeEngine(pieces=[text[at : at + 3] for at in range(0, len(text), 3)], limits=WIDE, **fields)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Put the clock forward."""

    def put_forward(seconds: float) -> None:
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + seconds)

    return put_forward


def sampled(engine: FakeEngine) -> list[Any]:
    """What each sequence depends on, and the key under which shards keep it."""
    return [(each.sampling.seed, each.inputs, each.output_key) for each in engine.requests]


def stream(body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return body | {"stream": True} | fields


def native(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "Hi", "parameters": parameters}


SAMPLED = native(do_sample=True, details=True, top_n_tokens=2, decoder_input_details=True, timings=True)
LIVE = native(do_sample=True, details=True, top_n_tokens=2, timings=True)
COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "timings": True}
CHAT_CASES = [
    CHAT,
    CHAT | {"n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "timings": True},
    CHAT | {"stop": ["says"], "temperature": 0.7, "service_tier": "auto"},
]
CASES = [
    Case("/generate", SAMPLED),
    Case("/generate", native(do_sample=True, best_of=2, details=True)),
    Case("/generate_stream", LIVE),
    Case("/generate_stream", native(stop=["wor"], details=True)),
    Case("/", {"inputs": "Hi", "stream": False}),
    Case("/", {"inputs": "Hi", "stream": True}),
    *(Case("/v1/chat/completions", body) for body in CHAT_CASES),
    *(Case("/v1/chat/completions", stream(body, **COUNTED)) for body in CHAT_CASES),
    Case("/v1/chat/completions", CHAT | {"prompt_logprobs": 2}),
    *(Case("/v1/chat/completions", body | {"tools": [TOOL]}, TWO_CALLS) for body in (CHAT, stream(CHAT, n=2))),
    *(Case("/v1/chat/completions", body, THOUGHTS, THINKING) for body in (CHAT, stream(CHAT, **COUNTED))),
    *(Case("/v1/chat/completions", body, template=DATED) for body in (CHAT, stream(CHAT))),
    Case("/v1/completions", {"prompt": ["a b", "c d"], "best_of": 2, "temperature": 0.9, "timings": True}),
    Case("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 2}),
    Case("/v1/completions", stream({"prompt": ["a b", "c d"], "n": 2, "logprobs": 1}, **COUNTED)),
    Case("/v1/messages", MESSAGES),
    Case("/v1/messages", stream(MESSAGES)),
    *(Case("/v1/messages", body | {"tools": [ANTHROPIC_TOOL]}, TWO_CALLS) for body in (MESSAGES, stream(MESSAGES))),
    Case("/v1/messages", stream(MESSAGES, thinking={"type": "adaptive"}), THOUGHTS, THINKING),
    Case("/v1/responses", {"input": "Hi"}),
    Case("/v1/responses", stream({"input": "Hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]})),
    *(
        Case("/v1/responses", body | {"tools": [OWN_TOOL]}, TWO_CALLS)
        for body in ({"input": "Hi"}, stream({"input": "Hi"}))
    ),
    *(Case("/v1/responses", body, THOUGHTS, THINKING) for body in ({"input": "Hi"}, stream({"input": "Hi"}))),
    Case("/v1/responses", stream({"input": "Hi", "background": True})),
    Case("/inferflow", {"text": "Hi", "is_streaming_mode": True, "decoding_alg": "sample.top_p"}),
    Case("/inferflow", {"text": "Hi"}),
    Case("/vertex", {"instances": [{"inputs": "Hi"}, CHAT]}),
    Case("/invocations", CHAT),
    Case("/invocations", stream(CHAT)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_a_router_renders_the_bytes_of_the_one_before_it(
    serve: Serve, model: Path, later: Callable[[float], None], case: Case
) -> None:
    write_model(model, chat_template=case.template)
    first, second = KeptClient(), writes(case.text, num_cached_tokens=7, cached_by_tier={"disk": 7}, pause=0.002)
    engine = writes(case.text, num_cached_tokens=16, cached_by_tier={"memory": 16})
    async with serve(engine) as client:
        expected = await exchanged(app_of(client), case.path, case.body, first)
    assert expected.status == 200, expected.chunks
    assert expected.chunks
    assert all(key for _, _, key in sampled(engine))
    known = {name: fact for name, fact in first.facts.items() if name != ANSWER}
    later(LATER_SECONDS)
    again = KeptClient(known)
    async with serve(second) as client:
        found = await exchanged(app_of(client), case.path, case.body, again)
    assert (found.status, found.chunks) == (expected.status, expected.chunks)
    assert found.without(*SPEEDS) == expected.without(*SPEEDS)
    assert sampled(second) == sampled(engine)
    assert not again.reason
    if HEAD in known:  # of a stream
        assert found.headers == expected.headers
        assert set(again.facts) == set(known)


async def test_nothing_runs_again_once_a_whole_answer_is_in_the_journal(serve: Serve) -> None:
    first, engine = KeptClient(), FakeEngine()
    async with serve(engine) as client:
        expected = await exchanged(app_of(client), "/v1/chat/completions", CHAT, first)
    idle = FakeEngine()
    async with serve(idle) as client:
        found = await exchanged(app_of(client), "/v1/chat/completions", CHAT, KeptClient(first.facts))
    assert found == expected
    assert not idle.requests


async def test_two_requests_share_no_fact(serve: Serve) -> None:
    """Else the tests above would show nothing."""
    async with serve(FakeEngine()) as client:
        one, other = [await exchanged(app_of(client), "/generate", SAMPLED, KeptClient()) for _ in range(2)]
        chats = [await exchanged(app_of(client), "/v1/chat/completions", CHAT, KeptClient()) for _ in range(2)]
    assert one.chunks != other.chunks  # the seed, and the timings
    assert chats[0].chunks != chats[1].chunks
    assert dict(one.headers)[b"x-request-id"] != dict(other.headers)[b"x-request-id"]


async def test_what_prompts_depend_on_is_kept_before_they_are_queued(serve: Serve) -> None:
    client_, engine = KeptClient(), FakeEngine()
    submit = engine.submit

    def checked(request: Any) -> Any:
        assert {"now", "seed.1", "arrived", "request_id"} <= set(client_.facts)
        return submit(request)

    engine.submit = checked  # type: ignore[method-assign]
    async with serve(engine) as client:
        found = await exchanged(app_of(client), "/v1/chat/completions", CHAT, client_)
    assert found.status == 200, found.chunks


async def test_each_call_of_each_choice_has_an_id_of_its_own(serve: Serve, model: Path) -> None:
    write_model(model, chat_template=HERMES)
    async with serve(writes(TWO_CALLS)) as client:
        body = CHAT | {"tools": [TOOL], "n": 2}
        found = await exchanged(app_of(client), "/v1/chat/completions", body, KeptClient())
    choices = json.loads(b"".join(found.chunks))["choices"]
    assert len({call["id"] for choice in choices for call in choice["message"]["tool_calls"]}) == 4


async def test_shards_keep_no_outputs_for_what_goes_on_behind_its_answer(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine) as client:
        body = {"input": "Hi", "background": True}
        found = await exchanged(app_of(client), "/v1/responses", body, KeptClient())
        assert found.status == 200
    assert [each.output_key for each in engine.requests] == [""]


# Errors


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate_stream", native()),
        ("/v1/chat/completions", stream(CHAT)),
        ("/v1/completions", stream({"prompt": "a"})),
        ("/v1/messages", stream(MESSAGES)),
        ("/v1/responses", stream({"input": "Hi"})),
    ],
)
@pytest.mark.parametrize("fails_again", [False, True])
async def test_an_error_within_a_stream_is_said_again_where_it_was(
    serve: Serve, path: str, body: dict[str, Any], *, fails_again: bool
) -> None:
    first = KeptClient()
    async with serve(writes("Hello world", error=ShardFailed("shard 3 is gone"), fails_at=2)) as client:
        expected = await exchanged(app_of(client), path, body, first)
    assert b"shard 3 is gone" in b"".join(expected.chunks[-2:])
    error = ShardFailed("another shard") if fails_again else None
    async with serve(writes("Hello world", error=error, fails_at=2)) as client:
        found = await exchanged(app_of(client), path, body, KeptClient(first.facts))
    assert found == expected


async def test_an_error_behind_an_early_head_ends_the_stream(serve: Serve) -> None:
    """The head was sent with a keep-alive comment, before there was an event."""
    client_ = KeptClient({KEY: "a", HEAD: [200, [["content-type", "text/event-stream"]]]})
    async with serve(writes("Hello", error=ShardFailed("gone"), fails_at=0)) as client:
        found = await exchanged(app_of(client), "/v1/chat/completions", stream(CHAT), client_)
    assert found.status == 200
    assert b"gone" in found.chunks[0]
    assert client_.facts[FAILURE][0] == 0
    assert not client_.reason


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate_stream", native(details=True)),
        ("/v1/chat/completions", stream(CHAT, **COUNTED)),
        ("/v1/messages", stream(MESSAGES)),
        ("/v1/responses", stream({"input": "Hi"})),
    ],
)
@pytest.mark.parametrize("is_at_once", [False, True])
async def test_an_answer_that_was_aborted_ends_there_again(
    serve: Serve, path: str, body: dict[str, Any], *, is_at_once: bool
) -> None:
    first, engine = KeptClient(), writes("Hello world, and more", pause=60 if is_at_once else 0.02)
    async with serve(engine) as client:
        asking = asyncio.create_task(exchanged(app_of(client), path, body, first))

        async def runs() -> bool:
            return bool(engine.streams) and (is_at_once or engine.streams[0].num_tokens > 1)

        await eventually(runs, "it runs")
        ((running,),) = ((await client.get("/v1/requests")).json()["data"],)
        await client.delete(f"/v1/requests/{running['id']}")
        expected = await asking
        num_tokens = engine.streams[0].num_tokens
    assert (num_tokens == 0) == is_at_once
    assert num_tokens < 7
    again = writes("Hello world, and more")
    async with serve(again) as client:
        found = await exchanged(app_of(client), path, body, KeptClient(first.facts))
    assert found == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/messages", MESSAGES | {"max_tokens": 0}), ("/v1/chat/completions", CHAT | {"n": 0})],
)
async def test_a_refusal_is_the_same_again(serve: Serve, path: str, body: dict[str, Any]) -> None:
    first = KeptClient()
    async with serve(FakeEngine()) as client:
        expected = await exchanged(app_of(client), path, body, first)
        assert expected.status in (400, 422)
        known = {name: fact for name, fact in first.facts.items() if name != ANSWER}
        assert await exchanged(app_of(client), path, body, KeptClient(known)) == expected


# Admission


def keys_file(folder: Path, **limits: Any) -> str:
    path = folder / "keys"
    digest = hashlib.sha256(b"sesame").hexdigest()
    path.write_text(json.dumps({"name": "one", "sha256": digest} | limits) + "\n")
    path.chmod(0o600)
    return str(path)


AUTHORIZED = (b"authorization", b"Bearer sesame")


@pytest.mark.parametrize(
    "limits", [{"requests_per_minute": 1}, {"tokens_per_minute": 40}, {"max_concurrent_requests": 1}]
)
async def test_limits_of_a_key_do_not_refuse_what_was_admitted(
    serve: Serve, tmp_path: Path, limits: dict[str, Any]
) -> None:
    path, body = "/generate", native(max_new_tokens=20)
    engine = FakeEngine(pause=0.05)

    async def runs() -> bool:
        return bool(engine.tasks)

    async with serve(engine, api_key_file=keys_file(tmp_path, **limits)) as client:
        app = app_of(client)
        running = asyncio.create_task(exchanged(app, path, body, KeptClient(), AUTHORIZED))
        await eventually(runs, "it runs")
        refused = await exchanged(app, path, body, KeptClient(), AUTHORIZED)
        admitted = await exchanged(app, path, body, KeptClient({KEY: "a"}), AUTHORIZED)
        assert (await running).status == 200
    assert (refused.status, admitted.status) == (429, 200)


async def test_neither_a_full_engine_nor_a_drain_refuses_what_was_admitted(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine) as client:
        app = app_of(client)

        def refuse(_incoming: Any) -> Any:
            raise AssertionError("admission is asked once")

        engine.check_room = engine.reserve = refuse  # type: ignore[method-assign]
        app.state.service.drain.begin()  # type: ignore[attr-defined]
        refused = await exchanged(app, "/generate", native(), unkept := KeptClient())
        assert unkept.is_unkept
        admitted = await exchanged(app, "/generate", native(), KeptClient({KEY: "a"}))
    assert (refused.status, admitted.status) == (503, 200)


async def test_a_deadline_counts_from_the_arrival_at_the_first_router(
    serve: Serve, later: Callable[[float], None]
) -> None:
    first, timeout = KeptClient(), (b"x-request-timeout", b"100")
    engine = FakeEngine()
    async with serve(engine) as client:
        app = app_of(client)
        await exchanged(app, "/generate", native(), first, timeout)
        later(40.0)
        del first.facts[ANSWER]
        await exchanged(app, "/generate", native(), KeptClient(first.facts), timeout)
    before, after = (request.deadline for request in engine.requests)
    assert before is not None
    assert after is not None
    assert after == pytest.approx(before - 40.0, abs=5.0)


# What goes with a router


async def test_a_conversation_that_was_stored_is_in_the_journal(serve: Serve) -> None:
    first, path = KeptClient(), "/v1/responses"
    async with serve(writes("Yes.")) as client:
        app = app_of(client)
        answered = await exchanged(app, path, {"input": "Hi"}, KeptClient())
        before = json.loads(answered.chunks[0])
        reference = {"type": "item_reference", "id": before["output"][0]["id"]}
        body = {"previous_response_id": before["id"], "input": [reference, {"role": "user", "content": "More"}]}
        expected = await exchanged(app, path, body, first)
        assert expected.status == 200, expected.chunks
    del first.facts[ANSWER]
    engine = writes("Yes.")
    async with serve(engine) as client:
        app = app_of(client)
        assert (await exchanged(app, path, body, KeptClient())).status == 400
        found = await exchanged(app, path, body, KeptClient(first.facts))
    assert found.chunks == expected.chunks
    assert "Yes." in engine.requests[-1].inputs


# Encoders


@pytest.fixture
def encoding(serve: Serve, tmp_path: Path) -> Any:
    """`async with encoding(encoder) as app`."""
    word_tokenizer().save(str(tmp_path / "tokenizer.json"))

    @asynccontextmanager
    async def serving(fake: FakeEncoder, **settings: Any) -> AsyncIterator[ASGIApp]:
        async def connect(settings: RouterSettings, metrics: Metrics) -> Any:
            return start_encoder([(ReplicaAddress(0, "unix:///encoder-0"), fake)], settings, metrics)  # type: ignore[list-item]

        async with serve(FakeEngine(), connect=connect, shard_return_timeout=0, **settings) as client:
            yield app_of(client)

    return serving


@pytest.mark.parametrize(
    ("facts", "path", "body"),
    [
        (EMBEDS, "/v1/embeddings", {"input": ["sea", "the blue sea"]}),
        (EMBEDS, "/embed", {"inputs": "the sea"}),
        (EMBEDS, "/embed_all", {"inputs": "the sea"}),
        (EMBEDS, "/v1/rerank", {"query": "sea", "documents": ["the sea", "birds fly"]}),
        (RANKS, "/v1/rerank", {"query": "sea", "documents": ["the sea", "birds fly"]}),
        (RANKS, "/rerank", {"query": "sea", "texts": ["the sea", "birds fly"]}),
        (CLASSES, "/predict", {"inputs": "the sea"}),
    ],
)
async def test_an_encoder_answers_the_same_again(encoding: Any, facts: Any, path: str, body: dict[str, Any]) -> None:
    first = KeptClient()
    async with encoding(FakeEncoder(facts, has_units=True)) as app:
        expected = await exchanged(app, path, body, first)
        assert expected.status == 200, expected.chunks
        del first.facts[ANSWER]
        found = await exchanged(app, path, body, KeptClient(first.facts))
    assert found.chunks == expected.chunks
    assert found.without(*SPEEDS) == expected.without(*SPEEDS)


async def test_a_full_encoder_does_not_refuse_what_was_admitted(encoding: Any) -> None:
    fake, path, body = FakeEncoder(), "/embed", {"inputs": "the sea"}
    async with encoding(fake, max_concurrent_requests=1) as app:
        fake.pause.clear()
        running = asyncio.create_task(exchanged(app, path, body, KeptClient()))

        async def runs() -> bool:
            return bool(fake.batches)

        await eventually(runs, "it runs")
        admitted = asyncio.create_task(exchanged(app, path, body, KeptClient({KEY: "a"})))
        refused = await exchanged(app, path, body, KeptClient())
        fake.pause.set()
        statuses = [(await running).status, (await admitted).status, refused.status]
    assert statuses == [200, 200, 429]


# No fact is drawn elsewhere

PACKAGES = ("api", "serving", "chat", "middleware", "text", "auth", "tenants")
CHANCE = {
    "uuid": None,
    "secrets": None,
    "random": None,
    "time": {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter"},
    "datetime": {"now", "utcnow", "today"},
    "os": {"urandom", "getpid"},
}
DRAWS = {"draw", "draw_next", "drawn"}
LIMITS, NOT_KEPT, BY_CALLERS = "for limits, logs and metrics", "of no answer that is kept", "callers draw it"
EXCEPTIONS = {
    "api/batches/handlers_batches.py": NOT_KEPT,
    "api/batches/handlers_files.py": NOT_KEPT,
    "api/common/handler.py:_journalled": "since the arrival, which is drawn",
    "api/common/model_choice.py": LIMITS,
    "api/console/handlers.py": NOT_KEPT,
    "api/embeddings/handlers.py:EncoderCall.encode": "for headers and metrics",
    "api/inferflow/handlers.py:_milliseconds": BY_CALLERS,
    "api/operators.py": NOT_KEPT,
    "api/requests/handlers.py": NOT_KEPT,
    "api/responses/builder.py:new_id": BY_CALLERS,
    "auth/accounts.py:": "a salt of owners, which are shown to no client",
    "auth/accounts.py:Accounts.find": "whether a key is valid",
    "auth/accounts.py:Accounts.find_owner": "whether a key is valid",
    "auth/accounts.py:charged": LIMITS,
    "middleware/access_log.py:AccessLog.__call__": LIMITS,
    "middleware/access_log.py:_request_id": "a fact once the request is kept",
    "middleware/auth.py:_found": LIMITS,
    "middleware/route_gate.py:RouteGate._charged": LIMITS,
    "serving/arrival.py:Arrival.of": "its distance to the wall clock's arrival is drawn",
    "serving/prepare.py:GenerationJob": "for headers and metrics, and for timings, which are drawn",
    "serving/run.py:_Run": "for metrics",
    "serving/running.py:ActiveRequest": LIMITS,
    "serving/step_queries.py": LIMITS,
    "serving/validation.py:random_seed": BY_CALLERS,
    "tenants/charges.py:Charges.__init__": "the name of a router",
    "tenants/charges.py:Charges.new_id": BY_CALLERS,
    "tenants/directory.py:TenantDirectory._restore": LIMITS,
    "tenants/minute_log.py:MinuteLog.__init__": LIMITS,
    "text/chat_template.py:": "the import",
    "text/chat_template.py:_Surroundings": "the instant is drawn where a task is made; chance depends on it",
    "text/control_tokens.py:_secret_names": "no token's text",
    "text/grammar.py": LIMITS,
    "text/template_renderer.py": LIMITS,
}


def undrawn(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What comes from a clock or from chance outside of a draw: where, and what."""

    def visit(node: ast.AST, place: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in DRAWS:
                return
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in CHANCE:
            names = CHANCE[node.value.id]
            if names is None or node.attr in names:
                yield ".".join(place), f"{node.value.id}.{node.attr}"
        if isinstance(node, ast.ImportFrom) and node.module in CHANCE:
            names = CHANCE[node.module]
            for each in node.names:
                if names is None or each.name in names:
                    yield ".".join(place), f"{node.module}.{each.name}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            place = (*place, node.name)
        for inner in ast.iter_child_nodes(node):
            yield from visit(inner, place)

    yield from visit(tree, ())


def test_clocks_and_chance_reach_answers_through_the_journal_alone() -> None:
    (folder,) = (Path(path).parent for path in funitel.router.api.__path__)
    found: dict[str, str] = {}
    for package in PACKAGES:
        for path in sorted((folder / package).rglob("*.py")):
            name = str(path.relative_to(folder))
            for place, what in undrawn(ast.parse(path.read_text())):
                found[f"{name}:{place}"] = what
    used = {exception for exception in EXCEPTIONS if any(_covers(exception, place) for place in found)}
    unknown = {place: what for place, what in found.items() if not any(_covers(each, place) for each in EXCEPTIONS)}
    assert not unknown, "draw it by the request's journal, or say here why no answer depends on it"
    assert used == set(EXCEPTIONS), "these exceptions are not needed"


def _covers(exception: str, place: str) -> bool:
    return place == exception or (not exception.endswith(":") and place.startswith((f"{exception}:", f"{exception}.")))


@pytest.mark.parametrize(
    ("source", "num_found"),
    [
        ("def f(): return uuid.uuid4()", 1),
        ("def f(): return drawn('id', lambda: uuid.uuid4())", 0),
        ("x = self._journal.draw('at', time.time)", 0),
        ("from time import time", 1),
        ("class A:\n    def g(self): return [time.monotonic() for _ in x]", 1),
    ],
)
def test_the_rule_finds_what_it_is_for(source: str, num_found: int) -> None:
    assert len(list(undrawn(ast.parse(source)))) == num_found
