"""Ask a server for log-probabilities on every route that gives them, and hold each against transformers."""

import json
from collections.abc import Sequence
from typing import Any

import httpx

from funitel_testing.truth import CLOSE, NEAR_TIE, Truth, check_place, processed_logprobs, raw_logprobs

NUM_TOP = 5
MAX_NEW_TOKENS = 10

# Native parameters. Greedy ways first; a temperature or a warper makes the others sample.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.7},
    "one candidate": {"top_k": 1},
    "temperature": {"temperature": 0.7, "top_k": 12, "seed": 5},
    "nucleus": {"top_p": 0.8, "repetition_penalty": 0.8, "seed": 6},
    "typical": {"typical_p": 0.7, "frequency_penalty": -0.5, "seed": 7},
    "everything": {
        "temperature": 1.4,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.02,
        "typical_p": 0.95,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.3,
        "logit_bias": {"40": 3.0, "41": -100.0},
        "seed": 2**64 - 1,
    },
}

# What both kinds of routes can be asked, natively and under /v1, so that they choose the same tokens.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {"temperature": 0}),
    "biased": (
        {"repetition_penalty": 1.3, "logit_bias": {"40": 5.0}},
        {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {"40": 5.0}},
    ),
    "sampled": ({"temperature": 0.8, "top_p": 0.9, "seed": 11}, {"temperature": 0.8, "top_p": 0.9, "seed": 11}),
}


class Checked:
    """How many places were held against the truth, and what differed."""

    def __init__(self) -> None:
        self.places = 0
        self.wrong: list[str] = []

    def note(self, where: str, difference: str | None) -> None:
        """Count one place."""
        self.places += 1
        if difference is not None:
            self.wrong.append(f"{where}: {difference}")

    def note_values(self, where: str, found: Sequence[float | None], truth: Sequence[float]) -> None:
        """Count a list of log-probabilities."""
        if len(found) != len(truth):
            self.note(where, f"{len(found)} values, truly {len(truth)}")
        for place, (a, b) in enumerate(zip(found, truth, strict=False)):
            close = a is not None and abs(a - b) < CLOSE
            self.note(f"{where}, place {place}", None if close else f"{a}, truly {b}")


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    """An answer with status 200, parsed."""
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


# Native routes ------------------------------------------------------------------------------------------------------


async def check_native(
    client: httpx.AsyncClient, truth: Truth, prompt: str, ways: Sequence[str], checked: Checked
) -> None:
    """`/generate` with the prompt's tokens: each way's log-probabilities are those after all processors."""
    ids = truth.encode(prompt)
    for name in ways:
        where = f"/generate, {name}, {prompt[:20]!r}"
        asked = {"details": True, "decoder_input_details": True, "top_n_tokens": NUM_TOP, **WAYS[name]}
        body = {"inputs": prompt, "parameters": asked | {"max_new_tokens": MAX_NEW_TOKENS}}
        details = (await post(client, "/generate", body))["details"]
        tokens, tops = details["tokens"], details["top_tokens"]
        assert len(tokens) == len(tops) >= 1
        full = ids + [token["id"] for token in tokens]
        scores = truth.scores(full)
        assert [token["id"] for token in details["prefill"]] == ids
        assert details["prefill"][0]["logprob"] is None
        found = [token["logprob"] for token in details["prefill"][1:]]
        checked.note_values(f"{where}, prompt", found, truth.prompt_logprobs(scores, ids))
        for place, (token, top) in enumerate(zip(tokens, tops, strict=True)):
            at = len(ids) + place
            logprobs = processed_logprobs(scores[at - 1], full[:at], WAYS[name])
            difference = check_place(logprobs, token, top, NUM_TOP)
            if "seed" not in WAYS[name] and float(logprobs.max() - logprobs[token["id"]]) > NEAR_TIE:
                difference = f"token {token['id']} is not the best"
            checked.note(f"{where}, place {place}", difference)


async def check_native_stream(client: httpx.AsyncClient, prompt: str, way: str) -> None:
    """`/generate_stream` says what `/generate` says."""
    asked = {"details": True, "top_n_tokens": NUM_TOP, "max_new_tokens": MAX_NEW_TOKENS} | WAYS[way]
    body = {"inputs": prompt, "parameters": asked}
    details = (await post(client, "/generate", body))["details"]
    response = await client.post("/generate_stream", json=body)
    events = [json.loads(line[5:]) for line in response.text.splitlines() if line.startswith("data:")]
    assert [rounded(event["token"]) for event in events] == [rounded(token) for token in details["tokens"]]
    tops = [[rounded(token) for token in event["top_tokens"]] for event in events]
    assert tops == [[rounded(token) for token in top] for top in details["top_tokens"]]


def rounded(token: dict[str, Any]) -> dict[str, Any]:
    """A token as different company must leave it."""
    return token | {"logprob": round(token["logprob"], 3) + 0.0}


# OpenAI's routes ----------------------------------------------------------------------------------------------------


async def _native_ids(client: httpx.AsyncClient, prompt: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    body = {"inputs": prompt, "parameters": {"details": True, "max_new_tokens": MAX_NEW_TOKENS} | parameters}
    tokens: list[dict[str, Any]] = (await post(client, "/generate", body))["details"]["tokens"]
    return tokens


async def check_completions(client: httpx.AsyncClient, truth: Truth, prompt: str, pair: str, checked: Checked) -> None:
    """`/v1/completions`, with the prompt echoed: log-probabilities of the model's own scores."""
    native, openai = PAIRS[pair]
    ids, tokens = truth.encode(prompt), await _native_ids(client, prompt, native)
    full = ids + [token["id"] for token in tokens]
    scores = truth.scores(full)
    body = {"model": "any", "prompt": ids, "max_tokens": MAX_NEW_TOKENS, "logprobs": NUM_TOP, "echo": True, **openai}
    (choice,) = (await post(client, "/v1/completions", body))["choices"]
    found, where = choice["logprobs"], f"/v1/completions, {pair}, {prompt[:20]!r}"
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    assert found["tokens"][len(ids) :] == [token["text"] for token in tokens]
    checked.note_values(where, found["token_logprobs"][1:], truth.prompt_logprobs(scores, full))
    rows = raw_logprobs(scores[:-1])
    places = zip(full[1:], rows, found["tokens"][1:], found["top_logprobs"][1:], strict=True)
    for place, (own, row, text, top) in enumerate(places):
        assert len(top) >= NUM_TOP
        truly = {text: float(row[own])}
        for each in row.topk(NUM_TOP).indices.tolist():
            if each != own:  # of tokens of one text, others than the first are named by their ids
                name = truth.text_of(each)
                truly[f"token_id:{each}" if name in truly else name] = float(row[each])
        wrong = [text for text in truly | top if abs(truly.get(text, 1.0) - top.get(text, 2.0)) >= CLOSE]
        checked.note(f"{where}, place {place}", f"{wrong} of {top}, truly {truly}" if wrong else None)


async def check_chat(client: httpx.AsyncClient, truth: Truth, question: str, pair: str, checked: Checked) -> None:
    """`/v1/chat/completions`: log-probabilities of the model's own scores, whole and streamed."""
    native, openai = PAIRS[pair]
    messages = [{"role": "user", "content": question}]
    templated = await post(client, "/chat_tokenize", {"model": "any", "messages": messages})
    prompt, where = templated["templated_text"], f"/v1/chat/completions, {pair}, {question[:20]!r}"
    ids, tokens = truth.encode(prompt), await _native_ids(client, prompt, native)
    logprobs = raw_logprobs(truth.scores(ids + [token["id"] for token in tokens])[len(ids) - 1 : -1])
    body = {"model": "any", "messages": messages, "max_tokens": MAX_NEW_TOKENS, "logprobs": True, **openai}
    body |= {"top_logprobs": NUM_TOP}
    (choice,) = (await post(client, "/v1/chat/completions", body))["choices"]
    content = choice["logprobs"]["content"]
    plain = [(token, row) for token, row in zip(tokens, logprobs, strict=True) if not token["special"]]
    assert [entry["token"] for entry in content] == [token["text"] for token, _ in plain]
    for place, ((token, row), entry) in enumerate(zip(plain, content, strict=True)):
        best = row.topk(NUM_TOP)
        values = [float(row[token["id"]]), *best.values.tolist()]
        found = [entry["logprob"], *(each["logprob"] for each in entry["top_logprobs"])]
        checked.note_values(f"{where}, place {place}", found, values)
        texts = [truth.text_of(each) for each in best.indices.tolist()]
        gaps = (best.values[:-1] - best.values[1:]).tolist()
        if min(gaps) > NEAR_TIE and [each["token"] for each in entry["top_logprobs"]] != texts:
            checked.note(f"{where}, place {place}", f"likeliest {entry['top_logprobs']}, truly {texts}")
    response = await client.post("/v1/chat/completions", json=body | {"stream": True})
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    given = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"]]
    streamed = [entry for each in given if each is not None for entry in each["content"]]
    assert [(e["token"], round(e["logprob"], 3) + 0.0) for e in streamed] == [
        (e["token"], round(e["logprob"], 3) + 0.0) for e in content
    ]
