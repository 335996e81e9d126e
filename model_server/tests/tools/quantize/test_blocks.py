"""Models written as blocks: what is written, and that the fused step and torch compute what the blocks stand for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.precision import ActivationDtype, Tier
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.quantized.block_formats import FORMATS, BlockFormat, format_of
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.settings import QuantizeSettings
from funitel.model_server.tools.quantize.command import quantize
from funitel.proto.errors import SettingsError, UnsupportedModel, WeightsError
from funitel_testing.executors import ids_of, load_executor, run_alone, start
from funitel_testing.forward_worker import CPU, run
from funitel_testing.threads import on_ranks
from funitel_testing.tiny import save_tiny, save_tokenizer
from funitel_testing.zoo import ZOO

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
EVERY = pytest.mark.parametrize(
    "name",
    "q8 q6 q5 q4 q4_b64t1 q3h q3 q2 a16w8 a16w4_g32 a16w8_g512 a16w4_g-1".split(),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("model"), **SIZES)


def settings_for(model: Path, target: Path, to: str, **changes: Any) -> QuantizeSettings:
    return QuantizeSettings(model_id=str(model), output_dir=str(target), to=to, num_threads=1, device="cpu", **changes)


def write(model: Path, target: Path, to: str, **changes: Any) -> Path:
    quantize(settings_for(model, target, to, **changes), model)
    return target


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 288, (length,), generator=generator).tolist() for length in (40, 9)]


def exact_copy(folder: Path, target: Path) -> Path:
    """The same model with what its blocks stand for in floating point."""
    spec_prefix = "model"
    weights = Weights(folder, torch.float32, CPU, spec_prefix, is_shown=False)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight_blocks")
        if name.endswith(".weight_inputs"):
            continue
        if stem == name:
            tensors[name] = tensor
        else:
            tensors[f"{stem}.weight"] = weights.read(f"{stem}.weight", weights._find(f"{stem}.weight").shape)
    target.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".json" and path.name != "config.json":
            (target / path.name).write_bytes(path.read_bytes())
    config = read_json(folder / "config.json")
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors")
    return target


@EVERY
def test_what_is_written_is_computed_on_as_it_is(name: str, model: Path, tmp_path: Path) -> None:
    folder = write(model, tmp_path / "blocks", name)
    usual = format_of(name)
    assert usual is not None
    config = read_json(folder / "config.json")["quantization_config"]
    assert config["quant_method"] == "funitel-blocks"
    assert config["format"] == usual.name
    tensors = load_file(folder / "model.safetensors")
    assert tensors["model.layers.0.mlp.down_proj.weight_blocks"].shape == (128, usual.row_bytes(256))
    assert torch.equal(tensors["model.norm.weight"], load_file(model / "model.safetensors")["model.norm.weight"])
    source = load_file(model / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(tensors["model.layers.0.mlp.down_proj.weight_blocks"], usual.encode(source))
    exact = exact_copy(folder, tmp_path / "exact")
    expected = run(exact, TensorParallel(), prompts(), 4)
    for size in (1, 2):

        def forward(parallel: TensorParallel) -> list[torch.Tensor]:
            return run(folder, parallel, prompts(), 4, Tier.GGUF, activations=ActivationDtype.INT16)

        found = on_ranks(size, forward)
        for ours, theirs in zip(found, expected, strict=True):
            # Keys and values are float16, and on two ranks matrices that are cut within a block are int8; those with
            # zeros have smaller blocks there.
            assert (ours - theirs).norm() / theirs.norm() < (5e-3 if size == 1 or "a16" in name else 0.08), size


@EVERY
def test_torch_computes_what_blocks_stand_for(name: str, model: Path, tmp_path: Path) -> None:
    folder = write(model, tmp_path / "blocks", name)
    expected = run(exact_copy(folder, tmp_path / "exact"), TensorParallel(), prompts(), 4)
    found = on_ranks(2, lambda parallel: run(folder, parallel, prompts(), 4))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["q6", "q3h", "a16w4", "a16w8_g-1"])
def test_blocks_made_on_loading_are_those_that_are_written(name: str, model: Path, tmp_path: Path) -> None:
    folder = write(model, tmp_path / "blocks", name, tensor="down_proj=q8,lm_head=q5_b32t1")
    chosen: dict[str, Any] = {"dtype": None, "enable_prefill_logprobs": False}
    stored = load_executor(folder, **chosen)
    made = load_executor(model, quantize=name, quantize_tensors="down_proj=q8,lm_head=q5_b32t1", **chosen)
    texts = [ids_of(run_alone(executor, start(1, prompts()[0], 20))) for executor in (stored, made)]
    assert texts[0] == texts[1]


# Inputs of `down_proj`, with groups of 512 and 64, which two ranks cut in a group and in a block of 64.
WIDE = {**SIZES, "intermediate_size": 1088}


@pytest.mark.parametrize("name", ["a16w8", "a16w8_g512", "a16w8_g-1", "a16w4_g512", "a16w4_g-1"])
@pytest.mark.parametrize("is_made", [False, True], ids=["written", "made"])
def test_ranks_have_the_codes_that_one_rank_has(name: str, is_made: bool, tmp_path: Path) -> None:
    """A rank that holds some inputs of an output has the scale of all of them."""
    source = save_tiny("llama", tmp_path / "wide", **WIDE, num_hidden_layers=1)
    weights = Weights(source if is_made else write(source, tmp_path / "blocks", name), torch.float32, CPU, "model")
    if is_made:
        weights.round_as(name, None, spec_of(read_json(source / "config.json")).names)
    stem, sizes = "model.layers.0.mlp.down_proj", (128, 1088)
    plain = load_file(source / "model.safetensors")[f"{stem}.weight"]
    stored = FORMATS["a16w8_g64"] if name == "a16w8" else found_of(name).stored(1088)
    whole = stored.decode(stored.encode(plain), 1088)
    assert weights.block_type(stem) is stored.kind
    shares = []
    for columns in ((0, 544), (544, 1088)):
        kind = weights.block_type(stem, columns)
        assert kind is not None
        assert kind.num_inputs == 32
        blocks = weights.read_blocks(stem, *sizes, columns=columns)
        fitted = stored.fitted(1088, *columns)
        assert fitted is not None
        assert blocks.shape == (128, kind.row_bytes(544))
        shares.append(fitted.decode(blocks, 544))
    assert torch.equal(torch.cat(shares, dim=1), whole)


def test_a_fused_step_on_two_ranks_computes_on_groups_that_they_cut(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "wide", **WIDE)
    for name in ("a16w8_g-1", "a16w4_g512"):
        folder = write(source, tmp_path / name, name)
        expected = run(exact_copy(folder, tmp_path / f"{name}-exact"), TensorParallel(), prompts(), 4)

        def forward(parallel: TensorParallel, folder: Path = folder) -> list[torch.Tensor]:
            return run(folder, parallel, prompts(), 4, Tier.GGUF, activations=ActivationDtype.INT16)

        for ours, theirs in zip(on_ranks(2, forward), expected, strict=True):
            assert (ours - theirs).norm() / theirs.norm() < 5e-3, name


def found_of(name: str) -> BlockFormat:
    found = format_of(name)
    assert found is not None
    return found


def test_formats_are_mixed_by_tensor(model: Path, tmp_path: Path) -> None:
    folder = write(model, tmp_path / "blocks", "q3h", tensor="lm_head=q6,v_proj=q4_b64t1")
    config = read_json(folder / "config.json")["quantization_config"]
    expected = {f"model.layers.{i}.self_attn.v_proj": "q4_b64t1" for i in range(3)}
    assert config["tensors"] == expected | {"lm_head": "q6_b64t1", "model.embed_tokens": "q8_b32t2"}
    tensors = load_file(folder / "model.safetensors")
    num_bytes = sum(tensor.nbytes for name, tensor in tensors.items() if name.endswith("weight_blocks"))
    sizes = {name: tuple(tensor.shape) for name, tensor in load_file(model / "model.safetensors").items()}
    total = 0
    for name, shape in sizes.items():
        if len(shape) == 2:
            stem = name.removesuffix(".weight")
            chosen = FORMATS[config["tensors"].get(stem, config["format"])]
            total += shape[0] * chosen.row_bytes(shape[1])
    assert num_bytes == total


def test_a_router_stays_in_floating_point(tmp_path: Path) -> None:
    mixtral = ZOO["mixtral"]
    source, sizes = tmp_path / "mixtral", {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    replace(mixtral, config={**mixtral.config, **sizes, "num_key_value_heads": 2}).save(source)
    save_tokenizer(source)
    names = load_file(write(source, tmp_path / "blocks", "a16w8") / "model.safetensors")
    assert any(each.endswith("gate.weight") for each in names)
    assert any("experts" in each and each.endswith("weight_blocks") for each in names)
    check_near(source, tmp_path / "blocks")


def test_layers_that_lie_the_other_way_round_are_turned(tmp_path: Path) -> None:
    source = save_tiny("gpt2", tmp_path / "gpt2", n_embd=64, n_head=4, n_inner=96)
    names = load_file(write(source, tmp_path / "blocks", "a16w8") / "model.safetensors")
    assert any(each.endswith("wpe.weight") for each in names)
    assert names["transformer.h.0.mlp.c_fc.weight_blocks"].shape == (96, FORMATS["a16w8_g64"].row_bytes(64))
    check_near(source, tmp_path / "blocks")


def check_near(source: Path, folder: Path) -> None:
    expected = run(source, TensorParallel(), prompts(), 4)
    for found in (run(folder, TensorParallel(), prompts(), 4), run(folder, TensorParallel(), prompts(), 4, Tier.GGUF)):
        for ours, theirs in zip(found, expected, strict=True):
            assert ((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).median() < 0.1


def test_what_cannot_be_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="'lm_hed' is part of the name of no matrix"):
        write(model, tmp_path / "a", "q4", tensor="lm_hed=q8")
    assert not (tmp_path / "a").exists()
    with pytest.raises(SettingsError, match="--method is not for --to q4"):
        settings_for(model, tmp_path / "a", "q4", method="int8")
    with pytest.raises(SettingsError, match="--method is not for --to q4"):
        settings_for(model, tmp_path / "a", "q4", method="gptq")
    with pytest.raises(SettingsError, match="--tensor is for blocks, which --to asks for"):
        QuantizeSettings(model_id="x", output_dir="y", tensor="lm_head=q8")
    odd = save_tiny("llama", tmp_path / "odd", hidden_size=48, intermediate_size=36)
    with pytest.raises(UnsupportedModel, match="has no matrix with whole blocks of 64 inputs"):
        write(odd, tmp_path / "b", "q6", tensor=None)
    with pytest.raises(SettingsError, match="--quantize-tensors lm_head=q8 is for --quantize with blocks"):
        load_executor(model, quantize_tensors="lm_head=q8")
    with pytest.raises(SettingsError, match="--quantize q4 keeps blocks, --dtype bfloat16 keeps bfloat16: give one"):
        load_executor(model, quantize="q4", dtype="bfloat16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cut": 1}, "weight_blocks is U8 with .* bytes an output, expected"),
        ({"scale": float("nan")}, "holds the scale nan; scales must be finite"),
        ({"format": "q9"}, "format 'q9' is not supported with funitel-blocks"),
        ({"inputs": None}, "lacks tensor model.layers.0.mlp.up_proj.weight_inputs"),
    ],
)
def test_a_damaged_folder_is_refused(change: dict[str, Any], message: str, model: Path, tmp_path: Path) -> None:
    folder = write(model, tmp_path / "blocks", "q4")
    path, name = folder / "model.safetensors", "model.layers.0.mlp.up_proj"
    tensors = load_file(path)
    blocks = tensors[f"{name}.weight_blocks"]
    if "cut" in change:
        tensors[f"{name}.weight_blocks"] = blocks[:, :-1].contiguous()
    if "scale" in change:
        blocks[0, 2:4] = torch.tensor([change["scale"]], dtype=torch.float16).view(torch.uint8)
    if "inputs" in change:
        del tensors[f"{name}.weight_inputs"]
    if "format" in change:
        config = read_json(folder / "config.json")
        config["quantization_config"]["format"] = change["format"]
        (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, path)
    with pytest.raises((WeightsError, UnsupportedModel), match=message):
        load_executor(folder, dtype=None)
