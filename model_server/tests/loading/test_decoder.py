"""What a shard's settings make of a checkpoint."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from funitel.model_server.cpu import compiler
from funitel.model_server.loading.decoder import load
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
    with pytest.raises(SettingsError, match=r"--rope-factor must be > 0 and <= 1024, given"):
        ModelServerSettings(model_id="x", rope_factor=factor)


def test_a_flag_for_threads_of_the_fused_step_is_warned_of_where_torch_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny("llama", tmp_path)
    settings = ModelServerSettings(model_id="tiny", device="cpu", num_threads=1, thread_spin_us=7)
    load(settings, folder)
    assert "--thread-spin-us" not in caplog.text
    monkeypatch.setattr(compiler, "COMPILERS", ("no-such-compiler",))
    load(replace(settings, cache_dir=str(tmp_path / "nothing built")), folder)
    assert caplog.text.count("--thread-spin-us 7 changes nothing: the fused CPU step") == 1


def test_a_number_of_threads_and_a_bound_on_it_contradict_each_other() -> None:
    message = "--most-threads 4 bounds the tuning of threads, which --num-threads 2 turns off: give one of them"
    with pytest.raises(SettingsError, match=f"^{message}$"):
        ModelServerSettings(model_id="x", num_threads=2, most_threads=4)
