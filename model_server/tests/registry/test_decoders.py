"""Every architecture of the table against transformers: the short form of `python -m funitel_testing.families`."""

import json
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

from funitel.model_server.cpu.coverage import missing
from funitel.model_server.registry import families
from funitel.model_server.registry.decoders import FAMILIES
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.spec.json_file import from_json, to_json
from funitel_testing.families import TOLERANCE, worst_error
from funitel_testing.zoo import ZOO

_EXPERTS = {"num_experts": 4, "num_chosen": 1, "intermediate_size": 8}


@pytest.mark.parametrize("name", ZOO)
def test_two_ranks_give_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    assert worst_error(name, tmp_path, num_decode=4, sizes=(2,))[0] < TOLERANCE
    spec = spec_of(json.loads((tmp_path / "config.json").read_text()))
    for is_whole in (False, True):
        assert from_json(to_json(spec, is_whole=is_whole), "spec") == spec


def test_no_architecture_is_in_two_modules_of_families() -> None:
    modules = [import_module(f"{families.__name__}.{found.name}") for found in iter_modules(families.__path__)]
    assert sorted(name for module in modules for name in module.ROWS) == sorted(FAMILIES)


def test_every_row_has_a_checkpoint_in_the_zoo() -> None:
    saved = {(tiny.family_config or {}).get("architectures", [tiny.architecture])[0] for tiny in ZOO.values()}
    aliases = {"BaiChuanForCausalLM", "ChatGLMForConditionalGeneration"}
    assert set(FAMILIES) - aliases == saved
    for alias, name in (
        ("BaiChuanForCausalLM", "BaichuanForCausalLM"),
        *[(a, "ChatGLMModel") for a in aliases if "GLM" in a],
    ):
        assert FAMILIES[alias] is FAMILIES[name]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("is_head_normalized", True),
        ("norm", "none"),
        ("rotary", {"scaling": {"kind": "dynamic"}}),
        ("window_rotary", {"scaling": {"kind": "dynamic"}}),
        ("names", {"embedding_in": "narrow"}),
        ("names", {"is_stack_interleaved": True}),
        ("qk_norm", "plain"),
        ("is_qk_norm_last", True),
        ("gate_limit", 7.0),
        ("gate_shift", 1.0),
        ("chunk_sizes", [4, None]),
        ("has_sinks", True),
        ("has_output_gate", True),
        ("query_growth", {"rate": 0.1, "period": 8}),
        ("experts", _EXPERTS | {"score": "sparsemixer"}),
        ("experts", _EXPERTS | {"shared_scale": 0.5}),
        ("experts", _EXPERTS | {"is_input_scaled": True}),
        ("layers", [{}, {"head_dim": 16}]),
        ("layers", [{}, {"kv_source": 0}]),
        ("layer_embeddings", {"size": 4, "vocab_size": 10}),
        ("has_layer_scale", True),
        ("has_value_norm", True),
        ("laurel_rank", 2),
        ("altup", {"num_streams": 2}),
        ("rotary", {"scaling": {"kind": "proportional", "share": 0.5}}),
        ("names", {"router_scale": "scale"}),
        ("names", {"expert_scale": "scale"}),
        ("experts", _EXPERTS | {"has_bias": True}),
        ("experts", _EXPERTS | {"has_router_bias": True}),
    ],
)
def test_the_fused_step_leaves_what_it_does_not_know_to_torch(field: str, value: object) -> None:
    plain = {
        "architecture": "Test",
        "vocab_size": 10,
        "hidden_size": 8,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "intermediate_size": 8,
        "max_position_embeddings": 8,
        "sliding_windows": [None, 4],
    }
    assert missing(from_json(json.dumps(plain), "spec")) is None
    assert missing(from_json(json.dumps(plain | {"experts": _EXPERTS}), "spec")) is None
    assert missing(from_json(json.dumps(plain | {field: value}), "spec")) is not None


@pytest.mark.parametrize(
    ("architecture", "what"),
    [("Gemma3nForCausalLM", "has_value_norm True"), ("Gemma4ForCausalLM", "has_value_norm True")]
    + [(name, "indexer") for name in ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")],
)
def test_the_fused_step_says_what_of_a_family_it_does_not_know(architecture: str, what: str) -> None:
    assert missing(spec_of({"architectures": [architecture]})) == what
