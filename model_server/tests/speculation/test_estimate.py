"""What `funitel models` says of a model with a drafter is what loading both then finds."""

import json
from pathlib import Path
from typing import Any

import pytest

from funitel.model_server.loading.generator import load_generator
from funitel.model_server.settings import ModelServerSettings, ModelsSettings
from funitel.model_server.tools.models.report import tell_needs
from funitel_testing.eagle3 import Eagle3Oracle
from funitel_testing.medusa import save_medusa
from funitel_testing.mtp import MtpOracle
from funitel_testing.tiny import byte_tokenizer, save_tiny
from funitel_testing.zoo import ZOO


def checkpoint(kind: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A target, and the settings of its drafter."""
    if kind in ZOO:
        ZOO[kind].save(folder)
        byte_tokenizer().save(str(folder / "tokenizer.json"))
        MtpOracle(folder)
        return folder, {}
    target = save_tiny("llama", folder / "target", num_hidden_layers=8)
    if kind == "eagle3":
        Eagle3Oracle(folder / "draft", target)
    elif kind == "medusa":
        save_medusa(folder / "draft")
    else:
        save_tiny("smollm", folder / "draft", num_hidden_layers=1)
    return target, {"draft_model": str(folder / "draft")}


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("kind", ["model", "eagle3", "medusa", "qwen3_5", "deepseek_v3"])
def test_a_model_with_a_drafter_takes_what_was_told(tmp_path: Path, kind: str, dtype: str | None) -> None:
    folder, settings = checkpoint(kind, tmp_path / "model")
    given: dict[str, Any] = settings | {"device": "cpu", "block_size": 4, "speculate": 3, "dtype": dtype}
    found = json.loads(tell_needs(ModelsSettings(model_id=str(folder), json=True, **given))[0])
    executor, info = load_generator(ModelServerSettings(model_id=str(folder), num_threads=1, **given), folder)
    assert found["weights"] == [info.weight_bytes]
    assert found["blocks"] == [executor.runner.pools.bytes_per_block]
    halves = json.loads(tell_needs(ModelsSettings(model_id=str(folder), json=True, num_shard=2, **given))[0])
    assert len(halves["weights"]) == len(halves["blocks"]) == 2
    assert max(halves["weights"]) < info.weight_bytes


def test_the_memory_of_a_step_counts_heads_and_the_hidden_states_that_they_read(tmp_path: Path) -> None:
    target = save_tiny("llama", tmp_path / "target")
    save_medusa(tmp_path / "heads")
    save_tiny("smollm", tmp_path / "draft", num_hidden_layers=1)

    def step_bytes(num_tokens: int, **settings: Any) -> int:
        chosen = {"device": "cpu", "dtype": "float32", "block_size": 4, "num_threads": 1} | settings
        executor, _ = load_generator(ModelServerSettings(model_id=str(target), **chosen), target)
        assert executor.options.step_bytes is not None
        return executor.options.step_bytes(num_tokens)

    plain, drafting = step_bytes(4096), step_bytes(4096, speculate=3, draft_model=str(tmp_path / "heads"))
    hidden = 4096 * 48 * 4
    assert drafting >= plain + hidden
    few = step_bytes(1, speculate=3, draft_model=str(tmp_path / "heads"))
    assert few >= 64 * 288 * 4, "the logits of a step's drafts"
    assert step_bytes(4096, speculate=3, draft_model=str(tmp_path / "draft")) < plain + hidden
