"""Several sequences of one request, held against the same seeds sent singly."""

import json
from typing import Any

import httpx

from funitel_testing.scores import MAX_NEW_TOKENS, post, rounded


async def check_siblings(client: httpx.AsyncClient, prompt: str) -> None:
    """n and best_of give what the seeds of their sequences give when sent singly."""
    await _check_best_of(client, prompt)
    sampling: dict[str, Any] = {"model": "any", "temperature": 1.2, "max_tokens": MAX_NEW_TOKENS, "seed": 2**63 - 2}
    for path, asked in (
        ("/v1/completions", {"prompt": prompt}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]}),
    ):
        body = sampling | asked
        alone = [(await _texts(client, path, body | {"seed": body["seed"] + place}))[0] for place in range(3)]
        assert len(set(alone)) > 1
        assert await _texts(client, path, body | {"n": 3}) == alone
        assert await _streamed_texts(client, path, body | {"n": 3}) == alone
    best = sampling | {"prompt": prompt, "n": 1, "best_of": 2, "logprobs": 0}
    (chosen,) = (await post(client, "/v1/completions", best))["choices"]
    each = [best | {"best_of": 1, "seed": best["seed"] + place} for place in range(2)]
    singles = [(await post(client, "/v1/completions", body))["choices"][0] for body in each]
    assert chosen["text"] in [single["text"] for single in singles]
    ended = [single for single in singles if single["finish_reason"] == "length"]  # an end token has no entry
    means = [sum(single["logprobs"]["token_logprobs"]) / MAX_NEW_TOKENS for single in ended]
    if len(ended) == len(singles):
        assert chosen["text"] == singles[means.index(max(means))]["text"]


async def _check_best_of(client: httpx.AsyncClient, prompt: str) -> None:
    """The seeds are drawn by the server, and told."""
    asked = {"temperature": 1.2, "details": True, "max_new_tokens": MAX_NEW_TOKENS, "top_n_tokens": 2}
    answer = await post(client, "/generate", {"inputs": prompt, "parameters": asked | {"best_of": 2}})
    (other,) = answer["details"].pop("best_of_sequences")
    best = answer["details"] | {"generated_text": answer["generated_text"]}
    means = []
    for told in (best, other):
        single = await post(client, "/generate", {"inputs": prompt, "parameters": asked | {"seed": told["seed"]}})
        assert told["generated_text"] == single["generated_text"]
        assert [t["id"] for t in told["tokens"]] == [t["id"] for t in single["details"]["tokens"]]
        assert [rounded(t) for t in told["tokens"]] == [rounded(t) for t in single["details"]["tokens"]]
        means.append(sum(token["logprob"] for token in told["tokens"]) / len(told["tokens"]))
    assert best["seed"] != other["seed"]
    assert means[0] >= means[1]


def _text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


async def _texts(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[str]:
    choices = (await post(client, path, body))["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [_text_of(choice) for choice in choices]


async def _streamed_texts(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[str]:
    response = await client.post(path, json=body | {"stream": True})
    texts = [""] * body["n"]
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return texts
