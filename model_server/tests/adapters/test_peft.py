"""PEFT as the oracle: adapters that it writes, and the logits of the models that it merges."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel_testing.adapter_worker import AdaptedModel
from funitel_testing.tiny import save_tiny

peft = pytest.importorskip("peft")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 8, "lora_alpha": 5, "use_rslora": True, "target_modules": ATTENTION},
    "all-linear": {"r": 3, "target_modules": "all-linear"},
    "regex": {"r": 16, "target_modules": r".*\.layers\.[02]\.mlp\.(up|down)_proj"},
    "patterns": {
        "r": 2,
        "target_modules": ["q_proj", "gate_proj"],
        "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 9},
        "alpha_pattern": {"gate_proj": 31},
    },
    "layers": {"r": 5, "target_modules": ATTENTION, "layers_to_transform": [0, 2]},
    "embedding": {"r": 6, "target_modules": ["embed_tokens", "lm_head", "o_proj"]},
    "saved": {"r": 7, "target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.mark.filterwarnings("ignore")
def test_eight_adapters_in_one_batch_equal_the_models_that_peft_merges(tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base")
    generator = torch.Generator().manual_seed(9)
    prompts = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in range(12, 21)]
    folders: list[Path | None] = [None]
    expected = []
    for config in ({}, *ADAPTERS.values()):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if config:
            model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_" in name or "modules_to_save" in name:
                        parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            folders.append(tmp_path / f"adapter{len(folders)}")
            model.save_pretrained(folders[-1])
            model = model.merge_and_unload()
        with torch.no_grad():
            expected.append(model(torch.tensor([prompts[len(expected)]])).logits[0])
    for ours in (AdaptedModel.torch_step(base, TensorParallel()), AdaptedModel.fused_step(base, TensorParallel())):
        found = ours.logits(prompts, ours.load(folders))
        plain = ours.logits(prompts)
        for folder, logits, theirs, before in zip(folders, found, expected, plain, strict=True):
            assert float((logits - theirs).norm() / theirs.norm()) < 1e-4, folder
            assert folder is None or float((before - theirs).norm() / theirs.norm()) > 1e-2, folder
