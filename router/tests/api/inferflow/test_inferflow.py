"""Inferflow's native route, over an engine that follows a script."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fakes import EOS, LIMITS, FakeEngine, Serve, byte_tokenizer

from funitel.proto.errors import BrokenScores, NotReady

PATH = "/inferflow"
WHOLE = {"is_streaming_mode": False}


def prompt_of(engine: FakeEngine) -> str:
    (request,) = engine.requests
    return byte_tokenizer().decode(list(request.input_ids), skip_special_tokens=False)


async def pieces(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    answer = await client.post(PATH, json={"text": "x"} | body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data:")]


async def test_i18_a_whole_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await client.post(PATH, json={"text": "Hi", "system_prompt": "Be.", "res_prefix": "So"} | WHOLE)
    found = answer.json()
    assert found.pop("time_cost") >= 0
    assert found == {"text": "Hello world!", "ret_code": "succ", "is_end": True}
    assert prompt_of(engine) == "[system]Be.\n[user]Hi\n[assistant]So"
    assert answer.headers["x-generated-tokens"] == "5"


async def test_i18_a_stream_has_pieces_of_16_bytes_on_the_borders_of_characters(serve: Serve) -> None:
    texts = ("é", "日本", "語", "🙂", " and", " ASCII", " text", "🙂")
    async with serve(FakeEngine(pieces=texts)) as client:
        found = await pieces(client)
    assert "".join(each["text"] for each in found) == "".join(texts)
    assert all(len(each["text"].encode()) >= 16 for each in found[:-1])
    assert [each["is_end"] for each in found] == [False] * (len(found) - 1) + [True]
    assert len(found) == 2
    assert {each["ret_code"] for each in found} == {"succ"}


async def test_i18_fields_of_sampling(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"text": "x", "random_seed": 7, "temperature": 0.5, "decoding_alg": "top_p", "max_output_len": 3} | WHOLE
    assert (await client.post(PATH, json=body | {"max_new_tokens": 4})).json()["text"] == "Hello world"
    (request,) = engine.requests
    sampling = request.sampling
    assert (sampling.seed, sampling.temperature, sampling.top_p) == (7, 0.5, pytest.approx(0.9))
    assert request.stopping.max_new_tokens == 3
    assert (await client.post(PATH, json={"text": "x", "temperature": 0, "max_new_tokens": 1} | WHOLE)).json()[
        "text"
    ] == "Hello"
    assert not engine.requests[1].sampling.is_sampled


@pytest.mark.parametrize("field", ["encoder_input_template", "decoder_input_template"])
async def test_i18_an_input_template(serve: Serve, field: str) -> None:
    engine = FakeEngine(limits=replace(LIMITS, eos_token_ids=frozenset({257})))
    template = "{bos}S:{system_prompt}{\\n}Q:{query},{_query}{</s>}{eos}{#0}A:{res_prefix}"
    body = {"text": "a<s>", "system_prompt": "b", "res_prefix": "c", field: template} | WHOLE
    async with serve(engine) as client:
        answer = await client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    (request,) = engine.requests
    encode = byte_tokenizer().encode
    ids = list(request.input_ids)
    assert prompt_of(engine) == "<s>S:b\nQ:a<s>, a<s></s></s>" + byte_tokenizer().decode([0]) + "A:c"
    start, end = (encode(text, add_special_tokens=False).ids[0] for text in ("<s>", EOS))
    assert (ids.count(start), ids.count(end)) == (1, 2)  # the client's is text


@pytest.mark.parametrize(
    ("engine", "body", "status", "code"),
    [
        (FakeEngine(max_requests=0), {"text": "x"}, 429, "error.busy"),
        (FakeEngine(error=NotReady("starting")), {"text": "x"}, 503, "error.busy"),
        (FakeEngine(), {}, 422, "error.empty_request"),
        (FakeEngine(), {"text": ""}, 422, "error.empty_request"),
        (FakeEngine(), {"text": "x" * 150}, 422, "error.too_long_request"),
        (FakeEngine(), {"text": "x", "max_output_len": 500}, 422, "error.too_long_request"),
        (
            FakeEngine(),
            {"text": "x" * 2000, "decoder_input_template": "{query}" * 2000},
            422,
            "error.too_long_request",
        ),
        (FakeEngine(), {"text": 5}, 422, "error.invalid_request_format"),
        (FakeEngine(), {"text": "x", "temperature": -1}, 422, "error.invalid_request_format"),
        (FakeEngine(), {"text": "x", "decoder_input_template": "{user_token}"}, 422, "error.invalid_request_format"),
        (FakeEngine(), {"text": "x", "decoder_input_template": "{#258}"}, 422, "error.invalid_request_format"),
        (
            FakeEngine(),
            {"text": "x", "decoder_input_template": "", "encoder_input_template": ""},
            422,
            "error.invalid_request_format",
        ),
        (FakeEngine(error=BrokenScores("broken")), {"text": "x"}, 424, "error.generation"),
    ],
)
@pytest.mark.parametrize("streams", [True, False])
async def test_i18_codes_of_errors(
    serve: Serve, engine: FakeEngine, body: dict[str, Any], status: int, code: str, streams: bool
) -> None:
    async with serve(engine) as client:
        answer = await client.post(PATH, json=body | {"is_streaming_mode": streams})
    assert (answer.status_code, answer.json()["ret_code"]) == (status, code), answer.text
    assert answer.json()["error"]


async def test_i18_a_body_that_is_no_json(client: httpx.AsyncClient) -> None:
    answer = await client.post(PATH, content=b"{", headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["ret_code"]) == (400, "error.invalid_request_format")


async def test_i18_an_error_ends_a_stream_that_has_begun(serve: Serve) -> None:
    async with serve(FakeEngine(pieces=["a" * 20] * 4, error=BrokenScores("broken"), fails_at=2)) as client:
        found = await pieces(client)
    assert [each["ret_code"] for each in found] == ["succ", "succ", "error.generation"]
