"""Compare embeddings with those of sentence-transformers, in distance and in texts a second.

Both embed the same texts on the same cores, in alternation, in one sitting: sentence-transformers' `encode` in this
process, with as many threads as there are cores; our server over HTTP, as OpenAI's client asks; and our encoder in this
process, tokenizing included. The best of the rounds counts, for noise only ever adds time; the median is shown beside
it. Texts are pieces of a file, of 4 to 60 words. The last line on stdout is one JSON object.

    python benchmarks/embeddings.py --texts 256 --rounds 7
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import tokenizers
import torch
from sentence_transformers import SentenceTransformer

from funitel.model_server.hub.resolve import resolve
from funitel.model_server.loading.encoder import load_encoder
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.step import EncoderInput, EncoderTask
from funitel_testing.servers import serving

ROOT = Path(__file__).parent.parent
CORPUS = ROOT / "model_server" / "funitel" / "model_server" / "files/calibration.txt"
LENGTHS = (4, 8, 12, 20, 30, 45, 60)  # words
BATCH_TOKENS = 512

Embed = Callable[[list[str]], np.ndarray]


def pieces(count: int, seed: int = 0) -> list[str]:
    """Texts of uneven lengths."""
    draw, words = random.Random(seed), CORPUS.read_text().split()
    found = []
    for _ in range(count):
        length = draw.choice(LENGTHS)
        start = draw.randrange(len(words) - length)
        found.append(" ".join(words[start : start + length]))
    return found


def over_http(url: str) -> Embed:
    """Ask a server for all texts in one request."""
    client = httpx.Client(base_url=url, timeout=600)

    def embed(texts: list[str]) -> np.ndarray:
        response = client.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"})
        response.raise_for_status()
        rows = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in response.json()["data"]]
        return np.stack(rows)

    return embed


def in_process(folder: Path, threads: int) -> Embed:
    """Our encoder by itself: tokenize, batch by token budget, encode."""
    settings = ModelServerSettings(model_id=str(folder), device="cpu", num_threads=threads)
    executor, info = load_encoder(settings, folder)
    assert info.encoder is not None
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(info.encoder.usual_tokens)
    width = info.encoder.width

    def embed(texts: list[str]) -> np.ndarray:
        found = tokenizer.encode_batch_fast(texts)
        inputs = [EncoderInput(input_ids=tuple(each.ids), is_normalized=True) for each in found]
        order = sorted(range(len(inputs)), key=lambda place: -len(inputs[place].input_ids))
        vectors = np.empty((len(texts), width), np.float32)
        batch: list[int] = []
        left = BATCH_TOKENS
        for place in [*order, None]:
            length = 0 if place is None else len(inputs[place].input_ids)
            if batch and (place is None or length > left):
                result = executor.encode(EncoderTask.EMBED, [inputs[one] for one in batch])
                vectors[batch] = np.frombuffer(result.values, "<f4").reshape(-1, width)
                batch, left = [], BATCH_TOKENS
            if place is not None:
                batch.append(place)
                left -= length
        return vectors

    return embed


def worst_distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest cosine distance between two vectors of the same text."""
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return float((1 - (ours * theirs).sum(1) / lengths).max())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-id", default="all-minilm-l6-v2")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    folder = resolve(arguments.model_id).folder
    texts = pieces(arguments.texts)
    model = SentenceTransformer(str(folder), device="cpu")
    with (
        tempfile.TemporaryDirectory() as logs,
        serving(Path(logs), "--model-id", arguments.model_id, "--device", "cpu") as server,
    ):
        ways: dict[str, Embed] = {
            "sentence-transformers": lambda texts: model.encode(texts, normalize_embeddings=True),
            "http": over_http(server.url),
            "in process": in_process(folder, threads),
        }
        vectors = {name: embed(texts) for name, embed in ways.items()}  # and warm up
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, embed in ways.items():
                began = time.perf_counter()
                embed(texts)
                seconds[name].append(time.perf_counter() - began)
    theirs = "sentence-transformers"
    rates = {name: len(texts) / min(times) for name, times in seconds.items()}
    for name, times in seconds.items():
        print(
            f"{name:22} {rates[name]:8.1f} texts/s best, {len(texts) / statistics.median(times):8.1f} median, "
            f"{rates[name] / rates[theirs]:5.2f}x, cosine distance {worst_distance(vectors[name], vectors[theirs]):.1e}"
        )
    print(
        json.dumps(
            {
                "texts": len(texts),
                "threads": threads,
                "texts_per_second": rates,
                "ratio": {name: rate / rates[theirs] for name, rate in rates.items()},
                "worst_cosine_distance": {name: worst_distance(vectors[name], vectors[theirs]) for name in ways},
            }
        )
    )


if __name__ == "__main__":
    main()
