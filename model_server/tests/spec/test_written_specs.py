"""A spec written by hand serves a model of an architecture in no table: its logits are those of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from funitel.model_server.registry import lookup
from funitel.model_server.registry.lookup import choose_spec
from funitel.model_server.tools.spec import check
from funitel.proto.errors import UnsupportedModel
from funitel_testing.families import TOLERANCE, worst_error
from funitel_testing.zoo import ZOO

SIZES: dict[str, Any] = {
    "architecture": "NobodyListedThisForCausalLM",
    "vocab_size": 288,
    "hidden_size": 48,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 8,
    "intermediate_size": 100,
    "max_position_embeddings": 256,
}
# Each from the paper and the names of the tensors, for a checkpoint of the zoo; nothing is derived from config.json.
GPT2: dict[str, Any] = SIZES | {
    "num_kv_heads": 6,
    "norm": "layer",
    "norm_eps": 1e-5,
    "has_norm_bias": True,
    "has_qkv_bias": True,
    "has_out_bias": True,
    "has_mlp_bias": True,
    "activation": "gelu_tanh",
    "is_gated": False,
    "position": "learned",
    "is_tied": True,
    "names": {
        "prefix": "transformer.",
        "embedding": "wte",
        "positions": "wpe",
        "attention_norm": "h.{i}.ln_1",
        "qkv": "h.{i}.attn.c_attn",
        "out": "h.{i}.attn.c_proj",
        "mlp_norm": "h.{i}.ln_2",
        "up": "h.{i}.mlp.c_fc",
        "down": "h.{i}.mlp.c_proj",
        "final_norm": "ln_f",
        "is_transposed": True,
    },
}
MIXTRAL: dict[str, Any] = SIZES | {
    "norm_eps": 1e-5,
    "sliding_windows": [24, 24],
    "rotary": {"base": 1e6},
    "experts": {"num_experts": 5, "num_chosen": 2, "intermediate_size": 100, "is_normalized": True},
    "names": {
        "router": "layers.{i}.block_sparse_moe.gate",
        "expert_gate": "layers.{i}.block_sparse_moe.experts.{j}.w1",
        "expert_up": "layers.{i}.block_sparse_moe.experts.{j}.w3",
        "expert_down": "layers.{i}.block_sparse_moe.experts.{j}.w2",
    },
}
DEEPSEEK_V2_LITE: dict[str, Any] = SIZES | {
    "num_heads": 3,
    "num_kv_heads": 1,
    "head_dim": 20,
    "rotary": {"dims": 8, "is_interleaved": True},
    "latent": {"rank": 20, "value_dim": 10},
    "experts": {"num_experts": 8, "num_chosen": 3, "intermediate_size": 21, "shared_size": 42},
}


@pytest.mark.parametrize(
    ("name", "spec"),
    [("gpt2", GPT2), ("mixtral", MIXTRAL), ("deepseek_v2_lite", DEEPSEEK_V2_LITE)],
    ids=["gpt2", "mixtral", "deepseek_v2_lite"],
)
def test_a_spec_written_by_hand_serves_an_architecture_removed_from_the_table(
    name: str, spec: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = {
        architecture: row for architecture, row in lookup.FAMILIES.items() if architecture != ZOO[name].architecture
    }
    monkeypatch.setattr(lookup, "FAMILIES", without)
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec))
    errors = worst_error(name, tmp_path / "model", num_decode=4, sizes=(1, 2), model_spec=str(file))
    assert max(errors) < TOLERANCE
    assert check(tmp_path / "model", str(file)) == []
    with pytest.raises(UnsupportedModel, match=f"{ZOO[name].architecture} is not supported"):
        choose_spec(None, tmp_path / "model")
