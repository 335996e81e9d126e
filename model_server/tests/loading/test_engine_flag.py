"""`--engine` forces what computes a model, or the start ends in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from funitel.model_server.convert.gguf_description import point_or_describe
from funitel.model_server.loading.encoder import load_encoder
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.models.transformers_fallback.packed import PackedModel
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import SettingsError, UnsupportedModel
from funitel_testing.executors import load_executor, prefill, start
from funitel_testing.tiny import save_tiny
from funitel_testing.tiny_encoders import save_tiny_encoder


def _settings(folder: Path, **given: Any) -> ModelServerSettings:
    return ModelServerSettings(model_id=str(folder), device="cpu", **given)


def test_transformers_computes_a_model_that_has_a_row(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    forced, usual = load_executor(folder, engine="transformers"), load_executor(folder)
    assert isinstance(forced.runner.decoder, PackedModel)
    assert not isinstance(usual.runner.decoder, PackedModel)
    tokens = [prefill(each, 1, [start(1, [3, 5, 7])]).generations[0].tokens.ids for each in (forced, usual)]
    assert tokens[0] == tokens[1]


def test_native_refuses_what_has_no_row(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamoidForCausalLM"]}))
    with pytest.raises(UnsupportedModel, match="--engine native: architecture LlamoidForCausalLM is not supported"):
        load_generator(_settings(folder, engine="native"), folder)
    executor, _ = load_generator(_settings(folder), folder)  # by the default, through transformers
    assert isinstance(executor.runner.decoder, PackedModel)


def test_transformers_reads_no_gguf(tmp_path: Path, make_gguf: Callable[..., Any]) -> None:
    make_gguf(tmp_path / "tiny.gguf")
    folder = tmp_path / "made"
    folder.mkdir()
    point_or_describe(tmp_path / "tiny.gguf", folder)
    with pytest.raises(UnsupportedModel, match="--engine transformers reads no GGUF"):
        load_generator(_settings(folder, engine="transformers"), folder)


def test_transformers_is_not_for_specs_and_encoders(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "decoder")
    with pytest.raises(SettingsError, match="--model-spec spec.json is not for --engine transformers"):
        load_generator(_settings(folder, engine="transformers", model_spec="spec.json"), folder)
    encoder = save_tiny_encoder("Bert", "Model", tmp_path / "encoder")
    with pytest.raises(SettingsError, match="--engine transformers is not for encoders"):
        load_encoder(_settings(encoder, engine="transformers"), encoder)
