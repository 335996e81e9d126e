"""Texts are the same with drafts and without, whatever the drafts are and whenever they are switched on or off."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from funitel.model_server.cpu.decoder import FusedDecoder
from funitel.model_server.executor.executor import Executor
from funitel.proto.step import Generation, GrammarType, RowUpdate, SequenceStart, StateSave
from funitel.proto.strategy import DecodingStrategy
from funitel_testing.drafters import KnownDrafter, always_drafting
from funitel_testing.executors import collect, decode, ids_of, keep_rows, load_executor, prefill, run_alone, start
from funitel_testing.tiny import byte_tokenizer, save_tiny
from funitel_testing.zoo import ZOO

SHARES = {"right": 1.0, "wrong": 0.0, "either": 0.7}
MOST = 4


def load(folder: Path, **settings: Any) -> Executor:
    return always_drafting(load_executor(folder, speculate=MOST, **settings))


@pytest.fixture(scope="module", params=["fused", "torch", "hybrid"])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    folder = tmp_path_factory.mktemp("tiny")
    if request.param == "hybrid":
        ZOO["qwen3_5"].save(folder)
        byte_tokenizer().save(str(folder / "tokenizer.json"))
        return load(folder)
    save_tiny("llama", folder)
    if request.param == "fused":
        executor = load(folder)
        assert is_exact(executor)
        return executor
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("funitel.model_server.loading.decoder.load_fused", lambda *_: None)
        return load(folder)


def is_exact(executor: Executor) -> bool:
    """Whether a token's logits have the same bits alone and in a chunk."""
    return isinstance(executor.runner.decoder, FusedDecoder)


def sequence(i: int, max_new_tokens: int = 12, **fields: Any) -> SequenceStart:
    prompt = [(7 * i + 3 * k * k + k) % 200 + 20 for k in range(4 + i % 5)]
    return start(i, prompt, max_new_tokens, **fields)


def with_drafts(
    executor: Executor, starts: list[SequenceStart], drafter: KnownDrafter, switch: bool = False
) -> tuple[dict[int, list[Generation]], int]:
    """What all of them get in one batch with drafts; `switch`: which are turned off and on on the way."""
    speculator = executor.speculator
    assert speculator is not None
    speculator.drafter = drafter
    found: dict[int, list[Generation]] = {}
    result = prefill(executor, 1, [replace(each, speculate=MOST) for each in starts])
    collect(result, found)
    num_steps = 1
    for step in itertools.count():
        if result.batch is None:
            break
        finished = {g.request_id for g in result.generations if g.finished is not None}
        batch = result.batch
        if finished:
            batch = keep_rows(executor, batch.id, [i for i in batch.request_ids if i not in finished])
        updates = []
        if switch and step % 2:
            updates = [RowUpdate(i, (), None, (), 0 if (i + step) % 4 == 1 else 3) for i in batch.request_ids]
        result = decode(executor, [batch], updates)
        assert 0 <= result.num_accepted_tokens <= result.num_draft_tokens
        assert sum(g.num_accepted for g in result.generations) == result.num_accepted_tokens
        collect(result, found)
        num_steps += 1
    return found, num_steps


HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_p": 0.95},
    "penalties": {"do_sample": True, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "count_penalty": 0.4},
    "watermark": {"watermark": True},
    "top": {"top_n_tokens": 3, "do_sample": True, "top_k": 20},
    "rules": {"min_new_tokens": 5, "banned_tokens": ((40, 41), (50,)), "ignore_eos": False},
    "raw": {"do_sample": True, "temperature": 1.5, "raw_logprobs": True},
    "grammar": {"grammar": "[ab]{3}(xyz|xzy)[0-9]{2,6}", "grammar_type": GrammarType.REGEX, "ignore_eos": False},
}


@pytest.mark.parametrize("how", HOW)
def test_texts_are_those_without_drafts(executor: Executor, how: str) -> None:
    starts = [sequence(i, seed=i, **HOW[how]) for i in range(1, 9)]
    alone = {each.request_id: run_alone(executor, each) for each in starts}
    texts = {each.request_id: [*each.input_ids, *ids_of(alone[each.request_id])] for each in starts}
    for share, switch in itertools.product(SHARES.values(), (False, True)):
        found, num_steps = with_drafts(executor, starts, KnownDrafter(texts, share), switch)
        for i, expected in alone.items():
            assert ids_of(found[i]) == ids_of(expected)
            pieces = [piece for g in found[i] for piece in g.tokens.texts]
            assert pieces == [piece for g in expected for piece in g.tokens.texts]
            logprobs = [logprob for g in found[i] for logprob in g.tokens.logprobs]
            near = [logprob for g in expected for logprob in g.tokens.logprobs]
            assert logprobs == (near if is_exact(executor) else pytest.approx(near, abs=1e-4))
            assert found[i][-1].finished == expected[-1].finished
            tops = [top.ids for g in found[i] for top in g.top_tokens]
            assert tops == [top.ids for g in expected for top in g.top_tokens]
        longest = max(len(generations) for generations in alone.values())
        if share == 1.0 and not switch:
            assert num_steps <= 1 + -(-12 // MOST), "drafts that are right save steps"
        assert num_steps <= longest + 1


@pytest.mark.parametrize("seeded", [False, True])
def test_a_hundred_texts_are_those_without_drafts(executor: Executor, seeded: bool) -> None:
    how: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.9} if seeded else {}
    for first in range(0, 100, 10):
        starts = [sequence(i, 10, seed=i, **how) for i in range(first, first + 10)]
        texts = {each.request_id: [*each.input_ids, *ids_of(run_alone(executor, each))] for each in starts}
        found, _ = with_drafts(executor, starts, KnownDrafter(texts, 0.7, seed=first), switch=True)
        for each in starts:
            assert [*each.input_ids, *ids_of(found[each.request_id])] == texts[each.request_id]


def test_what_ends_a_text_ends_it_within_drafts(executor: Executor) -> None:
    plain = run_alone(executor, sequence(3))
    texts = {3: [*sequence(3).input_ids, *ids_of(plain)]}
    pieces = [piece for g in plain for piece in g.tokens.texts]
    middle = ids_of(plain)[5]
    endings: list[dict[str, Any]] = [{"stop_token_ids": (middle,)}, {"stop_sequences": ("".join(pieces[4:6]),)}]
    endings.append({"stop_token_ids": (middle,), "min_new_tokens": 8})
    for ending in endings:
        alone = run_alone(executor, sequence(3, **ending))
        found, num_steps = with_drafts(executor, [sequence(3, **ending)], KnownDrafter(texts, 1.0))
        assert ids_of(found[3]) == ids_of(alone)
        assert found[3][-1].finished == alone[-1].finished
        assert all(g.num_accepted < len(g.tokens.ids) for g in found[3])
        assert num_steps <= len(ids_of(alone))


def test_a_resumed_sequence_goes_on_with_drafts(executor: Executor) -> None:
    how: dict[str, Any] = {"do_sample": True, "seed": 11, "repetition_penalty": 1.2}
    whole = sequence(5, **how)
    expected = ids_of(run_alone(executor, whole))
    texts = {5: [*whole.input_ids, *expected]}
    for given in (1, 4, 9):
        resumed = replace(whole, output_ids=tuple(expected[:given]))
        found, _ = with_drafts(executor, [resumed], KnownDrafter(texts, 0.8, seed=given))
        assert [*expected[:given], *ids_of(found[5])] == expected


def test_drafts_stay_within_the_blocks_of_a_row(executor: Executor) -> None:
    short = replace(sequence(4), blocks=(1, 2, 3))  # 12 tokens
    texts = {4: [*short.input_ids, *ids_of(run_alone(executor, sequence(4)))]}
    assert executor.speculator is not None
    executor.speculator.drafter = KnownDrafter(texts, 1.0)
    result = prefill(executor, 1, [replace(short, speculate=MOST)])
    computed = len(short.input_ids)
    while computed < 12:
        assert result.batch is not None
        result = decode(executor, [result.batch])
        computed += 1 + result.num_accepted_tokens
        assert computed <= 12
    assert result.batch is not None
    result = decode(executor, [result.batch], [RowUpdate(4, (4, 5))])
    assert result.num_accepted_tokens == MOST
    executor.clear()


def test_rows_with_a_strategy_have_no_drafts(executor: Executor) -> None:
    drafter = KnownDrafter({}, 0.5)
    found, _ = with_drafts(executor, [sequence(2, strategy=DecodingStrategy(mirostat=2))], drafter)
    assert len(ids_of(found[2])) == 12
    assert drafter.num_proposed == 0


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_a_state_that_is_saved_behind_drafts_is_that_of_the_text(executor: Executor, share: float) -> None:
    if executor.runner.pool.state_pool is None:
        pytest.skip("the model keeps no states")
    assert executor.speculator is not None
    blocks = tuple(range(1, 13))
    first = replace(sequence(4), blocks=blocks, state_slot=3, speculate=MOST)
    expected = ids_of(run_alone(executor, sequence(4)))
    position = 4 * (len(first.input_ids) // 4 + 2)
    executor.speculator.drafter = KnownDrafter({4: [*first.input_ids, *expected]}, share, seed=1)
    found: dict[int, list[Generation]] = {}
    result = prefill(executor, 1, [first])
    collect(result, found)
    updates = [RowUpdate(4, (), None, (StateSave(position, 6),))]
    while len(first.input_ids) + len(ids_of(found[4])) - 1 < position:
        assert result.batch is not None
        result = decode(executor, [result.batch], updates)
        updates = []
        collect(result, found)
    executor.clear()
    given = tuple(expected[: position + 1 - len(first.input_ids)])
    again = replace(first, output_ids=given, cache_len=position, state_slot=5, state_from=6, chunk_len=1, speculate=0)
    assert [*given, *ids_of(run_alone(executor, again))] == expected
