"""Mixtures of experts and latent attention: the experts chosen, shares of ranks, and the limits of the fused step."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.layers.mlp import Experts, Router
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.spec.model_spec import ExpertScore, ExpertsSpec, ModelSpec
from funitel.model_server.tools.quantize.layer_walk import inputs_of
from funitel.model_server.tools.spec import check
from funitel.proto.errors import UnsupportedModel, WeightsError
from funitel_testing import forward_worker
from funitel_testing.zoo import ZOO

CPU = torch.device("cpu")


def opened(folder: Path) -> tuple[ModelSpec, Weights]:
    spec = spec_of(read_json(folder / "config.json"))
    return spec, Weights(folder, torch.float32, CPU, spec.names.prefix, is_shown=False)


def naive_choice(logits: torch.Tensor, spec: ExpertsSpec, correction: torch.Tensor | None) -> dict[int, float]:
    """Experts of one token and their shares, said once more in plain Python."""
    scores = (logits.softmax(0) if spec.score is ExpertScore.SOFTMAX else logits.sigmoid()).tolist()
    ranked = scores if correction is None else [s + c for s, c in zip(scores, correction.tolist(), strict=True)]
    size = spec.num_experts // spec.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(spec.num_groups)]
    groups.sort(
        key=lambda group: sum(sorted((ranked[j] for j in group), reverse=True)[: spec.group_depth]), reverse=True
    )
    allowed = [j for group in groups[: spec.num_chosen_groups] for j in group]
    chosen = sorted(allowed, key=lambda j: ranked[j], reverse=True)[: spec.num_chosen]
    total = sum(scores[j] for j in chosen) if spec.is_normalized else 1.0
    return {j: scores[j] / total * spec.scale for j in chosen}


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3"])
def test_a_router_chooses_as_written(name: str, tmp_path: Path) -> None:
    ZOO[name].save(tmp_path)
    spec, weights = opened(tmp_path)
    assert spec.experts is not None
    router = Router(spec, spec.experts, weights, 1)
    x = torch.randn(40, spec.hidden_size, generator=torch.Generator().manual_seed(1))
    chosen, shares = router(x)
    matrix = weights.read_linear(weights.named(spec.names.router, i=1), spec.experts.num_experts, spec.hidden_size)
    for token in range(len(x)):
        found = dict(zip(chosen[token].tolist(), shares[token].tolist(), strict=True))
        assert found == pytest.approx(naive_choice(matrix @ x[token], spec.experts, router.correction), rel=1e-4)


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3"])
def test_a_token_has_the_same_bits_alone_and_in_company(name: str, tmp_path: Path) -> None:
    ZOO[name].save(tmp_path)
    spec, weights = opened(tmp_path)
    assert spec.experts is not None
    block = Experts(spec, spec.experts, weights, TensorParallel(), 1)
    x = torch.randn(33, spec.hidden_size, generator=torch.Generator().manual_seed(1))
    together = block(x)
    for token in range(len(x)):
        assert torch.equal(block(x[token : token + 1])[0], together[token])


def test_only_experts_that_are_hit_compute(tmp_path: Path) -> None:
    ZOO["mixtral"].save(tmp_path)
    spec, weights = opened(tmp_path)
    assert spec.experts is not None
    block = Experts(spec, spec.experts, weights, TensorParallel(), 0)
    x = torch.randn(1, spec.hidden_size, generator=torch.Generator().manual_seed(1))
    hit = set(block.router(x)[0].flatten().tolist())
    expected = block(x)
    for j, expert in enumerate(block.experts):
        if j not in hit:
            expert.down.matmul.weight = torch.full((1, 1), torch.nan)  # would fail, or spoil the sum
    assert torch.equal(block(x), expected)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v2_stacked"])
def test_experts_take_no_more_memory_than_their_share(name: str, tmp_path: Path) -> None:
    """Stacked or one by one: of three ranks each holds its part of every expert, and together they hold all."""
    ZOO[name].save(tmp_path)
    spec, _ = opened(tmp_path)
    assert spec.experts is not None
    last, held = spec.num_layers - 1, []
    for rank in range(3):
        _, weights = opened(tmp_path)
        Experts(replace(spec, num_layers=1), spec.experts, weights, TensorParallel(rank, 3), last)
        held.append(weights.sharded_bytes)
    experts = spec.experts
    units = experts.num_experts * experts.intermediate_size + experts.shared_size
    assert sum(held) == 3 * units * spec.hidden_size * 4
    assert max(held) <= sum(held) / 3 * 1.05


def test_stacked_and_separate_experts_give_the_same_logits(tmp_path: Path) -> None:
    tiny = ZOO["qwen3_moe"]
    replace(tiny, is_stacked=False).save(tmp_path / "separate")
    replace(tiny, is_stacked=True).save(tmp_path / "stacked")
    with safe_open(tmp_path / "stacked/model.safetensors", "pt") as file:
        assert any(name.endswith("experts.gate_up_proj") for name in file.keys())
    prompts = [[1, 2, 3, 4, 5, 6, 7]]
    separate, stacked = (
        forward_worker.run(tmp_path / kind, TensorParallel(), prompts, 2) for kind in ("separate", "stacked")
    )
    assert torch.equal(separate[0], stacked[0])


def test_experts_of_a_llama_4_may_lie_one_by_one(tmp_path: Path) -> None:
    ZOO["llama4"].save(tmp_path)
    prompts, path = [[1, 2, 3, 4, 5, 6, 7]], tmp_path / "model.safetensors"
    expected = forward_worker.run(tmp_path, TensorParallel(), prompts, 2)
    separate = {}
    for name, tensor in load_file(path).items():
        stem, _, kind = name.rpartition(".")
        if not stem.endswith(".experts"):
            separate[name] = tensor
            continue
        for j, matrix in enumerate(tensor.transpose(1, 2)):  # [outputs, inputs]
            parts = {"down_proj": matrix}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            separate |= {f"{stem}.{j}.{part}.weight": each.contiguous() for part, each in parts.items()}
    save_file(separate, path, {"format": "pt"})
    assert check(tmp_path, None) == []
    assert torch.allclose(forward_worker.run(tmp_path, TensorParallel(), prompts, 2)[0], expected[0], atol=1e-5)


def test_a_stack_that_is_too_small_is_one_clear_line(tmp_path: Path) -> None:
    ZOO["mixtral_stacked"].save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file(tensors | {name: tensors[name][:3].contiguous()}, tmp_path / "model.safetensors", {"format": "pt"})
    message = (
        r"tensor model.layers.0.mlp.experts.gate_up_proj has shape \[3, 200, 48\], expected a stack with a matrix 3"
    )
    with pytest.raises(WeightsError, match=message):
        forward_worker.run(tmp_path, TensorParallel(), [[1, 2, 3]], 1)


def test_check_names_experts_that_are_missing_or_misshapen(tmp_path: Path) -> None:
    ZOO["mixtral"].save(tmp_path)
    assert check(tmp_path, None) == []
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    stem = "model.layers.1.block_sparse_moe.experts"
    del tensors[f"{stem}.4.w1.weight"]
    tensors[f"{stem}.2.w2.weight"] = torch.zeros(48, 99)
    save_file(tensors, path, {"format": "pt"})
    assert check(tmp_path, None) == [
        f"wrong shape: {stem}.2.w2.weight is [48, 99], the spec says [48, 100]",
        f"missing: {stem}.4.w1.weight [100, 48]",
    ]


def test_latents_are_cached_once_for_all_heads(tmp_path: Path) -> None:
    ZOO["deepseek_v2"].save(tmp_path)
    spec, _ = opened(tmp_path)
    for rank in range(2):
        heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 2, rank)
        cache = KVCache(spec, heads, 3, 4, torch.float32, CPU)
        assert cache.num_bytes == 3 * KVCache.bytes_per_block(spec, heads, 4, torch.float32)
        assert cache.num_bytes == 3 * 4 * spec.num_layers * (20 + 8) * 4  # blocks, tokens, layers, latent and key


def test_quantize_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    ZOO["mixtral"].save(tmp_path)
    spec, weights = opened(tmp_path)
    with pytest.raises(UnsupportedModel, match="MixtralForCausalLM has a mixture of experts: it cannot be quantised"):
        inputs_of(spec, weights.prefix, 0)
    ZOO["gemma3n"].save(tmp_path / "differing")
    spec, weights = opened(tmp_path / "differing")
    with pytest.raises(UnsupportedModel, match="Gemma3nForCausalLM has layers that differ or embeddings of them"):
        inputs_of(spec, weights.prefix, 0)


@pytest.mark.parametrize(("said", "count"), [({}, 1), ({"num_nextn_predict_layers": 3}, 3)])
def test_layers_that_predict_further_tokens_are_left_aside(said: dict[str, int], count: int, tmp_path: Path) -> None:
    ZOO["deepseek_v3"].save(tmp_path)
    config = read_json(tmp_path / "config.json")
    known = {key: value for key, value in config.items() if key not in ("num_nextn_predict_layers", "num_mtp_layers")}
    (tmp_path / "config.json").write_text(json.dumps(known | said))
    path = tmp_path / "model.safetensors"
    further = {f"model.layers.{2 + i}.eh_proj.weight": torch.zeros(2, 2) for i in range(count + 1)}
    save_file(load_file(path) | further, path, {"format": "pt"})
    assert check(tmp_path, None) == [f"unexpected: model.layers.{2 + count}.eh_proj.weight"]


def test_so_many_further_layers_no_model_has() -> None:
    config = {"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 10**9}
    with pytest.raises(UnsupportedModel, match="num_nextn_predict_layers must be at most 64, given 1000000000"):
        spec_of(config)


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("gpt_oss", "model.layers.1.self_attn.sinks", [6]),
        ("gpt_oss", "model.layers.0.mlp.router.bias", [6]),
        ("gpt_oss", "model.norm.weight", [48]),
        ("llama4", "model.layers.1.feed_forward.router.weight", [5, 48]),
        ("llama4", "model.layers.1.feed_forward.shared_expert.up_proj.weight", [22, 48]),
        ("apertus", "model.layers.1.mlp.act_fn.alpha_p", [1]),
        ("granite_moe_shared", "model.layers.0.shared_mlp.output_linear.weight", [48, 25]),
        ("hunyuan_moe", "model.layers.0.mlp.gate.wg.weight", [6, 48]),
    ],
)
def test_what_does_not_fit_is_a_line_each(name: str, tensor: str, shape: list[int], tmp_path: Path) -> None:
    ZOO[name].save(tmp_path)
    assert check(tmp_path, None) == []
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    kept = tensors.pop(tensor)
    assert list(kept.shape) == shape
    save_file(tensors | {"model.layers.0.more": kept}, path, {"format": "pt"})
    assert check(tmp_path, None) == [f"missing: {tensor} {shape}", "unexpected: model.layers.0.more"]
    with pytest.raises(WeightsError, match=f"the checkpoint lacks tensor {tensor}"):
        forward_worker.run(tmp_path, TensorParallel(), [[1, 2, 3]], 1)
    wrong = [shape[0] + 1, *shape[1:]]
    save_file(tensors | {tensor: torch.zeros(wrong)}, path, {"format": "pt"})
    assert check(tmp_path, None) == [f"wrong shape: {tensor} is {wrong}, the spec says {shape}"]


@pytest.mark.parametrize(("stack", "shape"), [("gate_up_proj", [6, 48, 44]), ("gate_up_proj_bias", [6, 44])])
def test_a_stack_of_experts_that_does_not_fit_is_one_clear_line(stack: str, shape: list[int], tmp_path: Path) -> None:
    ZOO["gpt_oss"].save(tmp_path)
    path, name = tmp_path / "model.safetensors", f"model.layers.0.mlp.experts.{stack}"
    tensors = load_file(path)
    assert list(tensors[name].shape) == shape
    what = "matrix" if len(shape) == 3 else "vector"
    for wrong, message in (
        (tensors[name][:3], f"expected a stack with a {what} 3"),
        (tensors[name][None], f"expected a stack with a {what} 0"),
        (tensors[name][:, 1:], "expected"),
    ):
        save_file(tensors | {name: wrong.contiguous()}, path, {"format": "pt"})
        with pytest.raises(WeightsError, match=message) as raised:
            forward_worker.run(tmp_path, TensorParallel(), [[1, 2, 3]], 1)
        assert name in raised.value.message.replace("[0].bias", "_bias")
        assert "\n" not in raised.value.message


def test_a_phi_chooses_one_expert_after_the_other(tmp_path: Path) -> None:
    """As transformers writes it, with logits near each other and far, also below zero."""
    ZOO["phimoe"].save(tmp_path)
    spec, weights = opened(tmp_path)
    assert spec.experts is not None
    router = Router(spec, spec.experts, weights, 0)
    logits = torch.randn(400, 5, generator=torch.Generator().manual_seed(2)) * torch.tensor([[0.1], [1.0]]).repeat(
        200, 1
    )
    chosen, shares = router._one_by_one(logits)
    expected, experts = sparsemixer(logits, jitter_eps=spec.experts.jitter, training=False)
    assert torch.equal(chosen, experts)
    assert torch.allclose(shares, expected)
    assert 0 < int((shares == 1).sum()) < shares.numel()  # some are alone near the largest, others are not
