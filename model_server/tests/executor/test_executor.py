"""The executor keeps the cache rules of the wire, and its results do not depend on how steps are cut or shared."""

import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from funitel.model_server.executor.executor import Executor
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.loading import fused_backend
from funitel.model_server.sampling.sampler import SamplingState
from funitel.proto.errors import InvalidRequest, NotEnoughMemory, ResourceExhausted, SettingsError, UnknownBatch
from funitel.proto.step import (
    CachedBatch,
    FinishReason,
    Generation,
    RowUpdate,
    SamplingParams,
    SequenceStart,
    StoppingParams,
    WarmupLimits,
)
from funitel.proto.strategy import DecodingStrategy
from funitel_testing.executors import (
    BLOCKS_EACH,
    chunk,
    collect,
    decode,
    ids_of,
    keep_rows,
    load_executor,
    num_sequences,
    prefill,
    run_alone,
    run_out,
    start,
)
from funitel_testing.sampled_rows import STRATEGIES
from funitel_testing.tiny import EOS, save_tiny

PROMPT = list(range(40, 60))
OTHER = list(range(100, 133))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Executor:
    return load_executor(folder)


@pytest.fixture
def executor(loaded: Executor) -> Executor:
    loaded.clear()
    assert num_sequences(loaded) == 0
    return loaded


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Completion by transformers, recomputing everything for each token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_greedy_equals_transformers_and_leaves_nothing(executor: Executor, folder: Path) -> None:
    assert ids_of(run_alone(executor, start(1, PROMPT, 24))) == greedy(folder, PROMPT, 24)
    assert num_sequences(executor) == 0


def test_a_step_is_one_forward_and_shares_chunks_with_decodes(executor: Executor) -> None:
    first = prefill(executor, 1, [start(1, PROMPT)])
    assert (first.num_forwards, first.num_forward_rows, first.num_forward_tokens) == (1, 1, 20)
    assert first.batch is not None
    mixed = prefill(executor, 2, [start(2, OTHER, chunk_len=7)], first.batch)
    assert (mixed.num_forwards, mixed.num_forward_rows, mixed.num_forward_tokens) == (1, 2, 8)
    assert [g.request_id for g in mixed.generations] == [1]
    assert mixed.batch is not None
    assert mixed.batch.id == 1
    assert mixed.batch.request_ids == (1, 2)


@pytest.mark.parametrize("chunks", [[33], [1, 32], [7, 7, 7, 7, 5], [16, 17]])
def test_chunks_do_not_change_the_tokens(executor: Executor, chunks: list[int]) -> None:
    expected = ids_of(run_alone(executor, start(2, OTHER)))
    found: dict[int, list[Generation]] = {}
    result = prefill(executor, 1, [start(2, OTHER, chunk_len=chunks[0])])
    collect(result, found)
    for count in chunks[1:]:
        assert result.batch is not None
        assert result.generations == ()
        result = decode(executor, [result.batch], [chunk(2, count)])
        collect(result, found)
    assert result.batch is not None
    run_out(executor, decode(executor, [result.batch]), found)
    assert ids_of(found[2]) == expected


def test_without_orders_the_shard_chunks_by_its_own_budget(executor: Executor) -> None:
    result = prefill(executor, 1, [start(1, PROMPT)])
    assert result.batch is not None
    executor.batches.max_prefill_tokens = 12
    try:
        result = prefill(executor, 2, [start(2, OTHER, chunk_len=5)], result.batch)
        assert result.batch is not None
        assert result.batch.current_tokens == 1 + 11
        result = decode(executor, [result.batch])
        assert result.num_forward_tokens == 12
        assert [g.request_id for g in result.generations] == [1]
    finally:
        executor.batches.max_prefill_tokens = 64


def test_a_row_may_sit_out(executor: Executor) -> None:
    result = prefill(executor, 1, [start(1, PROMPT), start(2, OTHER, chunk_len=4)])
    assert result.batch is not None
    result = decode(executor, [result.batch], [chunk(2, 0)])
    assert result.num_forward_rows == 1
    assert [g.request_id for g in result.generations] == [1]


@pytest.mark.parametrize("sampled", [False, True])
def test_company_does_not_change_the_tokens(executor: Executor, sampled: bool) -> None:
    how = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2} if sampled else {}
    expected = {i: ids_of(run_alone(executor, start(i, OTHER[i:], 10 + i, seed=i, **how))) for i in range(5)}
    found: dict[int, list[Generation]] = {}
    result = prefill(executor, 0, [start(0, OTHER, 10, seed=0, **how), start(1, OTHER[1:], 11, seed=1, **how)])
    for i in (2, 3, 4):
        collect(result, found)
        assert result.batch is not None
        result = prefill(executor, i, [start(i, OTHER[i:], 10 + i, seed=i, chunk_len=9, **how)], result.batch)
    run_out(executor, result, found)
    assert {i: ids_of(generations) for i, generations in found.items()} == expected


@pytest.mark.parametrize("name", STRATEGIES)
def test_b6_strategies_go_on_exactly_where_they_stopped(executor: Executor, name: str) -> None:
    """With what the router was told of mirostat, after any token."""
    how = {"seed": 3, "temperature": 2.0, "strategy": DecodingStrategy(**STRATEGIES[name])}
    ids, mus = list[int](), list[float | None]()
    result = prefill(executor, 1, [start(1, PROMPT, 10, **how)])
    while True:
        ids += ids_of(list(result.generations))
        mus.append(dict(result.memories).get(1))
        if result.batch is None:
            break
        result = decode(executor, [result.batch])
    assert (None in mus) is not name.startswith("mirostat")
    for cut in (1, 4, 7):
        resumed = start(2, PROMPT, 10, output_ids=tuple(ids[:cut]), mirostat_mu=mus[cut - 1], **how)
        assert ids_of(run_alone(executor, resumed)) == ids[cut:]


@pytest.mark.parametrize("cut", [1, 4, 7])
def test_resuming_goes_on_exactly_where_it_stopped(executor: Executor, cut: int) -> None:
    how = {"do_sample": True, "seed": 11, "repetition_penalty": 1.3, "presence_penalty": 0.5, "count_penalty": 0.2}
    whole = run_alone(executor, start(1, PROMPT, 10, stop_sequences=("zzz",), **how))
    rest = run_alone(executor, start(2, PROMPT, 10, output_ids=tuple(ids_of(whole)[:cut]), **how))
    assert ids_of(rest) == ids_of(whole)[cut:]
    assert "".join(g.tokens.texts[0] for g in rest) == "".join(g.tokens.texts[0] for g in whole[cut:])
    assert rest[-1].finished == whole[-1].finished


def test_concatenation_takes_the_first_id(executor: Executor) -> None:
    one = prefill(executor, 1, [start(1, PROMPT)])
    two = prefill(executor, 2, [start(2, OTHER)])
    assert one.batch is not None
    assert two.batch is not None
    both = decode(executor, [one.batch, two.batch])
    assert both.batch is not None
    assert both.batch.id == 1
    assert both.batch.request_ids == (1, 2)
    assert both.concat_ns is not None
    assert both.num_forwards == 1
    with pytest.raises(UnknownBatch, match="Batch ID 2 not found in cache"):
        decode(executor, [two.batch])


def test_a_finished_row_stays_until_filtered_and_computes_nothing(executor: Executor) -> None:
    result = prefill(executor, 1, [start(1, PROMPT, 1), start(2, OTHER, 5)])
    assert result.batch is not None
    assert result.batch.request_ids == (1, 2)
    result = decode(executor, [result.batch])
    assert result.num_forward_rows == 1
    kept = keep_rows(executor, 1, [2])
    assert kept.request_ids == (2,)
    assert num_sequences(executor) == 1


def test_the_batch_is_gone_when_all_have_finished(executor: Executor) -> None:
    result = prefill(executor, 1, [start(1, PROMPT, 1), start(2, OTHER, 1)])
    assert result.batch is None
    assert num_sequences(executor) == 0
    with pytest.raises(UnknownBatch):
        keep_rows(executor, 1, [1])


@pytest.mark.parametrize("ids", [[], [9]])
def test_filter_refuses_to_keep_nothing_or_the_unknown(executor: Executor, ids: list[int]) -> None:
    prefill(executor, 1, [start(1, PROMPT)])
    with pytest.raises(UnknownBatch):
        keep_rows(executor, 1, ids)
    assert num_sequences(executor) == 1


def test_clear(executor: Executor) -> None:
    prefill(executor, 1, [start(1, PROMPT)])
    prefill(executor, 2, [start(2, PROMPT)])
    executor.clear(1)
    executor.clear(77)
    assert num_sequences(executor) == 1
    executor.clear()
    assert num_sequences(executor) == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": ((288, 1.0),)}, "logit_bias needs token ids within 0..287, given 288"),
        ({"adapter_id": "x"}, "adapter_id x is not loaded"),
        ({"temperature": -1.0}, "temperature must be > 0 and finite, given -1.0"),
        ({"temperature": math.nan}, "temperature must be > 0 and finite, given nan"),
        ({"blocks": (1, 2, 3, 4, 1)}, "request 1 has a block twice"),
        ({"input_ids": (1, 288)}, "token ids within 0..287, given 288"),
        ({"input_ids": ()}, "needs token ids"),
        ({"blocks": (1,)}, "needs 5 blocks for this step, it has 1"),
        ({"blocks": (100_000,)}, "outside the pool"),
        ({"slots": (100, 101, 7)}, "slot 7 of token 2"),
        ({"cache_len": 20}, "cache_len 20 must be < the 20 tokens"),
        ({"output_ids": tuple(range(8))}, "max_new_tokens must be > the 8"),
    ],
)
def test_bad_starts_are_refused_and_change_nothing(executor: Executor, fields: dict[str, object], message: str) -> None:
    running = prefill(executor, 5, [start(5, OTHER)])
    assert running.batch is not None
    with pytest.raises(InvalidRequest, match=message):
        prefill(executor, 1, [start(2, PROMPT), start(1, **({"input_ids": tuple(PROMPT)} | fields))], running.batch)  # type: ignore[arg-type]
    assert num_sequences(executor) == 1
    assert decode(executor, [running.batch]).num_forward_rows == 1


def test_a_block_to_be_written_has_one_owner(executor: Executor) -> None:
    first, second = start(1, PROMPT), start(2, PROMPT)
    with pytest.raises(InvalidRequest, match=f"block {first.blocks[0]} is granted to requests 1 and 2"):
        prefill(executor, 1, [first, replace(second, blocks=first.blocks)])
    assert num_sequences(executor) == 0
    run_alone(executor, first)
    shared = replace(second, blocks=first.blocks[:4] + second.blocks[4:], cache_len=16)
    with_prefix = replace(first, cache_len=16)
    assert len(prefill(executor, 1, [with_prefix, shared]).generations) == 2


def test_bad_row_updates_are_refused(executor: Executor) -> None:
    running = prefill(executor, 5, [start(5, OTHER)])
    assert running.batch is not None
    for update in (RowUpdate(6, (), 1), RowUpdate(5, (100_000,), None)):
        with pytest.raises(InvalidRequest):
            decode(executor, [running.batch], [update])
    with pytest.raises(UnknownBatch):
        decode(executor, [CachedBatch(99, ())])
    with pytest.raises(InvalidRequest):
        decode(executor, [])


def test_granted_blocks_are_used(executor: Executor) -> None:
    expected = ids_of(run_alone(executor, start(1, PROMPT, 8)))
    found: dict[int, list[Generation]] = {}
    result = prefill(executor, 1, [start(1, PROMPT, 8, blocks=(300, 17, 5, 60, 61))])  # twenty tokens exactly
    collect(result, found)
    assert result.batch is not None
    with pytest.raises(InvalidRequest, match="needs 6 blocks"):
        decode(executor, [result.batch])
    result = decode(executor, [result.batch], [RowUpdate(1, (200,))])
    collect(result, found)
    assert result.batch is not None
    run_out(executor, decode(executor, [result.batch], [RowUpdate(1, (9,))]), found)
    assert ids_of(found[1]) == expected


def test_finish_reasons(executor: Executor, folder: Path) -> None:
    tokens = ids_of(run_alone(executor, start(1, PROMPT, 12)))
    by_length = run_alone(executor, start(1, PROMPT, 3))[-1].finished
    assert by_length is not None
    assert (by_length.finish_reason, by_length.num_tokens, by_length.seed) == (FinishReason.LENGTH, 3, None)
    eos = load_executor(folder)
    eos.output.eos_token_ids = frozenset([tokens[4]])
    ended = run_alone(eos, start(1, PROMPT, 12, ignore_eos=False))[-1].finished
    assert ended is not None
    assert ended.finish_reason is FinishReason.EOS_TOKEN
    assert ended.num_tokens == tokens.index(tokens[4]) + 1
    ignored = run_alone(eos, start(1, PROMPT, 12))[-1].finished
    assert ignored is not None
    assert ignored.finish_reason is FinishReason.LENGTH


def test_a_stop_across_tokens_is_found_and_located(executor: Executor) -> None:
    plain = run_alone(executor, start(1, PROMPT, 20))
    assert plain[-1].finished is not None
    text = plain[-1].finished.text
    clean = [i for i in range(2, len(text) - 3) if "\ufffd" not in text[i : i + 3]]
    stop = text[clean[0] : clean[0] + 3]
    found = run_alone(executor, start(1, PROMPT, 20, stop_sequences=("never there", stop)))
    finished = found[-1].finished
    assert finished is not None
    assert finished.finish_reason is FinishReason.STOP_SEQUENCE
    assert finished.stop_index == 1
    assert finished.stop_start == text.index(stop)
    assert finished.text == text[: text.index(stop) + 3]
    assert len(found) < len(plain)


def test_b6_a_stop_token_ends_a_completion_and_its_text(executor: Executor) -> None:
    plain = run_alone(executor, start(1, PROMPT, 20))
    ids = ids_of(plain)
    place = next(i for i in range(2, 20) if ids[i] not in ids[:i])
    found = run_alone(executor, start(1, PROMPT, 20, stop_token_ids=(ids[place],)))
    assert ids_of(found) == ids[: place + 1]
    finished = found[-1].finished
    assert finished is not None
    assert finished.finish_reason is FinishReason.EOS_TOKEN
    assert finished.stop_start == len("".join(g.tokens.texts[0] for g in found[:-1]))
    later = run_alone(executor, start(1, PROMPT, 20, stop_token_ids=(ids[place],), min_new_tokens=place + 2))
    assert len(later) > place + 1
    assert ids[place] not in ids_of(later)[: place + 2]


def test_b6_no_stop_is_found_before_the_least_length(executor: Executor) -> None:
    plain = run_alone(executor, start(1, PROMPT, 20))
    assert plain[-1].finished is not None
    text = plain[-1].finished.text
    clean = [i for i in range(2, len(text) - 3) if "\ufffd" not in text[i : i + 3]]
    stop = text[clean[0] : clean[0] + 3]
    finished = run_alone(executor, start(1, PROMPT, 20, stop_sequences=(stop,), min_new_tokens=20))[-1].finished
    assert finished is not None
    assert finished.num_tokens == 20
    assert finished.text.startswith(text[: clean[0] + 3])


def test_b6_banned_and_allowed_tokens(executor: Executor) -> None:
    ids = ids_of(run_alone(executor, start(1, PROMPT, 20)))
    banned = ids_of(run_alone(executor, start(1, PROMPT, 20, banned_tokens=((ids[0], ids[1]),))))
    assert banned[0] == ids[0]
    assert banned[1] != ids[1]
    assert set(ids_of(run_alone(executor, start(1, PROMPT, 20, allowed_token_ids=(40, 41))))) <= {40, 41}


def test_prompt_logprobs_equal_transformers_however_chunked(executor: Executor, folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([OTHER])).logits[0].log_softmax(-1)
    expected = [float(logits[i, OTHER[i + 1]]) for i in range(len(OTHER) - 1)]
    for chunks in ([33], [10, 1, 22]):
        result = prefill(executor, 1, [start(1, OTHER, chunk_len=chunks[0], prefill_logprobs=True), start(2, PROMPT)])
        for count in chunks[1:]:
            assert result.batch is not None
            result = decode(executor, [result.batch], [chunk(1, count)])
        prompt = next(g for g in result.generations if g.request_id == 1).prefill_tokens
        assert prompt is not None
        assert list(prompt.ids) == OTHER
        assert math.isnan(prompt.logprobs[0])
        assert list(prompt.logprobs[1:]) == pytest.approx(expected, abs=1e-4)
        executor.clear()


def test_top_tokens(executor: Executor) -> None:
    generation = run_alone(executor, start(1, PROMPT, 2, top_n_tokens=4))[0]
    (top,) = generation.top_tokens
    assert len(top.ids) == 4
    assert top.ids[0] == generation.tokens.ids[0]
    assert top.logprobs[0] == pytest.approx(generation.tokens.logprobs[0])
    assert list(top.logprobs) == sorted(top.logprobs, reverse=True)


def test_text_prompts_are_tokenized_and_truncated_here(executor: Executor) -> None:
    ids = executor.codec.encode("hello world", add_special_tokens=False)
    expected = ids_of(run_alone(executor, start(1, ids[-5:], 4)))
    assert ids_of(run_alone(executor, start(1, (), 4, inputs="hello world", truncate=5))) == expected
    assert EOS not in executor.codec.decode(ids)


def test_warmup_limits(executor: Executor, folder: Path) -> None:
    fresh = load_executor(folder)
    warm = [
        SequenceStart(
            request_id=0,
            sampling=SamplingParams(watermark=True),
            stopping=StoppingParams(max_new_tokens=1),
            inputs="abc",
        )
    ]
    result = fresh.warmup(warm, WarmupLimits(max_batch_total_tokens=400))
    assert (result.pool_tokens, result.max_input_tokens, result.max_total_tokens) == (400, 255, 256)
    assert result.kv_bytes == result.total_kv_bytes == 101 * 2 * 3 * 4 * 3 * 8 * 4  # blocks, K and V, layers, ...
    with pytest.raises(SettingsError, match="--max-total-tokens 300 exceeds the model's context of 256"):
        fresh.warmup(warm, WarmupLimits(max_total_tokens=300))
    with pytest.raises(NotEnoughMemory, match="fewer than --max-total-tokens 200"):
        fresh.warmup(warm, WarmupLimits(max_total_tokens=200, max_batch_total_tokens=100))
    with pytest.raises(NotEnoughMemory, match="tokens fit"):
        fresh.warmup(warm, WarmupLimits(max_batch_total_tokens=10**12))


def test_steps_before_warmup_are_refused(folder: Path) -> None:
    from funitel.model_server.loading.decoder import load
    from funitel.model_server.settings import ModelServerSettings

    fresh, _ = load(ModelServerSettings(model_id=str(folder), device="cpu"), folder)
    with pytest.raises(InvalidRequest, match="Warmup must come before"):
        prefill(fresh, 1, [start(1, PROMPT)])


def test_a_refused_step_changes_nothing(executor: Executor) -> None:
    running = prefill(executor, 5, [start(5, PROMPT, blocks=(1, 2, 3, 4, 5))])
    assert running.batch is not None
    with pytest.raises(InvalidRequest, match="needs 5 blocks"):
        prefill(executor, 1, [start(1, PROMPT, blocks=(9,))], running.batch, [RowUpdate(5, (6,))])
    after = decode(executor, [running.batch], [RowUpdate(5, (6,))])
    assert after.batch is not None
    assert after.batch.max_tokens == 6 * 4
    too_many = RowUpdate(5, tuple(range(100, 180)))
    with pytest.raises(InvalidRequest, match="has 86 blocks, at most 65 are allowed"):
        decode(executor, [after.batch], [too_many])


def test_no_sequence_outgrows_the_models_context(executor: Executor) -> None:
    """Its last block may reach beyond it, and a table of learned positions has no more."""
    blocks = tuple(range(1, 66))
    with pytest.raises(InvalidRequest, match="request 1 would have 257 tokens, the model's context is 256"):
        prefill(executor, 1, [start(1, [7] * 257, blocks=blocks)])
    full = prefill(executor, 1, [start(1, [7] * 256, 9, blocks=blocks)])
    assert full.batch is not None
    with pytest.raises(InvalidRequest, match="257 tokens"):
        decode(executor, [full.batch])


def test_a_batch_of_the_same_id_is_replaced(executor: Executor) -> None:
    prefill(executor, 1, [start(1, PROMPT)])
    prefill(executor, 1, [start(2, PROMPT)])
    assert num_sequences(executor) == 1
    executor.clear()
    assert num_sequences(executor) == 0


def test_a_batch_named_twice_is_refused(executor: Executor) -> None:
    batch = prefill(executor, 3, [start(1, PROMPT)]).batch
    assert batch is not None
    with pytest.raises(InvalidRequest, match="names the same batch twice"):
        decode(executor, [batch, batch])
    assert decode(executor, [batch]).num_forward_rows == 1


def test_a_stop_that_comes_with_the_last_token_leaves_the_text_whole(executor: Executor) -> None:
    plain = run_alone(executor, start(1, PROMPT, 20))
    lengths = [len("".join(g.tokens.texts[0] for g in plain[: i + 1])) for i in range(20)]
    cut = next(i for i in range(3, 20) if lengths[i] - lengths[i - 1] == 1)
    assert plain[-1].finished is not None
    text = plain[-1].finished.text[: lengths[cut]]
    finished = run_alone(executor, start(1, PROMPT, cut + 1, stop_sequences=(text[-2:],)))[-1].finished
    assert finished is not None
    if finished.num_tokens == cut + 1:
        assert finished.finish_reason is FinishReason.LENGTH
        assert finished.stop_start == len(text) - 2
        assert finished.text == text


@pytest.mark.parametrize("how", [{"temperature": 1.2e-38}, {"repetition_penalty": 1.2e-38}, {"top_p": 1e-30}])
def test_extreme_parameters_do_not_raise(executor: Executor, how: dict[str, float]) -> None:
    together = prefill(executor, 1, [start(1, PROMPT, **how), start(2, OTHER)])
    assert len(together.generations) == 2
    executor.clear()
    expected = ids_of(run_alone(executor, start(2, OTHER, 1)))
    assert list(together.generations[1].tokens.ids) == expected


# Steps planned before the one before them was answered


def test_a_batch_that_ended_in_the_step_before_is_empty_to_who_plans_ahead(executor: Executor) -> None:
    prefill(executor, 1, [start(1, PROMPT, 1)])
    ended = CachedBatch(1, (1,))
    with pytest.raises(UnknownBatch, match="Batch ID 1 not found in cache"):
        decode(executor, [ended])
    assert keep_rows(executor, 1, [1], is_ahead=True) == CachedBatch(1, ())
    granted = RowUpdate(1, (30,), 1)
    step = executor.compute_decode([ended], [granted], is_ahead=True).describe()
    assert (step.generations, step.batch, step.num_forwards) == ((), None, 0)
    joined = executor.compute_prefill(2, [start(2, OTHER, 5)], ended, is_ahead=True).describe()
    assert joined.batch is not None
    assert (joined.batch.id, joined.batch.request_ids) == (1, (2,))
    with pytest.raises(UnknownBatch):
        executor.compute_decode([CachedBatch(7, (7,))], is_ahead=True)
    with pytest.raises(InvalidRequest, match="row update for request 1, which is not in the step"):
        executor.compute_decode([CachedBatch(1, (2,))], [granted], is_ahead=True)


def test_of_a_batch_joined_to_one_that_ended_the_rest_goes_on(executor: Executor) -> None:
    prefill(executor, 1, [start(1, PROMPT)])
    prefill(executor, 2, [start(2, OTHER, 1)])
    both = executor.compute_decode([CachedBatch(2, (2,)), CachedBatch(1, (1,))], is_ahead=True).describe()
    assert both.batch is not None
    assert (both.batch.id, both.batch.request_ids) == (2, (1,))
    assert num_sequences(executor) == 1


def test_who_plans_ahead_means_one_token_where_nothing_is_said(executor: Executor) -> None:
    first = prefill(executor, 1, [start(1, PROMPT, chunk_len=15)])
    assert first.batch is not None
    assert executor.compute_decode([first.batch], is_ahead=True).result.num_forward_tokens == 1
    assert decode(executor, [first.batch]).num_forward_tokens == 4


def test_steps_may_be_put_into_words_after_the_next_is_computed(executor: Executor) -> None:
    def begin() -> list[SequenceStart]:
        spans = {"stop_sequences": ("never said",)}
        return [start(1, PROMPT, 4), start(2, OTHER, 3, **spans), start(3, PROMPT[3:], 2, top_n_tokens=2)]

    batch = CachedBatch(1, (1, 2, 3))
    at_once: dict[int, list[Generation]] = {}
    run_out(executor, prefill(executor, 1, begin()), at_once)
    steps = [executor.compute_prefill(1, begin())]
    steps += [executor.compute_decode([batch], is_ahead=True) for _ in range(4)]
    later: dict[int, list[Generation]] = {}
    for step in steps:
        collect(step.describe(), later)
    assert later == at_once
    assert {i: generations[-1].finished is not None for i, generations in later.items()} == {1: True, 2: True, 3: True}


def test_a_prefill_that_fails_leaves_no_rows(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    over, calls = SamplingState.over, iter(range(2))

    def fail_second(*arguments: Any, **named: Any) -> SamplingState:
        if next(calls) == 1:
            raise RuntimeError("a bug")
        return over(*arguments, **named)

    monkeypatch.setattr(SamplingState, "over", fail_second)
    with pytest.raises(RuntimeError, match="a bug"):
        prefill(executor, 1, [start(1, PROMPT), start(2, OTHER)])
    assert num_sequences(executor) == 0


# Memory that is not there, and scores that are no numbers


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("can't start new thread"),
        NotEnoughMemory("there is no memory left for this step"),
    ],
    ids=str,
)
def test_a_step_without_memory_says_so_and_leaves_the_shard_sound(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    expected = ids_of(run_alone(executor, start(1, PROMPT)))
    kept: list[weakref.ref[torch.Tensor]] = []

    def fails(*_: object) -> torch.Tensor:
        held = torch.empty(1 << 20)
        kept.append(weakref.ref(held))
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(executor.runner, "decoder", fails)
        with pytest.raises(ResourceExhausted, match="no memory for a step of 10 tokens in 2 sequences"):
            prefill(executor, 1, [start(1, PROMPT[:5]), start(2, PROMPT[:5])])
    assert kept[0]() is None, "what the step took is let go of"
    assert num_sequences(executor) == 0
    assert ids_of(run_alone(executor, start(1, PROMPT))) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], ids=["fused", "torch"])
def test_scores_that_are_no_numbers_are_one_rows_alone_and_leave_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    if dtype == "bfloat16":
        monkeypatch.setattr(fused_backend, "missing", lambda spec: "torch is to compute")
    executor = load_executor(folder, dtype=dtype)
    assert executor.options.wipes_blocks is (dtype == "bfloat16")
    expected = ids_of(run_alone(executor, start(2, OTHER)))
    decoder = executor.runner.decoder

    def breaks(batch: ForwardBatch, cache: KVCache) -> torch.Tensor | None:
        logits = decoder(batch, cache)
        assert logits is not None
        for block in range(1 + BLOCKS_EACH, 1 + 2 * BLOCKS_EACH):  # those of request 1
            cache.pool[block] = torch.nan
        logits[0] = torch.nan
        return logits

    with monkeypatch.context() as patched:
        patched.setattr(executor.runner, "decoder", breaks)
        broken, sound = prefill(executor, 1, [start(1, PROMPT), start(2, OTHER)]).generations
    assert math.isnan(broken.tokens.logprobs[0])
    assert sound.tokens.ids[0] == expected[0]
    executor.clear()
    heir = start(1, OTHER)  # has the blocks that were left full of what is no number
    assert ids_of(run_alone(executor, heir)) == expected
