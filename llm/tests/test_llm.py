"""The offline API over a tiny model: what is asked is what comes back, in order, from anywhere, and nothing stays."""

import asyncio
import gc
import json
import random
import re
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from funitel.llm import LLM, Grammar, InvalidRequest, SamplingParams, StartupError
from funitel.proto.errors import NotReady, TemplateError
from funitel.proto.step import StepResult

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CONTEXT = 256


def ids(llm: LLM, prompts: Any, params: Any) -> list[list[tuple[int, ...]]]:
    """Token ids of every completion."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def text(llm: LLM, prompt: str, **params: Any) -> str:
    """Text of one greedy completion."""
    (output,) = llm.generate(prompt, SamplingParams(**({"temperature": 0, "max_tokens": 12} | params)), use_tqdm=False)
    return output.outputs[0].text


# Prompts


def test_a_text_its_tokens_and_lists_of_either_are_the_same_prompt(llm: LLM) -> None:
    encoded = list(b"Hello")
    prompts = llm.generate("Hello", GREEDY, use_tqdm=False)[0]
    assert (prompts.prompt, len(prompts.prompt_token_ids), len(prompts.outputs)) == ("Hello", len(encoded), 1)
    token_ids = prompts.prompt_token_ids
    named = [
        {"prompt": "Hello"},
        {"prompt_token_ids": list(token_ids)},
        {"prompt": None, "prompt_token_ids": token_ids},
    ]
    found = ids(llm, [token_ids, "Hello", list(token_ids), *named], GREEDY)
    assert found == [[prompts.outputs[0].token_ids]] * 6
    assert ids(llm, list(token_ids), GREEDY) == ids(llm, named[0], GREEDY) == found[:1]
    assert llm.generate([token_ids], GREEDY, use_tqdm=False)[0].prompt is None


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (3, "prompts must be a text, token ids or a list of these, given 3"),
        (
            {"prompt": "a", "multi_modal_data": {}},
            "prompt 0 must have 'prompt' or 'prompt_token_ids' and no other key, given 'prompt', 'multi_modal_data'",
        ),
        ([{}], "prompt 0 must have 'prompt' or 'prompt_token_ids' and no other key, given none"),
        ([{"prompt_token_ids": "a"}], "prompt 0 must be a text or token ids, given 'a'"),
        ([[*range(300), "b"]], "prompt 0 must be a text or token ids, given [0, 1, 2, 3, 4, 5, ...]"),
        (["a", None], "prompt 1 must be a text or token ids, given None"),
        (["a", [1, "b"]], "prompt 1 must be a text or token ids, given [1, 'b']"),
        (["a", [True]], "prompt 1 must be a text or token ids, given [True]"),
        (["a", ""], "prompt 1 has no tokens"),
        (["a", [5, -1]], "prompt 1: token ids must be within 0..287, given -1"),
        (["a", [288]], "prompt 1: token ids must be within 0..287, given 288"),
        (["a", "b" * CONTEXT], f"prompt 1: the prompt must have at most {CONTEXT - 1} tokens, given {CONTEXT}"),
    ],
)
def test_a_wrong_prompt_is_named_and_nothing_is_computed(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logprobs": 289}, "prompt 0: logprobs must be an integer within 0..288, given 289"),
        ({"logit_bias": {288: 1.0}}, "prompt 0: logit_bias: a token id must be an integer within 0..287, given 288"),
    ],
)
def test_what_the_vocabulary_does_not_have_is_refused(llm: LLM, params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate("a", SamplingParams(**params), use_tqdm=False)
    assert caught.value.message == message


def test_a_completion_ends_with_the_context(llm: LLM) -> None:
    prompt = "x" * (CONTEXT - 5)
    for max_tokens in (None, 100):
        (output,) = llm.generate(
            prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), use_tqdm=False
        )
        assert len(output.outputs[0].token_ids) == 5
        assert output.outputs[0].finish_reason == "length"


# Answers


def test_mixed_parameters_in_one_call_give_what_each_gives_alone(llm: LLM) -> None:
    prompts = ["alpha", "beta", "gamma", "delta", "epsilon"]
    each = [
        GREEDY,
        SamplingParams(seed=7, max_tokens=20, ignore_eos=True),
        SamplingParams(seed=7, temperature=0.7, top_p=0.9, top_k=20, max_tokens=5, ignore_eos=True),
        SamplingParams(seed=1, min_p=0.05, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=9, ignore_eos=True),
        SamplingParams(seed=2, n=3, frequency_penalty=0.7, max_tokens=7, ignore_eos=True),
    ]
    alone = [ids(llm, prompt, params)[0] for prompt, params in zip(prompts, each, strict=True)]
    assert ids(llm, prompts, each) == alone
    assert [[len(token_ids) for token_ids in found] for found in alone] == [[12], [20], [5], [9], [7, 7, 7]]
    backwards = ids(llm, prompts[::-1], each[::-1])
    assert backwards == alone[::-1]


def test_n_completions_are_those_of_the_following_seeds(llm: LLM) -> None:
    (several,) = ids(llm, "one", SamplingParams(n=4, seed=2**64 - 2, max_tokens=10, ignore_eos=True))
    single = [
        ids(llm, "one", SamplingParams(seed=seed, max_tokens=10, ignore_eos=True))[0][0]
        for seed in (2**64 - 2, 2**64 - 1, 0, 1)
    ]
    assert several == single
    assert len(set(several)) == 4


def test_without_a_seed_samples_differ(llm: LLM) -> None:
    found = ids(llm, ["same"] * 4, SamplingParams(max_tokens=20, ignore_eos=True))
    assert len({token_ids for (token_ids,) in found}) == 4


def test_logprobs_are_of_the_model_and_hold_the_token_taken(llm: LLM) -> None:
    params = SamplingParams(seed=3, temperature=0.5, top_k=50, logprobs=2, max_tokens=10, ignore_eos=True)
    (output,) = llm.generate("logs", params, use_tqdm=False)
    (completion,) = output.outputs
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids) == 10
    taken = []
    for token_id, found in zip(completion.token_ids, completion.logprobs, strict=True):
        ranks = [logprob.rank for logprob in found.values()]
        assert ranks in ([1, 2], [1, 2, None])
        assert len(found) == 2 or list(found)[2] == token_id
        values = [logprob.logprob for logprob in found.values()]
        assert values == sorted(values, reverse=True)
        taken.append(found[token_id].logprob)
    assert completion.cumulative_logprob == pytest.approx(sum(taken))
    # The temperature is no part of them: another one that draws the same token reports the same.
    hotter = llm.generate("logs", SamplingParams(temperature=0, logprobs=0, max_tokens=1), use_tqdm=False)
    (first,) = hotter[0].outputs[0].logprobs or ()
    assert first[hotter[0].outputs[0].token_ids[0]].logprob == pytest.approx(
        max(logprob.logprob for logprob in completion.logprobs[0].values()), abs=1e-5
    )


def test_no_logprobs_unless_asked_for_and_only_the_token_with_none_besides(llm: LLM) -> None:
    (without,) = llm.generate("a", GREEDY, use_tqdm=False)[0].outputs
    assert without.logprobs is None
    assert without.cumulative_logprob < 0
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)
    (output,) = llm.generate("a", params, use_tqdm=False)[0].outputs
    assert [list(found) for found in output.logprobs or ()] == [[token_id] for token_id in output.token_ids]


def test_a_stop_is_cut_off_unless_wanted(llm: LLM) -> None:
    whole = text(llm, "stop here", max_tokens=30, ignore_eos=True)
    stop = whole[4:6]
    at = whole.index(stop)
    (output,) = llm.generate(
        "stop here", SamplingParams(temperature=0, max_tokens=30, stop=["never there", stop]), use_tqdm=False
    )
    (completion,) = output.outputs
    assert completion.text == whole[:at]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    kept = text(llm, "stop here", max_tokens=30, stop=stop, include_stop_str_in_output=True)
    assert kept == whole[: at + len(stop)]


def test_b6_token_rules_of_vllm(llm: LLM) -> None:
    def output(**params: Any) -> Any:
        params = {"temperature": 0, "max_tokens": 12, "ignore_eos": True} | params
        return llm.generate("a", SamplingParams(**params), use_tqdm=False)[0].outputs[0]

    whole = output()
    place = next(i for i in range(2, 12) if whole.token_ids[i] not in whole.token_ids[:i])
    stop = whole.token_ids[place]
    cut = output(stop_token_ids=[stop])
    assert cut.token_ids == whole.token_ids[: place + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    kept = output(stop_token_ids=[stop], include_stop_str_in_output=True)
    assert kept.text.startswith(cut.text)
    assert len(kept.text) > len(cut.text)
    later = output(stop_token_ids=[stop], min_tokens=place + 2)
    assert stop not in later.token_ids[: place + 2]
    allowed = output(allowed_token_ids=[65, 66])
    assert set(allowed.token_ids) <= {65, 66}
    banned = output(allowed_token_ids=[65, 66], bad_words=[allowed.text[0]])
    assert allowed.text[0] not in banned.text
    assert len(set(banned.token_ids)) == 1
    special = output(logit_bias={256: 100.0}, max_tokens=2, skip_special_tokens=False)
    assert special.token_ids == (256, 256)
    assert len(special.text) > 0


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"allowed_token_ids": "a"}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"skip_special_tokens": 1}, "skip_special_tokens"),
    ],
)
def test_b6_wrong_token_rules_are_named(llm: LLM, params: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        llm.generate("a", SamplingParams(**params), use_tqdm=False)


def test_the_end_of_text_ends_unless_ignored(llm: LLM) -> None:
    bias = {256: 100.0}  # the model's end of text
    (output,) = llm.generate("a", SamplingParams(temperature=0, max_tokens=5, logit_bias=bias), use_tqdm=False)
    (completion,) = output.outputs
    assert (completion.token_ids, completion.text, completion.finish_reason) == ((256,), "", "stop")
    assert completion.stop_reason is None
    params = SamplingParams(temperature=0, max_tokens=5, logit_bias=bias, ignore_eos=True)
    (output,) = llm.generate("a", params, use_tqdm=False)
    assert output.outputs[0].token_ids == (256,) * 5
    assert output.outputs[0].finish_reason == "length"


def test_grammars_keep_completions_to_what_they_describe(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}, "is_new": {"type": "boolean"}},
        "required": ["size", "is_new"],
        "additionalProperties": False,
    }
    grammars = [Grammar.json(schema), Grammar.regex("[0-9]{3}-[a-f]{2}"), Grammar.choice(["yes", "no", "per(haps)"])]
    each = [SamplingParams(seed=seed, max_tokens=60, grammar=grammar, n=3) for seed, grammar in enumerate(grammars)]
    free = SamplingParams(seed=4, max_tokens=20, ignore_eos=True)
    *kept, beside = llm.generate(["x"] * 4, [*each, free], use_tqdm=False)
    texts = [[completion.text for completion in output.outputs] for output in kept]
    for text in texts[0]:
        assert set(json.loads(text)) == {"size", "is_new"}
    assert all(re.fullmatch("[0-9]{3}-[a-f]{2}", text) for text in texts[1])
    assert set(texts[2]) <= {"yes", "no", "per(haps)"}
    assert all(completion.finish_reason == "stop" for output in kept for completion in output.outputs)
    assert [beside.outputs[0].token_ids] == ids(llm, "x", free)[0]


def test_logprobs_are_there_for_every_token_of_a_grammar(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=40, grammar=Grammar.choice(["a long word", "another"]), logprobs=1
    )
    (output,) = llm.generate("x", params, use_tqdm=False)
    (completion,) = output.outputs
    assert completion.text in ("a long word", "another")
    assert completion.logprobs is not None
    assert [token_id in found for token_id, found in zip(completion.token_ids, completion.logprobs, strict=True)] == [
        True
    ] * len(completion.token_ids)


@pytest.mark.parametrize("grammar", [Grammar.regex("(a"), Grammar.json({"type": "nothing"}), Grammar.json("{")])
def test_a_grammar_that_cannot_be_kept_is_refused_and_named(llm: LLM, grammar: Grammar) -> None:
    params = [GREEDY, SamplingParams(grammar=grammar)]
    with pytest.raises(InvalidRequest, match=r"^prompt 1: .*grammar"):
        llm.generate(["a", "b"], params, use_tqdm=False)
    assert len(ids(llm, "a", GREEDY)) == 1


def test_a_small_pool_holds_many_prompts_one_after_another(model: Path, llm: LLM) -> None:
    draw = random.Random(0)
    prompts = ["".join(draw.choices("abcdefgh ", k=draw.randint(1, 120))) for _ in range(200)]
    each = [SamplingParams(seed=seed, max_tokens=draw.randint(1, 60), ignore_eos=True) for seed in range(len(prompts))]
    with LLM(model, num_threads=1, block_size=4, max_batch_total_tokens=600, max_total_tokens=200) as small:
        found = ids(small, prompts, each)
        assert small._model.engine._scheduler.num_preempted > 0
        assert small._model.engine._scheduler.blocks.num_used == 0
    assert [len(token_ids) for (token_ids,) in found] == [params.max_tokens for params in each]
    some = range(0, 200, 20)
    assert ids(llm, [prompts[i] for i in some], [each[i] for i in some]) == [found[i] for i in some]


# Chats


def test_a_chat_is_its_rendered_prompt(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt == "[user] Hi\n[assistant]"
    assert [output.outputs[0].token_ids] == ids(llm, "[user] Hi\n[assistant]", GREEDY)[0]
    in_parts = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]
    both = llm.chat([messages, in_parts], GREEDY, use_tqdm=False)
    same = replace(output, metrics=None, num_cached_tokens=0)
    assert [replace(each, metrics=None, num_cached_tokens=0) for each in both] == [same, same]


def test_an_answer_begun_is_continued(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt == "[user] Hi\n[assistant] Hello"


def test_developers_are_the_system_where_a_template_does_not_know_them(llm: LLM) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt == "[system] Be brief.\n[user] Hi\n[assistant]"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "messages must be a list of messages or of conversations, given 'Hi'"),
        ([[]], "conversation 0: a conversation must be a list of messages, given []"),
        (
            [[{"role": "user", "content": "a"}], [{"content": "b"}]],
            "conversation 1: message 0 must have a role, given {'content': 'b'}",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "conversation 0: message 0: content must be a text or text parts, given [{'type': 'image_url'}]",
        ),
    ],
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert caught.value.message == message


def test_a_model_without_a_template_completes_but_does_not_chat(model: Path, tmp_path: Path) -> None:
    for path in model.iterdir():
        if path.name != "tokenizer_config.json":
            (tmp_path / path.name).symlink_to(path)
    with LLM(tmp_path, num_threads=1, max_batch_total_tokens=1000) as llm:
        assert len(ids(llm, "a", GREEDY)) == 1
        with pytest.raises(TemplateError, match="the model has no chat template"):
            llm.chat([{"role": "user", "content": "Hi"}])


def test_nothing_said_about_sampling_takes_what_is_recommended(model: Path, tmp_path: Path) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "funitel.json").write_text('{"sampling": {"temperature": 0.0}}')
    with LLM(tmp_path, num_threads=1, max_batch_total_tokens=1000) as llm:
        first, second = ids(llm, ["a", "a"], None)
    assert first == second


# Threads, loops, progress, the end


async def test_a_running_event_loop_does_not_matter(llm: LLM) -> None:
    assert ids(llm, "a", GREEDY) == await asyncio.to_thread(ids, llm, "a", GREEDY)


def test_calls_of_several_threads_share_steps(llm: LLM) -> None:
    prompts = [f"thread {number}" for number in range(8)]
    alone = [ids(llm, prompt, GREEDY) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda prompt: ids(llm, prompt, GREEDY), prompts)) == alone


def test_progress_counts_completions_and_tokens(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], SamplingParams(n=2, max_tokens=4, ignore_eos=True))
    shown = capsys.readouterr().err
    assert "completions: 100%" in shown
    assert "4/4" in shown
    assert "tokens/s" in shown
    llm.generate("a", GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_an_interrupt_takes_every_sequence_out(llm: LLM) -> None:
    engine = llm._model.engine
    threading.Thread(target=_interrupt_main, args=(engine,)).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["long"] * 20, SamplingParams(max_tokens=200, ignore_eos=True, n=2), use_tqdm=False)
    assert engine.requests.streams == {}
    assert not engine._scheduler.waiting
    assert not engine._scheduler.running
    assert len(ids(llm, "after", GREEDY)) == 1


@pytest.mark.parametrize("has_begun", [True, False])
def test_an_interrupt_at_the_start_of_a_call_takes_its_sequences_out(
    llm: LLM, has_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, loop = llm._model.engine, llm._model.loop._loop
    call_soon = loop.call_soon_threadsafe

    def interrupted(*call: Any) -> None:
        monkeypatch.undo()
        if has_begun:
            call_soon(*call)
            while not engine._scheduler.running:
                time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "call_soon_threadsafe", interrupted)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["long"] * 20, SamplingParams(max_tokens=200, ignore_eos=True, n=2), use_tqdm=False)
    assert time.monotonic() < begin + 4
    assert engine.requests.streams == {}
    assert len(ids(llm, "after", GREEDY)) == 1


def _interrupt_main(engine: Any) -> None:
    while not engine._scheduler.running:
        time.sleep(0.01)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_a_failed_step_names_its_prompt_and_the_next_call_works(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: Any = llm._model.engine._replica.ranks

    def fail(*_: Any, **__: Any) -> StepResult:
        raise RuntimeError("no memory\nleft")

    with monkeypatch.context() as patch:
        patch.setattr(ranks._executor, "compute_prefill", fail)
        with pytest.raises(Exception, match=r"^prompt 0: RuntimeError: no memory left$"):
            llm.generate("a", GREEDY, use_tqdm=False)
    assert len(ids(llm, "a", GREEDY)) == 1


def test_closing_ends_threads_frees_memory_and_calls(model: Path) -> None:
    before = set(threading.enumerate())
    llm = LLM(model, num_threads=1, max_batch_total_tokens=1000)
    ranks: Any = llm._model.engine._replica.ranks
    executor = weakref.ref(ranks._executor)
    del ranks
    failures: list[Exception] = []

    def wait() -> None:
        try:
            llm.generate("a", SamplingParams(max_tokens=None, ignore_eos=True, n=50), use_tqdm=False)
        except NotReady as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not llm._model.engine.requests.streams:
        time.sleep(0.01)
    llm.close()
    llm.close()
    waiting.join(10)
    assert [str(error) for error in failures] == ["this LLM was closed before the answer was complete"]
    with pytest.raises(NotReady, match="this LLM is closed"):
        llm.generate("a", GREEDY, use_tqdm=False)
    assert set(threading.enumerate()) == before
    failures.clear()  # their tracebacks hold what they passed through
    gc.collect()
    assert executor() is None


def test_dropping_it_is_closing_it(model: Path) -> None:
    before = set(threading.enumerate())
    llm = LLM(model, num_threads=1, max_batch_total_tokens=1000)
    llm.generate("a", GREEDY, use_tqdm=False)
    del llm
    gc.collect()
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_shard": 0}, "num_shard must be an integer >= 1, given 0"),
        ({"dtype": "int3"}, "dtype must be one of None, float32, float16, bfloat16, given 'int3'"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, given 'tpu'"),
        ({"block_size": 0}, "block_size must be an integer >= 1, given 0"),
        ({"num_threads": 1.5}, "num_threads must be an integer >= 1, given 1.5"),
        (
            {"max_total_tokens": 200, "max_batch_total_tokens": 100},
            "max_total_tokens 200 must be <= max_batch_total_tokens 100",
        ),
        ({"max_total_tokens": 300}, "max_total_tokens 300 exceeds the model's context of 256"),
        ({"cuda_memory_fraction": 0}, "cuda_memory_fraction must be > 0 and <= 1, given 0"),
    ],
)
def test_wrong_arguments_are_refused_in_the_words_of_python(
    model: Path, arguments: dict[str, Any], message: str
) -> None:
    before = set(threading.enumerate())
    with pytest.raises(StartupError) as caught:
        LLM(model, **arguments)
    assert caught.value.message == message
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) != before:
        assert time.monotonic() < deadline, "a thread was left"
        time.sleep(0.01)


def test_models_are_kept_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path | None] = []

    def resolve(model: str, *, revision: str | None, cache_dir: str | Path | None) -> None:
        asked.append(None if cache_dir is None else Path(cache_dir))
        raise StartupError("that is all")

    monkeypatch.setattr("funitel.model_server.hub.resolve.resolve", resolve)
    monkeypatch.setenv("FUNITEL_CACHE", str(tmp_path))
    for given in ({}, {"cache_dir": "/elsewhere"}):
        with pytest.raises(StartupError, match="that is all"):
            LLM(**given)
    monkeypatch.delenv("FUNITEL_CACHE")
    with pytest.raises(StartupError, match="that is all"):
        LLM()
    assert asked == [tmp_path, Path("/elsewhere"), None]


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=f"^no such folder or file: {tmp_path}/none$"):
        LLM(tmp_path / "none")
