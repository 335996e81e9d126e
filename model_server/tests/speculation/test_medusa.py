"""Medusa heads: drafts are those of the heads written out, texts do not change; other speculators are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from funitel.model_server.loading.generator import load_generator
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import UnsupportedModel, WeightsError
from funitel_testing.drafters import run_drafted, watched
from funitel_testing.executors import ids_of, load_executor, run_alone, start
from funitel_testing.medusa import save_medusa
from funitel_testing.tiny import save_tiny

MOST = 4
PROMPTS: dict[int, list[int]] = {1: list(range(40, 60)), 2: list(range(100, 170)), 3: [5, 9]}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize(("num_blocks", "has_out"), [(1, True), (2, True), (1, False)])
def test_drafts_are_those_of_the_heads(target: Path, tmp_path: Path, num_blocks: int, has_out: bool) -> None:
    tensors = save_medusa(tmp_path, num_blocks=num_blocks, has_out=has_out)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    executor = load_executor(target, speculate=MOST, draft_model=str(tmp_path))
    calls = watched(executor)
    starts = [start(i, prompt, 8) for i, prompt in PROMPTS.items()]
    found, drafted, _ = run_drafted(executor, starts, MOST)
    assert drafted
    assert len(calls) > 2
    for row, drafts in calls:
        assert len(drafts) == min(row.limit, 3)
        with torch.inference_mode():
            hidden = model.model(torch.tensor([row.tokens[:-1]])).last_hidden_state[0, -1]
            for head, draft in enumerate(drafts):
                x = hidden
                for block in range(num_blocks):
                    weight, bias = (tensors[f"{head}.{block}.linear.{kind}"] for kind in ("weight", "bias"))
                    x = x + F.silu(F.linear(x, weight, bias))
                out = tensors.get(f"{head}.{num_blocks}.weight", model.lm_head.weight)
                assert draft == int((out @ x).argmax())
    plain = load_executor(target)
    for each in starts:
        assert ids_of(found[each.request_id]) == ids_of(run_alone(plain, each))


def test_heads_in_a_file_of_pytorch_are_read_as_tensors_alone(target: Path, tmp_path: Path) -> None:
    tensors = save_medusa(tmp_path)
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    executor = load_executor(target, speculate=MOST, draft_model=str(tmp_path))
    assert executor.speculator is not None
    assert executor.speculator.drafter.name == "medusa"
    torch.save({"0": Path("x")}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(WeightsError, match=rf"^{tmp_path}/medusa_lm_head\.pt"):
        load_executor(target, speculate=MOST, draft_model=str(tmp_path))


def test_heads_for_another_model_are_refused(tmp_path: Path) -> None:
    other = save_tiny("llama", tmp_path / "target", hidden_size=96)
    save_medusa(tmp_path / "heads")
    message = r"heads holds no Medusa heads for LlamaForCausalLM with a hidden size of 96: tensor 0\.0\.linear\.weight"
    with pytest.raises(WeightsError, match=message):
        load_executor(other, speculate=MOST, draft_model=str(tmp_path / "heads"))


def test_heads_that_are_not_whole_are_refused(target: Path, tmp_path: Path) -> None:
    save_medusa(tmp_path)
    path = tmp_path / "medusa_lm_head.safetensors"
    tensors = load_file(path)
    del tensors["1.0.linear.bias"]
    save_file(tensors, path)
    with pytest.raises(WeightsError, match=r"^the checkpoint lacks tensor 1\.0\.linear\.bias$"):
        load_executor(target, speculate=MOST, draft_model=str(tmp_path))


@pytest.mark.parametrize("count", [0, 65, "3", None])
def test_a_number_of_heads_has_bounds(target: Path, tmp_path: Path, count: object) -> None:
    save_medusa(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": count}))
    with pytest.raises(WeightsError, match=r"config\.json: medusa_num_heads must be within 1\.\.64, given"):
        load_executor(target, speculate=MOST, draft_model=str(tmp_path))


def test_an_mlp_speculator_is_refused_by_name(target: Path, tmp_path: Path) -> None:
    save_medusa(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mlp_speculator"}))
    with pytest.raises(
        UnsupportedModel, match=rf"^--draft-model {tmp_path} is an MLP speculator, which is not support"
    ):
        load_executor(target, speculate=MOST, draft_model=str(tmp_path))


def test_what_makes_drafts_is_no_model(tmp_path: Path) -> None:
    save_medusa(tmp_path)
    settings = ModelServerSettings(model_id="heads", device="cpu", num_threads=1)
    message = r"^heads makes draft tokens for another model: serve org/base with --speculate 3 --draft-model heads$"
    with pytest.raises(UnsupportedModel, match=message):
        load_generator(settings, tmp_path)
