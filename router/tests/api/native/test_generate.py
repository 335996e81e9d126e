"""TGI's native routes, over a scripted engine."""

import json
from typing import Any

import httpx
import pytest
from fakes import LIMITS, FakeEngine, Serve, eventually

from funitel.proto.errors import ShardFailed

TEXT = "Hello world!"


def events(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream"
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


async def test_generate_answers_with_the_text_alone(client: httpx.AsyncClient) -> None:
    response = await client.post("/generate", json={"inputs": "Hi"})
    assert response.status_code == 200
    assert response.json() == {"generated_text": TEXT}


async def test_details(client: httpx.AsyncClient) -> None:
    body = {"inputs": "Hi", "parameters": {"details": True, "decoder_input_details": True}}
    details = (await client.post("/generate", json=body)).json()["details"]
    assert list(details) == ["finish_reason", "generated_tokens", "seed", "prefill", "tokens"]
    assert details["finish_reason"] == "eos_token"
    assert details["generated_tokens"] == 5
    assert details["seed"] is None
    assert [token["logprob"] for token in details["prefill"]] == [None, -1.0, -1.0]
    assert details["tokens"][0] == {"id": 0, "text": "Hello", "logprob": -0.5, "special": False}
    assert details["tokens"][-1]["special"] is True


async def test_a_sampled_request_tells_its_seed(client: httpx.AsyncClient) -> None:
    body = {"inputs": "Hi", "parameters": {"details": True, "do_sample": True, "seed": 2**64 - 1}}
    assert (await client.post("/generate", json=body)).json()["details"]["seed"] == 2**64 - 1


async def test_without_parameters_tokens_are_sampled(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for body in ({"inputs": "Hi"}, {"inputs": "Hi", "parameters": None}, {"inputs": "Hi", "parameters": {}}):
        await client.post("/generate", json=body)
    assert [request.sampling.do_sample for request in engine.requests] == [True, True, False]


async def test_top_tokens_are_listed_with_infinities_as_null(client: httpx.AsyncClient) -> None:
    body = {"inputs": "Hi", "parameters": {"details": True, "top_n_tokens": 2}}
    details = (await client.post("/generate", json=body)).json()["details"]
    assert [token["logprob"] for token in details["top_tokens"][0]] == [-0.5, None]


async def test_the_stop_is_part_of_the_text(client: httpx.AsyncClient) -> None:
    body = {"inputs": "Hi", "parameters": {"stop": ["o w"], "details": True}}
    answer = (await client.post("/generate", json=body)).json()
    assert answer["generated_text"] == "Hello w"
    assert answer["details"]["finish_reason"] == "stop_sequence"


async def test_the_root_answers_with_an_array_that_begins_with_the_prompt(client: httpx.AsyncClient) -> None:
    whole = await client.post("/", json={"inputs": "Hi "})
    assert whole.json() == [{"generated_text": "Hi " + TEXT}]
    body = {"inputs": "Hi ", "parameters": {"return_full_text": False}, "stream": False}
    assert (await client.post("/", json=body)).json() == [{"generated_text": TEXT}]


async def test_the_root_streams_when_asked(client: httpx.AsyncClient) -> None:
    last = events(await client.post("/", json={"inputs": "Hi ", "stream": True}))[-1]
    assert last["generated_text"] == "Hi " + TEXT


async def test_generate_stream(client: httpx.AsyncClient) -> None:
    body = {"inputs": "Hi", "parameters": {"details": True}}
    response = await client.post("/generate_stream", json=body)
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *first, last = events(response)
    assert [event["index"] for event in (*first, last)] == [1, 2, 3, 4, 5]
    assert list(first[0]) == ["index", "token", "generated_text", "details"]
    assert all(event["generated_text"] is None and event["details"] is None for event in first)
    assert last["generated_text"] == TEXT
    assert last["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": 5,
        "seed": None,
        "input_length": 3,
    }


async def test_a_step_of_several_tokens_is_several_events(serve: Serve) -> None:
    async with serve(FakeEngine(stride=3)) as client:
        received = events(await client.post("/generate_stream", json={"inputs": "Hi"}))
    assert [event["index"] for event in received] == [1, 2, 3, 4, 5]
    assert [event["generated_text"] for event in received] == [None] * 4 + [TEXT]


async def test_an_error_before_the_first_token_has_its_own_status(serve: Serve) -> None:
    async with serve(FakeEngine(error=ShardFailed("rank 1 died"))) as client:
        response = await client.post("/generate_stream", json={"inputs": "Hi"})
    assert response.status_code == 424
    assert response.json() == {
        "error": "Request failed during generation: rank 1 died",
        "error_type": "generation",
    }


async def test_an_error_after_the_first_token_is_the_last_event(serve: Serve) -> None:
    async with serve(FakeEngine(error=ShardFailed("rank 1 died"), fails_at=2)) as client:
        received = events(await client.post("/generate_stream", json={"inputs": "Hi"}))
        metrics = (await client.get("/metrics")).text
    assert len(received) == 3
    assert received[-1]["error_type"] == "generation"
    assert 'tgi_request_failure{err="generation"} 1.0' in metrics


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_too_many_requests(serve: Serve, path: str) -> None:
    async with serve(FakeEngine(max_requests=0)) as client:
        response = await client.post(path, json={"inputs": "Hi"})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error_type"] == "overloaded"
    assert response.json()["error"].startswith("Model is overloaded")


async def test_best_of_returns_the_likeliest_and_the_others(serve: Serve) -> None:
    engine = FakeEngine(logprobs=[-3.0, -1.0, -2.0])
    body = {"inputs": "Hi", "parameters": {"best_of": 3, "do_sample": True, "details": True}}
    async with serve(engine, max_best_of=3) as client:
        details = (await client.post("/generate", json=body)).json()["details"]
    seeds = [request.sampling.seed for request in engine.requests]
    assert len(set(seeds)) == 3
    assert details["seed"] == seeds[1]
    assert [other["seed"] for other in details["best_of_sequences"]] == [seeds[2], seeds[0]]
    assert details["best_of_sequences"][0]["generated_text"] == TEXT


async def test_best_of_leaves_nothing_behind_when_it_does_not_fit(serve: Serve) -> None:
    engine = FakeEngine(max_requests=1, pause=60.0)
    async with serve(engine) as client:
        body = {"inputs": "Hi", "parameters": {"best_of": 2, "do_sample": True}}
        assert (await client.post("/generate", json=body)).status_code == 429
        assert len(engine.cancelled) == 1


async def test_best_of_fails_when_one_sequence_does(serve: Serve) -> None:
    async with serve(FakeEngine(error=ShardFailed("rank 1 died"), fails_at=1)) as client:
        body = {"inputs": "Hi", "parameters": {"best_of": 2, "do_sample": True}}
        assert (await client.post("/generate", json=body)).status_code == 424


async def test_the_compute_type_is_as_told(serve: Serve, engine: FakeEngine) -> None:
    async with serve(engine, compute_type="2-nvidia-l4") as client:
        answer = await client.post("/generate", json={"inputs": "Hi"})
    assert answer.headers["x-compute-type"] == "2-nvidia-l4"


async def test_response_headers(client: httpx.AsyncClient) -> None:
    headers = (await client.post("/generate", json={"inputs": "Hé"})).headers
    assert headers["x-compute-type"] == "1-fake"
    assert headers["x-compute-characters"] == "2"
    assert headers["x-prompt-tokens"] == "4"  # <s>, H, and two bytes
    assert headers["x-generated-tokens"] == "5"
    assert float(headers["x-compute-time"]) >= 0
    for name in ("total", "validation", "queue", "inference"):
        assert int(headers[f"x-{name}-time"]) >= 0
    assert int(headers["x-time-per-token"]) >= 0
    assert 0 <= int(headers["x-time-to-first-token"]) <= int(headers["x-total-time"])
    assert float(headers["x-tokens-per-second"]) > 0
    streamed = (await client.post("/generate_stream", json={"inputs": "Hé"})).headers
    assert streamed["x-compute-characters"] == "2"
    assert "x-total-time" not in streamed


async def test_truncate_keeps_the_end_of_the_prompt(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post("/generate", json={"inputs": "abcdef", "parameters": {"truncate": 2}})
    assert len(engine.requests[0].input_ids) == 2
    whole = await client.post("/tokenize", json={"inputs": "ef"})
    assert engine.requests[0].input_ids == tuple(token["id"] for token in whole.json()[1:])


async def test_a_prompt_of_any_length_can_be_truncated(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"inputs": "x" * 100_000, "parameters": {"truncate": 10}}
    assert (await client.post("/generate", json=body)).status_code == 200
    assert engine.requests[0].stopping.max_new_tokens == LIMITS.max_total_tokens - 10


async def test_tokenize_counts_bytes_and_keeps_special_tokens(client: httpx.AsyncClient) -> None:
    tokens = (await client.post("/tokenize", json={"inputs": "aéz"})).json()
    assert [(token["start"], token["stop"]) for token in tokens] == [(0, 0), (0, 1), (1, 3), (1, 3), (3, 4)]
    assert [token["text"] for token in tokens] == ["", "a", "é", "é", "z"]


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        ({"type": "regex", "value": 5}, "parameters.grammar.value: must be a valid string. Given: 5"),
        ({"type": "regex"}, "parameters.grammar.value: this field is required"),
        ({"type": "json_schema", "value": {"name": "a"}}, "parameters.grammar.value.schema: this field is required"),
        ({"type": "yaml", "value": ""}, "parameters.grammar: "),
        ({"value": {}}, "parameters.grammar: "),
        ("a+", "parameters.grammar: "),
    ],
)
async def test_a_grammar_of_another_shape(client: httpx.AsyncClient, grammar: object, word: str) -> None:
    response = await client.post("/generate", json={"inputs": "Hi", "parameters": {"grammar": grammar}})
    assert response.status_code == 422
    assert word in response.json()["error"]


async def test_lengths_are_checked_before_the_grammar(client: httpx.AsyncClient) -> None:
    grammar = {"type": "regex", "value": "("}
    for max_new_tokens, word in ((1000, "`max_new_tokens` must be <="), (5, "grammar")):
        parameters = {"grammar": grammar, "max_new_tokens": max_new_tokens}
        response = await client.post("/generate", json={"inputs": "Hi", "parameters": parameters})
        assert response.status_code == 422
        assert word in response.json()["error"]


async def test_a_client_that_leaves_a_stream_ends_its_sequence(
    listening: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.pieces, engine.pause = ("a",) * 90, 0.02
    async with listening.stream("POST", "/generate_stream", json={"inputs": "Hi"}) as response:
        async for _ in response.aiter_lines():
            break
    await eventually(engine.was_cancelled, "cancel")


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
async def test_a_client_that_leaves_before_the_first_token_ends_its_sequence(
    listening: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    engine.pause = 60.0
    with pytest.raises(httpx.ReadTimeout):
        await listening.post(path, json={"inputs": "Hi"}, timeout=0.3)
    await eventually(engine.was_cancelled, "cancel")
    assert 'tgi_request_failure{err="dropped"} 1.0' in (await listening.get("/metrics")).text
