"""all-MiniLM-L6-v2 from the catalogue: the vectors of sentence-transformers, through OpenAI's client and plain HTTP."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from funitel.model_server.hub import resolve
from funitel_testing.servers import Server, free_port, run_launcher
from funitel_testing.tiny_encoders import save_tiny_encoder

MODEL = "all-minilm-l6-v2"
TEXTS = (
    "The sea is deep.",
    "a",
    "Vögel fliegen über das Meer ☃",
    "What is the capital of France? " * 6,
    "The sea is deep.",
    "one two three " * 40,
)
MAX_DISTANCE = 1e-5


@pytest.fixture
def server(launch: Any) -> Server:
    found: Server = launch("--model-id", MODEL, "--device", "cpu")
    return found


@pytest.fixture(scope="module")
def expected() -> list[list[float]]:
    """What sentence-transformers makes of the texts."""
    from sentence_transformers import SentenceTransformer  # seconds to import

    model = SentenceTransformer(str(resolve.resolve(MODEL).folder), device="cpu")
    found: list[list[float]] = model.encode(list(TEXTS)).tolist()
    return found


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    dot = math.fsum(x * y for x, y in zip(a, b, strict=True))
    return 1 - dot / (math.hypot(*a) * math.hypot(*b))


def test_vectors_equal_those_of_sentence_transformers(
    server: Server, expected: list[list[float]], figures: dict[str, object]
) -> None:
    response = httpx.post(f"{server.url}/embed", json={"inputs": list(TEXTS)}, timeout=60)
    assert response.status_code == 200, response.text
    found = response.json()
    worst = max(distance(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert worst < MAX_DISTANCE
    assert all(math.hypot(*vector) == pytest.approx(1, abs=1e-5) for vector in found)
    figures["worst cosine distance to sentence-transformers"] = worst


@pytest.mark.parametrize("wishes", [{}, {"encoding_format": "float"}, {"dimensions": 64}])
def test_openais_client_needs_no_changes(server: Server, expected: list[list[float]], wishes: dict[str, Any]) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
    answer = client.embeddings.create(model=MODEL, input=list(TEXTS), **wishes)
    width = wishes.get("dimensions", 384)
    assert [entry.index for entry in answer.data] == list(range(len(TEXTS)))
    for entry, vector in zip(answer.data, expected, strict=True):
        assert len(entry.embedding) == width
        assert distance(entry.embedding, vector[:width]) < MAX_DISTANCE
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 100
    with pytest.raises(openai.BadRequestError, match="at most 256 tokens"):
        client.embeddings.create(model=MODEL, input="sea " * 300)


def test_the_server_says_what_it_is_for(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        info = client.get("/info").json()
        assert info["model_type"] == {"embedding": {"pooling": "mean"}}
        assert info["max_input_length"] == 256
        for path, body in (("/generate", {"inputs": "Hi"}), ("/rerank", {"query": "a", "texts": ["b"]})):
            refused = client.post(path, json=body)
            assert (refused.status_code, refused.json()["error_type"]) == (422, "wrong_task")
        cut = client.post("/embed", json={"inputs": "sea " * 300, "truncate": True})
        assert (cut.status_code, cut.headers["x-compute-tokens"]) == (200, "256")
        most = client.post("/embed", json={"inputs": ["a"] * 10_000})
        assert "may hold at most 2048 texts. Given: 10000" in most.json()["error"]
    assert server.metrics()["funitel_forward_tokens_total"] > 256
    assert server.metrics()['funitel_memory_bytes{kind="resident",rank="0"}'] > 0
    assert "/v1/embeddings" in server.out.read_text()


def test_an_encoder_is_not_split(tmp_path: Path) -> None:
    save_tiny_encoder("Bert", "Model", tmp_path)
    port = str(free_port())
    ended = run_launcher(
        "--model-id", str(tmp_path), "--num-shard", "2", "--device", "cpu", "--port", port, timeout=180
    )
    assert ended.code == 1
    assert "--num-shard 2: an encoder is not split over shards" in ended.last_line
