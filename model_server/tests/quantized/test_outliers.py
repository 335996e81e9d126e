"""Outliers of blocks: what is kept apart, what is read of it, products with it, and files that are damaged."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu import compiler
from funitel.model_server.cpu.build import cpu_flags
from funitel.model_server.cpu.footprint import weight_bytes
from funitel.model_server.cpu.native import load_library
from funitel.model_server.cpu.precision import ActivationDtype, MatrixKind, Tier
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.hub.resolve import cache_folder
from funitel.model_server.models.footprint import SizedProducts
from funitel.model_server.quantized.block_formats import FORMATS
from funitel.model_server.quantized.outliers import Outliers, has_outliers, split
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.settings import PerplexitySettings, QuantizeSettings
from funitel.model_server.tools.perplexity.command import run as perplexity
from funitel.model_server.tools.quantize.command import quantize
from funitel.model_server.tools.quantize.job import CheckpointSource
from funitel.proto.errors import FunitelError, SettingsError
from funitel_testing import inferflow_blocks
from funitel_testing.executors import load_executor
from funitel_testing.forward_worker import CPU, fused_decoder, run
from funitel_testing.products import product
from funitel_testing.threads import on_ranks
from funitel_testing.tiny import save_tiny, save_tokenizer
from funitel_testing.zoo import ZOO

TEXT = Path(__file__).parents[3] / "benchmarks" / "heldout_long.txt"
STEM = "model.layers.0.mlp.down_proj"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
Tensors = dict[str, torch.Tensor]
SETS = [name for name, needs, _ in compiler.INSTRUCTION_SETS if needs <= cpu_flags()]
EVERY_SET = pytest.mark.parametrize("instruction_set", SETS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("model"), **SIZES)


def written(model: Path, target: Path, to: str = "q3", outliers: float = 0.01, tensor: str | None = None) -> Path:
    settings = QuantizeSettings(
        model_id=str(model),
        output_dir=str(target),
        to=to,
        tensor=tensor,
        outliers=outliers,
        device="cpu",
        num_threads=1,
    )
    quantize(settings, model)
    return target


def values_of(name: str, tensors: Tensors, stem: str) -> npt.NDArray[np.float32]:
    """The weights of a matrix, by NumPy alone: its blocks one by one, and the differences one by one."""
    raw, size = tensors[f"{stem}.weight_blocks"].numpy(), inferflow_blocks.BYTES[name]
    rows = [
        np.concatenate([inferflow_blocks.decode(name, row[i : i + size].tobytes()) for i in range(0, len(row), size)])
        for row in raw
    ]
    weights = np.stack(rows)[:, : int(tensors[f"{stem}.weight_inputs"])]
    starts = tensors[f"{stem}.outlier_rows"].tolist()
    columns, deltas = tensors[f"{stem}.outlier_columns"].numpy(), tensors[f"{stem}.outlier_deltas"].numpy()
    for row, (first, last) in enumerate(itertools.pairwise(starts)):
        for i in range(first, last):
            weights[row, columns[i]] += np.float32(deltas[i])
    return weights


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 288, (length,), generator=generator).tolist() for length in (40, 9)]


@pytest.mark.parametrize("name", [name for name in FORMATS if has_outliers(FORMATS[name], 512)])
@pytest.mark.parametrize("share", [0.01, 0.05])
def test_the_weights_that_are_left_have_smaller_errors(name: str, share: float) -> None:
    chosen, random = FORMATS[name], np.random.default_rng(5)
    weights = torch.from_numpy(random.standard_normal((48, 512)).astype(np.float32))
    weights[random.random(weights.shape) < 0.005] *= 8
    blocks, outliers = split(weights, chosen, round(share * weights.numel()))
    assert outliers.count == round(share * weights.numel())
    found, plain = chosen.decode(blocks, 512), chosen.decode(chosen.encode(weights), 512)
    without = found.clone()
    outliers.add_to(found)
    is_apart = found != without
    assert is_apart.sum() <= outliers.count
    # float16 of a difference; of the others the block is all there is.
    assert ((found - weights).abs()[is_apart] <= 2**-10 * (found - without).abs()[is_apart]).all()
    # 16 levels in groups of 256 leave more: fewer of the groups than of the weights have an outlier that is far away.
    assert (found - weights).square().sum() < (0.85 if chosen.num_inputs <= 128 else 0.99) * (
        plain - weights
    ).square().sum()


def test_the_smallest_ranges_of_all_are_chosen() -> None:
    """Two blocks of 32 of each row: of one a weight is far away, of the next two together, alone these save little."""
    weights = torch.linspace(-1, 1, 64).repeat(4, 1)
    weights[0, 5], weights[1, 40], weights[1, 41], weights[2, 7] = 9.0, -7.0, -6.9, 1.4
    _, outliers = split(weights, FORMATS["q3_b32t1b"], 3)
    rows = torch.repeat_interleave(torch.arange(4), outliers.starts.diff()).tolist()
    assert list(zip(rows, outliers.columns.tolist(), strict=True)) == [(0, 5), (1, 40), (1, 41)]


def test_what_is_written_and_read_is_what_numpy_reads(model: Path, tmp_path: Path) -> None:
    folder = written(model, tmp_path / "blocks", "q3", tensor="up_proj=q4_b64t1,lm_head=q8")
    tensors, config = load_file(folder / "model.safetensors"), read_json(folder / "config.json")["quantization_config"]
    assert not any("outlier" in name for name in tensors if "lm_head" in name or "embed" in name)
    source = load_file(model / "model.safetensors")
    weights = Weights(folder, torch.float32, CPU, "model", is_shown=False)
    stems = [name.removesuffix(".outlier_rows") for name in tensors if name.endswith(".outlier_rows")]
    assert len(stems) == 3 * 7
    for stem in stems:
        shape = source[f"{stem}.weight"].shape
        count = round(0.01 * shape.numel())
        assert tensors[f"{stem}.outlier_columns"].shape == tensors[f"{stem}.outlier_deltas"].shape == (count,)
        expected = torch.from_numpy(values_of(config["tensors"].get(stem, config["format"]), tensors, stem))
        assert torch.equal(weights.read(f"{stem}.weight", shape), expected)
        rows, columns = (3, shape[0] - 5), (33, shape[1] - 40)
        part = weights.read(f"{stem}.weight", shape, rows=rows, columns=columns)
        assert torch.equal(part, expected[slice(*rows), slice(*columns)])


def exact_copy(folder: Path, model: Path, target: Path) -> Path:
    """The same model with what its blocks and outliers stand for in floating point."""
    spec = spec_of(read_json(folder / "config.json"))
    weights = Weights(folder, torch.float32, CPU, spec.names.prefix, is_shown=False)
    tensors = {}
    for name, each in load_file(model / "model.safetensors").items():
        found = weights._find(name).shape
        is_turned = spec.names.is_transposed and each.dim() == 2 and ".h." in name  # GPT-2's layers
        tensors[name] = weights.read(name, found).t().contiguous() if is_turned else weights.read(name, found)
    target.mkdir()
    for path in model.glob("*.json"):
        (target / path.name).write_bytes(path.read_bytes())
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize(
    ("family", "to", "tensor", "changes"),
    [
        ("llama", "q3", None, SIZES),
        ("llama", "q4_b64t1", "embed=q3,lm_head=q2,v_proj=q8", SIZES),
        ("gpt2", "q3h", None, {"n_embd": 64, "n_head": 4, "n_inner": 128}),
    ],
)
def test_the_fused_step_computes_on_them_as_they_are(
    family: str, to: str, tensor: str | None, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = save_tiny(family, tmp_path / "model", **changes)
    folder = written(model, tmp_path / "blocks", to, 0.03, tensor)
    exact = exact_copy(folder, model, tmp_path / "exact")
    expected = run(exact, TensorParallel(), prompts(), 4)
    for size in (1, 2):

        def forward(parallel: TensorParallel) -> list[torch.Tensor]:
            decoder = fused_decoder(folder, Tier.GGUF, parallel)
            spec = spec_of(read_json(folder / "config.json"))
            weights = Weights(folder, torch.float32, CPU, spec.names.prefix, is_shown=False)
            predicted = weight_bytes(spec, parallel, Tier.GGUF, weights.block_type, weights.num_outliers)
            assert predicted == decoder.program.held_bytes
            without = weight_bytes(spec, parallel, Tier.GGUF, weights.block_type)
            assert predicted > without
            return run(folder, parallel, prompts(), 4, Tier.GGUF, activations=ActivationDtype.INT16)

        found = on_ranks(size, forward)
        for ours, theirs in zip(found, expected, strict=True):
            # Keys and values are float16, and on two ranks the matrices that are cut within a block are int8.
            assert (ours - theirs).norm() / theirs.norm() < (5e-3 if size == 1 else 0.08), size


def test_experts_have_them_too(tmp_path: Path) -> None:
    mixtral, model = ZOO["mixtral"], tmp_path / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    replace(mixtral, config={**mixtral.config, **sizes}).save(model)
    save_tokenizer(model)
    folder = written(model, tmp_path / "blocks", "q3", 0.03)
    found = run(folder, TensorParallel(), prompts(), 4, Tier.GGUF, activations=ActivationDtype.INT16)
    expected = run(folder, TensorParallel(), prompts(), 4)
    assert any(".experts." in name and "outlier" in name for name in load_file(folder / "model.safetensors"))
    for ours, theirs in zip(found, expected, strict=True):
        # Close scores may choose another expert for single rows.
        assert ((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).median() < 5e-3


def drawn(num_outputs: int, num_inputs: int, share: float) -> tuple[torch.Tensor, Outliers, torch.Tensor]:
    """Blocks of q3 with outliers, and in float64 what they stand for."""
    random, chosen = np.random.default_rng(6), FORMATS["q3_b32t1b"]
    weights = torch.from_numpy(random.standard_normal((num_outputs, num_inputs)).astype(np.float32))
    blocks, outliers = split(weights, chosen, round(share * weights.numel()))
    exact = chosen.decode(blocks, num_inputs)
    outliers.add_to(exact)
    return blocks, outliers, exact.double()


@EVERY_SET
@pytest.mark.parametrize("num_outputs", [16, 40, 200])
def test_a_product_is_that_of_the_weights_they_stand_for(num_outputs: int, instruction_set: str) -> None:
    library = load_library(cache_folder(None), instruction_set)
    blocks, outliers, exact = drawn(num_outputs, 256, 0.03)
    x = torch.randn(23, 256, generator=torch.Generator().manual_seed(8))
    expected = x.double() @ exact.t()
    every = {}
    for activations, most in ((ActivationDtype.INT16, 1e-4), (ActivationDtype.INT8, 2e-2)):
        found = product(library, MatrixKind.Q3_B32T1, blocks, x, activations, outliers=outliers)
        assert (found - expected).norm() / expected.norm() < most
        without = product(library, MatrixKind.Q3_B32T1, blocks, x, activations)
        assert (without - expected).norm() / expected.norm() > 0.1
        every[activations] = found
    for activations, found in every.items():
        for count in range(1, 14):
            for threads in (1, 2):
                some = product(
                    library,
                    MatrixKind.Q3_B32T1,
                    blocks,
                    x[:count].contiguous(),
                    activations,
                    num_threads=threads,
                    outliers=outliers,
                )
                assert torch.equal(some, found[:count]), (count, threads)


@pytest.mark.parametrize("activations", list(ActivationDtype))
def test_every_instruction_set_gives_the_same_bits(activations: ActivationDtype) -> None:
    blocks, outliers, _ = drawn(70, 512, 0.02)
    x = torch.randn(9, 512, generator=torch.Generator().manual_seed(9))
    first, *others = [
        product(load_library(cache_folder(None), each), MatrixKind.Q3_B32T1, blocks, x, activations, outliers=outliers)
        for each in SETS
    ]
    for other in others:
        assert torch.equal(first, other)


def test_activations_that_deltas_are_multiplied_with_are_not_rounded() -> None:
    """With levels of 8 bits the error is that of the blocks alone: less than if the levels were taken for them too."""
    blocks, outliers, exact = drawn(200, 256, 0.05)
    library = load_library(cache_folder(None))
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(10))
    expected, apart = x.double() @ exact.t(), torch.zeros(200, 256)
    outliers.add_to(apart)
    found = product(library, MatrixKind.Q3_B32T1, blocks, x, ActivationDtype.INT8, outliers=outliers).double()
    plain = product(library, MatrixKind.Q3_B32T1, blocks, x, ActivationDtype.INT8).double()
    assert ((found - plain) - x.double() @ apart.double().t()).abs().max() < 1e-4
    scale = x.view(16, 8, 32).abs().amax(2, keepdim=True) / 127
    levels = ((x.view(16, 8, 32) / scale).round() * scale).view(16, 256).double()
    rounded = plain + levels @ apart.double().t()
    assert (found - expected).norm() < (rounded - expected).norm()


@pytest.mark.slow  # two times a model of 135 million weights; what is read is held against NumPy above in seconds
def test_they_lower_the_perplexity_of_q3(demo_model: Path, tmp_path: Path) -> None:
    """Of a model with hidden units scaled, and back at their reader, so that its weights are on no grid of 4 bits."""
    source, generator = CheckpointSource(demo_model), torch.Generator().manual_seed(20)
    tensors = {name: source.read(name).float() for name in source.names}
    for name in [name for name in tensors if name.endswith("up_proj.weight")]:
        units = torch.exp2(torch.rand(len(tensors[name]), generator=generator) - 0.5)
        tensors[name] = tensors[name] * units[:, None]
        down = name.replace("up_proj", "down_proj")
        tensors[down] = (tensors[down] / units).contiguous()
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((demo_model / name).read_bytes())
    save_file(tensors, model / "model.safetensors")
    found = []
    for share in (0.0, 0.01):
        settings = PerplexitySettings(
            model_id=str(written(model, tmp_path / f"q3-{share}", "q3", share)),
            text=str(TEXT),
            max_text_tokens=1500,
            num_threads=1,
            device="cpu",
            json=True,
        )
        found.append(json.loads(perplexity(settings))["results"][0]["perplexity"])
    assert found[1] < 0.8 * found[0]


def test_torch_computes_on_what_they_stand_for(model: Path, tmp_path: Path) -> None:
    folder = written(model, tmp_path / "blocks", "q3", 0.05)
    expected = run(exact_copy(folder, model, tmp_path / "exact"), TensorParallel(), prompts(), 4)
    found = on_ranks(2, lambda parallel: run(folder, parallel, prompts(), 4))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_kernels_without_them_get_floating_point(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = written(model, tmp_path / "blocks", "q3", tensor="v_proj=q8")
    weights = Weights(folder, torch.float32, CPU, "model", is_shown=True)
    weights.products = SizedProducts()
    assert weights.kept(STEM) is None
    assert weights.kept(STEM.replace("down", "up")) is None
    assert weights.kept("model.layers.0.self_attn.v_proj") is not None
    lines = [each for each in caplog.messages if "outliers" in each]
    assert lines == ["matrices of blocks with outliers become torch.float32: the kernels have none for them"]


def test_what_cannot_be_is_refused(model: Path, tmp_path: Path) -> None:
    for wrong in (-0.01, 0.051, float("nan")):
        with pytest.raises(SettingsError, match=r"--outliers must be .*0\.05"):
            written(model, tmp_path / "a", "q3", wrong)
    with pytest.raises(SettingsError, match="--outliers is for blocks, which --to asks for"):
        QuantizeSettings(model_id="x", output_dir="y", outliers=0.01)
    with pytest.raises(SettingsError, match=r"--outliers 0\.01: no matrix of under 8 bits has so many weights"):
        written(model, tmp_path / "a", "q8", 0.01)
    assert not (tmp_path / "a").exists()


def _too_far(tensors: Tensors) -> None:
    tensors[f"{STEM}.outlier_columns"][-1] = 256


def _twice(tensors: Tensors) -> None:
    starts = tensors[f"{STEM}.outlier_rows"]
    place = int(starts[(starts.diff() >= 2).nonzero()[0, 0]])
    tensors[f"{STEM}.outlier_columns"][place + 1] = tensors[f"{STEM}.outlier_columns"][place].item()


def _backwards(tensors: Tensors) -> None:
    tensors[f"{STEM}.outlier_rows"][3] = 10_000


def _negative(tensors: Tensors) -> None:
    tensors[f"{STEM}.outlier_rows"][0] = -1


def _short(tensors: Tensors) -> None:
    tensors[f"{STEM}.outlier_deltas"] = tensors[f"{STEM}.outlier_deltas"][:-1].clone()


def _few_rows(tensors: Tensors) -> None:
    tensors[f"{STEM}.outlier_rows"] = tensors[f"{STEM}.outlier_rows"][1:].clone()


def _infinite(tensors: Tensors) -> None:
    tensors[f"{STEM}.outlier_deltas"][2] = float("inf")


def _missing(tensors: Tensors) -> None:
    del tensors[f"{STEM}.outlier_columns"]


def _wide(tensors: Tensors) -> None:
    tensors[f"{STEM}.outlier_columns"] = tensors[f"{STEM}.outlier_columns"].to(torch.int32)


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (_too_far, f"tensor {STEM}.outlier_columns names input 256, the layer has 256"),
        (_twice, f"tensor {STEM}.outlier_columns must ascend within an output"),
        (_backwards, f"tensor {STEM}.outlier_rows must ascend from 0 to 328, the number of outliers"),
        (_negative, f"tensor {STEM}.outlier_rows must ascend from 0 to 328, the number of outliers"),
        (_short, f"tensor {STEM}.outlier_deltas has shape [327], expected [328]"),
        (_few_rows, f"tensor {STEM}.outlier_rows has shape [128], expected [129]"),
        (_infinite, f"tensor {STEM}.outlier_deltas holds inf; differences must be finite"),
        (_missing, f"the checkpoint lacks tensor {STEM}.outlier_columns"),
        (_wide, f"tensor {STEM}.outlier_columns is I32, expected U16"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("dtype", ["float32", None], ids=["torch", "fused"])
def test_damage_is_refused_in_one_line(
    damage: Callable[[Tensors], None], line: str, dtype: str | None, model: Path, tmp_path: Path
) -> None:
    folder = written(model, tmp_path / "blocks")
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(FunitelError) as refused:
        load_executor(folder, dtype=dtype)
    assert line in refused.value.message
    assert "\n" not in refused.value.message
