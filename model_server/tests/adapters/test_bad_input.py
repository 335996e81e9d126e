"""Adapters that cannot be used are refused in one line that names field or tensor, and nothing of them is kept."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from funitel.model_server.adapters.registry import AdapterWeights, LoadedAdapters
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.proto.errors import InvalidRequest, ResourceExhausted
from funitel_testing.adapter_worker import MAX_RANK, AdaptedModel
from funitel_testing.tiny import save_tiny
from funitel_testing.tiny_adapters import Tensors, TinyAdapter, save_adapter, write_adapter

PLAIN = TinyAdapter(rank=4, targets=("q_proj", "v_proj"))
Q = "base_model.model.model.layers.0.self_attn.q_proj"
Change = Callable[[dict[str, Any], Tensors], None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def registry(base: Path) -> LoadedAdapters:
    return AdaptedModel.fused_step(base, TensorParallel()).registry


def field(name: str, value: Any) -> Change:
    return lambda config, tensors: config.update({name: value})


def tensor(name: str, *shape: int, value: float = 0.5) -> Change:
    return lambda config, tensors: tensors.update({name: torch.full(shape, value)})


def without(name: str) -> Change:
    def drop(config: dict[str, Any], tensors: Tensors) -> None:
        del tensors[name]

    return drop


CASES: dict[str, tuple[Change, str]] = {
    "another kind": (field("peft_type", "IA3"), "peft_type 'IA3' is not supported: adapters must be LORA"),
    "no kind": (field("peft_type", None), "peft_type None is not supported"),
    "DoRA": (field("use_dora", True), "use_dora is not supported"),
    "QA-LoRA": (field("use_qalora", True), "use_qalora is not supported"),
    "bias": (field("bias", "all"), "bias 'all' is not supported"),
    "bias of B": (field("lora_bias", True), "lora_bias True is not supported"),
    "parameters": (field("target_parameters", ["mlp.experts.down_proj"]), "target_parameters"),
    "another task": (field("task_type", "SEQ_CLS"), "task_type 'SEQ_CLS' is not supported"),
    "a changed base": (field("init_lora_weights", "pissa_niter_4"), "init_lora_weights pissa_niter_4"),
    "a rank over the limit": (field("r", MAX_RANK + 1), f"r is {MAX_RANK + 1}, above --max-lora-rank {MAX_RANK}"),
    "a pattern's rank over it": (field("rank_pattern", {"q_proj": 999}), "rank_pattern q_proj is 999, above"),
    "no rank": (field("r", 0), "r must be an integer > 0, given 0"),
    "a rank of text": (field("r", "8"), "r must be an integer > 0, given '8'"),
    "no number": (field("lora_alpha", float("inf")), "lora_alpha must be a finite number, given inf"),
    "a bad pattern": (field("rank_pattern", {"(": 4}), "rank_pattern '(' is no regular expression"),
    "a number beyond all": (field("lora_alpha", 10**400), "lora_alpha must be a finite number, given 1000"),
    "a pattern's number beyond all": (field("alpha_pattern", {"q_proj": 10**400}), "alpha_pattern q_proj must be a"),
    "a pattern with flags": (field("rank_pattern", {"(?i)q_proj": 4}), "rank_pattern '(?i)q_proj' is no regular"),
    "a pattern of numbers with flags": (field("alpha_pattern", {"(?i)q_proj": 4}), "alpha_pattern '(?i)q_proj' is no"),
    "a bad target": (field("target_modules", "*"), "target_modules '*' is no regular expression"),
    "a long target": (field("target_modules", "a" * 1001), "target_modules has a pattern of 1001 characters"),
    "targets of another type": (field("target_modules", 5), "target_modules must be a list of names, given 5"),
    "layers of text": (field("layers_to_transform", "all"), "layers_to_transform must be layer numbers"),
    "a head without weight": (field("modules_to_save", ["lm_head"]), "modules_to_save names lm_head, of which"),
    "another base": (tensor(f"{Q}.lora_A.weight", 4, 64), "shape [4, 64], expected [4, 48]: it is for another base"),
    "another rank": (field("r", 8), "has shape [4, 48], expected [8, 48]"),
    "another vocabulary": (
        tensor("base_model.model.lm_head.weight", 300, 48),
        "lm_head.weight has shape [300, 48], expected [288, 48]",
    ),
    "a layer too many": (
        tensor(Q.replace(".0.", ".7.") + ".lora_A.weight", 4, 48),
        "the base has no model.layers.7.self_attn.q_proj that takes adapters",
    ),
    "an expert": (
        tensor("base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight", 4, 48),
        "is of a mixture of experts, of which no matrix takes adapters",
    ),
    "a norm": (
        tensor("base_model.model.model.layers.0.input_layernorm.weight", 48),
        "the base has no model.layers.0.input_layernorm that takes adapters",
    ),
    "a projection saved whole": (tensor(f"{Q}.weight", 48, 48), "of modules_to_save this model takes the embedding"),
    "no target": (
        tensor("base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight", 4, 48),
        "is surplus: target_modules of adapter_config.json do not name",
    ),
    "no tensor of an adapter": (tensor("base_model.model.lm_head.bias", 288), "is surplus: it is none of a LoRA"),
    "a bare name": (tensor("model.layers.0.self_attn.q_proj.lora_A.weight", 4, 48), "is surplus"),
    "a magnitude": (tensor(f"{Q}.lora_magnitude_vector", 48), "is of DoRA (use_dora)"),
    "no B": (without(f"{Q}.lora_B.weight"), "q_proj.lora_A.weight has no lora_B beside it"),
    "no A": (without(f"{Q}.lora_A.weight"), "q_proj.lora_B.weight has no lora_A beside it"),
    "twice the same": (tensor(f"{Q}.lora_A.default.weight", 4, 48), "are the same part of model.layers.0"),
    "no finite numbers": (
        tensor(f"{Q}.lora_A.weight", 4, 48, value=float("nan")),
        "holds values that are not finite numbers",
    ),
    "an embedding by halves of a projection": (
        lambda c, t: (
            c.update(target_modules=["q_proj", "v_proj", "embed_tokens"]),
            t.update({"base_model.model.model.embed_tokens.lora_A.weight": torch.zeros(4, 288)}),
        ),
        "model.embed_tokens is an embedding",
    ),
    "a scale that is too large": (field("lora_alpha", 1e308), "(lora_alpha by rank) is not finite"),
    "a flag of text": (field("use_rslora", "true"), "use_rslora must be true or false, given 'true'"),
    "a matrix under two wrappers": (
        lambda c, t: t.update({name.replace("model.model.model.", "model.model.model.language_model."): 0 * each
                               for name, each in list(t.items())}),
        "are the same matrix of the base",
    ),
    "no floating point": (
        lambda c, t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 48, dtype=torch.int8)}),
        "has numbers of torch.int8",
    ),
    "no tensors": (lambda c, t: t.clear(), "holds no tensor"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), CASES.values(), ids=CASES)
def test_refused(change: Change, message: str, base: Path, registry: LoadedAdapters, tmp_path: Path) -> None:
    folder = save_adapter(base, tmp_path / "plain", PLAIN)
    config, tensors = PLAIN.config(), load_file(folder / "adapter_model.safetensors")
    change(config, tensors)
    write_adapter(tmp_path / "changed", config, tensors)
    assert refusal(registry, tmp_path / "changed").startswith("adapter changed cannot be loaded: ")
    assert message in refusal(registry, tmp_path / "changed")


def refusal(registry: LoadedAdapters, folder: Path) -> str:
    with pytest.raises(InvalidRequest) as refused:
        registry.load(folder.name, str(folder), lambda _: False)
    with pytest.raises(InvalidRequest, match="is not loaded"):
        registry.get(folder.name)
    assert "\n" not in refused.value.message
    return refused.value.message


def test_files(base: Path, registry: LoadedAdapters, tmp_path: Path) -> None:
    assert "is not a folder" in refusal(registry, tmp_path / "nowhere")
    folder = save_adapter(base, tmp_path / "adapter", PLAIN)
    tensors = folder / "adapter_model.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-10])
    assert "is truncated" in refusal(registry, folder)
    tensors.write_bytes(b"not a header")
    assert str(tensors) in refusal(registry, folder)
    tensors.unlink()
    assert "holds no adapter_model.safetensors" in refusal(registry, folder)
    (folder / "adapter_model.bin").write_bytes(pickle.dumps({}))
    assert "adapter_model.bin is a pickle, which can run code" in refusal(registry, folder)
    (folder / "adapter_config.json").write_text("[1]")
    assert "adapter_config.json" in refusal(registry, folder)
    (folder / "adapter_config.json").unlink()
    assert "holds no adapter_config.json" in refusal(registry, folder)


def test_an_id_again(base: Path, tmp_path: Path) -> None:
    registry = AdaptedModel.torch_step(base, TensorParallel()).registry
    first, second = (save_adapter(base, tmp_path / name, PLAIN, seed) for seed, name in enumerate(("one", "two")))
    loaded = registry.load("a", str(first), lambda _: False)
    assert registry.load("a", str(first), lambda _: True) is loaded
    with pytest.raises(InvalidRequest, match="adapter a is in use from .*one: unload it before .*two is loaded"):
        registry.load("a", str(second), lambda _: True)
    assert registry.get("a") is loaded
    replaced = registry.load("a", str(second), lambda _: False)
    assert registry.get("a") is replaced is not loaded
    registry.unload("a")
    with pytest.raises(InvalidRequest, match="adapter a is not loaded"):
        registry.unload("a")
    with pytest.raises(InvalidRequest, match="id of an adapter must not be empty"):
        registry.load("", str(first), lambda _: False)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory: you tried 99 bytes")])
def test_without_memory_nothing_is_loaded(error: Exception, base: Path, tmp_path: Path) -> None:
    model, folder = AdaptedModel.torch_step(base, TensorParallel()), save_adapter(base, tmp_path / "a", PLAIN)
    own = model.registry._base
    assert own is not None

    def fail(_: object) -> AdapterWeights:
        raise error

    registry = LoadedAdapters(replace(own, place=fail), MAX_RANK)
    message = f"^adapter a cannot be loaded: there is no memory for the weights of {folder}$"
    with pytest.raises(ResourceExhausted, match=message):
        registry.load("a", str(folder), lambda _: False)
    with pytest.raises(InvalidRequest, match="is not loaded"):
        registry.get("a")


def test_switched_off_or_not_possible(tmp_path: Path) -> None:
    for registry, reason in (
        (LoadedAdapters(None, 64, "an encoder takes none"), "an encoder takes none"),
        (LoadedAdapters(None, 0, "it takes none"), "--max-lora-rank is 0"),
    ):
        assert registry.max_rank == 0
        with pytest.raises(InvalidRequest, match=f"adapter a cannot be loaded: {reason}"):
            registry.load("a", str(tmp_path), lambda _: False)
