"""EAGLE-3 heads: drafts are those of the layer written out, texts do not change, other heads are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from funitel.proto.errors import UnsupportedModel, WeightsError
from funitel_testing.drafters import run_drafted, watched
from funitel_testing.eagle3 import Eagle3Oracle
from funitel_testing.executors import ids_of, load_executor, run_alone, start
from funitel_testing.tiny import save_tiny

MOST = 3
PROMPTS: dict[int, list[int]] = {1: list(range(40, 60)), 2: list(range(100, 170)), 3: [5, 9]}
KINDS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "plain": ("midlayer", {}, (1, 3, 4)),
    "told": ("midlayer", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 7]}}, (0, 2, 7)),
    "speculators": (
        "layers.0",
        {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 6]},
        (0, 2, 5),
    ),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=8)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_layer(target: Path, tmp_path: Path, kind: str) -> None:
    layer, config, read = KINDS[kind]
    oracle = Eagle3Oracle(tmp_path, target, layer=layer, **config)
    if 7 in read:  # transformers gives the last layer's outputs behind the norm
        oracle.model.model.norm = torch.nn.Identity()
    executor = load_executor(target, speculate=MOST, draft_model=str(tmp_path))
    calls = watched(executor)
    starts = [start(i, prompt, 8) for i, prompt in PROMPTS.items()]
    found, drafted, _ = run_drafted(executor, starts, MOST)
    assert drafted
    assert len(calls) > 2
    for row, drafts in calls:
        assert drafts == oracle.drafts(row.tokens, row.limit, read)
    plain = load_executor(target)
    for each in starts:
        assert ids_of(found[each.request_id]) == ids_of(run_alone(plain, each))


def refused(target: Path, folder: Path) -> None:
    load_executor(target, speculate=MOST, draft_model=str(folder))


def test_a_head_for_another_hidden_size_is_refused(target: Path, tmp_path: Path) -> None:
    other = save_tiny("llama", tmp_path / "other", hidden_size=96)
    Eagle3Oracle(tmp_path / "head", other)
    message = rf"^{tmp_path}/head is no EAGLE-3 head for LlamaForCausalLM with a hidden size of 48: tensor fc\.weight"
    with pytest.raises(WeightsError, match=message):
        refused(target, tmp_path / "head")


def test_a_head_that_reads_layers_that_are_not_there_is_refused(tmp_path: Path) -> None:
    target = save_tiny("llama", tmp_path / "target")
    Eagle3Oracle(tmp_path / "head", target)
    with pytest.raises(WeightsError, match=r"^the EAGLE-3 head reads layer -1, and LlamaForCausalLM has 3 layers$"):
        refused(target, tmp_path / "head")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("d2t", r"proposes 100 of 288 tokens, and has no d2t to say which$"),
        ("midlayer.hidden_norm.weight", r"^the checkpoint lacks tensor midlayer\.hidden_norm\.weight$"),
        ("fc.weight", r"the checkpoint lacks tensor fc\.weight$"),
    ],
)
def test_a_head_that_is_not_whole_is_refused(target: Path, tmp_path: Path, name: str, message: str) -> None:
    Eagle3Oracle(tmp_path, target)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(WeightsError, match=message):
        refused(target, tmp_path)


def test_a_map_beyond_the_targets_tokens_is_refused(target: Path, tmp_path: Path) -> None:
    Eagle3Oracle(tmp_path, target)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["d2t"][-1] += 1000
    save_file(tensors, path)
    with pytest.raises(WeightsError, match=rf"^tensor d2t of {tmp_path} names tokens beyond the 288 of the target$"):
        refused(target, tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"transformer_layer_config": "x"}, "transformer_layer_config must be an object, given 'x'"),
        ({"eagle_config": [1]}, "eagle_config must be an object"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["a"]}}, "layer_ids must be an integer, given 'a'"),
        ({"eagle_aux_hidden_state_layer_ids": "abc"}, "layer_ids must be a list of integers, given 'abc'"),
        ({"eagle_aux_hidden_state_layer_ids": [1.5, 2, 3]}, "layer_ids must be an integer, given '1.5'"),
        ({"eagle_aux_hidden_state_layer_ids": 4}, "layer_ids must be a list of integers, given '4'"),
        ({"draft_vocab_size": "x"}, "draft_vocab_size must be an integer, given 'x'"),
        ({"draft_vocab_size": -5}, "draft_vocab_size must be > 0, given -5"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused_in_one_line(
    target: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    Eagle3Oracle(tmp_path / "head", target)
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(UnsupportedModel) as error:
        refused(target, tmp_path / "head")
    assert error.value.message.startswith("config.json of an EAGLE-3 head has a value of the wrong kind: ")
    assert message in error.value.message
    assert "\n" not in error.value.message
