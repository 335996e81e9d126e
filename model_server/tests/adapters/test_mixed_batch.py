"""Rows of many adapters in one batch: the logits of the merged models, in both steps, on one rank and two."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from funitel.model_server.cpu.coverage import missing
from funitel.model_server.cpu.precision import Tier
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel_testing.adapter_worker import AdaptedModel, serve_adapters
from funitel_testing.forward_worker import run
from funitel_testing.ranks import run_ranks
from funitel_testing.servers import free_port
from funitel_testing.tiny import save_tiny
from funitel_testing.tiny_adapters import EIGHT, TinyAdapter, merge, save_adapter, write_adapter
from funitel_testing.zoo import ZOO

ALONE = TensorParallel()
TOLERANCE = 1e-4  # of float32
NUM_DECODE = 6


def make_prompts(count: int, seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(9, 31, (count,), generator=generator).tolist()
    return [torch.randint(0, 288, (length,), generator=generator).tolist() for length in lengths]


@dataclass(frozen=True)
class Case:
    """A base with adapters, sequences of which some have none, and the logits that they must have."""

    base: Path
    folders: list[Path | None]
    prompts: list[list[int]]
    expected: list[torch.Tensor]


def make_case(
    work: Path, family: str, adapters: tuple[TinyAdapter, ...], *, is_transposed: bool = False, **changes: object
) -> Case:
    """Sequences of the base and of each adapter, the first of them twice."""
    base = save_tiny(family, work / "base", **changes)
    prompts = make_prompts(len(adapters) + 3)
    folders: list[Path | None] = []
    expected: dict[Path | None, Path] = {None: base}
    for i, made in enumerate(adapters):
        folder = save_adapter(base, work / f"adapter{i}", made, i, is_transposed=is_transposed)
        expected[folder] = merge(base, folder, made, work / f"merged{i}", is_transposed=is_transposed)
        folders.append(folder)
    folders = [None, *folders, folders[0], None]
    logits = [
        run(expected[folder], ALONE, [prompt], NUM_DECODE)[0] for folder, prompt in zip(folders, prompts, strict=True)
    ]
    return Case(base, folders, prompts, logits)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("llama"), "llama", EIGHT)


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = TOLERANCE) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        error = float((ours - theirs).norm() / theirs.norm())
        assert ours.shape == theirs.shape
        assert error < tolerance


def assert_same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def models_of(folder: Path) -> list[AdaptedModel]:
    return [AdaptedModel.torch_step(folder, ALONE), AdaptedModel.fused_step(folder, ALONE)]


def test_eight_adapters_and_the_base_in_one_batch_equal_the_merged_models(llama: Case) -> None:
    for model in models_of(llama.base):
        assert_close(model.logits(llama.prompts, model.load(llama.folders)), llama.expected)


def test_rows_join_late_in_chunks_of_any_size_and_are_preempted(llama: Case) -> None:
    for model in models_of(llama.base):
        adapters = model.load(llama.folders)
        for seed in (1, 2):
            assert_close(model.logits(llama.prompts, adapters, seed=seed), llama.expected)


def test_two_ranks_equal_the_merged_models(llama: Case, tmp_path: Path) -> None:
    folders = [None if folder is None else str(folder) for folder in llama.folders]
    job = {"size": 2, "port": free_port(), "folder": str(llama.base), "prompts": llama.prompts, "adapters": folders}
    (tmp_path / "job.json").write_text(json.dumps(job))
    run_ranks(serve_adapters, tmp_path, 2)
    for logits in torch.load(tmp_path / "logits.pt"):
        assert_close(logits, llama.expected)


@pytest.mark.parametrize("tier", [Tier.FLOAT32, Tier.BFLOAT16, Tier.INT8], ids=lambda tier: tier.label)
def test_a_row_has_the_same_bits_alone_and_in_company_on_any_number_of_threads(llama: Case, tier: Tier) -> None:
    model = AdaptedModel.fused_step(llama.base, ALONE, tier)
    adapters = model.load(llama.folders)
    together = model.logits(llama.prompts, adapters)
    alone = [model.logits([prompt], [own])[0] for prompt, own in zip(llama.prompts, adapters, strict=True)]
    assert_same_bits(alone, together)
    assert_same_bits(model.logits(llama.prompts, adapters, chunk=2), together)
    other = AdaptedModel.fused_step(llama.base, ALONE, tier, num_threads=5)
    assert_same_bits(other.logits(llama.prompts, other.load(llama.folders)), together)


def test_rows_of_the_torch_step_have_the_same_bits_alone_and_in_company(llama: Case) -> None:
    model = AdaptedModel.torch_step(llama.base, ALONE)
    adapters = model.load(llama.folders)
    together = model.logits(llama.prompts, adapters)
    for prompt, own, expected in list(zip(llama.prompts, adapters, together, strict=True))[:5]:
        twice = model.logits([prompt, prompt], [own, None])[0]
        assert_close([twice], [expected], 1e-6)


@pytest.mark.parametrize("tier", [None, Tier.FLOAT32, Tier.INT8], ids=["torch", "float32", "int8"])
def test_rows_of_the_base_have_the_bits_that_they_have_without_adapters(llama: Case, tier: Tier | None) -> None:
    before = run(llama.base, ALONE, llama.prompts, NUM_DECODE, tier)
    model = AdaptedModel.torch_step(llama.base, ALONE)
    if tier is not None:
        model = AdaptedModel.fused_step(llama.base, ALONE, tier)
    adapters = model.load(llama.folders)
    found = model.logits(llama.prompts, adapters)
    assert_same_bits([found[0], found[-1]], [before[0], before[-1]])
    assert_same_bits(model.logits(llama.prompts), before)


FUSED_QKV = (TinyAdapter(rank=4, targets=("c_attn", "c_proj")), TinyAdapter(rank=9, targets=("c_fc",), alpha=3.0))
FAMILIES = {
    "smollm": {},  # the head is the embedding's table
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "llama_bias": {"hidden_size": 45, "intermediate_size": 37, "head_dim": 22, "num_attention_heads": 3}
    | {"num_key_value_heads": 1},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    case = make_case(tmp_path, family, (EIGHT[7], EIGHT[3], EIGHT[0]), **FAMILIES[family])
    for model in models_of(case.base):
        assert_close(model.logits(case.prompts, model.load(case.folders)), case.expected)


def test_packed_and_transposed_projections(tmp_path: Path) -> None:
    case = make_case(tmp_path, "gpt2", FUSED_QKV, is_transposed=True)
    for model in models_of(case.base):
        assert_close(model.logits(case.prompts, model.load(case.folders)), case.expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_files_of_half_precision_are_kept_so(dtype: torch.dtype, llama: Case, tmp_path: Path) -> None:
    folders: list[Path | None] = []
    expected = []
    for i, (made, prompt) in enumerate(zip(EIGHT[5:], llama.prompts, strict=False)):
        folder = save_adapter(llama.base, tmp_path / f"a{i}", made, i)
        tensors = load_file(folder / "adapter_model.safetensors")
        write_adapter(folder, made.config(), {name: tensor.to(dtype) for name, tensor in tensors.items()})
        wide = tmp_path / f"wide{i}"
        write_adapter(wide, made.config(), {name: tensor.to(dtype).float() for name, tensor in tensors.items()})
        merged = merge(llama.base, wide, made, tmp_path / f"merged{i}")
        expected.append(run(merged, ALONE, [prompt], NUM_DECODE)[0])
        folders.append(folder)
    for model in models_of(llama.base):
        adapters = model.load(folders)
        assert_close(model.logits(llama.prompts[: len(folders)], adapters), expected)
    sizes = [adapter.weights.num_bytes for adapter in adapters if adapter is not None]
    wide_size = model.registry.load("wide", str(tmp_path / "wide0"), lambda _: False).weights.num_bytes
    assert 2 * sizes[0] == wide_size


ZOO_TARGETS = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "deepseek_v2_lite": ("q_proj", "o_proj"),
    "mixtral": ("q_proj", "v_proj", "o_proj"),
    "qwen3_5": ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "q_proj", "k_proj", "o_proj", "up_proj"),
    "lfm2": ("in_proj", "out_proj", "q_proj", "w1", "w2"),
    "falcon_h1": ("in_proj", "out_proj", "q_proj", "k_proj", "o_proj", "up_proj", "gate_proj", "down_proj"),
    "kimi_linear": ("q_proj", "o_proj"),
    "minimax": ("qkv_proj", "out_proj", "q_proj", "o_proj"),
    "mamba": ("in_proj", "out_proj"),
    "falcon_mamba": ("in_proj", "out_proj"),
    "mamba2": ("in_proj", "out_proj"),
    "jamba": ("in_proj", "out_proj", "q_proj", "o_proj"),
}


@pytest.mark.parametrize("family", ZOO_TARGETS)
def test_families_with_matrices_of_their_own(family: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    ZOO[family].save(base)
    made = TinyAdapter(rank=5, targets=ZOO_TARGETS[family], scale=0.1)
    adapter = save_adapter(base, tmp_path / "adapter", made)
    prompts = make_prompts(2)
    [expected] = run(merge(base, adapter, made, tmp_path / "merged"), ALONE, prompts[:1], NUM_DECODE)
    [plain] = run(base, ALONE, prompts[1:], NUM_DECODE)
    models = [AdaptedModel.torch_step(base, ALONE)]
    if missing(models[0].spec) is None:
        models.append(AdaptedModel.fused_step(base, ALONE))
    for model in models:
        assert_close(model.logits(prompts, model.load([adapter, None])), [expected, plain])
        assert float((model.logits(prompts)[0] - expected).norm() / expected.norm()) > 1e-2
