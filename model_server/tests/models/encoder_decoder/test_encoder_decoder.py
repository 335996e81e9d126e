"""Encoder-decoders write what transformers writes, whatever shares their steps and however they are cut or resumed."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from funitel.model_server.executor.executor import Executor
from funitel.model_server.executor.pool_sizing import GpuPoolMemory
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.models.encoder.packed import Packed
from funitel.model_server.models.encoder_decoder.forced_tokens import DecodingRules, read_rules
from funitel.model_server.registry.encoder_decoders import seq2seq_spec_of
from funitel.model_server.settings import ModelServerSettings
from funitel.model_server.tools.spec import check, show
from funitel.proto.errors import InvalidRequest, SettingsError, UnsupportedModel, WeightsError
from funitel.proto.step import FinishReason, Generation, GrammarType, WarmupLimits
from funitel_testing import seq2seq_worker
from funitel_testing.executors import (
    BLOCK_SIZE,
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
from funitel_testing.fake_gpus import FakeGpu
from funitel_testing.ranks import run_ranks
from funitel_testing.servers import free_port
from funitel_testing.tiny_seq2seq import (
    EOS_ID,
    FAMILIES,
    FORCED_LANGUAGE,
    LANGUAGE_ID,
    OTHER_LANGUAGE_ID,
    T5_START,
    decoder_logprobs,
    generate,
    save_tiny_seq2seq,
)

SHORT = [70, 80, 90, EOS_ID]
LONG = [*range(40, 75), EOS_ID]
LETTERS = tuple((token_id, 50.0) for token_id in range(60, 94))  # so that the text is one that can be searched


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save_tiny_seq2seq(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path]) -> dict[str, Executor]:
    return {family: load_executor(folder) for family, folder in folders.items()}


@pytest.fixture(params=["t5", "bart"])
def executor(loaded: dict[str, Executor], request: pytest.FixtureRequest) -> Executor:
    found = loaded[request.param]
    found.clear()
    assert num_sequences(found) == 0
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_two_lengths_writes_what_transformers_writes(
    family: str, folders: dict[str, Path], loaded: dict[str, Executor]
) -> None:
    executor = loaded[family]
    expected = generate(folders[family], [SHORT, LONG], 24)
    assert all(len(set(ids)) > 2 for ids in expected), "the tokens hardly vary"
    found: dict[int, list[Generation]] = {}
    starts = [start(1, SHORT, 24, ignore_eos=False), start(2, LONG, 24, ignore_eos=False)]
    run_out(executor, prefill(executor, 1, starts), found)
    assert [ids_of(found[1]), ids_of(found[2])] == expected
    assert num_sequences(executor) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_both_stacks_alone_is_the_same_model(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders[family], tmp_path / family)
    transformers.AutoModel.from_pretrained(folder).save_pretrained(folder)
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    assert architecture == f"{FAMILIES[family][0]}Model"
    found = run_alone(load_executor(folder), start(1, LONG, 12, ignore_eos=False))
    assert [ids_of(found)] == generate(folder, [LONG], 12)


def test_of_a_first_token_that_is_the_last_the_end_is_what_is_forced(
    folders: dict[str, Path], loaded: dict[str, Executor]
) -> None:
    found = run_alone(loaded["mbart"], start(1, LONG, 1, ignore_eos=False))
    assert [ids_of(found)] == generate(folders["mbart"], [LONG], 1) == [[EOS_ID]]
    assert ids_of(run_alone(loaded["mbart"], start(1, LONG, 1))) == [LANGUAGE_ID]


def recorded_reading(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by how many tokens the encoder reads, each time that it does."""
    model: Any = executor.runner.decoder
    read: list[int] = []
    encode = model.encoder

    def recorded(packed: Packed) -> torch.Tensor:
        read.append(len(packed.input_ids))
        encoded: torch.Tensor = encode(packed)
        return encoded

    monkeypatch.setattr(model, "encoder", recorded)
    return read


def test_the_encoder_reads_no_more_at_once_than_the_longest_prompt_it_can(
    loaded: dict[str, Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = loaded["bart"]  # reads 64 tokens
    starts = [start(i, LONG[-count:], 6) for i, count in enumerate((20, 36, 10, 30))]
    expected = {each.request_id: ids_of(run_alone(executor, each)) for each in starts}
    read = recorded_reading(executor, monkeypatch)
    found: dict[int, list[Generation]] = {}
    run_out(executor, prefill(executor, 1, starts), found)
    assert {i: ids_of(generations) for i, generations in found.items()} == expected
    assert read == [36, 60]


def test_where_the_peak_of_memory_counts_the_encoder_rehearses_all_that_it_reads_at_once(
    loaded: dict[str, Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor: Any = loaded["bart"]  # reads 64 tokens
    read = recorded_reading(executor, monkeypatch)
    monkeypatch.setattr(executor.runner, "cache", None)
    executor.profiler.profile([start(0, LONG)], 3, 64)
    gpu = GpuPoolMemory(FakeGpu(10**9), 1.0)
    monkeypatch.setattr(executor.profiler, "memory", gpu)
    executor.profiler.profile([start(0, LONG)], 3, 64)
    assert read == [35, 64]


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mt5", ("feed_forward_proj", "relative_attention_num_buckets", "tie_word_embeddings")),
        ("t5", ("feed_forward_proj", "layer_norm_epsilon", "tie_word_embeddings")),
        ("m2m_100", ("scale_embedding", "activation_function", "pad_token_id")),
        ("mbart", ("scale_embedding", "activation_function")),
        ("bart", ("scale_embedding", "activation_function")),
    ],
)
def test_a_field_left_out_means_what_transformers_takes_for_it(family: str, fields: tuple[str, ...]) -> None:
    kind = FAMILIES[family][0]
    config = getattr(transformers, f"{kind}Config")().to_dict() | {"architectures": [f"{kind}Model"]}
    assert set(fields) <= config.keys()
    given = {key: value for key, value in config.items() if key not in fields}
    assert seq2seq_spec_of(given) == seq2seq_spec_of(config)


def test_company_that_joins_and_leaves_changes_nothing(executor: Executor) -> None:
    prompts = {i: [*LONG[i : 3 * i + 5], EOS_ID] for i in range(5)}
    for how in ({}, {"do_sample": True, "temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2}):
        starts = {i: start(i, ids, 8 + 3 * i, seed=i, **how) for i, ids in prompts.items()}
        expected = {i: ids_of(run_alone(executor, each)) for i, each in starts.items()}
        found: dict[int, list[Generation]] = {}
        result = prefill(executor, 0, [starts[0], starts[1], starts[2]])
        collect(result, found)
        assert result.batch is not None
        left = keep_rows(executor, result.batch.id, [0, 2])  # the client of 1 has gone
        for i in (3, 4):
            result = prefill(executor, i, [starts[i]], left)
            collect(result, found)
            assert result.batch is not None
            left = result.batch
        run_out(executor, decode(executor, [left]), found)
        assert ids_of(found.pop(1)) == expected.pop(1)[:1]
        assert {i: ids_of(generations) for i, generations in found.items()} == expected
        assert num_sequences(executor) == 0


@pytest.mark.parametrize("chunks", [[36, 1], [37], [7, 20, 5, 5], [1, 36]])
def test_chunks_of_a_prompt_do_not_change_the_tokens(executor: Executor, chunks: list[int]) -> None:
    expected = ids_of(run_alone(executor, start(2, LONG)))
    found: dict[int, list[Generation]] = {}
    result = prefill(executor, 1, [start(2, LONG, chunk_len=chunks[0]), start(3, SHORT)])
    collect(result, found)
    for count in chunks[1:]:
        assert result.batch is not None
        result = decode(executor, [result.batch], [chunk(2, count)])
        collect(result, found)
    assert result.batch is not None
    run_out(executor, decode(executor, [result.batch]), found)
    assert ids_of(found[2]) == expected


@pytest.mark.parametrize("cut", [1, 7])
@pytest.mark.parametrize("chunk_len", [None, 38])
def test_resuming_goes_on_exactly_where_it_stopped(executor: Executor, cut: int, chunk_len: int | None) -> None:
    how: dict[str, Any] = {"do_sample": True, "seed": 11, "repetition_penalty": 1.3, "count_penalty": 0.2}
    whole = run_alone(executor, start(1, LONG, 10, stop_sequences=("zzz",), **how))
    again = start(2, LONG, 10, output_ids=tuple(ids_of(whole)[:cut]), stop_sequences=("zzz",), **how)
    found: dict[int, list[Generation]] = {}
    result = prefill(executor, 1, [replace(again, chunk_len=chunk_len)])
    run_out(executor, result, found)
    assert ids_of(found[2]) == ids_of(whole)[cut:]
    assert found[2][-1].finished == whole[-1].finished


def test_penalties_see_what_the_decoder_has_written_only(folders: dict[str, Path], loaded: dict[str, Executor]) -> None:
    for family in ("t5", "bart"):
        expected = generate(folders[family], [LONG], 24, repetition_penalty=1.5)
        found = run_alone(loaded[family], start(1, LONG, 24, ignore_eos=False, repetition_penalty=1.5))
        assert [ids_of(found)] == expected
        assert expected != generate(folders[family], [LONG], 24)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_transformers(family: str, folders: dict[str, Path], loaded: dict[str, Executor]) -> None:
    found = run_alone(loaded[family], start(1, LONG, 9, top_n_tokens=3))
    ids = ids_of(found)
    opening = T5_START if "t5" in family else EOS_ID
    expected = decoder_logprobs(folders[family], LONG, [opening, *ids])
    num_forced = 1 if family in FORCED_LANGUAGE else 0  # which are certain
    for place, generation in enumerate(found[num_forced:], num_forced):
        (logprob,), (top,) = generation.tokens.logprobs, generation.top_tokens
        assert logprob == pytest.approx(float(expected[place][ids[place]]), abs=5e-4)
        assert list(top.logprobs) == pytest.approx(expected[place][list(top.ids)].tolist(), abs=5e-4)


@pytest.mark.parametrize("family", ["t5", "t5_gated", "mt5"])
def test_sums_that_outgrow_float16_are_no_nan(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders[family], tmp_path / family)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(".wo.weight"):
            tensors[name] = tensor * 2e4
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    executor = load_executor(folder, dtype="float16")
    found = run_alone(executor, start(1, LONG, 9))
    ids = ids_of(found)
    expected = decoder_logprobs(folder, LONG, [T5_START, *ids])
    for place, generation in enumerate(found):
        assert generation.tokens.logprobs[0] == pytest.approx(float(expected[place][ids[place]]), abs=0.05)


def test_a_stop_sequence_ends_the_text(executor: Executor) -> None:
    how: dict[str, Any] = {"logit_bias": LETTERS, "do_sample": True, "seed": 3}
    (*_, whole) = run_alone(executor, start(1, LONG, 12, **how))
    assert whole.finished is not None
    text = whole.finished.text
    assert len(set(text)) > 1
    stop = next(letter for letter in text if letter != text[0])
    (*_, last) = run_alone(executor, start(2, LONG, 12, **how, stop_sequences=(stop,)))
    assert last.finished is not None
    assert last.finished.finish_reason is FinishReason.STOP_SEQUENCE
    assert last.finished.text == text[: text.index(stop) + 1]


def test_a_prompt_that_an_encoder_reads_has_no_logprobs(executor: Executor) -> None:
    (first, *_) = run_alone(executor, start(1, SHORT, 3, prefill_logprobs=True))
    assert first.prefill_tokens is not None
    assert first.prefill_tokens.ids == tuple(SHORT)
    assert all(map(math.isnan, first.prefill_tokens.logprobs))


@pytest.mark.parametrize("cut", [0, 1, 4])
def test_a_grammar_begins_behind_a_forced_language(loaded: dict[str, Executor], cut: int) -> None:
    how: dict[str, Any] = {"grammar": "[ab]{6}", "grammar_type": GrammarType.REGEX, "ignore_eos": False}
    executor = loaded["m2m_100"]
    whole = ids_of(run_alone(executor, start(1, SHORT, 12, **how)))
    assert whole[0] == LANGUAGE_ID
    assert whole[-1] == EOS_ID
    assert len(whole) == 8
    rest = run_alone(executor, start(2, SHORT, 12, output_ids=tuple(whole[:cut]), **how))
    assert ids_of(rest) == whole[cut:]
    ended = rest[-1].finished
    assert ended is not None
    assert set(ended.text) <= set("ab")


def test_a_request_says_which_language_comes_first(folders: dict[str, Path], loaded: dict[str, Executor]) -> None:
    executor = loaded["m2m_100"]
    asked = start(1, LONG, 24, ignore_eos=False, first_token=OTHER_LANGUAGE_ID)
    plain = start(2, LONG, 24, ignore_eos=False)
    found: dict[int, list[Generation]] = {}
    run_out(executor, prefill(executor, 1, [asked, plain]), found)
    expected = generate(folders["m2m_100"], [LONG], 24, forced_bos_token_id=OTHER_LANGUAGE_ID)
    assert [ids_of(found[1])] == expected
    assert [ids_of(found[2])] == generate(folders["m2m_100"], [LONG], 24)
    again = start(3, LONG, 24, ignore_eos=False, first_token=OTHER_LANGUAGE_ID, output_ids=tuple(expected[0][:4]))
    assert ids_of(run_alone(executor, again)) == expected[0][4:]
    how: dict[str, Any] = {"grammar": "[ab]{6}", "grammar_type": GrammarType.REGEX, "ignore_eos": False}
    ids = ids_of(run_alone(executor, start(4, SHORT, 12, first_token=OTHER_LANGUAGE_ID, **how)))
    assert (ids[0], ids[-1], len(ids)) == (OTHER_LANGUAGE_ID, EOS_ID, 8)


@pytest.mark.parametrize(
    ("family", "token", "line"),
    [
        ("bart", 5, "first_token is not supported by this shard"),
        ("m2m_100", 288, "first_token must be within 0..287, given 288"),
    ],
)
def test_a_first_token_that_cannot_be_is_refused(
    family: str, token: int, line: str, loaded: dict[str, Executor]
) -> None:
    with pytest.raises(InvalidRequest, match=line):
        prefill(loaded[family], 1, [start(1, SHORT, 4, first_token=token)])
    assert num_sequences(loaded[family]) == 0


def test_what_does_not_fit_a_stack_is_refused_or_ends_there(loaded: dict[str, Executor]) -> None:
    executor = loaded["bart"]
    with pytest.raises(InvalidRequest, match="prompt of 65 tokens, the model's encoder reads 64"):
        prefill(executor, 1, [start(1, [70] * 65, 8)])
    with pytest.raises(InvalidRequest, match="cache_len must be 0"):
        prefill(executor, 1, [start(1, LONG, 8, cache_len=4)])
    with pytest.raises(InvalidRequest, match="64 completion tokens, the model's decoder writes 64"):
        prefill(executor, 1, [start(1, SHORT, 80, output_ids=(70,) * 64)])
    assert num_sequences(executor) == 0
    found = run_alone(executor, start(1, SHORT, 80))  # the decoder has positions for 64
    assert len(ids_of(found)) == 64
    assert found[-1].finished is not None
    assert found[-1].finished.finish_reason is FinishReason.LENGTH
    with pytest.raises(SettingsError, match="--max-input-tokens 65 exceeds the 64 tokens"):
        executor.warmup([start(0, SHORT)], WarmupLimits(max_input_tokens=65))


def test_two_ranks_together_write_what_transformers_writes(folders: dict[str, Path], tmp_path: Path) -> None:
    chosen = [folders[family] for family in ("t5", "bart", "m2m_100")]
    job = {
        "folders": list(map(str, chosen)),
        "ports": [free_port() for _ in chosen],
        "prompts": [SHORT, LONG],
        "count": 8,
        "size": 2,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    run_ranks(seq2seq_worker.serve_rank, tmp_path, 2)
    shares = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for folder, *found in zip(chosen, *shares, strict=True):
        together = found[0] | found[1]
        assert [together["0"], together["1"]] == generate(folder, [SHORT, LONG], 8)


def test_a_spec_is_shown_and_held_against_the_tensors(folders: dict[str, Path], tmp_path: Path) -> None:
    for folder in folders.values():
        shown = json.loads(show(folder, is_whole=False))
        assert {"encoder", "decoder", "cross"} <= shown.keys()
        assert check(folder, None) == []
    config = json.loads((folders["bart"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"decoder_ffn_dim": 61}))
    (tmp_path / "model.safetensors").symlink_to(folders["bart"] / "model.safetensors")
    problems = check(tmp_path, None)
    assert len(problems) == 2 * 3  # two layers: fc1 with its bias, fc2
    assert "wrong shape: model.decoder.layers.0.fc1.weight is [60, 48], the spec says [61, 48]" in problems


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("t5", {"d_kv": None}, "encoder: head_dim must be"),
        ("t5", {"feed_forward_proj": "gated-mish"}, "activation 'mish' is not supported"),
        (
            "t5",
            {"relative_attention_num_buckets": 2},
            "relative_attention_num_buckets must be within 4..65536, given 2",
        ),
        ("bart", {"encoder_attention_heads": 7}, "encoder: hidden size 48 does not divide into 7 heads"),
        ("bart", {"decoder_layers": -1}, "decoder: num_layers must be within"),
        ("bart", {"d_model": "wide"}, "value of the wrong kind"),
    ],
)
def test_impossible_configs_are_refused_in_one_line(
    family: str, changes: dict[str, Any], message: str, folders: dict[str, Path]
) -> None:
    config = json.loads((folders[family] / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=message):
        seq2seq_spec_of(config | changes)


def test_rules_are_read_with_those_of_generation_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text('{"decoder_start_token_id": 3, "forced_eos_token_id": 4, "num_beams": 4}')
    (tmp_path / "generation_config.json").write_text('{"decoder_start_token_id": 5, "forced_bos_token_id": [6]}')
    with caplog.at_level("INFO"):
        assert read_rules(tmp_path, 10) == DecodingRules(start=5, forced_first=6, forced_last=4)
    assert "num_beams=4 is not used" in caplog.text
    with pytest.raises(WeightsError, match=r"decoder_start_token_id must be within 0\.\.4, given 5"):
        read_rules(tmp_path, 5)
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(WeightsError, match="does not say what the decoder begins with"):
        read_rules(tmp_path, 10)


@pytest.mark.parametrize(
    ("key", "asks", "is_nothing"),
    [
        ("repetition_penalty", 1.2, 1.0),
        ("encoder_repetition_penalty", 1.5, 1.0),
        ("no_repeat_ngram_size", 3, 0),
        ("min_length", 56, 0),
        ("min_new_tokens", 4, 0),
        ("bad_words_ids", [[7]], []),
        ("sequence_bias", [[[7], -2.0]], []),
        ("suppress_tokens", [7], []),
        ("begin_suppress_tokens", [7], []),
        ("length_penalty", 2.0, 1.0),
        ("exponential_decay_length_penalty", [5, 1.1], None),
    ],
)
def test_what_a_checkpoint_asks_of_generation_and_is_not_used_is_said(
    key: str, asks: Any, is_nothing: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for value, is_said in ((asks, True), (is_nothing, False)):
        caplog.clear()
        (tmp_path / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": 3, key: value}))
        with caplog.at_level("INFO"):
            read_rules(tmp_path, 10)
        assert (f"{key}={value} is not used" in caplog.text) is is_said


@pytest.mark.parametrize(("family", "is_said"), [("m2m_100", True), ("mbart", True), ("bart", False), ("t5", False)])
def test_completions_of_which_nothing_says_the_language_are_told_of(
    family: str, is_said: bool, folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(folders[family], tmp_path / family)
    with caplog.at_level("WARNING"):
        if is_said:
            load_executor(folder)
            assert "forced_bos_token_id" not in caplog.text
        path = folder / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"forced_bos_token_id": None}))
        load_executor(folder)
    assert ("forced_bos_token_id" in caplog.text) is is_said


@pytest.mark.parametrize(("flag", "value"), [("quantize", "int8"), ("rope_scaling", "linear"), ("rope_factor", 2.0)])
def test_what_is_for_decoders_is_refused(flag: str, value: Any, folders: dict[str, Path]) -> None:
    with pytest.raises(SettingsError, match=f"--{flag.replace('_', '-')} {value} is not for encoder-decoders"):
        load_executor(folders["t5"], **{flag: value})


@pytest.mark.parametrize("max_new_tokens", [4, 5, 6])
def test_a_completion_fits_the_blocks_that_tgis_router_reserves(
    executor: Executor, folders: dict[str, Path], max_new_tokens: int
) -> None:
    """It counts no opening token: without `speculate` the last of 36 + 5 would have no place."""
    settings = ModelServerSettings(model_id="tiny", device="cpu", block_size=BLOCK_SIZE, num_threads=1)
    _, info = load_generator(settings, folders["t5"])
    num_tokens = len(LONG) + max_new_tokens + info.speculate - 1
    blocks = tuple(range(1, 1 + -(-num_tokens // BLOCK_SIZE)))
    assert len(ids_of(run_alone(executor, start(1, LONG, max_new_tokens, blocks=blocks)))) == max_new_tokens


def test_a_flag_for_threads_of_the_fused_step_is_said_to_change_nothing(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    load_executor(folders["t5"], thread_spin_us=7)
    assert caplog.text.count("--thread-spin-us 7 changes nothing: the fused CPU step") == 1
