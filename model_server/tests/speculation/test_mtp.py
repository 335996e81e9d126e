"""Layers for multi-token prediction: drafts are those of transformers' own module, and texts do not change."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.registry.lookup import choose_spec
from funitel.model_server.spec.state_layers import STATE_KINDS
from funitel.model_server.speculation.mtp import LAYOUTS, layer_spec
from funitel.proto.errors import WeightsError
from funitel_testing.drafters import run_drafted, watched
from funitel_testing.executors import chunk, decode, ids_of, load_executor, prefill, run_alone, start
from funitel_testing.mtp import MtpOracle
from funitel_testing.tiny import byte_tokenizer
from funitel_testing.zoo import ZOO

MOST = 3
PROMPTS: dict[int, list[int]] = {1: list(range(40, 60)), 2: list(range(100, 170)), 3: [5, 9]}
FAMILIES = ("qwen3_5", "qwen3_next", "deepseek_v3", "glm4_moe", "deepseek_v32")


def save(family: str, folder: Path) -> MtpOracle:
    ZOO[family].save(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return MtpOracle(folder)


@pytest.fixture(scope="module", params=FAMILIES)
def oracle_and_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[MtpOracle, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return save(request.param, folder), folder


def test_drafts_are_those_of_transformers(oracle_and_folder: tuple[MtpOracle, Path]) -> None:
    oracle, folder = oracle_and_folder
    executor = load_executor(folder, speculate=MOST)
    calls = watched(executor)
    found, drafted, _ = run_drafted(executor, [start(i, prompt, 8) for i, prompt in PROMPTS.items()], MOST)
    assert drafted
    assert len(calls) > 2
    for row, drafts in calls:
        assert len(drafts) == row.limit
        assert drafts == oracle.drafts(row.tokens, row.limit)
    plain = load_executor(folder)
    for i, prompt in PROMPTS.items():
        assert ids_of(found[i]) == ids_of(run_alone(plain, start(i, prompt, 8)))


def test_prompts_in_chunks_give_the_same_drafts(tmp_path: Path) -> None:
    oracle = save("qwen3_5", tmp_path)
    executor = load_executor(tmp_path, speculate=MOST)
    calls = watched(executor)
    first = prefill(executor, 1, [replace(start(2, PROMPTS[2], 10, chunk_len=33), speculate=MOST)])
    second = decode(executor, [first.batch], [chunk(2, 20)])
    joined = prefill(executor, 2, [replace(start(1, PROMPTS[1], 10), speculate=MOST)], second.batch, [chunk(2, 1)])
    last = decode(executor, [joined.batch], [chunk(2, 16)])
    for _ in range(3):
        last = decode(executor, [last.batch])
    assert {row.request_id for row, _ in calls} == {1, 2}
    for row, drafts in calls:
        assert drafts == oracle.drafts(row.tokens, row.limit)


def test_seeded_text_is_the_same_with_drafts_and_without(tmp_path: Path) -> None:
    save("qwen3_5", tmp_path)
    plain, drafting = load_executor(tmp_path), load_executor(tmp_path, speculate=MOST)
    starts = [start(i, prompt, 20, do_sample=True, temperature=1.3, seed=i) for i, prompt in PROMPTS.items()]
    found, drafted, _ = run_drafted(drafting, starts, MOST)
    assert drafted
    for each in starts:
        assert ids_of(found[each.request_id]) == ids_of(run_alone(plain, each))


def test_a_layer_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    save("qwen3_5", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["mtp.layers.0.self_attn.k_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"^the checkpoint lacks tensor mtp\.layers\.0\.self_attn\.k_proj\.weight$"):
        load_executor(tmp_path, speculate=MOST)


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "kimi_linear", "jamba", "minimax", "mamba", "mamba2"])
def test_the_layer_keeps_no_state(family: str, tmp_path: Path) -> None:
    ZOO[family].save(tmp_path)
    spec = choose_spec(None, tmp_path)
    weights = Weights(tmp_path, torch.float32, torch.device("cpu"), spec.names.prefix, is_shown=False)
    layer = layer_spec(spec, LAYOUTS["mtp"], weights)
    assert [name for name in (*STATE_KINDS, "is_state_beside", "state_layers") if getattr(layer, name)] == []


def test_a_model_without_the_layer_looks_its_drafts_up(tmp_path: Path) -> None:
    ZOO["deepseek_v3"].save(tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    speculator = load_executor(tmp_path, speculate=MOST).speculator
    assert speculator is not None
    assert speculator.drafter.name == "ngram"


def test_nothing_of_the_layer_is_read_where_nothing_speculates(tmp_path: Path) -> None:
    save("qwen3_5", tmp_path)
    executor = load_executor(tmp_path)
    assert executor.speculator is None
    assert executor.runner.pool.companion is None
