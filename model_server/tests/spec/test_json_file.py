"""Specs that users write: a model in no table is served by one, and every mistake in it is one clear line."""

import json
from pathlib import Path
from typing import Any

import pytest

from funitel.model_server.registry import lookup
from funitel.model_server.registry.lookup import choose_spec, spec_of
from funitel.model_server.spec.json_file import from_json
from funitel.model_server.tools.spec import check, show
from funitel.proto.errors import SettingsError, UnsupportedModel
from funitel_testing.tiny import save_tiny
from funitel_testing.zoo import ZOO

# Written by hand from a StableLM's tensors and its paper: no field is derived from config.json.
HAND_WRITTEN: dict[str, Any] = {
    "architecture": "NobodyListedThisForCausalLM",
    "vocab_size": 288,
    "hidden_size": 48,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 8,
    "intermediate_size": 100,
    "max_position_embeddings": 256,
    "norm": "layer",
    "norm_eps": 1e-5,
    "has_norm_bias": True,
    "has_qkv_bias": True,
    "rotary": {"dims": 2},
}

EXPERTS = {"num_experts": 4, "num_chosen": 1, "intermediate_size": 8}
LATENT = {"rank": 8, "value_dim": 8}
INDEXER = {"num_heads": 2, "head_dim": 4, "num_chosen": 3}
INDEXED = {"latent": LATENT | {"query_rank": 8}, "num_kv_heads": 1}


def test_a_spec_written_by_hand_is_the_one_of_an_architecture_removed_from_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ZOO["stablelm"].save(tmp_path / "model")
    listed = spec_of(json.loads((tmp_path / "model/config.json").read_text()))
    without = {name: row for name, row in lookup.FAMILIES.items() if name != "StableLmForCausalLM"}
    monkeypatch.setattr(lookup, "FAMILIES", without)
    with pytest.raises(UnsupportedModel, match="StableLmForCausalLM is not supported"):
        choose_spec(None, tmp_path / "model")
    (tmp_path / "spec.json").write_text(json.dumps(HAND_WRITTEN))
    found = choose_spec(str(tmp_path / "spec.json"), tmp_path / "model")
    assert found == from_json(json.dumps(HAND_WRITTEN), "spec")
    differing = {n for n in HAND_WRITTEN if getattr(found, n) != getattr(listed, n)}
    assert differing == {"architecture"}
    assert check(tmp_path / "model", str(tmp_path / "spec.json")) == []


def test_what_show_prints_is_the_spec(tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path)
    for is_whole in (False, True):
        assert from_json(show(folder, is_whole=is_whole), "spec") == choose_spec(None, folder)


def test_check_names_what_is_missing_unexpected_and_of_the_wrong_shape(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    given = json.loads(show(folder, is_whole=False))
    assert check(folder, None) == []
    given |= {"vocab_size": 300, "names": {"gate": "layers.{i}.mlp.gait_proj"}, "num_layers": 1}
    (tmp_path / "spec.json").write_text(json.dumps(given))
    problems = check(folder, str(tmp_path / "spec.json"))
    assert "wrong shape: model.embed_tokens.weight is [288, 48], the spec says [300, 48]" in problems
    assert "missing: model.layers.0.mlp.gait_proj.weight [100, 48]" in problems
    assert "unexpected: model.layers.0.mlp.gate_proj.weight" in problems
    assert "unexpected: model.layers.2.mlp.down_proj.weight" in problems


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_sise": 3}, "unknown field vocab_sise: did you mean vocab_size?"),
        ({"names": {"gait": "x"}}, "unknown field names.gait: did you mean gate?"),
        ({"vocab_size": "288"}, 'vocab_size must be an integer, given "288"'),
        ({"vocab_size": True}, "vocab_size must be an integer, given true"),
        ({"num_layers": 0}, "num_layers must be within 1..4096, given 0"),
        ({"norm_eps": 10**400}, "norm_eps must be a finite number, given 1000"),
        ({"num_layers": 10**12}, "num_layers must be within 1..4096, given 1000000000000"),
        (
            {"position": "sinusoidal", "max_position_embeddings": 1 << 18},
            "max_position_embeddings must be <= 131072 with sinusoidal positions, given 262144",
        ),
        ({"norm": "batch"}, 'norm must be one of rms, layer, none, given "batch"'),
        ({"norm_eps": float("nan")}, "norm_eps must be a finite number, given NaN"),
        ({"rotary": 3}, "rotary must be an object, given 3"),
        ({"rotary": {"sections": [1, 1]}}, "rotary.sections must be three numbers >= 0 with the sum 4 .* given .1, 1."),
        ({"rotary": {"sections": [1, 1, 1]}}, "rotary.sections must be three numbers >= 0 with the sum 4"),
        ({"rotary": {"sections": [5, -1, 0]}}, "rotary.sections must be three numbers >= 0 with the sum 4"),
        ({"rotary": {"has_mixed_sections": True}}, "rotary.has_mixed_sections needs sections"),
        (
            {"rotary": {"sections": [1, 2, 1], "has_mixed_sections": True}},
            r"rotary.sections\[1\] must be at most 1 with has_mixed_sections, given 2",
        ),
        ({"whole_spans": "some"}, 'whole_spans must be one of none, all, windows, given "some"'),
        (
            {"layer_embeddings": {"size": 2, "vocab_size": 9, "media_token": 9}},
            "layer_embeddings.media_token must be within 0..8, given 9",
        ),
        ({"rotary": {"dims": 9}}, r"rotary.dims must be even and within 2..8 \(head_dim\), given 9"),
        ({"sliding_windows": [4]}, "sliding_windows must have an entry for each of 2 layers, given 1"),
        ({"sliding_windows": [4, "x"]}, r'sliding_windows\[1\] must be an integer, given "x"'),
        ({"num_kv_heads": 4}, "6 query heads do not divide into 4 key-value heads"),
        ({"names": {"out": "layers.{k}.out"}}, "names.out may hold {i} and {j} and no other braces"),
        ({"names": {"out": ""}}, "names.out must not be empty"),
        ({"is_parallel": True, "norm_placement": "post"}, "is_parallel needs norm_placement pre, given post"),
        ({"names": {"out": "a|b"}}, "names.out must not list alternatives, given"),
        ({"experts": {"num_experts": 4, "num_chosen": 1}}, "the field experts.intermediate_size is missing"),
        ({"experts": EXPERTS | {"num_chosen": 5}}, r"experts.num_chosen must be within 1..4 \(num_experts\), given 5"),
        ({"experts": EXPERTS | {"num_groups": 3}}, "experts.num_groups must divide 4 experts, given 3"),
        ({"experts": EXPERTS | {"num_groups": 4, "num_chosen": 2}}, "experts.num_chosen must be at most the 1 of"),
        ({"experts": EXPERTS | {"dense_layers": [2]}}, "experts.dense_layers must be within 0..1, given 2"),
        ({"experts": EXPERTS | {"num_experts": 1 << 18}}, "experts.num_experts must be within 1..131072 for 2 layers"),
        ({"experts": EXPERTS, "names": {"expert_down": "x.{i}"}}, "names.expert_down must hold {j}, given"),
        ({"experts": EXPERTS | {"shared_size": 8}, "names": {"shared_up": ""}}, "names.shared_up must not be empty"),
        ({"experts": EXPERTS | {"shared_scale": 0}}, "experts.shared_scale must be > 0, given 0"),
        ({"experts": EXPERTS | {"jitter": -1}}, "experts.jitter must be >= 0, given -1"),
        (
            {"experts": EXPERTS | {"score": "sparsemixer", "num_groups": 2}},
            "experts.score sparsemixer needs num_groups 1 and no names.router_correction",
        ),
        ({"chunk_sizes": [4]}, "chunk_sizes must have an entry for each of 2 layers, given 1"),
        ({"chunk_sizes": [4, 0]}, "chunk_sizes must be null or >= 1, given 0"),
        ({"activation": "xielu"}, "activation xielu needs is_gated false"),
        ({"is_gated": False, "gate_limit": 7}, "gate_limit and gate_shift need is_gated true"),
        ({"gate_limit": 0}, "gate_limit must be > 0, given 0"),
        ({"has_sinks": True, "names": {"sinks": ""}}, "names.sinks must not be empty"),
        ({"query_growth": {"rate": 0.1, "period": 0}}, "query_growth.period must be >= 1, given 0"),
        ({"query_growth": {"rate": 0.1, "period": 8, "offset": -1}}, "query_growth.offset must be >= 0, given -1"),
        ({"latent": LATENT, "num_kv_heads": 1, "has_sinks": True}, "latent needs has_sinks false"),
        ({"latent": LATENT, "num_kv_heads": 1, "has_output_gate": True}, "latent needs has_output_gate false"),
        ({"has_output_gate": True, "names": {"output_gate": ""}}, "names.output_gate must not be empty"),
        ({"latent": LATENT}, "latent needs num_kv_heads 1, given 3"),
        ({"latent": LATENT, "num_kv_heads": 1, "rotary": {}}, "latent needs rotary.dims below head_dim 8, given None"),
        ({"latent": LATENT | {"rank": 0}, "num_kv_heads": 1}, "latent.rank must be within 1..4194304, given 0"),
        ({"layers": [{}]}, "layers must have an entry for each of 2 layers, given 1"),
        ({"layers": [{}, {"head_dim": 0}]}, r"layers\[1\].head_dim must be within 1..8192, given 0"),
        ({"layers": [{"num_kv_heads": 4}, {}]}, r"layers\[0\].num_kv_heads must divide 6 query heads, given 4"),
        ({"layers": [{}, {"gate_sparsity": 1}]}, r"layers\[1\].gate_sparsity must be at least 0 and below 1, given 1"),
        ({"layers": [{"kv_source": 0}, {}]}, r"layers\[0\].kv_source must be a layer before it, given 0"),
        (
            {"layers": [{}, {"kv_source": 0, "head_dim": 4}]},
            r"layers\[1\].head_dim must be the 8 of layer 0, which it has keys and values of, given 4",
        ),
        (
            {"num_layers": 3, "layers": [{}, {"kv_source": 0}, {"kv_source": 1}]},
            r"layers\[2\].kv_source must be a layer with keys and values of its own, given 1",
        ),
        ({"layers": [{}, {"kv_source": 0}], "names": {"qkv": "x.{i}"}}, "kv_source need names.qkv empty"),
        ({"layers": [{}, {"head_dim": 4}], "rotary": {}}, r"rotary.dims must be even and within 2..4 \(head_dim\)"),
        ({"layers": [{}, {"kv_source": 0}], "latent": LATENT, "num_kv_heads": 1}, "layers must be empty with latent"),
        (
            {"layer_embeddings": {"size": 0, "vocab_size": 9}},
            "layer_embeddings.size must be within 1..1048576, given 0",
        ),
        ({"laurel_rank": 0}, "laurel_rank must be within 1..1048576, given 0"),
        ({"altup": {"num_streams": 1}}, "altup.num_streams must be within 2..64, given 1"),
        ({"altup": {"num_streams": 2, "active": 2}}, "altup.active must be within 0..1, given 2"),
        ({"rotary": {"scaling": {"kind": "proportional", "share": 0}}}, "scaling.share must be above 0 and at most 1"),
        ({"experts": EXPERTS | {"is_beside_mlp": True}}, "experts.is_beside_mlp needs dense_layers empty and norm_pl"),
        ({"indexer": INDEXER}, "indexer needs latent with a query_rank"),
        (
            INDEXED | {"indexer": INDEXER | {"num_chosen": 0}},
            "indexer.num_chosen must be within 1..2147483648, given 0",
        ),
        (INDEXED | {"indexer": INDEXER | {"head_dim": 1}}, "indexer.head_dim must be within 2..8192, given 1"),
        (
            INDEXED | {"indexer": INDEXER | {"sharing_layers": [0]}},
            "indexer.sharing_layers must be within 1..1, given 0",
        ),
        (INDEXED | {"indexer": INDEXER, "names": {"index_k": ""}}, "names.index_k must not be empty"),
    ],
)
def test_a_wrong_spec_is_one_line_naming_field_value_and_limit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        from_json(json.dumps(HAND_WRITTEN | change), "mine.json")
    assert caught.value.message.startswith("mine.json: ")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000, '{"architecture": "x"}'])
def test_what_is_no_spec_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="mine.json"):
        from_json(text, "mine.json")
