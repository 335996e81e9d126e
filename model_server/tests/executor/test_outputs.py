"""What an executor records of sequences with an output key, however tokens are sampled, and the rows that it holds."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from funitel.model_server.executor.async_sampling import AsyncSampling
from funitel.model_server.executor.executor import Executor
from funitel.model_server.gpu_sampling.ops import TorchMaths
from funitel.proto.errors import InvalidRequest
from funitel.proto.step import BlockCopy, Generation, GrammarType, SequenceStart, WarmupLimits
from funitel.proto.strategy import DecodingStrategy
from funitel.proto.takeover.state import HeldBatch, HeldRow
from funitel_testing.drafters import KnownDrafter, always_drafting
from funitel_testing.executors import (
    BLOCKS_EACH,
    collect,
    decode,
    ids_of,
    keep_rows,
    load_executor,
    prefill,
    run_alone,
    run_out,
    start,
)
from funitel_testing.outputs import assert_recorded, key_of, keyed, recorded
from funitel_testing.tiny import save_tiny

PROMPT = list(range(40, 60))
LIMITS = WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=2000)
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "temperature": 1.5, "top_n_tokens": 2, "ignore_eos": False},
    {"stop_sequences": ("a", "e", "i"), "do_sample": True},
    {"prefill_logprobs": True},
    {"prompt_logprobs": 2},
    {"grammar": "(yes|no), (certainly|never) [0-9]{2,4}", "grammar_type": GrammarType.REGEX, "ignore_eos": False},
    {"strategy": DecodingStrategy(mirostat=2, mirostat_tau=3.0)},
)


def on_device(executor: Executor) -> Executor:
    """The same model, with steps launched ahead."""
    runner = executor.runner
    parts = executor.spec, runner.decoder, runner.pools, executor.codec, executor.parallel, executor.options
    made = Executor(*parts, partial(AsyncSampling, maths=TorchMaths()), runner.rules)
    made.warmup([start(0, PROMPT)], LIMITS)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def executor(folder: Path) -> Executor:
    return load_executor(folder)


@pytest.fixture(params=["host", "device"])
def either(request: pytest.FixtureRequest, executor: Executor) -> Executor:
    """Sampled on the host, or on the device while the next step is launched."""
    return executor if request.param == "host" else on_device(executor)


def sequences() -> list[SequenceStart]:
    return [keyed(start(i, PROMPT[i:], 12, seed=i, **kind)) for i, kind in enumerate(KINDS)]


def test_every_generation_is_recorded(either: Executor) -> None:
    brought: dict[int, list[Generation]] = {}
    run_out(either, prefill(either, 1, sequences()), brought)

    assert_recorded([either], brought)
    assert any(len(each.tokens.ids) > 1 for each in brought[5]), "no span was forced"
    mus = {key: outputs.mirostat_mu is not None for key, outputs in recorded([either]).items()}
    assert mus == {key_of(i): i == 6 for i in range(len(KINDS))}


def test_accepted_drafts_are_recorded_with_the_token_behind_them(folder: Path) -> None:
    executor = always_drafting(load_executor(folder, speculate=4))
    starts = [replace(keyed(each), speculate=4) for each in sequences()[:2]]
    texts = {each.request_id: [*each.input_ids, *ids_of(run_alone(executor, each))] for each in starts}
    executor.output.records.clear()
    assert executor.speculator is not None
    executor.speculator.drafter = KnownDrafter(texts, 0.7)
    brought: dict[int, list[Generation]] = {}
    run_out(executor, prefill(executor, 1, starts), brought)

    assert_recorded([executor], brought)
    assert any(each.num_accepted for each in brought[0])


def test_records_outlive_batches_and_the_pool_until_they_are_released(executor: Executor) -> None:
    one, two, three = (keyed(each) for each in sequences()[:3])
    brought: dict[int, list[Generation]] = {}
    result = prefill(executor, 1, [one, two, replace(three, output_key="")])
    collect(result, brought)
    del brought[2]  # has no key
    keep_rows(executor, 1, [1])
    executor.clear()
    executor.warmup([start(0, PROMPT)], LIMITS)
    assert_recorded([executor], brought)

    executor.output.records.release([key_of(0)])
    assert list(recorded([executor])) == [key_of(1)]
    executor.sleep(1)
    assert recorded([executor]) == {}


def test_a_sequence_that_comes_back_goes_on_in_its_record(executor: Executor) -> None:
    whole = keyed(start(1, PROMPT, 8))
    expected = ids_of(run_alone(executor, whole))
    executor.output.records.clear()
    brought: dict[int, list[Generation]] = {}
    result = prefill(executor, 1, [whole])
    collect(result, brought)
    executor.clear()
    known = tuple(ids_of(brought[1]))
    run_out(executor, prefill(executor, 1, [replace(whole, request_id=2, output_ids=known)]), brought)

    found = recorded([executor])[key_of(1)]
    assert found.num_before == 0
    assert [token_id for each in found.steps for token_id in each.generation.tokens.ids] == expected
    assert [each.generation.request_id for each in found.steps] == [1] + 7 * [2]


def test_a_call_that_is_refused_changes_no_record(executor: Executor) -> None:
    brought: dict[int, list[Generation]] = {}
    collect(prefill(executor, 1, [keyed(start(1, PROMPT))]), brought)
    with pytest.raises(InvalidRequest):
        prefill(executor, 2, [keyed(start(1, PROMPT)), start(2, [10_000])])

    assert_recorded([executor], brought)


def test_rows_are_told_once_the_steps_before_are_known(either: Executor) -> None:
    batch = prefill(either, 1, [keyed(start(1, PROMPT)), start(2, PROMPT[:5], state_slot=0)]).batch
    assert batch is not None
    steps = [either.compute_decode([batch], is_ahead=True) for _ in range(2)]
    held = either.hold()

    blocks = [tuple(range(first, first + BLOCKS_EACH)) for first in (1 + BLOCKS_EACH, 1 + 2 * BLOCKS_EACH)]
    rows = HeldRow(1, key_of(1), blocks[0], 22, 23), HeldRow(2, "", blocks[1], 7, 8)
    assert held == (HeldBatch(1, rows),)
    assert all(len(step.describe().generations) == 2 for step in steps)
    assert len(decode(either, [batch]).generations) == 2


def test_rows_behind_a_call_that_lost_copies_are_not_told(folder: Path) -> None:
    executor = load_executor(folder, kv_host_gb=0.001)
    prefill(executor, 1, [start(1, PROMPT)])
    with pytest.raises(InvalidRequest):
        executor.compute_prefill(2, [start(2, PROMPT)], copies=[BlockCopy(10**6, 1, True)])
    with pytest.raises(InvalidRequest, match="copies of blocks has failed"):
        executor.hold()
    executor.clear()

    assert executor.hold() == ()


def test_tokens_are_those_of_an_undisturbed_run_after_rows_were_told(either: Executor) -> None:
    whole = start(1, PROMPT, 12, do_sample=True, seed=3)
    expected = ids_of(run_alone(either, whole))
    found: dict[int, list[Generation]] = {}
    result = prefill(either, 1, [whole])
    collect(result, found)
    for _ in range(3):
        assert either.hold()
        assert result.batch is not None
        result = decode(either, [result.batch])
        collect(result, found)
    run_out(either, decode(either, [result.batch]), found)

    assert ids_of(found[1]) == expected
    assert either.hold() == ()
