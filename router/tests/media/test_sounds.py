"""Sounds of prompts: spectrograms and tokens equal those of transformers' processors, limits, and what is refused."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from funitel.proto.errors import InvalidRequest, StartupError
from funitel.proto.step import MediaKind
from funitel.router.media.interface import MediaSource, PreparedMedia
from funitel.router.media.service import MediaService
from funitel.router.media.sound_families import sound_family_of
from funitel.router.settings import RouterSettings
from funitel.router.text.model_files import ModelFiles
from funitel_testing.sound_files import flac, wav
from funitel_testing.voice_models import NUM_MEL_BINS, VOICE_FAMILIES, Part, VoiceOracle, save_voice
from funitel_testing.whisper_models import sound

PLACE = "messages[0].content[1].input_audio"
OWNER = b"owner"
TOLERANCE = 1e-4
Services = Callable[..., MediaService]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {family: tmp_path_factory.mktemp(family) for family in VOICE_FAMILIES}
    for family, folder in found.items():
        save_voice(family, folder)
    return found


def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture
async def make(folders: dict[str, Path]) -> AsyncIterator[Services]:
    """`make(family, **settings)`: services that are closed at the end."""
    made: list[MediaService] = []

    def of(family: str, **settings: Any) -> MediaService:
        folder = folders[family]
        found = MediaService.create(
            RouterSettings(validation_workers=1, **settings), ModelFiles(folder), tokenizer_of(folder)
        )
        assert found is not None
        made.append(found)
        return found

    yield of
    for each in made:
        await each.close()


def source(data: bytes) -> MediaSource:
    return MediaSource(MediaKind.AUDIO, PLACE, data=data)


async def prepared(service: MediaService, samples: np.ndarray, **how: Any) -> PreparedMedia:
    [item] = await service.prepare([source(wav(samples, kind="float32", **how))], OWNER)
    return item


async def refusal(service: MediaService, data: bytes) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await service.prepare([source(data)], OWNER)
    assert caught.value.param == PLACE
    assert caught.value.message.startswith(f"`{PLACE}` ")
    assert "\n" not in caught.value.message
    return caught.value.message


QWEN = [0.0201, 0.05, 0.5, 1.003, 7.77, 29.999, 30.0]
LENGTHS = [
    *(("qwen2_audio", each) for each in QWEN),
    *(("voxtral", each) for each in (0.01, 3.3, 30.0, 30.01, 61.7)),
    *(("gemma4", each) for each in (0.0101, 0.02, 0.0301, 0.5, 1.003, 7.77, 29.99, 30.0)),
]


@pytest.mark.parametrize(("family", "seconds"), LENGTHS)
async def test_spectrograms_and_tokens_are_those_of_the_processor(
    family: str, seconds: float, make: Services, folders: dict[str, Path]
) -> None:
    samples, other = sound(seconds, 3), sound(0.7, 4)
    parts: list[Part] = ["Hear ", samples, " and ", other, " well"]
    oracle = VoiceOracle(family, folders[family])
    expected = oracle.inputs(parts)
    service = make(family)
    items = await service.prepare([source(wav(each, kind="float32")) for each in (samples, other)], OWNER)
    text, plain = service.insert(oracle.row.prompt(parts), [], items)
    assert plain == []
    ids, placed = service.place(tokenizer_of(folders[family]).encode(text, add_special_tokens=False).ids, items)
    assert ids == expected["input_ids"][0].tolist()
    assert [each.span.length for each in placed] == [item.input.num_features for item in items]
    mels = [np.frombuffer(item.input.values, "<f4").reshape(item.input.shape) for item in items]
    wanted = expected["input_features"]
    if family == "gemma4":
        heard = expected["input_features_mask"].sum(-1).tolist()
        assert [mel.shape for mel in mels] == [(128, frames) for frames in heard]
        for mel, each, frames in zip(mels, wanted, heard, strict=True):
            assert np.abs(mel.T - each[:frames].numpy()).max() < TOLERANCE
        return
    ours = np.concatenate([mel.reshape(NUM_MEL_BINS, -1, 3000).swapaxes(0, 1) for mel in mels])
    assert ours.shape == tuple(wanted.shape)
    assert np.abs(ours - wanted.numpy()).max() < TOLERANCE
    if family == "qwen2_audio":
        heard = expected["feature_attention_mask"].sum(-1).tolist()
        assert [item.input.size for item in items] == [(frames,) for frames in heard]


@pytest.mark.parametrize("family", VOICE_FAMILIES)
async def test_markers_and_kinds(family: str, make: Services) -> None:
    service, row = make(family), VOICE_FAMILIES[family]
    assert service.kinds == {MediaKind.AUDIO}
    assert service.marker(MediaKind.AUDIO) == row.marker
    assert service.prompt_marker(MediaKind.AUDIO) == row.around


async def test_text_of_the_client_is_never_a_place(make: Services) -> None:
    service = make("voxtral")
    item = await prepared(service, sound(0.4))
    text = "say [AUDIO]: [BEGIN_AUDIO][AUDIO]"
    found, plain = service.insert(text, [(0, 11)], [item])
    assert (found, plain) == (text, [(0, 11)])
    with pytest.raises(InvalidRequest, match="0 sounds, and the prompt 1 places for sounds"):
        service.insert(text, [(0, 11)], [])


async def test_items_have_keys_by_what_they_are(make: Services) -> None:
    service, samples = make("qwen2_audio"), sound(1.0)
    first = (await prepared(service, samples)).input
    [again] = await service.prepare([source(flac(samples))], OWNER)
    assert again.input.values == first.values
    assert again.input.key == first.key
    longer = (await prepared(service, np.pad(samples, (0, 1600)))).input  # silence alone
    assert longer.key != first.key
    assert ((await prepared(make("voxtral"), samples)).input.key) != first.key
    stereo = (await prepared(service, np.stack([samples, samples], 1))).input
    assert stereo.key == first.key
    assert await prepared(service, samples) is await prepared(service, samples)


async def test_sounds_that_cannot_be_are_refused_with_a_reason(make: Services) -> None:
    service = make("voxtral", max_audio_seconds=2.0, max_audio_bytes=200_000)
    assert "formats WAV, FLAC, OGG (Vorbis or Opus), MP3" in await refusal(service, b"hello")
    assert "cannot be decoded as MP4" in await refusal(service, b"\0\0\0\x20ftypM4A " + bytes(40))
    assert "must be at most 2 s long (--max-audio-seconds)" in await refusal(service, wav(sound(2.1)))
    assert "has 256044 bytes: at most 200000 are taken (--max-audio-bytes)" in await refusal(service, wav(sound(8.0)))
    assert "has no samples" in await refusal(service, wav(np.zeros(0, np.float32)))
    assert "cannot be decoded as WAV" in await refusal(service, wav(sound(1.0))[:30])
    assert (await prepared(service, sound(2.0))).input.num_features == 30
    short = make("qwen2_audio")
    assert "at most 30 s long (the longest that the model hears)" in await refusal(short, wav(sound(30.01)))
    assert "has 320 samples at 16 kHz: too few for a feature" in await refusal(short, wav(sound(0.02)))
    gemma = make("gemma4")
    assert "at most 30 s long (the longest that the model hears)" in await refusal(gemma, wav(sound(30.01)))
    assert "has 160 samples at 16 kHz: too few for a feature" in await refusal(gemma, wav(sound(0.01)))
    with pytest.raises(InvalidRequest, match="image, which this model does not take"):
        await service.prepare([MediaSource(MediaKind.IMAGE, PLACE, data=b"")], OWNER)


BAD_FILES: dict[str, tuple[str, dict[str, Any], str]] = {
    "rate": (
        "preprocessor_config.json",
        {"sampling_rate": 8000},
        "has sampling_rate 8000: sounds are served with 16000",
    ),
    "bins": ("preprocessor_config.json", {"feature_size": 128}, "has feature_size 128: sounds are served with 80"),
    "dither": ("preprocessor_config.json", {"dither": 0.1}, "has dither 0.1"),
    "positions": (
        "config.json",
        {"audio_config": {"num_mel_bins": 80, "max_source_positions": 750}},
        "1500 are served",
    ),
    "width": (
        "config.json",
        {"audio_config": {"num_mel_bins": 80, "hidden_size": 32, "intermediate_size": 1601}},
        "must divide 48000",
    ),
    "words": ("config.json", {"audio_config": {"num_mel_bins": "many"}}, "which must be a number > 0"),
    "token": ("config.json", {"audio_token_id": 9999}, "no token"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_files_that_are_not_served_are_refused(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    changed, values, message = BAD_FILES[case]
    for name in ("config.json", "preprocessor_config.json"):
        given = json.loads((folders["voxtral"] / name).read_text())
        (tmp_path / name).write_text(json.dumps(given | (values if name == changed else {})))
    tokenizer = tokenizer_of(folders["voxtral"]) if case != "token" else Tokenizer.from_str(_without_audio(folders))
    with pytest.raises(StartupError, match=message):
        sound_family_of(ModelFiles(tmp_path), tokenizer)


@pytest.mark.parametrize("changes", [{"preemphasis": 0.97}, {"mel_floor": 1e-5}, {"frame_length": 512}])
def test_other_spectrograms_of_gemma_are_refused(
    changes: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        given = json.loads((folders["gemma4"] / name).read_text())
        (tmp_path / name).write_text(json.dumps(given | (changes if name != "config.json" else {})))
    with pytest.raises(StartupError, match=f"has {next(iter(changes))} .*: sounds are served with"):
        sound_family_of(ModelFiles(tmp_path), tokenizer_of(folders["gemma4"]))


def test_a_gemma_without_an_audio_tower_takes_no_sounds(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        given = json.loads((folders["gemma4"] / name).read_text())
        (tmp_path / name).write_text(json.dumps(given | ({"audio_config": None} if name == "config.json" else {})))
    assert sound_family_of(ModelFiles(tmp_path), tokenizer_of(folders["gemma4"])) is None


def _without_audio(folders: dict[str, Path]) -> str:
    given = json.loads((folders["voxtral"] / "tokenizer.json").read_text())
    given["added_tokens"] = [each for each in given["added_tokens"] if each["content"] != "[AUDIO]"]
    return json.dumps(given)


def test_a_folder_without_a_feature_extractor_takes_no_sounds(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folders["voxtral"] / "config.json").read_text())
    assert sound_family_of(ModelFiles(tmp_path), tokenizer_of(folders["voxtral"])) is None
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert sound_family_of(ModelFiles(tmp_path), tokenizer_of(folders["voxtral"])) is None
