"""Layers of pipeline stages."""

import re
from dataclasses import replace

import pytest

from funitel.model_server.spec.layer_spec import LayerSpec
from funitel.model_server.spec.model_spec import ExpertsSpec, ModelSpec
from funitel.model_server.spec.stage_spec import StageSpec, layer_elements, stages_of, with_experts

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=100,
    hidden_size=64,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_position_embeddings=256,
)


def test_stages_have_as_many_layers_where_nothing_else_is_read() -> None:
    assert stages_of(SPEC, 2) == [range(4), range(4, 8)]
    assert stages_of(SPEC, 4) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert stages_of(SPEC, 1) == [range(8)]


def test_a_large_head_takes_the_place_of_layers() -> None:
    layer = layer_elements(SPEC, 0)
    wide = replace(SPEC, vocab_size=4 * layer // SPEC.hidden_size)
    assert stages_of(wide, 2) == [range(6), range(6, 8)]


def test_experts_count_as_what_a_stage_reads() -> None:
    experts = ExpertsSpec(num_experts=8, num_chosen=2, intermediate_size=128, dense_layers=(0, 1, 2, 3))
    first, last = stages_of(replace(SPEC, experts=experts), 2)
    assert len(first) > len(last)


def test_layers_can_be_asked_for() -> None:
    assert stages_of(SPEC, 2, (1, 7)) == [range(1), range(1, 8)]
    with pytest.raises(ValueError, match="adds up to 7 layers, the model has 8"):
        stages_of(SPEC, 2, (1, 6))
    with pytest.raises(ValueError, match="has 9 stages, the model has 8 layers"):
        stages_of(SPEC, 9)


def test_no_cut_parts_a_layer_from_the_keys_that_it_shares() -> None:
    sharing = tuple(LayerSpec(kv_source=3) if index > 3 else LayerSpec() for index in range(8))
    spec = replace(SPEC, layers=sharing)
    assert stages_of(spec, 2) == [range(3), range(3, 8)]
    with pytest.raises(ValueError, match="layer 4 has the keys and values of layer 3"):
        stages_of(spec, 2, (4, 4))
    with pytest.raises(ValueError, match="has 5 stages, into which the model cannot be cut: layer 4 has the keys"):
        stages_of(spec, 5)


def test_a_stage_knows_its_layers_and_ends() -> None:
    first, last = (StageSpec.of(SPEC, layers) for layers in stages_of(SPEC, 2))
    assert (first.is_first, first.is_last, last.is_first, last.is_last) == (True, False, False, True)
    assert first.attention_layers == (0, 1, 2, 3)
    assert last.attention_layers == (4, 5, 6, 7)
    assert (first.holds_table, last.holds_table) == (True, False)
    assert StageSpec.of(replace(SPEC, is_tied=True), range(4, 8)).holds_table
    assert last.at(5).held_layers == range(4, 8)
    assert last.of_one_layer().held_layers == range(1)


def test_tensors_of_other_stages_are_known_and_no_others() -> None:
    last = StageSpec.of(SPEC, range(4, 8))
    patterns = [re.compile(pattern) for pattern in last.names.ignored]

    def is_ignored(name: str) -> bool:
        return any(pattern.search(name) for pattern in patterns)

    assert is_ignored("model.layers.0.self_attn.q_proj.weight")
    assert is_ignored("model.layers.3.mlp.up_proj.weight")
    assert is_ignored("model.embed_tokens.weight")
    assert not is_ignored("model.layers.4.self_attn.q_proj.weight")
    assert not is_ignored("model.layers.10.self_attn.q_proj.weight")
    assert not is_ignored("model.norm.weight")
    assert not is_ignored("lm_head.weight")


def test_tensors_of_other_ranks_experts_are_known() -> None:
    spec = replace(SPEC, experts=ExpertsSpec(num_experts=12, num_chosen=2, intermediate_size=32))
    patterns = [re.compile(pattern) for pattern in with_experts(spec, range(6)).names.ignored]

    def is_ignored(name: str) -> bool:
        return any(pattern.search(name) for pattern in patterns)

    assert is_ignored("model.layers.3.mlp.experts.11.up_proj.weight")
    assert not is_ignored("model.layers.3.mlp.experts.1.up_proj.weight")
    assert not is_ignored("model.layers.3.mlp.gate.weight")
