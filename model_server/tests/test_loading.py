"""What a shard's settings make of a checkpoint."""

import json
from pathlib import Path

import pytest

from funitel.model_server.loading import load
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import SettingsError
from funitel_testing.tiny import save_tiny


@pytest.mark.parametrize(
    ("scaling", "factor", "kind", "context"),
    [
        (None, None, "default", 256),
        ("linear", None, "linear", 256),
        (None, 2.0, "linear", 512),
        ("linear", 0.5, "linear", 128),
    ],
)
def test_rotary_positions_are_stretched_as_the_settings_say(
    tmp_path: Path, scaling: str | None, factor: float | None, kind: str, context: int
) -> None:
    folder = save_tiny("llama", tmp_path)
    settings = ModelServerSettings(
        model_id=str(folder), device="cpu", num_threads=1, rope_scaling=scaling, rope_factor=factor
    )
    executor, _ = load(settings, folder)
    assert executor.spec.rotary.scaling.kind == kind
    assert executor.spec.rotary.scaling.factor == (factor or 1.0)
    assert executor.spec.max_position_embeddings == context


def test_the_flag_replaces_what_the_checkpoint_says(tmp_path: Path) -> None:
    folder = save_tiny("llama3_rope", tmp_path)
    settings = ModelServerSettings(model_id=str(folder), device="cpu", num_threads=1, rope_factor=3.0)
    executor, _ = load(settings, folder)
    assert (executor.spec.rotary.scaling.kind, executor.spec.rotary.scaling.factor) == ("linear", 3.0)


def test_a_model_without_rotary_positions_says_that_nothing_is_stretched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny("gpt2", tmp_path)
    settings = ModelServerSettings(model_id=str(folder), device="cpu", num_threads=1, rope_factor=2.0)
    executor, _ = load(settings, folder)
    assert executor.spec.max_position_embeddings == json.loads((folder / "config.json").read_text())["n_positions"]
    assert "--rope-factor change nothing: GPT2LMHeadModel has no rotary positions" in caplog.text


@pytest.mark.parametrize("factor", [0.0, -1.0, 2000.0, float("nan")])
def test_a_factor_has_bounds(factor: float) -> None:
    with pytest.raises(SettingsError, match=r"--rope-factor must be within \(0, 1024\]"):
        ModelServerSettings(model_id="x", rope_factor=factor)
