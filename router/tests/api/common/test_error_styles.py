"""Each route answers errors as its own API does: TGI's routes with 422, others as OpenAI and Anthropic do."""

from typing import Any

import httpx
import openai
import pytest
from fakes import FakeEngine, Serve

from funitel.proto.errors import Overloaded, ShardFailed

HI = {"role": "user", "content": "Hi"}
CHAT = {"messages": [HI]}
JSON = {"content-type": "application/json"}
TGI_ROUTES = {
    "/generate": {"inputs": "Hi", "parameters": {"temperature": -1}},
    "/v1/chat/completions": CHAT | {"temperature": -1},
    "/v1/completions": {"prompt": "Hi", "temperature": -1},
}
OWN_ROUTES = {
    "/v1/responses": {"input": "Hi", "temperature": -1},
    "/v1/responses/input_tokens": {"input": "Hi", "text": {"format": {"type": "xml"}}},
    "/v1/embeddings": {"input": "Hi", "dimensions": -1},
    "/v1/messages": {"model": "m", "max_tokens": 5, "messages": [HI], "temperature": -1},
}


def library(client: httpx.AsyncClient, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://funitel/v1", http_client=client, max_retries=0, **({"api_key": "none"} | options)
    )


@pytest.mark.parametrize("path", TGI_ROUTES)
async def test_b8_routes_of_tgi_keep_its_status(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, json=TGI_ROUTES[path])
    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"


@pytest.mark.parametrize("path", OWN_ROUTES)
@pytest.mark.parametrize("openai_errors", [False, True])
async def test_b8_other_routes_answer_as_their_api(serve: Serve, path: str, openai_errors: bool) -> None:
    async with serve(FakeEngine(), openai_errors=openai_errors) as client:
        response = await client.post(path, json=OWN_ROUTES[path])
        malformed = await client.post(path, content=b"{", headers=JSON)
    for answer in (response, malformed):
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        if path != "/v1/messages":
            assert set(answer.json()) == {"error"}
            assert set(error) == {"message", "type", "param", "code"}
    if path.startswith("/v1/responses"):
        assert response.json()["error"]["param"] in ("temperature", "text.format")


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "temperature", "integer_below_min_value"),
    ({"temperature": 2.5}, "temperature", "decimal_above_max_value"),
    ({"top_p": 1.5}, "top_p", "decimal_above_max_value"),
    ({"frequency_penalty": 3}, "frequency_penalty", "integer_above_max_value"),
    ({"messages": []}, "messages", "array_below_min_length"),
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"messages": "Hi"}, "messages", "invalid_type"),
    ({"n": 129}, "n", "integer_above_max_value"),
    ({"stop": list("abcde")}, "stop", "array_above_max_length"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
    ({"num_beams": 2}, "num_beams", "unsupported_parameter"),
    ({"max_tokens": 1000}, "max_tokens", "context_length_exceeded"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD)
async def test_b8_openai_errors_gives_openais_status_body_and_bounds(
    serve: Serve, fields: dict[str, Any], param: str, code: str
) -> None:
    async with serve(FakeEngine(), openai_errors=True, max_stop_sequences=9) as client:
        response = await client.post("/v1/chat/completions", json=CHAT | fields)
    assert response.status_code == 400, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


async def test_b8_strict_fields_with_openai_errors(serve: Serve) -> None:
    async with serve(FakeEngine(), openai_errors=True, strict_fields=True) as client:
        response = await client.post("/v1/chat/completions", json=CHAT | {"made_up": 1})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unknown_parameter")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"temperature": 2.1}, "temperature"), ({"logprobs": 6}, "logprobs"), ({"best_of": 21}, "best_of")],
)
async def test_b8_openais_bounds_of_completions(serve: Serve, fields: dict[str, Any], param: str) -> None:
    async with serve(FakeEngine(), openai_errors=True, max_top_n_tokens=9) as client:
        response = await client.post("/v1/completions", json={"prompt": "Hi"} | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_b8_tgis_bounds_hold_without_the_flag(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/chat/completions", json=CHAT | {"temperature": 2.5})).status_code == 200


@pytest.mark.parametrize("openai_errors", [False, True])
async def test_b8_the_openai_client_gets_its_exceptions(serve: Serve, openai_errors: bool) -> None:
    bad = openai.BadRequestError if openai_errors else openai.UnprocessableEntityError
    async with serve(FakeEngine(), openai_errors=openai_errors, api_key="key") as http:
        client = library(http, api_key="key")
        with pytest.raises(bad):
            await client.chat.completions.create(model="m", messages=[HI], temperature=-1)  # type: ignore[list-item]
        with pytest.raises(bad):
            await client.completions.create(model="m", prompt="Hi", max_tokens=1000, stream=True)
        with pytest.raises(openai.BadRequestError) as raised:
            await client.responses.create(model="m", input="Hi", max_output_tokens=1000)
        assert (raised.value.param, raised.value.code) == ("max_output_tokens", "context_length_exceeded")
        with pytest.raises(openai.BadRequestError):
            await client.embeddings.create(model="m", input="Hi")
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.retrieve("resp_no")
        assert missing.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.models.retrieve("no-such-model")
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.AuthenticationError) as refused:
            await library(http, api_key="wrong").chat.completions.create(model="m", messages=[HI])  # type: ignore[list-item]
        assert refused.value.code == "invalid_api_key"


@pytest.mark.parametrize("openai_errors", [False, True])
async def test_b8_a_full_server_is_a_rate_limit(serve: Serve, openai_errors: bool) -> None:
    async with serve(FakeEngine(error=Overloaded("too many requests")), openai_errors=openai_errors) as http:
        client = library(http)
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="m", messages=[HI])  # type: ignore[list-item]
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(model="m", input="Hi")


@pytest.mark.parametrize(("openai_errors", "status"), [(False, 424), (True, 500)])
async def test_b8_a_failed_shard_is_a_servers_error(serve: Serve, openai_errors: bool, status: int) -> None:
    async with serve(FakeEngine(error=ShardFailed("gone")), openai_errors=openai_errors) as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
        own = await client.post("/v1/responses", json={"input": "Hi"})
    assert (response.status_code, own.status_code) == (status, 500)
    assert response.json()["error"]["type"] == own.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize(("openai_errors", "fields"), [(False, {"error", "error_type"}), (True, {"error"})])
async def test_b8_a_stream_that_fails_ends_with_the_routes_record(
    serve: Serve, openai_errors: bool, fields: set[str]
) -> None:
    engine = FakeEngine(error=ShardFailed("gone"), fails_at=2)
    async with serve(engine, openai_errors=openai_errors) as client:
        response = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith('data: {"error')]
    assert len(events) == 1
    assert set(httpx.Response(200, text=events[0]).json()) == fields


async def test_b8_the_document_tells_the_statuses(serve: Serve) -> None:
    for openai_errors, statuses in ((False, {"422", "424"}), (True, set())):
        async with serve(FakeEngine(), openai_errors=openai_errors) as client:
            paths = (await client.get("/openapi.json")).json()["paths"]
        assert {"422", "424"} & paths["/v1/chat/completions"]["post"]["responses"].keys() == statuses
        assert not {"422", "424"} & paths["/v1/responses"]["post"]["responses"].keys()
