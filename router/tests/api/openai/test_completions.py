"""OpenAI's completions, over a scripted engine."""

import json
from typing import Any

import httpx
import pytest
from fakes import EOS, FakeEngine, Serve

from funitel.proto.errors import ShardFailed
from funitel.router.api.openai.completion_text import named_logprobs
from funitel.router.serving import prepare as serving

ROUTE = "/v1/completions"
TEXT = "Hello world!"


async def whole(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post(ROUTE, json={"prompt": "Hi"} | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def chunks(client: httpx.AsyncClient, **fields: Any) -> list[Any]:
    response = await client.post(ROUTE, json={"prompt": "Hi", "stream": True} | fields)
    assert response.status_code == 200, response.text
    *frames, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


async def refused(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post(ROUTE, json={"prompt": "Hi"} | fields)
    assert response.status_code == 422, response.text
    return response.json()


async def test_a_completion(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await whole(client)
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("system_fingerprint").endswith("-native")
    assert answer.pop("model").startswith("/")
    usage = answer.pop("usage")
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 5, 8)
    assert answer == {
        "object": "text_completion",
        "choices": [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}],
    }
    assert engine.requests[0].inputs == "Hi"
    assert engine.requests[0].add_special_tokens


async def test_a_stream(client: httpx.AsyncClient) -> None:
    received = await chunks(client)
    choices = [chunk["choices"][0] for chunk in received]
    assert [choice["text"] for choice in choices] == ["Hello", " wor", "ld", "!", ""]
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["stop"]
    assert len({chunk["id"] for chunk in received}) == 1
    assert [chunk["usage"] is None for chunk in received] == [True] * 4 + [False], "TGI's last chunk counts"


async def test_usage_comes_last_when_asked(client: httpx.AsyncClient) -> None:
    *received, usage = await chunks(client, stream_options={"include_usage": True})
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 8
    assert all(chunk["usage"] is None for chunk in received)
    assert all(chunk["usage"] is None for chunk in await chunks(client, stream_options={"include_usage": False}))


@pytest.mark.parametrize("more", [{}, {"include_usage": True}])
@pytest.mark.parametrize("logprobs", [None, 1])
async def test_b1_usage_in_every_chunk(client: httpx.AsyncClient, more: Any, logprobs: int | None) -> None:
    options = {"continuous_usage_stats": True} | more
    *received, last = await chunks(client, prompt=["Hi", "Hoho"], stream_options=options, logprobs=logprobs)
    for index, prompt_tokens in enumerate([3, 5]):
        usages = [chunk["usage"] for chunk in received if chunk["choices"][0]["index"] == index]
        assert [usage["completion_tokens"] for usage in usages] == [1, 2, 3, 4, 5]
        assert {usage["prompt_tokens"] for usage in usages} == {prompt_tokens}
        assert all(usage["total_tokens"] == prompt_tokens + usage["completion_tokens"] for usage in usages)
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"], last["usage"]["total_tokens"]) == (
        8,
        10,
        18,
    )


async def test_b1_no_usage_where_it_is_not_included(client: httpx.AsyncClient) -> None:
    options = {"continuous_usage_stats": True, "include_usage": False}
    assert all(chunk["usage"] is None for chunk in await chunks(client, stream_options=options))
    options = {"continuous_usage_stats": False, "include_usage": True}
    *received, last = await chunks(client, stream_options=options)
    assert all(chunk["usage"] is None for chunk in received)
    assert last["usage"]["total_tokens"] == 8


async def test_b1_usage_of_a_prompt_alone(client: httpx.AsyncClient) -> None:
    options = {"continuous_usage_stats": True}
    received = await chunks(client, stream_options=options, echo=True, max_tokens=0)
    assert [chunk["usage"]["completion_tokens"] for chunk in received] == [0] * len(received)


@pytest.mark.parametrize(
    ("prompt", "inputs", "ids"),
    [
        ("Hi", ["Hi"], None),
        (["Hi", "Ho"], ["Hi", "Ho"], None),
        ([39, 72], ["Hi"], [(39, 72)]),
        ([[39, 72], [39]], ["Hi", "H"], [(39, 72), (39,)]),
    ],
)
async def test_prompts(client: httpx.AsyncClient, engine: FakeEngine, prompt: Any, inputs: Any, ids: Any) -> None:
    answer = await whole(client, prompt=prompt, echo=True)
    assert [request.inputs for request in engine.requests] == inputs
    assert [choice["text"] for choice in answer["choices"]] == [text + TEXT for text in inputs]
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(inputs)))
    if ids is not None:
        assert [request.input_ids for request in engine.requests] == ids


async def test_several_prompts_with_several_completions(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await whole(client, prompt=["Hi", "Hoho"], n=2, seed=2**64 - 1, max_tokens=1)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [request.inputs for request in engine.requests] == ["Hi", "Hi", "Hoho", "Hoho"]
    assert [request.sampling.seed for request in engine.requests] == [2**64 - 1, 0, 1, 2]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3 + 5, 4)
    received = await chunks(client, prompt=["Hi", "Hoho"], n=2, echo=True)
    texts = [""] * 4
    for chunk in received:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["Hi" + TEXT, "Hi" + TEXT, "Hoho" + TEXT, "Hoho" + TEXT]
    assert [chunk["usage"] is not None for chunk in received] == [False] * (len(received) - 1) + [True]


async def test_the_best_of_several(serve: Serve) -> None:
    engine = FakeEngine(logprobs=[-3.0, -1.0, -2.0])
    async with serve(engine, max_best_of=3) as client:
        answer = await whole(client, best_of=3, n=2, logprobs=0, max_tokens=1)
    assert [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]] == [[-1.0], [-2.0]]
    assert answer["usage"]["completion_tokens"] == 3
    assert all(request.sampling.raw_logprobs for request in engine.requests)


async def test_logprobs(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    (choice,) = (await whole(client, logprobs=2))["choices"]
    texts = ["Hello", " wor", "ld", "!", EOS]
    assert choice["logprobs"] == {
        "tokens": texts,
        "token_logprobs": [-0.5] * 5,
        "top_logprobs": [{text: -0.5, "x": -9999.0} for text in texts],
        "text_offset": [0, 5, 9, 11, 12],
    }
    assert engine.requests[0].sampling.raw_logprobs


async def test_b2_logprobs_0_is_the_chosen_token_alone(client: httpx.AsyncClient) -> None:
    (choice,) = (await whole(client, logprobs=0, echo=True, max_tokens=1))["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["top_logprobs"] == [
        None,
        *({text: value} for text, value in zip(logprobs["tokens"][1:], logprobs["token_logprobs"][1:], strict=True)),
    ]


@pytest.mark.parametrize(
    ("prompt", "tokens", "offsets"),
    [
        ("Hi", ["<s>", "H", "i", "Hello"], [0, 0, 1, 2]),
        ([39, 72], ["H", "i", "Hello"], [0, 1, 2]),
        ([256, 39, 256, 72], ["<s>", "H", "<s>", "i", "Hello"], [0, 3, 4, 7, 8]),
    ],
)
@pytest.mark.parametrize("width", [0, 1, 3, 5])
async def test_b2_logprobs_of_the_prompt(
    client: httpx.AsyncClient, engine: FakeEngine, prompt: Any, tokens: list[str], offsets: list[int], width: int
) -> None:
    (choice,) = (await whole(client, prompt=prompt, echo=True, logprobs=width, max_tokens=1))["choices"]
    assert engine.requests[0].prompt_logprobs == width
    assert engine.requests[0].prefill_logprobs, "no cached prefix: its tokens have scores too"
    logprobs, num_prompt = choice["logprobs"], len(tokens) - 1
    assert logprobs["tokens"] == tokens
    assert logprobs["token_logprobs"] == [None, *[-1.0] * (num_prompt - 1), -0.5]
    assert logprobs["text_offset"] == offsets
    for token, at in list(zip(tokens, offsets, strict=True))[1:]:
        assert choice["text"].startswith(token, at)
    first, *others = logprobs["top_logprobs"]
    assert first is None
    for token, logprob, top in zip(tokens[1:], logprobs["token_logprobs"][1:], others[:-1], strict=False):
        assert top[token] == logprob
        assert len(top) >= max(width, 1)
        assert sorted(top.values(), reverse=True)[:width][:1] in ([], [-0.25])


def test_b2_tokens_of_one_text_have_a_name_each() -> None:
    named = named_logprobs(3, "a", -2.0, [(1, "b", -1.0), (2, "a", -1.5)])
    assert named == {"a": -2.0, "b": -1.0, "token_id:2": -1.5}
    named = named_logprobs(3, "?", -1.0, [(3, "!", -1.0), (2, "b", -1.5)])
    assert named == {"?": -1.0, "b": -1.5}, "the token that was taken is among the likeliest"


async def test_b2_prompts_side_by_side_and_streamed(client: httpx.AsyncClient) -> None:
    fields = {"prompt": ["Hi", "Hoho"], "echo": True, "logprobs": 2, "max_tokens": 1, "n": 2}
    choices = (await whole(client, **fields))["choices"]
    assert [choice["text"] for choice in choices] == ["HiHello"] * 2 + ["HohoHello"] * 2
    assert [len(choice["logprobs"]["top_logprobs"]) for choice in choices] == [4, 4, 6, 6]
    for chunk in await chunks(client, **fields):
        (choice,) = chunk["choices"]
        assert choice["logprobs"] == choices[choice["index"]]["logprobs"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (ROUTE, {"prompt": "x" * 90, "n": 8, "echo": True, "logprobs": 20}),
        (ROUTE, {"prompt": ["x" * 90] * 4, "echo": True, "logprobs": 20}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 60}], "prompt_logprobs": 20, "n": 8}),
    ],
)
async def test_b2_scores_of_prompts_are_bounded(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str, fields: Any
) -> None:
    assert (await client.post(path, json=fields)).status_code == 200
    monkeypatch.setattr(serving, "MAX_PROMPT_SCORES", 5000)
    response = await client.post(path, json=fields)
    assert response.status_code == 422
    assert "must ask for at most 5000 values" in response.json()["error"]["message"]


async def test_b2_the_token_that_ends_a_text_is_scored(serve: Serve) -> None:
    async with serve(FakeEngine([])) as client:
        (choice,) = (await whole(client, echo=True, logprobs=1, max_tokens=1))["choices"]
    assert choice["text"] == "Hi"
    assert choice["logprobs"]["tokens"] == ["<s>", "H", "i", EOS], "lm-eval takes the last one for the completion's"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]


async def test_b2_a_stop_that_was_cut_off_has_no_tokens(client: httpx.AsyncClient) -> None:
    (choice,) = (await whole(client, stop=["ld!"], logprobs=0))["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("Hello wor", ["Hello", " wor"])


async def test_only_the_prompt(client: httpx.AsyncClient) -> None:
    answer = await whole(client, echo=True, max_tokens=0, logprobs=0)
    assert answer["choices"][0]["text"] == "Hi"
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert len(answer["choices"][0]["logprobs"]["top_logprobs"]) == 3
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stop", [None, "o w", ["rld", "!"], "H"])
@pytest.mark.parametrize("stride", [1, 5])
@pytest.mark.parametrize("max_tokens", [2, 50])
@pytest.mark.parametrize("echo", [False, True])
async def test_streamed_and_whole_are_equal(serve: Serve, stop: Any, stride: int, max_tokens: int, echo: bool) -> None:
    fields = {"stop": stop, "max_tokens": max_tokens, "logprobs": 1, "echo": echo}
    async with serve(FakeEngine(stride=stride)) as client:
        (answer,) = (await whole(client, **fields))["choices"]
        choices = [chunk["choices"][0] for chunk in await chunks(client, **fields)]
    assert "".join(choice["text"] for choice in choices) == answer["text"]
    assert choices[-1]["finish_reason"] == answer["finish_reason"]
    for name, values in answer["logprobs"].items():
        assert [value for choice in choices for value in choice["logprobs"][name]] == values


async def test_parameters_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await whole(client, temperature=0.5, presence_penalty=1, frequency_penalty=-1, min_p=0.1, logit_bias={"3": 4})
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.min_p, sampling.logit_bias) == (0.5, 0.1, ((3, 4.0),))
    assert (sampling.presence_penalty, sampling.count_penalty, sampling.frequency_penalty) == (1.0, -1.0, 0.0)
    await whole(client, temperature=0)
    assert not engine.requests[1].sampling.is_sampled


@pytest.mark.parametrize(
    ("fields", "param", "error_type"),
    [
        ({"suffix": ""}, "suffix", "suffix not supported"),
        ({"prompt": ["a"] * 5}, "prompt", "batch size exceeded"),
        ({"prompt": []}, "prompt", "validation"),
        ({"prompt": ""}, "prompt", "validation"),
        ({"prompt": [[]]}, "prompt", "validation"),
        ({"prompt": [1, "a"]}, "prompt", "validation"),
        ({"prompt": [100000]}, "prompt", "validation"),
        ({"prompt": None}, "prompt", "validation"),
        ({"best_of": 3}, "best_of", "validation"),
        ({"best_of": 1, "n": 2}, "best_of", "validation"),
        ({"best_of": 2, "stream": True}, "best_of", "validation"),
        ({"n": 129}, "n", "validation"),
        ({"n": 100, "prompt": ["a", "b"]}, "n", "validation"),
        ({"logprobs": 21}, "logprobs", "validation"),
        ({"max_tokens": 0}, "max_tokens", "validation"),
        ({"max_tokens": 200}, "max_tokens", "validation"),
        ({"stream_options": {}}, "stream_options", "validation"),
        ({"top_p": 1.5}, "top_p", "validation"),
    ],
)
async def test_what_is_refused(client: httpx.AsyncClient, fields: Any, param: str, error_type: str) -> None:
    body = await refused(client, **fields)
    assert body["error_type"] == error_type
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"].split(".")[0] == param
    assert param in body["error"]["message"]


_KINDS = "must be a string, an array of strings, an array of token ids or an array of such arrays"
_ID = "must be a token id, an integer >= 0 and <= 4294967295"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (5, f"prompt: {_KINDS}. Given: 5"),
        ({}, f"prompt: {_KINDS}. Given: {{}}"),
        ([], "prompt: must not be empty. Given: []"),
        (["a", 5], "prompt: item 1 must be a string, as item 0 is. Given: 5"),
        ([1, "a"], f"prompt: item 1 {_ID}. Given: 'a'"),
        ([-1], f"prompt: item 0 {_ID}. Given: -1"),
        ([True], f"prompt: item 0 {_ID}. Given: True"),
        ([2**32], f"prompt: item 0 {_ID}. Given: 4294967296"),
        ([1, [2]], f"prompt: item 1 {_ID}. Given: [2]"),
        ([[1], 2], "prompt: item 1 must be an array of token ids. Given: 2"),
        ([[]], "prompt: item 0 must be an array of token ids. Given: []"),
        ([[1], [2, 1.5]], f"prompt: item 1.1 {_ID}. Given: 1.5"),
    ],
)
async def test_a_wrong_prompt_is_told_in_one_line(client: httpx.AsyncClient, prompt: Any, says: str) -> None:
    body = await refused(client, prompt=prompt)
    assert body["error"]["message"] == f"Input validation error: {says}"
    assert body["error"]["param"] == "prompt"


async def test_errors_before_the_first_token_have_a_status(serve: Serve) -> None:
    async with serve(FakeEngine(error=ShardFailed("rank 1 died"))) as client:
        response = await client.post(ROUTE, json={"prompt": "Hi", "stream": True})
    assert response.status_code == 424
    assert response.json()["error"]["type"] == "server_error"
