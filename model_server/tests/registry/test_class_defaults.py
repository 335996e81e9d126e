"""A `config.json` means by the fields that it leaves out what transformers' class takes for them."""

import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers

from funitel.model_server.registry import families, rules
from funitel.model_server.registry.decoders import FAMILIES
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.tools.spec import check
from funitel.proto.errors import UnsupportedModel
from funitel_testing.zoo import ZOO

KNOWN = {name: tiny for name, tiny in ZOO.items() if tiny.family_config is None}
KINDS = {tiny.architecture: tiny.kind for tiny in KNOWN.values()}  # those that transformers knows


def defaults_of(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = getattr(transformers, f"{kind}Config")().to_dict()
    return found


def without(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what the defaults say as well, in the objects of a config too, unless one replaces another kind's."""
    found = {}
    for key, value in given.items():
        known = defaults.get(key)
        if isinstance(value, dict) and isinstance(known, dict) and known.get("rope_type", "default") == "default":
            value = without(value, known)
        if key not in defaults or (value != known and value != {}):
            found[key] = value
    return found


@pytest.mark.parametrize("name", KNOWN)
def test_fields_that_say_the_default_can_be_left_out(name: str) -> None:
    tiny = KNOWN[name]
    config = json.loads(tiny.configure().to_json_string())
    stripped = without(config, defaults_of(tiny.kind))
    assert len(stripped) < len(config)
    architectures = {"architectures": [tiny.architecture]}
    assert spec_of(stripped | architectures) == spec_of(config | architectures)


# Those whose class alone is no model: two do not say how many experts a token has, one turns 21 elements.
_NEEDED = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "Dots1ForCausalLM": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "Glm4MoeForCausalLM": {"head_dim": 128},
}


@pytest.mark.parametrize("architecture", KINDS)
def test_a_config_that_says_nothing_is_the_class_as_it_stands(architecture: str) -> None:
    given = {"architectures": [architecture], **_NEEDED.get(architecture, {})}
    assert spec_of(given) == spec_of(defaults_of(KINDS[architecture]) | given)


def test_every_row_that_transformers_knows_is_held_against_it() -> None:
    own = {
        "MiniCPMFor",
        "InternLM",
        "IQuest",
        "Baichuan",
        "BaiChuan",
        "ChatGLM",
        "QWenLM",
    }  # code that comes with checkpoints
    assert {name for name in FAMILIES if not name.startswith(tuple(own))} == set(KINDS)


# All that rules may read, and more, but what the base of all classes reads, and what says which tensors are of no use.
_FIELDS = {
    field
    for package in (families, rules)
    for path in Path(package.__path__[0]).glob("*.py")
    for field in re.findall(r'"(\w+)"', path.read_text())
}
_FIELDS -= {"architectures", "tie_word_embeddings", "partial_rotary_factor", "original_max_position_embeddings"}
_FIELDS -= {"rope_theta", "rope_scaling", "rope_parameters", "num_nextn_predict_layers", "num_mtp_layers"}
_OLD_NAMES = {"FalconForCausalLM": {"n_head", "n_layer"}}  # of its first checkpoints, whose own code read them


def unread(architecture: str) -> set[str]:
    """Fields that the sources of transformers' class do not name, but those that its row refuses."""
    cls = getattr(transformers, f"{KINDS[architecture]}Config")
    folder = Path(inspect.getfile(cls)).parent
    models, configurations = (
        "".join(path.read_text() for path in folder.glob(f"{kind}_*.py")) for kind in ("modeling", "configuration")
    )
    named = set(re.findall(r"\w+", models + configurations)) | cls.attribute_map.keys()
    if not re.search(r"\blayer_types\b", models):
        named.discard("layer_types")  # told of in a warning only
    return _FIELDS - named - FAMILIES[architecture].fixed.keys() - _OLD_NAMES.get(architecture, set())


@pytest.mark.parametrize("name", KNOWN)
def test_fields_that_the_class_does_not_read_change_nothing(name: str) -> None:
    tiny = KNOWN[name]
    architectures = {"architectures": [tiny.architecture]}
    whole = json.loads(tiny.configure().to_json_string()) | architectures
    fields = unread(tiny.architecture)
    assert "kv_channels" in fields
    for config in (whole, without(whole, defaults_of(tiny.kind)) | architectures):
        expected = spec_of(config)
        for value in (3, 0.37, False, "gelu", ["full_attention"] * 9):
            assert spec_of(config | dict.fromkeys(fields, value)) == expected


@pytest.mark.parametrize("name", ["gpt_neox", "bloom"])
def test_a_number_of_kv_heads_does_not_hinder_a_family_without_one(name: str, tmp_path: Path) -> None:
    ZOO[name].save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_key_value_heads": 4}))
    assert check(tmp_path, None) == []


def plain(architecture: str, **fields: Any) -> Any:
    return spec_of({"architectures": [architecture], **fields})


def test_a_field_that_is_null_is_not_left_out() -> None:
    assert plain("MistralForCausalLM").window(0) == 4096
    assert plain("MistralForCausalLM", sliding_window=None).window(0) is None
    assert plain("MixtralForCausalLM").num_kv_heads == 8
    assert plain("MixtralForCausalLM", num_key_value_heads=None).num_kv_heads == 32
    assert plain("DeepseekV3ForCausalLM").latent.query_rank == 1536
    assert plain("DeepseekV3ForCausalLM", q_lora_rank=None).latent.query_rank is None


def test_a_field_by_another_name_counts() -> None:
    bloom = plain("BloomForCausalLM", n_embed=1024, n_layer=24, num_attention_heads=16)
    assert (bloom.hidden_size, bloom.num_layers, bloom.num_heads, bloom.intermediate_size) == (1024, 24, 16, 4096)
    falcon = plain("FalconForCausalLM", n_embed=64, n_layer=3, n_head=4)
    assert (falcon.hidden_size, falcon.num_layers, falcon.num_heads) == (64, 3, 4)
    xglm = plain("XGLMForCausalLM", hidden_size=256, num_hidden_layers=2, num_attention_heads=8)
    assert (xglm.hidden_size, xglm.num_layers, xglm.num_heads, xglm.embedding_scale) == (256, 2, 8, 16.0)
    assert plain("MixtralForCausalLM", num_experts=4).experts.num_experts == 4
    neo = plain("GPTNeoForCausalLM", num_layers=4, attention_types=[[["global", "local"], 1], [["local"], 2]])
    assert neo.sliding_windows == (None, 256, 256, 256)


def test_what_no_class_says_is_asked_for() -> None:
    with pytest.raises(UnsupportedModel, match="DeepseekV2ForCausalLM lacks the field 'num_experts_per_tok'"):
        plain("DeepseekV2ForCausalLM")


_LAYERS = 6


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Qwen2Moe", "SmolLM3"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_sliding_window": False},
        {"max_window_layers": 3},
        {"max_window_layers": 0},
        {"max_window_layers": _LAYERS},
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2},
        {"layer_types": ["sliding_attention"] * _LAYERS, "use_sliding_window": False},
    ],
)
def test_windows_are_in_the_layers_where_transformers_has_them(kind: str, fields: dict[str, Any]) -> None:
    given = {"num_hidden_layers": _LAYERS, "use_sliding_window": True, "sliding_window": 20, **fields}
    theirs = getattr(transformers, f"{kind}Config")(**given)
    expected = [
        20 if each == "sliding_attention" and theirs.use_sliding_window else None for each in theirs.layer_types
    ]
    spec = plain(f"{kind}ForCausalLM", **given)
    assert [spec.window(i) for i in range(_LAYERS)] == expected


def test_what_gemma_calls_gelu_is_the_approximation() -> None:
    assert plain("GemmaForCausalLM", hidden_act="gelu").activation == "gelu_tanh"
    assert plain("GemmaForCausalLM", hidden_act="relu").activation == "relu"


def test_the_trained_context_is_what_the_config_says_else_the_scaling_else_all_of_it() -> None:
    scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama = plain("LlamaForCausalLM", max_position_embeddings=4096, rope_scaling=scaling)
    assert llama.rotary.scaling.original_max_position == 4096
    said = scaling | {"original_max_position_embeddings": 64}
    llama = plain("LlamaForCausalLM", max_position_embeddings=4096, rope_scaling=said)
    assert llama.rotary.scaling.original_max_position == 64
    phi = plain("Phi3ForCausalLM", original_max_position_embeddings=32, rope_scaling=said)
    assert phi.rotary.scaling.original_max_position == 32
