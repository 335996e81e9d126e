"""Whisper hears, and writes what transformers writes, whatever shares its steps and however they are cut or resumed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from funitel.model_server.executor.executor import Executor
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.sampling.grammar import GrammarState
from funitel.model_server.sampling.transcript_rules import TranscriptRules, TranscriptTokens
from funitel.model_server.settings import ModelServerSettings
from funitel.model_server.tools.spec import check
from funitel.proto.errors import InvalidRequest, SettingsError
from funitel.proto.step import (
    Capability,
    Generation,
    MediaInput,
    MediaKind,
    MediaSpan,
    SamplingParams,
    SequenceStart,
    StoppingParams,
    WarmupLimits,
)
from funitel_testing import whisper_worker
from funitel_testing.executors import chunk, collect, decode, ids_of, num_sequences, prefill, run_alone, run_out
from funitel_testing.ranks import run_ranks
from funitel_testing.servers import free_port
from funitel_testing.tiny_whisper import (
    END,
    FIRST_TIMESTAMP,
    IDS,
    NO_TIMESTAMPS,
    NUM_FEATURES,
    SUPPRESSED,
    VOCAB_SIZE,
    generate,
    hear,
    load_whisper,
    mel_of,
    save_tiny_whisper,
    sound,
    transcription,
    whisper_executor,
)

PLAIN = (IDS["<|startoftranscript|>"], IDS["<|de|>"], IDS["<|transcribe|>"], NO_TIMESTAMPS)
TIMED = PLAIN[:-1]
SECONDS = (7.3, 30.0, 2.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def executor(folder: Path) -> Executor:
    return whisper_executor(folder)


@pytest.fixture(scope="module")
def mels(folder: Path) -> list[torch.Tensor]:
    return [mel_of(folder, sound(seconds, seed)) for seed, seconds in enumerate(SECONDS)]


@pytest.fixture(scope="module")
def keys(executor: Executor, mels: list[torch.Tensor]) -> list[bytes]:
    return [hear(executor, mel) for mel in mels]


def test_features_are_those_of_transformers(
    folder: Path, executor: Executor, mels: list[torch.Tensor], keys: list[bytes]
) -> None:
    encoder = load_whisper(folder).model.encoder
    media = executor.media
    assert media is not None
    for mel, key in zip(mels, keys, strict=True):
        with torch.inference_mode():
            expected = encoder(mel).last_hidden_state[0]
        assert torch.allclose(media.features(key).features, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("opening", "how"),
    [
        (PLAIN, {"language": "de", "task": "transcribe"}),
        (TIMED, {"language": "de", "task": "transcribe", "return_timestamps": True}),
        (
            (PLAIN[0], IDS["<|fr|>"], IDS["<|translate|>"]),
            {"language": "fr", "task": "translate", "return_timestamps": 1},
        ),
    ],
)
def test_alone_and_together_it_writes_what_transformers_writes(
    opening: tuple[int, ...],
    how: dict[str, Any],
    folder: Path,
    executor: Executor,
    mels: list[torch.Tensor],
    keys: list[bytes],
) -> None:
    timed = "return_timestamps" in how
    how = how | ({"return_timestamps": True} if timed else {})
    expected = [generate(folder, mel, len(opening), **how) for mel in mels]
    assert all(len(set(ids)) > 4 for ids in expected), "the tokens hardly vary"
    starts = [transcription(i, key, opening, with_timestamps=timed) for i, key in enumerate(keys)]
    alone = [ids_of(run_alone(executor, start)) for start in starts]
    assert alone == expected
    found: dict[int, list[Generation]] = {}
    run_out(executor, prefill(executor, 1, starts), found)
    assert [ids_of(found[i]) for i in range(len(starts))] == expected
    assert num_sequences(executor) == 0


def test_logprobs_are_those_of_transformers(
    folder: Path, executor: Executor, mels: list[torch.Tensor], keys: list[bytes]
) -> None:
    found = run_alone(executor, replace(transcription(1, keys[0], PLAIN, raw_logprobs=True), top_n_tokens=3))
    ids = ids_of(found)
    model = load_whisper(folder).double()
    with torch.inference_mode():
        answer = model(input_features=mels[0].double(), decoder_input_ids=torch.tensor([[*PLAIN, *ids]]))
    expected = answer.logits[0, len(PLAIN) - 1 :].log_softmax(-1)
    for place, generation in enumerate(found):
        (top,) = generation.top_tokens
        assert list(top.logprobs) == pytest.approx(expected[place][list(top.ids)].tolist(), abs=5e-4)


def test_at_a_temperature_raw_logprobs_are_those_behind_the_rules_of_timestamps(
    executor: Executor, keys: list[bytes]
) -> None:
    greedy = run_alone(executor, transcription(1, keys[0], TIMED, with_timestamps=True))
    how: dict[str, Any] = {"do_sample": True, "temperature": 0.5, "top_k": 1, "raw_logprobs": True}
    likeliest = run_alone(executor, transcription(2, keys[0], TIMED, with_timestamps=True, **how))
    assert ids_of(likeliest) == ids_of(greedy)
    logprobs = [generation.tokens.logprobs[0] for generation in likeliest]
    assert logprobs == pytest.approx([generation.tokens.logprobs[0] for generation in greedy], abs=1e-4)


@pytest.mark.parametrize("chunks", [[1503, 1], [700, 804], [1, 1499, 4], [1500, 1, 3]])
def test_chunks_of_a_prompt_do_not_change_the_tokens(executor: Executor, keys: list[bytes], chunks: list[int]) -> None:
    expected = ids_of(run_alone(executor, transcription(2, keys[0], PLAIN)))
    found: dict[int, list[Generation]] = {}
    begun = replace(transcription(2, keys[0], PLAIN), chunk_len=chunks[0])
    result = prefill(executor, 1, [begun, transcription(3, keys[1], TIMED, with_timestamps=True)])
    collect(result, found)
    for count in chunks[1:]:
        assert result.batch is not None
        result = decode(executor, [result.batch], [chunk(2, count)])
        collect(result, found)
    assert result.batch is not None
    run_out(executor, decode(executor, [result.batch]), found)
    assert ids_of(found[2]) == expected


@pytest.mark.parametrize("cut", [1, 2, 7])
@pytest.mark.parametrize("timed", [False, True])
def test_resuming_goes_on_exactly_where_it_stopped(
    executor: Executor, keys: list[bytes], cut: int, *, timed: bool
) -> None:
    opening = TIMED if timed else PLAIN
    how: dict[str, Any] = {"with_timestamps": timed, "do_sample": True, "temperature": 0.7, "seed": 11}
    whole = ids_of(run_alone(executor, transcription(1, keys[0], opening, **how)))
    again = replace(transcription(2, keys[0], opening, **how), output_ids=tuple(whole[:cut]))
    assert ids_of(run_alone(executor, again)) == whole[cut:]


def test_text_that_came_before_is_part_of_the_opening(
    folder: Path, executor: Executor, mels: list[torch.Tensor], keys: list[bytes]
) -> None:
    before = [IDS["<|startofprev|>"], *range(65, 85)]
    how = {"language": "de", "task": "transcribe", "prompt_ids": torch.tensor(before)}
    expected = generate(folder, mels[0], len(before) + len(PLAIN), **how)
    found = ids_of(run_alone(executor, transcription(1, keys[0], (*before, *PLAIN))))
    assert found == expected
    assert found != ids_of(run_alone(executor, transcription(1, keys[0], PLAIN)))


def test_a_language_is_detected_by_one_step_over_the_languages(
    folder: Path, executor: Executor, mels: list[torch.Tensor], keys: list[bytes]
) -> None:
    languages = (IDS["<|en|>"], IDS["<|de|>"], IDS["<|fr|>"])
    expected = load_whisper(folder).detect_language(input_features=torch.cat(mels)).tolist()
    found = []
    for i, key in enumerate(keys):
        start = transcription(i, key, PLAIN[:1], 1, allowed_token_ids=languages)
        found += ids_of(run_alone(executor, start))
    assert found == expected


def test_how_likely_silence_is_can_be_asked_though_it_is_suppressed(executor: Executor, keys: list[bytes]) -> None:
    no_speech = IDS["<|nospeech|>"]
    assert no_speech in SUPPRESSED
    asked = transcription(1, keys[0], PLAIN[:1], 1, allowed_token_ids=(no_speech,), raw_logprobs=True)
    (generation,) = run_alone(executor, asked)
    assert generation.tokens.ids == (no_speech,)
    assert -50 < generation.tokens.logprobs[0] < 0


def test_what_cannot_be_heard_is_refused(executor: Executor, keys: list[bytes], mels: list[torch.Tensor]) -> None:
    begun = transcription(1, keys[0], PLAIN)
    for media, message in (
        ((MediaSpan(keys[0], 1, NUM_FEATURES),), "a prompt needs one sound, 1500 tokens from 0 on"),
        ((MediaSpan(keys[0], 0, 30),), "a prompt needs one sound"),
        ((MediaSpan(b"unknown", 0, NUM_FEATURES),), "is not encoded"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            prefill(executor, 1, [replace(begun, media=media)])
    with pytest.raises(InvalidRequest, match="64 tokens of the decoder, which has room for 1 to 64"):
        prefill(executor, 1, [replace(begun, output_ids=(70,) * 60, stopping=StoppingParams(max_new_tokens=99))])
    with pytest.raises(InvalidRequest, match="has 0 tokens of the decoder"):
        prefill(executor, 1, [replace(begun, input_ids=begun.input_ids[:NUM_FEATURES])])
    media_input = MediaInput(
        key=b"x", kind=MediaKind.AUDIO, shape=(80, 100), values=b"\0" * 32000, num_features=NUM_FEATURES
    )
    with pytest.raises(InvalidRequest, match=r"shape must be \[80, 3000\] of float32, given \[80, 100\]"):
        executor.encode_media(media_input).result()
    wrong = replace(media_input, shape=(80, 3000), values=mels[0].numpy().tobytes(), num_features=50)
    with pytest.raises(InvalidRequest, match="num_features must be 1500, given 50"):
        executor.encode_media(wrong).result()
    assert num_sequences(executor) == 0


def test_a_prompt_without_a_sound_is_computed_as_the_probe_of_a_router_wants(executor: Executor) -> None:
    probe = SequenceStart(
        request_id=1,
        sampling=SamplingParams(),
        stopping=StoppingParams(max_new_tokens=1, ignore_eos=True),
        input_ids=(0,),
        blocks=(1,),
        chunk_len=1,
    )
    (generation,) = run_alone(executor, probe)
    assert len(generation.tokens.ids) == 1


def test_the_router_is_told_what_is_heard(folder: Path) -> None:
    settings = ModelServerSettings(model_id=str(folder), device="cpu", dtype="float32")
    _, info = load_generator(settings, folder)
    assert Capability.MEDIA in info.capabilities
    assert info.media is not None
    assert info.media.kinds == frozenset({MediaKind.AUDIO})
    assert info.media.feature_bytes == 48 * 4
    assert info.num_opening_tokens == 0
    with pytest.raises(SettingsError, match="--media-cache-gb must have room for 288000 bytes"):
        load_generator(replace(settings, media_cache_gb=0.0001), folder)


def test_the_longest_prompt_has_room_for_an_opening(executor: Executor) -> None:
    warm = SequenceStart(
        request_id=0, sampling=SamplingParams(), stopping=StoppingParams(max_new_tokens=1), inputs="x" * 20
    )
    limits = executor.warmup([warm], WarmupLimits(max_prefill_tokens=2000, max_batch_total_tokens=16_000))
    assert limits.max_input_tokens == NUM_FEATURES + 63
    with pytest.raises(SettingsError, match="--max-input-tokens 1564 exceeds the 1563 tokens"):
        executor.warmup([warm], WarmupLimits(max_input_tokens=1564))


def test_two_ranks_together_write_what_transformers_writes(folder: Path, tmp_path: Path) -> None:
    sounds = [[seconds, seed] for seed, seconds in enumerate(SECONDS[:2])]
    job = {"folder": str(folder), "port": free_port(), "sounds": sounds, "opening": list(TIMED), "size": 2}
    (tmp_path / "job.json").write_text(json.dumps(job))
    run_ranks(whisper_worker.serve_rank, tmp_path, 2)
    shares = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    together = shares[0] | shares[1]
    how = {"language": "de", "task": "transcribe", "return_timestamps": True}
    for place, (seconds, seed) in enumerate(sounds):
        expected = generate(folder, mel_of(folder, sound(seconds, int(seed))), len(TIMED), **how)
        assert together[str(place)] == expected


def test_more_mel_bins_and_a_spec_that_fits_the_tensors(folder: Path, tmp_path: Path) -> None:
    assert check(folder, None) == []
    large = save_tiny_whisper(tmp_path, seed=3, num_mel_bins=128)
    mel = mel_of(large, sound(4.0))
    executor = whisper_executor(large)
    expected = generate(large, mel, len(PLAIN), language="de", task="transcribe")
    assert ids_of(run_alone(executor, transcription(1, hear(executor, mel), PLAIN))) == expected


TOKENS = TranscriptTokens(end=END, suppressed=(5,), suppressed_first=(32,), no_timestamps=NO_TIMESTAMPS, max_initial=50)


def allowed(completion: list[int], *, timed: bool = True, inner: GrammarState | None = None) -> set[int]:
    rules = TranscriptRules(TOKENS, VOCAB_SIZE, completion, inner, with_timestamps=timed)
    mask = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
    rules.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")))


def test_rules_of_timestamps() -> None:
    first, text, special = FIRST_TIMESTAMP, set(range(END)) - {5}, set(range(END, NO_TIMESTAMPS))
    times = set(range(first, VOCAB_SIZE))
    assert allowed([]) == set(range(first, first + 51))
    assert allowed([first + 3]) == text | special  # a text comes behind the time at which it begins
    assert allowed([first + 3, 70]) == text | special | (times - set(range(first, first + 4)))
    assert allowed([first, 70, first + 9]) == special | set(range(first + 9, VOCAB_SIZE))  # it ends
    assert allowed([first, 70, first + 9, first + 9]) == text | special
    assert allowed([], timed=False) == (text - {32}) | special | {NO_TIMESTAMPS} | times
