"""`/embed`, `/rerank`, `/predict` and `/v1/embeddings` over shards that compute by a rule anyone can follow."""

import asyncio
import base64
import json
import math
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from encoders import CLASSES, EMBEDS, FILLS, RANKS, FakeEncoder
from fakes import FakeEngine, Serve, eventually

from funitel.proto.errors import InvalidRequest, ShardFailed
from funitel.proto.step import EncoderFacts
from funitel.router.encoder.engine import start_encoder
from funitel.router.replica_set.table import ReplicaAddress
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics
from funitel_testing.words import word_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    word_tokenizer().save(str(tmp_path / "tokenizer.json"))
    prompts = {"prompts": {"query": "birds fly "}, "default_prompt_name": None}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return tmp_path


@pytest.fixture
def encoding(serve: Serve) -> Any:
    """`async with encoding(*fakes, **settings) as client`."""

    @asynccontextmanager
    async def serving(*fakes: FakeEncoder, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
        async def connect(settings: RouterSettings, metrics: Metrics) -> Any:
            places = [ReplicaAddress(index, f"unix:///encoder-{index}") for index in range(len(fakes))]
            return start_encoder(list(zip(places, fakes, strict=True)), settings, metrics)  # type: ignore[arg-type]

        async with serve(FakeEngine(), connect=connect, **{"shard_return_timeout": 0, **settings}) as client:
            yield client

    return serving


async def test_vectors_come_in_the_order_of_their_texts(encoding: Any) -> None:
    shard = FakeEncoder()
    async with encoding(shard) as client:
        response = await client.post("/embed", json={"inputs": ["sea", "the blue sea", "sea is", "the"]})
    assert response.status_code == 200
    assert response.json() == [[6, 3, 0, 0], [6, 5, 0, 0], [7, 4, 0, 0], [5, 3, 0, 0]]
    assert response.headers["x-compute-tokens"] == "15"
    [batch] = shard.batches
    assert [len(text.input_ids) for text in batch] == [5, 4, 3, 3]
    assert all(text.is_normalized for text in batch)


async def test_one_text_is_a_list_of_one_vector(encoding: Any) -> None:
    async with encoding(FakeEncoder()) as client:
        assert (await client.post("/embed", json={"inputs": "sea"})).json() == [[6, 3, 0, 0]]


async def test_tokens_are_taken_as_they_are(encoding: Any) -> None:
    async with encoding(FakeEncoder()) as client:
        assert (await client.post("/embed", json={"inputs": [9, 8, 7]})).json() == [[8, 3, 0, 0]]
        assert (await client.post("/embed", json={"inputs": [[9, 8], [5, 5, 5]]})).json() == [
            [9, 2, 0, 0],
            [5, 3, 0, 0],
        ]


async def test_wishes_reach_the_shard(encoding: Any) -> None:
    shard = FakeEncoder()
    async with encoding(shard) as client:
        body = {"inputs": "sea", "normalize": False, "dimensions": 2, "prompt_name": "query"}
        assert (await client.post("/embed", json=body)).json() == [[6, 5]]
    [[text]] = shard.batches
    assert (text.dimensions, text.is_normalized) == (2, False)
    assert len(text.input_ids) == 5


@pytest.mark.parametrize(("direction", "last"), [("Right", 6), ("Left", 5)])
async def test_long_texts_are_cut_when_asked(direction: str, last: int, encoding: Any) -> None:
    async with encoding(FakeEncoder()) as client:
        body = {"inputs": "sea " * 20 + "the", "truncate": True, "truncation_direction": direction}
        assert (await client.post("/embed", json=body)).json() == [[last, 12, 0, 0]]


@pytest.mark.parametrize(
    ("path", "body", "words", "param"),
    [
        ("/embed", {}, "inputs: this field is required", None),
        ("/embed", {"inputs": []}, "inputs: must not be empty. Given: []", None),
        ("/embed", {"inputs": ""}, "`inputs` cannot be empty", None),
        ("/embed", {"inputs": ["sea", ""]}, "item 1 of `inputs` cannot be empty", None),
        ("/embed", {"inputs": ["sea", 5]}, "item 1 must be a string, as item 0 is. Given: 5", None),
        ("/embed", {"inputs": 5}, "must be a string, an array of strings", None),
        ("/embed", {"inputs": [9999]}, "`inputs` names tokens by id, < 64. Given: 9999", None),
        ("/embed", {"inputs": "sea " * 11}, "`inputs` must have at most 12 tokens. Given: 13", None),
        ("/embed", {"inputs": ["a", "sea " * 11]}, "item 1 of `inputs` must have at most 12 tokens. Given: 13", None),
        ("/embed", {"inputs": [5] * 13}, "`inputs` must have at most 12 tokens. Given: 13", None),
        ("/embed", {"inputs": ["sea"] * 9}, "`inputs` may hold at most 8 texts. Given: 9", None),
        ("/embed", {"inputs": "sea", "dimensions": 5}, "`dimensions` must be <= 4, those of the model. Given: 5", None),
        ("/embed", {"inputs": "sea", "dimensions": 0}, "dimensions: must be greater than or equal to 1", None),
        ("/embed", {"inputs": "sea", "prompt_name": "x"}, "`prompt_name` must be one of the model's: query.", None),
        ("/embed", {"inputs": "sea", "truncate": "yes"}, "truncate: must be a valid boolean", None),
        ("/v1/embeddings", {"input": ""}, "`input` cannot be empty", "input"),
        ("/v1/embeddings", {"input": "sea " * 11}, "`input` must have at most 12 tokens", "input"),
        ("/v1/embeddings", {"input": "sea", "dimensions": 5}, "`dimensions` must be <= 4", "dimensions"),
        ("/v1/embeddings", {"input": "sea", "encoding_format": "hex"}, "encoding_format: must be", "encoding_format"),
    ],
)
async def test_what_is_wrong_is_said_in_one_line(
    path: str, body: Any, words: str, param: str | None, encoding: Any
) -> None:
    async with encoding(FakeEncoder(), max_client_texts=8) as client:
        response = await client.post(path, json=body)
    assert response.status_code == (422 if path == "/embed" else 400)
    error = response.json()["error"]
    if path == "/embed":
        assert words in error
    else:
        assert words in error["message"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("encoding_format", ["float", "base64", None])
async def test_openai_gets_vectors_and_usage(encoding_format: str | None, encoding: Any) -> None:
    shard = FakeEncoder()
    async with encoding(shard, served_model_name="mini") as client:
        body = {"model": "text-embedding", "input": ["the sea", "sea"], "encoding_format": encoding_format, "user": "u"}
        answer = (await client.post("/v1/embeddings", json=body)).json()
    found = [entry["embedding"] for entry in answer["data"]]
    if encoding_format == "base64":
        found = [list(struct.unpack("<4f", base64.b64decode(text))) for text in found]
    assert found == [[6, 4, 0, 0], [6, 3, 0, 0]]
    assert [(entry["object"], entry["index"]) for entry in answer["data"]] == [("embedding", 0), ("embedding", 1)]
    assert (answer["object"], answer["model"]) == ("list", "text-embedding")
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}


async def test_dimensions_cut_base64_too(encoding: Any) -> None:
    async with encoding(FakeEncoder()) as client:
        body = {"input": "sea", "dimensions": 3, "encoding_format": "base64"}
        answer = (await client.post("/v1/embeddings", json=body)).json()
    assert len(base64.b64decode(answer["data"][0]["embedding"])) == 12


async def test_ranks_are_sorted_and_squeezed(encoding: Any) -> None:
    shard = FakeEncoder(RANKS)
    body = {"query": "sea", "texts": ["the", "the blue sea", "is it"]}
    async with encoding(shard) as client:
        ranks = (await client.post("/rerank", json=body)).json()
        raw = (await client.post("/rerank", json=body | {"raw_scores": True, "return_text": True})).json()
    assert [rank["index"] for rank in ranks] == [1, 2, 0]
    assert [round(rank["score"], 4) for rank in ranks] == [0.7311, 0.5, 0.2689]
    assert "text" not in ranks[0]
    assert raw[0] == {"index": 1, "text": "the blue sea", "score": 1.0}
    assert shard.batches[0][0].type_ids == (0, 0, 0, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"query": "sea", "texts": []}, "`texts` cannot be empty"),
        ({"query": "", "texts": ["a"]}, "`query` cannot be empty"),
        ({"query": "sea", "texts": ["a", 5]}, "texts.1: must be a valid string. Given: 5"),
        ({"query": "sea", "texts": ["sea " * 20]}, "`texts` must have at most 20 tokens. Given: 24"),
        ({"texts": ["sea"]}, "query: this field is required"),
    ],
)
async def test_bad_ranks_are_refused(body: Any, words: str, encoding: Any) -> None:
    async with encoding(FakeEncoder(RANKS)) as client:
        response = await client.post("/rerank", json=body)
    assert response.status_code == 422
    assert words in response.json()["error"]


async def test_classes_of_texts_pairs_and_batches(encoding: Any) -> None:
    shard = FakeEncoder(CLASSES)
    async with encoding(shard) as client:
        one = (await client.post("/predict", json={"inputs": "sea"})).json()
        pair = (await client.post("/predict", json={"inputs": ["sea", "the"], "raw_scores": True})).json()
        batch = (await client.post("/predict", json={"inputs": [["sea"], ["sea", "the"]], "top_k": 1})).json()
    assert [entry["label"] for entry in one] == ["good", "so", "bad"]
    assert sum(entry["score"] for entry in one) == pytest.approx(1)
    assert pair == [{"score": 1.0, "label": "good"}, {"score": 0.0, "label": "so"}, {"score": -1.0, "label": "bad"}]
    assert [[entry["label"] for entry in each] for each in batch] == [["good"], ["good"]]
    assert sorted(text.type_ids for text in shard.batches[2]) == [(0, 0, 0), (0, 0, 0, 1, 1)]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (["a", "b", "c"], "must be one or two strings: a text or a pair"),
        ([["a"], "b"], "item 1 must be an array, as item 0 is. Given: 'b'"),
        ([["a"], []], "item 1 must be one or two strings"),
        ([["a", 1]], "item 0 must be one or two strings"),
        ({"a": 1}, "must be a string, a pair of strings"),
        ("", "`inputs` cannot be empty"),
    ],
)
async def test_bad_predictions_are_refused(inputs: Any, words: str, encoding: Any) -> None:
    async with encoding(FakeEncoder(CLASSES)) as client:
        response = await client.post("/predict", json={"inputs": inputs})
    assert response.status_code == 422
    assert words in response.json()["error"]


async def test_masks_are_filled(encoding: Any) -> None:
    async with encoding(FakeEncoder(FILLS)) as client:
        answer = (await client.post("/predict", json={"inputs": "the [MASK] is blue", "top_k": 2})).json()
        usual = (await client.post("/predict", json={"inputs": [["[MASK]"], ["the [MASK]"]]})).json()
        none = await client.post("/predict", json={"inputs": [["[MASK]"], ["the sea"]]})
        raw = await client.post("/predict", json={"inputs": "[MASK]", "raw_scores": True})
    assert answer == [{"score": 0.5, "label": "the", "token": 5}, {"score": 0.25, "label": "sea", "token": 6}]
    assert [len(each) for each in usual] == [5, 5]
    assert (none.status_code, raw.status_code) == (422, 422)
    assert "item 1 of `inputs` must have one mask token. Given: 0" in none.json()["error"]
    assert "`raw_scores` is for classes" in raw.json()["error"]


@pytest.mark.parametrize(
    ("facts", "path", "body", "words"),
    [
        (RANKS, "/embed", {"inputs": "sea"}, "an encoder for ranks"),
        (EMBEDS, "/predict", {"inputs": "sea"}, "an encoder for embeddings"),
        (EMBEDS, "/rerank", {"query": "sea", "texts": ["sea"]}, "an encoder for embeddings; ranks need"),
        (CLASSES, "/rerank", {"query": "sea", "texts": ["sea"]}, "an encoder for classes; ranks need"),
        (EMBEDS, "/generate", {"inputs": "sea"}, "does not generate text: it is an encoder for embeddings"),
        (EMBEDS, "/generate_stream", {"inputs": "sea"}, "does not generate text"),
        (EMBEDS, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "does not generate text"),
        (EMBEDS, "/v1/completions", {"prompt": "sea"}, "does not generate text"),
        (EMBEDS, "/v1/responses", {"input": "sea"}, "does not generate text"),
    ],
)
async def test_what_the_model_is_not_for_is_refused(
    facts: EncoderFacts, path: str, body: Any, words: str, encoding: Any
) -> None:
    async with encoding(FakeEncoder(facts)) as client:
        response = await client.post(path, json=body)
    assert response.status_code == (400 if path in ("/v1/embeddings", "/v1/rerank", "/v1/responses") else 422)
    answer = response.json()
    if path.startswith("/v1"):
        assert words in answer["error"]["message"]
        assert answer["error"]["code"] == "model_not_supported"
    else:
        assert words in answer["error"]
        assert answer["error_type"] == "wrong_task"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": "sea"}),
        ("/rerank", {"query": "sea", "texts": ["sea"]}),
        ("/predict", {"inputs": "sea"}),
        ("/v1/embeddings", {"input": "sea"}),
        ("/embed_all", {"inputs": "sea"}),
        ("/similarity", {"inputs": {"source_sentence": "sea", "sentences": ["sea"]}}),
        ("/v1/rerank", {"query": "sea", "documents": ["sea"]}),
    ],
)
async def test_a_model_that_generates_refuses_what_encoders_do(serve: Serve, path: str, body: Any) -> None:
    async with serve(FakeEngine()) as client:
        response = await client.post(path, json=body)
    assert response.status_code == (400 if path.startswith("/v1") else 422)
    assert "the model served here generates text" in str(response.json()["error"])


async def test_info_and_metrics_say_what_is_served(encoding: Any) -> None:
    async with encoding(FakeEncoder(), FakeEncoder(), max_batch_prefill_tokens=64) as client:
        assert (await client.get("/health")).status_code == 200
        await client.post("/embed", json={"inputs": ["sea", "the sea"]})
        info = (await client.get("/info")).json()
        metrics = (await client.get("/metrics")).text
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (info["model_dtype"], info["max_input_length"], info["max_batch_tokens"]) == ("float32", 12, 64)
    assert info["max_input_tokens"] == 12
    assert "tgi_request_count 1.0" in metrics
    assert "tgi_request_success 1.0" in metrics
    assert "funitel_forward_tokens_total 7.0" in metrics
    assert 'tgi_batch_inference_success{method="encode"} 1.0' in metrics


async def test_classes_are_told_by_info(encoding: Any) -> None:
    async with encoding(FakeEncoder(CLASSES)) as client:
        found = (await client.get("/info")).json()["model_type"]
    assert found["classifier"]["id2label"] == {"0": "bad", "1": "so", "2": "good"}
    assert found["classifier"]["label2id"] == {"bad": 0, "so": 1, "good": 2}


# What goes wrong


async def test_a_failing_batch_fails_only_who_is_at_fault(encoding: Any) -> None:
    shard = FakeEncoder(poison=8)  # "deep"
    shard.pause.clear()
    async with encoding(shard, pipeline_steps=1) as client:
        first = asyncio.create_task(client.post("/embed", json={"inputs": "sea"}))
        await eventually(lambda: _true(shard.batches), "the first batch")
        others = [
            asyncio.create_task(client.post("/embed", json={"inputs": [text, "sea"]})) for text in ("the", "deep", "it")
        ]

        async def all_wait() -> bool:
            return "tgi_queue_size 6.0" in (await client.get("/metrics")).text

        await eventually(all_wait, "six texts that wait")
        shard.pause.set()
        answers = [await task for task in (first, *others)]
    assert [answer.status_code for answer in answers] == [200, 200, 424, 200]
    assert "a poisoned batch" in answers[2].json()["error"]
    assert len(shard.batches[1]) == 6


async def _true(value: object) -> bool:
    return bool(value)


async def test_a_row_that_is_no_number_fails_its_request(encoding: Any) -> None:
    async with encoding(FakeEncoder(broken=8)) as client:
        bad = await client.post("/embed", json={"inputs": ["sea", "deep"]})
        good = await client.post("/embed", json={"inputs": ["sea"]})
    assert (bad.status_code, good.status_code) == (424, 200)
    assert "numbers for text 1 are not finite" in bad.json()["error"]


async def test_another_replica_takes_over_what_a_lost_one_had(encoding: Any) -> None:
    lost, well = FakeEncoder(errors=[ShardFailed("gone"), ShardFailed("gone")]), FakeEncoder()
    async with encoding(lost, well, max_batch_prefill_tokens=8) as client:
        answer = await client.post("/embed", json={"inputs": ["sea", "the sea", "it", "is", "deep", "blue"]})
        metrics = (await client.get("/metrics")).text
    assert answer.status_code == 200
    assert [row[0] for row in answer.json()] == [6, 6, 15, 7, 8, 10]
    assert 'funitel_replicas{state="lost"} 1.0' in metrics


async def test_the_last_replica_is_kept_and_its_failure_told(encoding: Any) -> None:
    async with encoding(FakeEncoder(errors=[ShardFailed("gone")])) as client:
        bad = await client.post("/embed", json={"inputs": "sea"})
        good = await client.post("/embed", json={"inputs": "sea"})
    assert (bad.status_code, good.status_code) == (424, 200)


async def test_texts_wait_for_the_only_replica_to_come_back(encoding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, fresh = FakeEncoder(errors=[ShardFailed("gone")]), FakeEncoder()
    is_back = asyncio.Event()

    async def connect(address: str, patience_seconds: float, tls: object) -> FakeEncoder:
        await is_back.wait()
        return fresh

    monkeypatch.setattr("funitel.router.replica_set.failover.MIN_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("funitel.router.replica_set.failover.Shards.connect", connect)
    async with encoding(lost, shard_return_timeout=60) as client:
        before = asyncio.create_task(client.post("/embed", json={"inputs": ["sea", "the sea"]}))
        await eventually(lambda: _true(lost.batches), "the batch that is lost")

        async def is_lost() -> bool:
            return (await client.get("/health")).status_code == 503

        await eventually(is_lost, "the loss is seen")
        since = asyncio.create_task(client.post("/embed", json={"inputs": "deep"}))
        late = await client.post("/embed", json={"inputs": "sea"}, headers={"x-request-timeout": "0.4"})
        assert not before.done()
        is_back.set()
        answers = [await before, await since]
        assert (await client.get("/health")).status_code == 200
        metrics = (await client.get("/metrics")).text
    assert late.status_code == 504
    assert [answer.status_code for answer in answers] == [200, 200]
    assert [row[0] for row in answers[0].json()] == [6, 6]
    assert 'funitel_replicas{state="serving"} 1.0' in metrics
    assert "funitel_replica_returns_total 1.0" in metrics


async def test_texts_that_were_with_every_lost_replica_fail(encoding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(address: str, patience_seconds: float, tls: object) -> FakeEncoder:
        return FakeEncoder(errors=[ShardFailed("gone")])

    monkeypatch.setattr("funitel.router.replica_set.failover.MIN_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("funitel.router.replica_set.failover.Shards.connect", connect)
    async with encoding(FakeEncoder(errors=[ShardFailed("gone")]), shard_return_timeout=60) as client:
        answer = await client.post("/embed", json={"inputs": "sea"})
    assert answer.status_code == 424


async def test_a_batch_in_each_of_two_steps_is_one_loss(encoding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that dies takes both with it; the request was with two lost replicas, and may go to a third."""
    lost = [FakeEncoder(errors=[ShardFailed("gone"), ShardFailed("gone")]) for _ in range(2)]
    left = [lost[1], FakeEncoder()]

    async def connect(address: str, patience_seconds: float, tls: object) -> FakeEncoder:
        return left.pop(0)

    monkeypatch.setattr("funitel.router.replica_set.failover.MIN_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("funitel.router.replica_set.failover.Shards.connect", connect)
    for shard in lost:
        shard.pause.clear()
    async with encoding(lost[0], shard_return_timeout=60, max_batch_size=1) as client:
        asking = asyncio.create_task(client.post("/embed", json={"inputs": ["sea", "the sea"]}))
        for shard in lost:
            await eventually(lambda shard=shard: _true(len(shard.batches) == 2), "both batches are with it")  # type: ignore[misc]
            shard.pause.set()
        assert (await asking).status_code == 200


async def test_a_shard_that_hangs_is_lost(encoding: Any) -> None:
    shard = FakeEncoder()
    shard.pause.clear()
    async with encoding(shard, step_timeout_s=0.01) as client:
        answer = await client.post("/embed", json={"inputs": "sea"}, timeout=5)
    assert answer.status_code == 424
    assert "has not answered for 0.05 s" in answer.json()["error"]


async def test_too_many_requests_are_told_when_to_come_again(encoding: Any) -> None:
    shard = FakeEncoder()
    shard.pause.clear()
    async with encoding(shard, max_concurrent_requests=1) as client:
        running = asyncio.create_task(client.post("/embed", json={"inputs": "sea"}))
        await eventually(lambda: _true(shard.batches), "the first batch")
        refused = await client.post("/embed", json={"inputs": "sea"})
        shard.pause.set()
        assert (await running).status_code == 200
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error_type"] == "overloaded"


async def test_a_deadline_ends_the_wait(encoding: Any) -> None:
    shard = FakeEncoder()
    shard.pause.clear()
    async with encoding(shard) as client:
        late = await client.post("/embed", json={"inputs": "sea"}, headers={"x-request-timeout": "0.05"})
        shard.pause.set()
        assert (await client.post("/embed", json={"inputs": "sea"})).status_code == 200
    assert late.status_code == 504


async def test_a_refusal_by_the_shard_is_the_clients(encoding: Any) -> None:
    async with encoding(FakeEncoder(errors=[InvalidRequest("no such token")])) as client:
        response = await client.post("/embed", json={"inputs": "sea"})
    assert response.status_code == 422


# `POST /`, `/similarity`, `/embed_all`, `/v1/rerank`

SEA = {"source_sentence": "sea", "sentences": ["sea", "the blue deep sea", "it"]}


async def test_b3_similarity_is_the_cosine_of_vectors(encoding: Any) -> None:
    shard = FakeEncoder(has_units=True)
    async with encoding(shard) as client:
        answer = await client.post("/similarity", json={"inputs": SEA, "parameters": {}})
        cut = {"truncate": True, "truncation_direction": "left", "prompt_name": "query"}
        long = {"inputs": {"source_sentence": "the " * 30, "sentences": ["sea " * 30]}, "parameters": cut}
        assert (await client.post("/similarity", json=long)).json() == [pytest.approx(0.9972, abs=1e-3)]
    vectors = [(6, 3), (6, 3), (6, 6), (15, 3)]
    first = vectors[0]
    expected = [(first[0] * x + first[1] * y) / math.hypot(*first) / math.hypot(x, y) for x, y in vectors[1:]]
    assert answer.json() == pytest.approx(expected, abs=1e-6)
    assert answer.headers["x-compute-tokens"] == "15"
    assert len(shard.batches[0]) == 4


async def test_b3_embed_all_gives_each_token_a_vector(encoding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("funitel.router.api.embeddings.similarity.SLICE", 6)  # two tokens
    shard = FakeEncoder()
    async with encoding(shard) as client:
        answer = await client.post("/embed_all", json={"inputs": ["sea", "the blue sea"]})
        one = (await client.post("/embed_all", json={"inputs": "sea", "prompt_name": "query"})).json()
        ids = (await client.post("/embed_all", json={"inputs": [[9, 8]]})).json()
    assert answer.headers["x-compute-tokens"] == "8"
    assert [[token[0] for token in text] for text in answer.json()] == [[2, 6, 3], [2, 5, 10, 6, 3]]
    assert [token[1:] for token in answer.json()[1]] == [[place + 0.5, 0.0] for place in range(5)]
    assert (len(one), len(one[0])) == (1, 5)
    assert ids == [[[9, 0.5, 0], [8, 1.5, 0]]]


async def test_b3_embed_all_is_bounded_by_the_numbers_of_its_answer(
    encoding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("funitel.router.api.embeddings.similarity.MAX_NUMBERS", 20)
    shard = FakeEncoder()
    async with encoding(shard) as client:
        assert (await client.post("/embed_all", json={"inputs": ["sea", "sea"]})).status_code == 200
        refused = await client.post("/embed_all", json={"inputs": ["sea", "the sea"]})
    assert refused.status_code == 422
    assert "`inputs` must have at most 6 tokens, each of which gets a vector. Given: 7" in refused.json()["error"]
    assert len(shard.batches) == 1


async def test_b3_tokens_and_texts_are_not_mixed_in_a_batch(encoding: Any) -> None:
    shard = FakeEncoder()
    shard.pause.clear()
    async with encoding(shard, pipeline_steps=1) as client:
        asking = [asyncio.create_task(client.post("/embed", json={"inputs": "it"}))]
        await eventually(lambda: _true(shard.batches), "the first batch")
        for path in ("/embed", "/embed_all", "/embed"):
            asking.append(asyncio.create_task(client.post(path, json={"inputs": "sea"})))

        async def all_wait() -> bool:
            return "tgi_queue_size 3.0" in (await client.get("/metrics")).text

        await eventually(all_wait, "three texts that wait")
        shard.pause.set()
        answers = [(await task).json() for task in asking]
    assert answers[1] == answers[3] == [[6, 3, 0, 0]]
    assert answers[2] == [[[2, 0.5, 0], [6, 1.5, 0], [3, 2.5, 0]]]
    assert sorted(len(batch) for batch in shard.batches[1:]) == [1, 2]  # in the order in which requests arrived


RERANK = {"model": "any", "query": "sea", "documents": ["the", {"text": "the blue sea", "title": "x"}, "is it"]}


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
async def test_b3_documents_are_ranked_in_the_shape_of_other_services(path: str, encoding: Any) -> None:
    shard = FakeEncoder(RANKS)
    async with encoding(shard) as client:
        answer = (await client.post(path, json=RERANK)).json()
        best = (await client.post(path, json=RERANK | {"top_n": 1, "return_documents": False})).json()
        raw = (await client.post(path, json=RERANK | {"use_activation": False, "top_n": 0})).json()
        own = (await client.post("/rerank", json={"query": "sea", "texts": ["the", "the blue sea", "is it"]})).json()
        same = (await client.post("/rerank", json=RERANK)).json()
    assert same["results"] == answer["results"]
    assert answer.pop("id").startswith("rerank-")
    results = answer.pop("results")
    assert answer == {"object": "list", "model": "any", "usage": {"prompt_tokens": 18, "total_tokens": 18}}
    assert [result["index"] for result in results] == [1, 2, 0]
    assert [result["document"] for result in results] == [{"text": "the blue sea"}, {"text": "is it"}, {"text": "the"}]
    assert [result["relevance_score"] for result in results] == [rank["score"] for rank in own]
    assert best["results"] == [{"index": 1, "relevance_score": results[0]["relevance_score"]}]
    assert [result["relevance_score"] for result in raw["results"]] == [1.0, 0.0, -1.0]


async def test_b3_an_embedding_model_ranks_by_cosine(encoding: Any) -> None:
    async with encoding(FakeEncoder(has_units=True)) as client:
        answer = (await client.post("/v1/rerank", json=RERANK)).json()
        near = (
            await client.post(
                "/similarity",
                json={"inputs": {"source_sentence": "sea", "sentences": ["the", "the blue sea", "is it"]}},
            )
        ).json()
    assert {result["index"]: result["relevance_score"] for result in answer["results"]} == dict(enumerate(near))
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert answer["usage"]["total_tokens"] == 3 + 3 + 5 + 4


async def test_b3_long_documents_are_cut_when_asked(encoding: Any) -> None:
    body = {"query": "sea", "documents": ["the " * 40]}
    async with encoding(FakeEncoder(RANKS)) as client:
        for wish in ({"truncate_prompt_tokens": -1}, {"max_tokens_per_doc": 4096}):
            answer = await client.post("/v1/rerank", json=body | wish)
            assert answer.json()["usage"]["total_tokens"] == 20
        refused = [
            (await client.post("/v1/rerank", json=body | wish)).json()["error"]["message"]
            for wish in ({}, {"max_tokens_per_doc": 5}, {"truncate_prompt_tokens": 7})
        ]
    assert "must have at most 20 tokens. Given: 44" in refused[0]
    assert "`max_tokens_per_doc` must be >= 20" in refused[1]
    assert "truncate_prompt_tokens" in refused[2]


@pytest.mark.parametrize(
    ("facts", "path", "body", "words"),
    [
        (EMBEDS, "/similarity", {"inputs": "sea"}, "inputs: must be an object. Given: 'sea'"),
        (EMBEDS, "/similarity", {"inputs": SEA | {"sentences": []}}, "`inputs.sentences` cannot be empty"),
        (
            EMBEDS,
            "/similarity",
            {"inputs": SEA | {"sentences": ["a", ""]}},
            "item 1 of `inputs.sentences` cannot be empty",
        ),
        (EMBEDS, "/similarity", {"inputs": SEA | {"source_sentence": ""}}, "`inputs.source_sentence` cannot be empty"),
        (EMBEDS, "/similarity", {"inputs": SEA | {"source_sentence": "a " * 20}}, "`inputs.source_sentence` must have"),
        (EMBEDS, "/similarity", {"inputs": SEA | {"sentences": ["a"] * 9}}, "may hold at most 8 texts. Given: 9"),
        (EMBEDS, "/similarity", {"inputs": SEA, "parameters": {"prompt_name": "x"}}, "`prompt_name` must be one of"),
        (RANKS, "/similarity", {"inputs": SEA}, "an encoder for ranks"),
        (EMBEDS, "/embed_all", {"inputs": []}, "inputs: must not be empty"),
        (EMBEDS, "/embed_all", {"inputs": "sea " * 11}, "`inputs` must have at most 12 tokens. Given: 13"),
        (CLASSES, "/embed_all", {"inputs": "sea"}, "an encoder for classes"),
        (RANKS, "/v1/rerank", {"query": "sea", "documents": []}, "`documents` cannot be empty"),
        (RANKS, "/v1/rerank", {"query": "", "documents": ["a"]}, "`query` cannot be empty"),
        (RANKS, "/v1/rerank", {"query": "sea", "documents": ["a", 5]}, "documents.1: must be a string, or an object"),
        (EMBEDS, "/v1/rerank", {"query": "sea", "documents": ["a", ""]}, "item 1 of `documents` cannot be empty"),
        (RANKS, "/v1/rerank", {"documents": ["a"]}, "query: this field is required"),
        (
            RANKS,
            "/v1/rerank",
            {"query": "sea", "documents": ["a"], "top_n": -1},
            "top_n: must be greater than or equal",
        ),
        (
            RANKS,
            "/v1/rerank",
            {"query": "sea", "documents": ["a"], "rank_fields": ["b"]},
            "rank_fields: is not supported",
        ),
        (CLASSES, "/v1/rerank", {"query": "sea", "documents": ["a"]}, "an encoder for classes; ranks need"),
        (EMBEDS, "/", {"inputs": {"sentences": ["a"]}}, "inputs.source_sentence: this field is required"),
        (EMBEDS, "/", {"inputs": []}, "inputs: must not be empty"),
        (EMBEDS, "/", {}, "inputs: this field is required"),
        (RANKS, "/", {"inputs": "sea"}, "query: this field is required"),
    ],
)
async def test_b3_what_is_wrong_is_said_in_one_line(
    facts: EncoderFacts, path: str, body: Any, words: str, encoding: Any
) -> None:
    async with encoding(FakeEncoder(facts), max_client_texts=8) as client:
        response = await client.post(path, json=body)
    assert response.status_code in (400, 422)
    error = response.json()["error"]
    assert words in (error["message"] if path.startswith("/v") else error)


async def test_b3_a_bare_url_is_for_what_the_model_does(encoding: Any) -> None:
    tasks: list[tuple[EncoderFacts, Any, str]] = [
        (EMBEDS, {"inputs": ["sea", "the sea"], "normalize": False}, "/embed"),
        (FILLS, {"inputs": "sea"}, "/embed"),
        (EMBEDS, {"inputs": SEA}, "/similarity"),
        (RANKS, {"query": "sea", "texts": ["the", "it is"]}, "/rerank"),
        (CLASSES, {"inputs": [["sea"], ["sea", "it"]]}, "/predict"),
    ]
    for facts, body, path in tasks:
        async with encoding(FakeEncoder(facts, has_units=True)) as client:
            direct, bare, invoked = [await client.post(each, json=body) for each in (path, "/", "/invocations")]
            metrics = (await client.get("/metrics")).text
        assert direct.status_code == 200, direct.text
        assert bare.json() == invoked.json() == direct.json()
        assert bare.headers["x-compute-tokens"] == direct.headers["x-compute-tokens"]
        assert "tgi_request_count 3.0" in metrics
        assert "tgi_request_success 3.0" in metrics


async def test_b3_keys_and_limits_hold_for_every_route_of_encoders(encoding: Any) -> None:
    shard = FakeEncoder()
    paths = {
        "/": {"inputs": "sea"},
        "/embed_all": {"inputs": "sea"},
        "/similarity": {"inputs": SEA},
        "/v1/rerank": {"query": "sea", "documents": ["sea"]},
    }
    async with encoding(shard, api_key="secret", max_concurrent_requests=1, payload_limit=200) as client:
        key = {"authorization": "Bearer secret"}
        shard.pause.clear()
        running = asyncio.create_task(client.post("/embed", json={"inputs": "sea"}, headers=key))
        await eventually(lambda: _true(shard.batches), "the first batch")
        for path, body in paths.items():
            assert (await client.post(path, json=body)).status_code == 401
            assert (await client.post(path, json=body, headers=key)).status_code == 429
        shard.pause.set()
        assert (await running).status_code == 200
        for path, body in paths.items():
            assert (await client.post(path, json=body | {"model": "a" * 300}, headers=key)).status_code == 413
            assert (await client.post(path, content=b"{", headers=key)).status_code in (400, 415, 422)
            assert (await client.post(path, json=body, headers=key)).status_code == 200
