"""What is known of a model that transcribes comes from its files, and where these say nothing from its tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest

from funitel.proto.errors import InvalidRequest, StartupError
from funitel.router.audio.languages import NAMES, code_of, name_of
from funitel.router.audio.speech_model import SpeechModel
from funitel.router.text.model_files import ModelFiles

CONFIG = {
    "architectures": ["WhisperForConditionalGeneration"],
    "num_mel_bins": 128,
    "max_source_positions": 1500,
    "max_target_positions": 448,
}
GENERATION = {
    "eos_token_id": 50257,
    "decoder_start_token_id": 50258,
    "no_timestamps_token_id": 50364,
    "prev_sot_token_id": 50362,
    "lang_to_id": {"<|en|>": 50259, "<|de|>": 50261},
    "task_to_id": {"transcribe": 50360, "translate": 50359},
}
TOKENS = {"<|notimestamps|>": 50363, "<|endoftext|>": 50256, "<|startoftranscript|>": 50257}


def read(
    folder: Path, generation: dict[str, Any], tokens: dict[str, int] | None = None, **config: Any
) -> SpeechModel | None:
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return SpeechModel.of(ModelFiles(folder), (tokens or {}).get)


def test_a_multilingual_model(tmp_path: Path) -> None:
    model = read(tmp_path, GENERATION)
    assert model is not None
    assert (model.num_mel_bins, model.num_frames, model.max_tokens) == (128, 3000, 448)
    assert (model.first_timestamp, model.no_speech) == (50365, 50363)
    assert model.opening("de", "translate", with_timestamps=True) == [50258, 50261, 50359]
    assert model.opening("en", "transcribe", with_timestamps=False) == [50258, 50259, 50360, 50364]
    model.check_task("translate")
    assert [model.language(each) for each in ("de", "German", " EN ")] == ["de", "de", "en"]
    with pytest.raises(
        InvalidRequest, match="`language` must be one of the model's languages: de, en. Given: 'klingon'"
    ):
        model.language("klingon")


def test_an_english_model_whose_files_say_little(tmp_path: Path) -> None:
    model = read(tmp_path, {}, TOKENS)
    assert model is not None
    assert (model.start, model.end, model.previous) == (50257, 50256, None)
    assert model.opening(None, "transcribe", with_timestamps=False) == [50257, 50363]
    assert model.language("english") == "en"
    with pytest.raises(InvalidRequest, match="the model does not translate"):
        model.check_task("translate")
    with pytest.raises(InvalidRequest, match="must be one of the model's languages: en"):
        model.language("de")


def test_other_models_are_none(tmp_path: Path) -> None:
    assert read(tmp_path, {}, architectures=["LlamaForCausalLM"]) is None


@pytest.mark.parametrize(
    ("generation", "config", "message"),
    [
        ({}, {}, r"the model knows no token <\|notimestamps\|>"),
        (GENERATION | {"lang_to_id": {"<|en|>": "x"}}, {}, "lang_to_id must be token ids by name"),
        (GENERATION, {"num_mel_bins": "many"}, "num_mel_bins must be a number > 0, given 'many'"),
    ],
)
def test_what_cannot_be_is_refused(
    generation: dict[str, Any], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=message):
        read(tmp_path, generation, **config)


def test_languages_are_those_of_transformers() -> None:
    from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

    assert NAMES == LANGUAGES
    assert {name: code_of(name.title()) for name in TO_LANGUAGE_CODE} == TO_LANGUAGE_CODE
    assert (name_of("haw"), name_of("tlh")) == ("hawaiian", "tlh")
