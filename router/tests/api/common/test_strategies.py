"""Decoding strategies on every route that takes them: what reaches the engine, and what is refused by name."""

from typing import Any

import httpx
import pytest
from fakes import FakeEngine

from funitel.proto.step import SamplingParams
from funitel.proto.strategy import OFF, DecodingStrategy
from funitel.router.serving.sampling_request import SamplingRequest
from funitel.router.text.model_files import RecommendedSampling

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
ROUTES = pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE, "/vertex", "/v2/models/m/versions/1/infer"])
STRATEGY: dict[str, Any] = {
    "top_n_sigma": 1.5,
    "max_k": 7,
    "tfs_z": 0.9,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "dry_multiplier": 0.8,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": [".", ","],
    "fsd_alpha": 0.25,
    "fsd_k": 4,
    "fsd_n": 2,
    "fsd_beta": 0.75,
    "fsd_random_tokens": 5,
    "no_repeat_ngram_size": 3,
}


def body(path: str, **fields: Any) -> dict[str, Any]:
    """A body of the route with these fields where it has its parameters."""
    if path == CHAT:
        return {"messages": [{"role": "user", "content": "Hi"}], **fields}
    if path == COMPLETIONS:
        return {"prompt": "Hi", **fields}
    if path == GENERATE:
        return {"inputs": "Hi", "parameters": fields}
    if path == "/vertex":
        return {"instances": [{"inputs": "Hi", "parameters": fields}]}
    return {
        "id": "1",
        "inputs": [{"name": "i", "shape": [1], "datatype": "BYTES", "data": [72, 105]}],
        "outputs": [{"name": "o"}],
        "parameters": fields,
    }


async def sampling_of(client: httpx.AsyncClient, engine: FakeEngine, path: str, **fields: Any) -> SamplingParams:
    response = await client.post(path, json=body(path, **fields))
    assert response.status_code == 200, response.text
    return engine.requests[-1].sampling


@ROUTES
async def test_b6_strategies_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    expected = {name: tuple(value) if isinstance(value, list) else value for name, value in STRATEGY.items()}
    assert (await sampling_of(client, engine, path, **STRATEGY)).strategy == DecodingStrategy(**expected)
    mirostat = {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.25}
    assert (await sampling_of(client, engine, path, **mirostat)).strategy == DecodingStrategy(**mirostat)
    rules = await sampling_of(client, engine, path, min_tokens=2, allowed_token_ids=[5, 6], bad_words=["a"])
    assert (rules.min_new_tokens, rules.allowed_token_ids) == (2, (5, 6))
    assert rules.banned_tokens
    assert rules.strategy is None


@ROUTES
async def test_b6_what_is_off_costs_nothing(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    """Clients of llama.cpp send all fields, most of them off."""
    others = {"mirostat_tau": 5.0, "mirostat_eta": 0.1, "dry_base": 1.75, "xtc_threshold": 0.1, "top_k": 40}
    fields = others | dict(OFF) | {"top_n_sigma": -1.0, "dry_penalty_last_n": -1}
    assert (await sampling_of(client, engine, path, **fields)).strategy is None


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"top_n_sigma": -1.5}, "top_n_sigma", "-1"),
    ({"max_k": -1}, "max_k", "0"),
    ({"max_k": 1.5}, "max_k", "integer"),
    ({"tfs_z": 1.5}, "tfs_z", "1"),
    ({"tfs_z": "0.5"}, "tfs_z", "number"),
    ({"xtc_probability": -0.1}, "xtc_probability", "0"),
    ({"xtc_threshold": 2}, "xtc_threshold", "1"),
    ({"mirostat": 3}, "mirostat", "2"),
    ({"mirostat": 2, "mirostat_tau": -1}, "mirostat_tau", "0"),
    ({"mirostat": 2, "mirostat_eta": 1.5}, "mirostat_eta", "1"),
    ({"dry_multiplier": -1}, "dry_multiplier", "0"),
    ({"dry_base": 0.5}, "dry_base", "1"),
    ({"dry_allowed_length": 0}, "dry_allowed_length", "1"),
    ({"dry_penalty_last_n": -2}, "dry_penalty_last_n", "-1"),
    ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers.0", "1"),
    ({"dry_sequence_breakers": ["."] * 65}, "dry_sequence_breakers", "64"),
    ({"fsd_alpha": 1.5}, "fsd_alpha", "1"),
    ({"fsd_k": 0}, "fsd_k", "1"),
    ({"fsd_n": 9}, "fsd_n", "8"),
    ({"fsd_beta": -1}, "fsd_beta", "0"),
    ({"fsd_random_tokens": -1}, "fsd_random_tokens", "0"),
    ({"no_repeat_ngram_size": 1025}, "no_repeat_ngram_size", "1024"),
    ({"decoding_alg": "beam"}, "decoding_alg", "'beam'"),
    ({"mirostat": 2, "top_k": 40}, "top_k", "`mirostat` and `top_k` exclude each other. Given: 2 and 40"),
    ({"mirostat": 1, "top_p": 0.9}, "top_p", "1 and 0.9"),
    ({"mirostat": 1, "min_p": 0.5}, "min_p", "1 and 0.5"),
    ({"mirostat": 1, "typical_p": 0.5}, "typical_p", "1 and 0.5"),
    ({"mirostat": 1, "tfs_z": 0.5}, "tfs_z", "1 and 0.5"),
    ({"mirostat": 1, "fsd_alpha": 0.5}, "fsd_alpha", "1 and 0.5"),
    ({"decoding_alg": "mirostat", "top_n_sigma": 2.0}, "top_n_sigma", "2 and 2.0"),
    ({"fsd_alpha": 0.5, "top_p": 0.5}, "top_p", "0.5 and 0.5"),
    ({"fsd_alpha": 0.5, "xtc_probability": 1.0}, "xtc_probability", "0.5 and 1.0"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
@pytest.mark.parametrize(("fields", "param", "words"), WRONG)
async def test_b6_what_is_wrong_is_one_line_with_field_value_and_limit(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    response = await client.post(path, json=body(path, **fields))
    assert response.status_code == 422, response.text
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert words in message
    assert param in message
    assert "Given" in message or "given" in message
    assert "\n" not in message
    if not isinstance(error, str):
        assert error["param"] == param
    assert not engine.requests


async def test_b6_wrong_tokens_are_named_as_the_native_route_calls_them(client: httpx.AsyncClient) -> None:
    for fields, name in (
        ({"min_tokens": 10, "max_new_tokens": 9}, "min_tokens"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
    ):
        response = await client.post(GENERATE, json=body(GENERATE, **fields))
        assert response.status_code == 422
        assert f"`{name}`" in response.json()["error"]


@pytest.mark.parametrize("path", [CHAT, GENERATE])
@pytest.mark.parametrize(
    ("name", "shared", "own"),
    [
        ("sample.std", {"top_p": 0.9}, {"max_k": 8}),
        ("TOP_K", {"top_k": 8}, {}),
        ("top_p", {"top_p": 0.9}, {}),
        ("min_p", {"min_p": 0.05}, {}),
        ("tfs", {}, {"tfs_z": 0.95}),
        ("typical", {"typical_p": 0.95}, {}),
        ("mirostat", {}, {"mirostat": 2}),
        ("fsd", {}, {"fsd_alpha": 0.5}),
        ("random_fsd", {"top_p": 0.93}, {"fsd_alpha": 0.5, "fsd_random_tokens": 10, "max_k": 8}),
    ],
)
async def test_b6_inferflows_names_set_what_is_not_given(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, name: str, shared: dict[str, Any], own: dict[str, Any]
) -> None:
    found = await sampling_of(client, engine, path, decoding_alg=name)
    assert found.strategy == (DecodingStrategy(**own) if own else None)
    neutral = SamplingParams()
    for field in ("top_k", "top_p", "min_p", "typical_p"):
        assert getattr(found, field) == shared.get(field, getattr(neutral, field))
    assert found.is_sampled is (name != "fsd")


async def test_b6_greedy_is_greedy_and_what_is_given_wins(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for path in (CHAT, GENERATE):
        fields = {"decoding_alg": "greedy", "temperature": 0.7, "tfs_z": 0.5, "dry_multiplier": 1.0}
        greedy = await sampling_of(client, engine, path, **fields)
        assert not greedy.is_sampled
        assert greedy.strategy == DecodingStrategy(dry_multiplier=1.0)
        given = await sampling_of(client, engine, path, decoding_alg="std", max_k=3, top_p=0.5)
        assert (given.top_p, given.strategy) == (0.5, DecodingStrategy(max_k=3))


async def test_b6_a_temperature_of_zero_leaves_nothing_to_draw(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields = {"temperature": 0, "mirostat": 2, "no_repeat_ngram_size": 2}
    found = await sampling_of(client, engine, CHAT, **fields)
    assert not found.is_sampled
    assert found.strategy == DecodingStrategy(no_repeat_ngram_size=2)
    assert not (await sampling_of(client, engine, CHAT, fsd_alpha=0.5, temperature=0.5)).is_sampled


def test_b6_what_a_model_recommends_gives_way() -> None:
    recommended = RecommendedSampling(0.6, 0.9)
    for strategy, expected in (
        (DecodingStrategy(mirostat=2), None),
        (DecodingStrategy(fsd_alpha=0.5), None),
        (DecodingStrategy(tfs_z=0.5), 0.9),
    ):
        resolved = SamplingRequest(strategy=strategy).resolved(recommended)
        assert (resolved.temperature, resolved.top_p) == (0.6, expected)


async def test_b6_the_document_tells_the_fields_and_their_bounds(client: httpx.AsyncClient) -> None:
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    for name in ("GenerateParameters", "ChatRequest", "CompletionRequest"):
        fields = schemas[name]["properties"]
        assert set(DecodingStrategy.__slots__) | {"decoding_alg", "min_tokens", "bad_words"} <= set(fields)
        assert all(fields[field]["description"] for field in DecodingStrategy.__slots__)
        assert (fields["mirostat"]["anyOf"][0]["minimum"], fields["mirostat"]["anyOf"][0]["maximum"]) == (0, 2)
