"""An architecture of no row is told of the nearest one, whose spec can be printed for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.registry.nearest import nearest_row
from funitel.model_server.tools.spec import show
from funitel.proto.errors import NoRow
from funitel_testing.zoo import ZOO


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["Qwen4ForCausalLM"]}, "Qwen3ForCausalLM"),
        ({"architectures": ["Qwen4MoeForCausalLM"], "num_experts": 8}, "Qwen3MoeForCausalLM"),
        ({"architectures": ["MiMoForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": ["XyzForCausalLM"], "model_type": "gemma5_text"}, "Gemma3ForCausalLM"),
        ({"architectures": ["Kimi3ForCausalLM"], "kv_lora_rank": 512, "n_routed_experts": 8}, "DeepseekV3ForCausalLM"),
        ({"architectures": ["DeepseekV4ForCausalLM"], "kv_lora_rank": 9, "n_routed_experts": 8}, "DeepseekV3ForCausal"),
        (
            {"architectures": ["Qwen4NextForCausalLM"], "linear_conv_kernel_dim": 4, "num_experts": 8},
            "Qwen3NextForCausal",
        ),
        ({"architectures": ["XyzForCausalLM"], "mamba_d_conv": 4}, "Qwen3_5ForCausalLM"),
        ({"kv_lora_rank": 9, "mamba_d_conv": 4}, "LlamaForCausalLM"),
        ({}, "LlamaForCausalLM"),
    ],
)
def test_the_nearest_row(config: dict[str, Any], expected: str) -> None:
    assert nearest_row(config).startswith(expected)


def test_its_spec_reads_the_config_of_the_unknown_one(tmp_path: Path) -> None:
    ZOO["qwen3"].save(tmp_path)
    known = show(tmp_path, is_whole=False)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["Qwen4ForCausalLM"]}))
    with pytest.raises(
        NoRow, match="Qwen4ForCausalLM is not supported: .* is Qwen3ForCausalLM; .*--model-spec"
    ) as caught:
        spec_of(json.loads(path.read_text()))
    assert "funitel spec show MODEL --architecture Qwen3ForCausalLM" in caught.value.message
    assert show(tmp_path, is_whole=False, architecture="Qwen3ForCausalLM") == known
