"""The routes of hosting platforms: SageMaker, Vertex AI, KServe."""

from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve

from funitel.proto.errors import ShardFailed
from funitel.router.text.tokenizer import Tokenizer

TEXT = "Hello world!"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
INFER = "/v2/models/any/versions/1/infer"


# SageMaker


async def test_invocations_with_inputs_answer_as_the_root_does(client: httpx.AsyncClient) -> None:
    body = {"inputs": "Hi ", "parameters": {"details": True}}
    whole, direct = await client.post("/invocations", json=body), await client.post("/", json=body)
    assert whole.json() == direct.json()
    assert whole.json()[0]["generated_text"] == "Hi " + TEXT
    assert whole.headers["x-generated-tokens"] == "5"
    streamed = await client.post("/invocations", json={"inputs": "Hi", "stream": True})
    assert streamed.headers["content-type"] == "text/event-stream"
    assert streamed.text.count("data: ") == 5


async def test_invocations_with_messages_answer_a_chat(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/invocations", json=CHAT)).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == TEXT
    streamed = await client.post("/invocations", json=CHAT | {"stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")


async def test_invocations_with_a_prompt_answer_a_completion(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/invocations", json={"prompt": "Hi"})).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"] == TEXT


async def test_invocations_prefer_inputs(client: httpx.AsyncClient) -> None:
    assert (await client.post("/invocations", json={"inputs": "Hi"} | CHAT)).json() == [{"generated_text": "Hi" + TEXT}]


@pytest.mark.parametrize("body", [{}, {"input": "Hi"}, [], "Hi"])
async def test_invocations_of_no_kind(client: httpx.AsyncClient, body: Any) -> None:
    response = await client.post("/invocations", json=body)
    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"
    assert "must" in response.json()["error"]


async def test_an_invocation_counts_once(client: httpx.AsyncClient) -> None:
    """TGI counts what one route hands to another twice (contract 10.1)."""
    await client.post("/invocations", json={"inputs": "Hi"})
    await client.post("/invocations", json=CHAT)
    await client.post("/invocations", json={"inputs": ""})
    await client.post("/vertex", json={"instances": [{"inputs": "Hi"}, CHAT]})
    lines = (await client.get("/metrics")).text.splitlines()
    assert "tgi_request_count 4.0" in lines
    assert "tgi_request_success 3.0" in lines
    assert 'tgi_request_failure{err="validation"} 1.0' in lines


# Vertex AI


async def test_vertex_predicts_for_prompts_and_chats(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"instances": [{"inputs": "Hi"}, CHAT, {"inputs": "So ", "parameters": {"return_full_text": True}}]}
    response = await client.post("/vertex", json=body)
    assert response.json() == {"predictions": [TEXT, TEXT, "So " + TEXT]}
    assert len(engine.requests) == 3


async def test_vertex_honours_every_parameter(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """TGI reads `max_new_tokens` and `seed` alone (contract 5.12)."""
    parameters = {"temperature": 0.5, "top_k": 3, "seed": 7, "max_new_tokens": 4, "stop": ["!"], "truncate": 1}
    await client.post("/vertex", json={"instances": [{"inputs": "Hi", "parameters": parameters}]})
    request = engine.requests[0]
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0.5, 3, 7)
    assert request.stopping.max_new_tokens == 4
    assert request.stopping.stop_sequences == ("!",)
    assert len(request.input_ids) == 1
    assert request.prefill_logprobs is False, "nobody asked for the prompt's details"


@pytest.mark.parametrize(
    ("parameters", "samples"),
    [({}, True), ({"max_new_tokens": 3}, True), ({"do_sample": False}, False), ({"do_sample": True}, True)],
)
async def test_vertex_samples_unless_told_not_to(
    client: httpx.AsyncClient, engine: FakeEngine, parameters: dict[str, Any], samples: bool
) -> None:
    await client.post("/vertex", json={"instances": [{"inputs": "Hi", "parameters": parameters}]})
    assert engine.requests[0].sampling.do_sample is samples


@pytest.mark.parametrize(
    ("body", "error_type", "word"),
    [
        ({"instances": []}, "Input validation error", "instances"),
        ({}, "validation", "instances"),
        ({"instances": [{"inputs": ""}]}, "validation", "`inputs` cannot be empty"),
        ({"instances": [{"input": "a"}]}, "validation", "instances.0.inputs: this field is required"),
        ({"instances": [{"inputs": 5}]}, "validation", "instances.0.inputs: must be"),
        ({"instances": [{"messages": "Hi"}]}, "validation", "instances.0.messages: must be"),
        ({"instances": [CHAT | {"n": 2}]}, "validation", "`n`"),
        ({"instances": [5]}, "validation", "instances.0: must be an object"),
        ({"instances": [{"inputs": "a", "parameters": {"temperature": 0}}]}, "validation", "`temperature` must be"),
    ],
)
async def test_a_wrong_prediction_says_why(
    client: httpx.AsyncClient, body: dict[str, Any], error_type: str, word: str
) -> None:
    """TGI hides every cause behind 500 Incomplete generation (contract 5.7)."""
    response = await client.post("/vertex", json=body)
    assert response.status_code == 422
    assert response.json()["error_type"] == error_type
    assert word in response.json()["error"]


async def test_best_of_holds_for_each_prompt(serve: Serve) -> None:
    engine = FakeEngine(logprobs=[-3.0, -1.0, -1.0, -3.0])
    parameters = {"best_of": 2, "do_sample": True, "max_new_tokens": 1}
    async with serve(engine) as client:
        body = {"instances": [{"inputs": "Hi", "parameters": parameters}, {"inputs": "Ho", "parameters": parameters}]}
        response = await client.post("/vertex", json=body)
        assert response.json() == {"predictions": ["Hello", "Hello"]}
        assert [request.inputs for request in engine.requests] == ["Hi", "Hi", "Ho", "Ho"]
        assert len({request.sampling.seed for request in engine.requests}) == 4
        assert response.headers["x-generated-tokens"] == "4"
        engine.requests.clear()
        await client.post(INFER, json=infer(["Hi"], parameters=parameters))
        assert len(engine.requests) == 2


@pytest.mark.parametrize("best_of", [1, 2])
async def test_more_prompts_than_can_ever_run_are_refused_before_any_is_tokenized(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, best_of: int
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", None)
    parameters = {"best_of": best_of, "do_sample": True}
    num_prompts = 6 // best_of + 1
    async with serve(FakeEngine(), max_concurrent_requests=6) as client:
        instances = [{"inputs": "Hi", "parameters": parameters}] * num_prompts
        vertex = await client.post("/vertex", json={"instances": instances})
        kserve = await client.post(INFER, json=infer(*[["Hi"]] * num_prompts, parameters=parameters))
    for response, field in ((vertex, "instances"), (kserve, "inputs")):
        assert response.status_code == 429
        says = f"`{field}` times `best_of` must be <= 6. Given: {num_prompts * best_of}"
        assert response.json()["error"] == f"Model is overloaded: {says}"


async def test_a_failed_prediction_keeps_its_status(serve: Serve) -> None:
    async with serve(FakeEngine(error=ShardFailed("rank 1 died"))) as client:
        response = await client.post("/vertex", json={"instances": [{"inputs": "Hi"}, {"inputs": "Ho"}]})
    assert response.status_code == 424
    async with serve(FakeEngine(max_requests=1, pause=60.0)) as client:
        response = await client.post("/vertex", json={"instances": [{"inputs": "Hi"}, {"inputs": "Ho"}]})
    assert response.status_code == 429


async def test_vertex_chooses_its_own_paths(serve: Serve) -> None:
    settings = {"aip_predict_route": "/v1/endpoints/1:predict", "aip_health_route": "/alive", "api_key": "k"}
    async with serve(FakeEngine(), **settings) as client:
        assert (await client.get("/alive")).status_code == 200
        body = {"instances": [{"inputs": "Hi"}]}
        assert (await client.post("/v1/endpoints/1:predict", json=body)).status_code == 401
        assert (await client.post("/v1/endpoints/1:predict", json=body)).content == b"", "TGI's shape, for all its path"
        headers = {"authorization": "Bearer k"}
        answer = await client.post("/v1/endpoints/1:predict", json=body, headers=headers)
        assert answer.json() == {"predictions": [TEXT]}
        assert (await client.post("/vertex", json=body, headers=headers)).status_code == 200
        assert "/alive" in (await client.get("/openapi.json")).json()["paths"]


async def test_a_path_that_vertex_takes_over_is_its_alone(serve: Serve) -> None:
    async with serve(FakeEngine(), aip_predict_route="/generate", aip_health_route="/health") as client:
        assert (await client.post("/generate", json={"instances": [{"inputs": "Hi"}]})).status_code == 200
        assert (await client.get("/health")).status_code == 200


async def test_what_else_is_wrong_beside_an_unknown_field_is_told(client: httpx.AsyncClient) -> None:
    response = await client.post("/chat_tokenize", json={"messages": 5, "made_up_b": 1})
    assert response.status_code == 422
    assert "messages" in response.json()["error"]


# KServe


def infer(*prompts: Any, **fields: Any) -> dict[str, Any]:
    inputs = [{"name": f"in{i}", "shape": [1], "datatype": "BYTES", "data": data} for i, data in enumerate(prompts)]
    return {"id": "7", "inputs": inputs, "outputs": [{"name": f"out{i}"} for i in range(len(prompts))]} | fields


async def test_infer_takes_and_gives_bytes_as_tgi_does(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await client.post(INFER, json=infer(list("Hé".encode()), list(b"Ho"), parameters={"seed": 3}))
    answer = response.json()
    data = list(TEXT.encode())
    assert answer["id"] == "7"
    assert answer["outputs"] == [
        {"name": f"out{i}", "shape": [1, len(data)], "datatype": "BYTES", "data": data} for i in range(2)
    ]
    assert [request.inputs for request in engine.requests] == ["Hé", "Ho"]
    assert [request.sampling.seed for request in engine.requests] == [3, 3]
    assert response.headers["x-compute-characters"] == "4"


async def test_infer_takes_and_gives_strings_as_the_protocol_does(client: httpx.AsyncClient) -> None:
    answer = (await client.post(INFER, json=infer(["Hi "], parameters={"return_full_text": True}))).json()
    assert answer["outputs"] == [{"name": "out0", "shape": [1], "datatype": "BYTES", "data": ["Hi " + TEXT]}]


@pytest.mark.parametrize(
    ("body", "error_type", "word"),
    [
        (infer([0xFF, 0xFE]), "utf8", "inputs.0.data is not UTF-8"),
        (infer(["Hi"], outputs=[]), "length mismatch", "1 and 0"),
        (infer(), "validation", "`inputs` cannot be empty"),
        (infer([]), "validation", "`inputs` cannot be empty"),
        (infer([256]), "validation", "inputs.0.data"),
        (infer(["a", "b"]), "validation", "inputs.0.data"),
        (infer(["a"], parameters={"best_of": 5}), "validation", "`best_of` must be > 0 and <= 2"),
        ({"id": "1"}, "validation", "inputs: this field is required"),
    ],
)
async def test_a_wrong_infer(client: httpx.AsyncClient, body: dict[str, Any], error_type: str, word: str) -> None:
    response = await client.post(INFER, json=body)
    assert response.status_code == 422, response.text
    assert response.json()["error_type"] == error_type
    assert word in response.json()["error"]


async def test_kserve_metadata(client: httpx.AsyncClient) -> None:
    server = (await client.get("/v2")).json()
    assert server["name"] == "text-generation-inference"
    assert server["extensions"] == ["health", "models", "metrics"]
    model = (await client.get("/v2/models/mine/versions/3")).json()
    assert model == {"name": "mine", "version": "3", "extensions": ["infer", "ready"]}
    assert (await client.get("/v2/models/mine/versions/3/ready")).json() == {"live": True}


# Templates


async def test_chat_tokenize(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/chat_tokenize", json=CHAT)).json()
    assert answer["templated_text"] == "[user]Hi\n[assistant]"
    tokens = answer["tokenize_response"]
    assert "".join(token["text"] for token in tokens) == answer["templated_text"]
    assert [token["stop"] for token in tokens] == list(range(1, len(tokens) + 1)), "no special token was added"
    assert set(tokens[0]) == {"id", "text", "start", "stop"}
