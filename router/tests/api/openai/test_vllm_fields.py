"""vLLM's fields of chats and completions reach the engine, and shape the text alike in streams and whole answers."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve

from funitel.proto.errors import FunitelError
from funitel.proto.settings.options import Counts
from funitel.proto.step import FinishReason, GeneratedText, Generation, GrammarType, Tokens
from funitel.router.chat.transcript import Transcript
from funitel.router.serving.service import Service
from funitel.router.settings import RouterSettings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "Hi"},
}
BOTH = pytest.mark.parametrize("path", BODIES)


async def text_of(client: httpx.AsyncClient, path: str, **fields: Any) -> str:
    """The text of an answer, which is the same streamed."""
    response = await client.post(path, json=BODIES[path] | fields)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    whole: str = choice["message"]["content"] if path == CHAT else choice["text"]
    streamed = await client.post(path, json=BODIES[path] | fields | {"stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    assert whole == "".join(c["delta"].get("content") or "" if path == CHAT else c["text"] for c in choices)
    return whole


@BOTH
async def test_b6_lengths_and_tokens_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    fields = {"min_tokens": 3, "stop_token_ids": [5, 6], "allowed_token_ids": [7], "max_tokens": 9}
    await text_of(client, path, **fields)
    sampling = engine.requests[-1].sampling
    assert (sampling.min_new_tokens, sampling.stop_token_ids, sampling.allowed_token_ids) == (3, (5, 6), (7,))
    assert sampling.changes_scores


@BOTH
async def test_b6_bad_words_are_banned_at_the_beginning_and_behind_a_space(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    await text_of(client, path, bad_words=["ab"])
    assert engine.requests[-1].sampling.banned_tokens == ((64, 65), (220, 64, 65))  # of bytes


@BOTH
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 10, "max_tokens": 9}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids.0"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["a"] * 257}, "bad_words"),
        ({"bad_words": ["a" * 257]}, "bad_words.0"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
        ({"truncation_side": "right"}, "truncation_side"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "start: ("}, "guided_grammar"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": {"a": 1}}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ],
)
async def test_b6_what_is_wrong_is_refused_by_name(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    response = await client.post(path, json=BODIES[path] | fields)
    assert response.status_code == 422, response.text
    assert response.json()["error"]["param"] == param


@BOTH
@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"guided_json": {"type": "object"}}, GrammarType.JSON, '{"type": "object"}'),
        ({"guided_json": '{"type": "object"}'}, GrammarType.JSON, '{"type": "object"}'),
        ({"guided_regex": "a+", "guided_decoding_backend": "outlines"}, GrammarType.REGEX, "a+"),
        ({"guided_choice": ["yes", "no"]}, GrammarType.REGEX, "yes|no"),
        ({"guided_grammar": 'start: "a"'}, GrammarType.LARK, 'start: "a"'),
        ({"structured_outputs": {"regex": "a+"}}, GrammarType.REGEX, "a+"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, GrammarType.REGEX, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, GrammarType.LARK, 'root ::= "a"'),
        ({"structured_outputs": {"json": {"type": "object"}, "backend": "x"}}, GrammarType.JSON, '{"type": "object"}'),
        ({"structured_outputs": {"json_object": True}}, GrammarType.JSON, '{"type": "object"}'),
        ({"response_format": {"type": "json_object"}}, GrammarType.JSON, '{"type": "object"}'),
        ({"response_format": {"type": "text"}, "guided_regex": None}, GrammarType.NONE, ""),
    ],
)
async def test_b6_grammars_reach_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, fields: dict[str, Any], kind: GrammarType, text: str
) -> None:
    await text_of(client, path, **fields)
    sampling = engine.requests[-1].sampling
    assert (sampling.grammar_type, sampling.grammar) == (kind, text)


@BOTH
async def test_b6_the_stop_is_part_of_the_text_on_demand(serve: Serve, path: str) -> None:
    async with serve(FakeEngine(pieces=("Hel", "lo wor", "ld!"))) as client:
        assert await text_of(client, path, stop=["o w"]) == "Hell"
        assert await text_of(client, path, stop=["o w"], include_stop_str_in_output=True) == "Hello w"
        assert await text_of(client, path, include_stop_str_in_output=True) == "Hello world!"


@BOTH
async def test_b6_the_end_token_is_never_part_of_the_text(client: httpx.AsyncClient, path: str) -> None:
    plain = await text_of(client, path)
    assert await text_of(client, path, skip_special_tokens=False) == plain
    assert await text_of(client, path, skip_special_tokens=True) == plain


def test_b6_special_tokens_are_part_of_the_text_on_demand() -> None:
    def step(text: str, *, is_special: bool, finished: GeneratedText | None = None) -> Generation:
        return Generation(1, Tokens((1,), (0.0,), (text,), (is_special,)), finished=finished)

    end = GeneratedText("a\ufffdb", 4, FinishReason.EOS_TOKEN)
    steps = [
        step("a", is_special=False),
        step("\ufffd<|x|>", is_special=True),  # what was left of a character comes before it
        step("b", is_special=False),
        step("</s>", is_special=True, finished=end),
    ]
    for shown, expected in ((False, "a\ufffdb"), (True, "a\ufffd<|x|>b")):
        transcript = Transcript((), keeps_tokens=False, shows_special=shown)
        assert "".join(transcript.feed(each) for each in steps) == expected
    transcript = Transcript(("zz",), keeps_tokens=True, shows_special=True, shows_stop=True)
    assert "".join(transcript.feed(each) for each in steps) == "a\ufffd<|x|>b</s>"


@BOTH
async def test_b6_prompts_are_truncated_to_their_last_tokens(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    await text_of(client, path)
    whole = engine.requests[-1].input_ids
    await text_of(client, path, truncate_prompt_tokens=2)
    assert engine.requests[-1].input_ids == whole[-2:]
    long = {"prompt": "x" * 500} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x" * 500}]}
    refused = await client.post(path, json=long)
    assert refused.status_code == 422
    await text_of(client, path, truncate_prompt_tokens=-1, max_tokens=5, **long)
    assert len(engine.requests[-1].input_ids) == 100
    await text_of(client, path, truncate_prompt_tokens=-1, max_tokens=150, **long)
    assert len(engine.requests[-1].input_ids) == 50


async def test_b6_special_tokens_of_prompts(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await text_of(client, COMPLETIONS)
    added = engine.requests[-1].input_ids
    await text_of(client, COMPLETIONS, add_special_tokens=False)
    assert engine.requests[-1].input_ids == added[1:]
    await text_of(client, CHAT)
    chat = engine.requests[-1].input_ids
    await text_of(client, CHAT, add_special_tokens=True)
    assert engine.requests[-1].input_ids == added[:1] + chat


def events_of(response: httpx.Response) -> list[Any]:
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


@BOTH
async def test_b6_token_ids_are_answered_on_demand(serve: Serve, path: str) -> None:
    async with serve(engine := FakeEngine(pieces=("He", "llo", "x", "yz"))) as client:
        for fields in ({}, {"stop": ["xyz"]}, {"logprobs": 1 if path == COMPLETIONS else True}):
            body = BODIES[path] | fields | {"return_token_ids": True, "n": 2}
            whole = (await client.post(path, json=body)).json()
            prompt = list(engine.requests[-1].input_ids)
            holder = whole["choices"][0] if path == COMPLETIONS else whole
            assert holder["prompt_token_ids"] == prompt
            events = events_of(await client.post(path, json=body | {"stream": True}))
            for choice in whole["choices"]:
                parts = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
                assert [each for c in parts for each in c.get("token_ids") or ()] == choice["token_ids"]
                assert len(choice["token_ids"]) >= 4
            if path == CHAT:
                firsts = [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event]
                assert firsts == [prompt]
            else:
                given = [c["prompt_token_ids"] for e in events for c in e["choices"] if "prompt_token_ids" in c]
                assert given == [prompt, prompt]
        plain = (await client.post(path, json=BODIES[path])).json()
        assert not {"token_ids", "prompt_token_ids"} & (plain.keys() | plain["choices"][0].keys())


@BOTH
async def test_b6_prompt_logprobs(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    answer = (await client.post(path, json=BODIES[path] | {"prompt_logprobs": 2})).json()
    holder = answer["choices"][0] if path == COMPLETIONS else answer
    scores, prompt = holder["prompt_logprobs"], engine.requests[-1].input_ids
    assert len(scores) == len(prompt)
    assert scores[0] is None
    for token_id, at in zip(prompt[1:], scores[1:], strict=True):
        assert set(at[str(token_id)]) == {"logprob", "rank", "decoded_token"}
        assert len(at) in (2, 3)
        assert {1, 2} <= {entry["rank"] for entry in at.values()}
    assert engine.requests[-1].prompt_logprobs == 2
    none = (await client.post(path, json=BODIES[path] | {"prompt_logprobs": 0})).json()
    scores = (none["choices"][0] if path == COMPLETIONS else none)["prompt_logprobs"]
    assert [len(at) for at in scores[1:]] == [1] * (len(scores) - 1)


@BOTH
@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1, "stream": True}, {"prompt_logprobs": 10**6}])
async def test_b6_prompt_logprobs_have_bounds(client: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> None:
    response = await client.post(path, json=BODIES[path] | fields)
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "prompt_logprobs"


async def test_b6_echo_and_prompt_logprobs(client: httpx.AsyncClient) -> None:
    body = {"prompt": "Hi", "echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 0}
    choice = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]
    assert choice["text"] == "Hi"
    assert len(choice["prompt_logprobs"]) == len(choice["logprobs"]["tokens"])


@BOTH
async def test_b6_typical_p(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    for typical_p, temperature, expected in ((0.5, 1.0, 0.5), (1, 1.0, 1.0), (0.5, 0, 1.0)):
        await text_of(client, path, typical_p=typical_p, temperature=temperature)
        assert engine.requests[-1].sampling.typical_p == expected
        assert engine.requests[-1].sampling.is_sampled is (temperature != 0)


# What ends every completion of a model


@BOTH
async def test_every_completion_ends_at_the_defaults_of_the_model(serve: Serve, engine: FakeEngine, path: str) -> None:
    async with serve(engine, default_stop=("wor", "zzz"), default_stop_token_ids=Counts("5,6")) as client:
        assert (await text_of(client, path, stop=["zzz"])).endswith("Hello ")
        asked = engine.requests[-1]
        assert asked.stopping.stop_sequences == ("zzz", "wor")
        assert asked.sampling.stop_token_ids == (5, 6)
        await text_of(client, path, ignore_eos=True)
        asked = engine.requests[-1]
        assert (asked.stopping.stop_sequences, asked.sampling.stop_token_ids) == ((), ())
        limit = {"stop": ["a", "b", "c", "d"]}  # the defaults do not count
        assert (await client.post(path, json=BODIES[path] | limit)).status_code == 200


async def test_a_default_stop_token_is_one_of_the_model(model: Path, engine: FakeEngine) -> None:
    failures: list[FunitelError] = []
    service = Service(RouterSettings(tokenizer_name=str(model), default_stop_token_ids=Counts("2000000")))
    await service.start(engine.connect, failures.append)
    await service.close()
    assert "--default-stop-token-ids must be within 0.." in failures[0].message
