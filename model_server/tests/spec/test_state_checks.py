"""Layers with states that no model can have: one line with field, value and limit."""

from dataclasses import replace
from typing import Any

import pytest

from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.spec.json_file import check_spec
from funitel.model_server.spec.layer_spec import MultiplierSpec
from funitel.model_server.spec.model_spec import ModelSpec, NormPlacement
from funitel.model_server.spec.state_layers import DeltaNetSpec, ShortConvSpec
from funitel.proto.errors import UnsupportedModel
from funitel_testing.zoo import ZOO


def spec_from(name: str, **changes: Any) -> ModelSpec:
    tiny = ZOO[name]
    return spec_of(tiny.configure().to_dict() | {"architectures": [tiny.architecture]} | changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3_next", {"linear_num_value_heads": 4}, "delta_net.num_value_heads must be a multiple of num_key_heads"),
        ("qwen3_next", {"linear_num_key_heads": 0}, "delta_net.num_key_heads must be within 1..65536, given 0"),
        ("qwen3_next", {"linear_key_head_dim": 0}, "delta_net.key_dim must be within 1..8192, given 0"),
        ("qwen3_next", {"linear_value_head_dim": -8}, "delta_net.value_dim must be within 1..8192, given -8"),
        ("qwen3_next", {"linear_conv_kernel_dim": 0}, "delta_net.conv_width must be within 1..64, given 0"),
        ("qwen3_next", {"linear_conv_kernel_dim": "4"}, "delta_net.conv_width must be an integer"),
        ("lfm2", {"conv_L_cache": 0}, "short_conv.conv_width must be within 2..64, given 0"),
        ("bamba", {"mamba_n_groups": 4}, "mamba2.num_heads must be a multiple of num_groups, given 6 and 4"),
        ("bamba", {"mamba_d_state": 0}, "mamba2.state_dim must be within 1..8192, given 0"),
        ("bamba", {"mamba_n_heads": 5}, "mamba_n_heads 5 of mamba_d_head 16 must be 96"),
        ("bamba", {"mamba_n_heads": 0}, "mamba_n_heads"),
        ("falcon_h1", {"mamba_d_ssm": 95}, "mamba_n_heads 6 of mamba_d_head 16 must be 95, mamba_d_ssm"),
        ("falcon_h1", {"mamba_d_ssm": 0}, "mamba_n_heads 6 of mamba_d_head 16 must be 0, mamba_d_ssm"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, "multipliers.state_parts must be empty or have 5 entries"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 2.0, None, 1.0, 1.0]}, "value of the wrong kind: multipliers:"),
        ("falcon_h1", {"mlp_multipliers": [1.0]}, "value of the wrong kind: multipliers:"),
        ("falcon_h1", {"key_multiplier": 0.0}, "attention_scale must be > 0, given 0.0"),
        ("kimi_linear", {"linear_head_dim": 0}, "delta_net.key_dim must be within 1..8192, given 0"),
        ("kimi_linear", {"linear_attn_config": {"num_heads": 0}}, "delta_net.num_value_heads must be within 1..65536"),
        ("kimi_linear", {"qk_rope_head_dim": 5}, "rotary.dims must be even"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "only 'sigmoid' is supported"),
        ("minimax", {"head_dim": 9000}, "head_dim must be within 1..8192, given 9000"),
        ("minimax", {"linear_attn_beta_factor": "half"}, "value of the wrong kind: multipliers:"),
        ("minimax", {"sliding_window": 5}, "config.json says sliding_window=5, only None is supported"),
        ("mamba2", {"num_heads": 5}, "num_heads 5 of head_dim 16 must be 96, expand * hidden_size"),
        ("mamba2", {"n_groups": 4}, "mamba2.num_heads must be a multiple of num_groups, given 6 and 4"),
        ("mamba", {"state_size": 0}, "mamba.state_dim must be within 1..8192, given 0"),
        ("mamba", {"conv_kernel": 100}, "mamba.conv_width must be within 1..64, given 100"),
        ("mamba", {"time_step_rank": 0}, "mamba.step_rank must be within 1..8192, given 0"),
        ("mamba", {"time_step_rank": "all"}, "mamba.step_rank must be an integer"),
        ("falcon_mamba", {"intermediate_size": -1}, "intermediate_size must be within 1.."),
        ("jamba", {"attn_layer_period": 0}, "value of the wrong kind: state_layers:"),
        ("jamba", {"num_experts_per_tok": 9}, "experts.num_chosen must be within 1..4"),
    ],
)
def test_sizes_that_cannot_be_are_one_line(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        spec_from(name, **changes)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_layers": ()}, "state_layers must name the layers of delta_net, given none"),
        ({"delta_net": None}, "state_layers need one of delta_net, mamba2, mamba, lightning, short_conv, given none"),
        ({"short_conv": ShortConvSpec(channels=48, conv_width=3)}, "given delta_net, short_conv"),
        ({"state_layers": (0, 3)}, "state_layers must be within 0..2, given 3"),
        ({"state_layers": (0, 0)}, "state_layers must name each layer once"),
        ({"state_layers": (), "delta_net": None, "is_state_beside": True}, "is_state_beside needs state_layers"),
        ({"multipliers": MultiplierSpec(attention_in=2.0)}, "multipliers.attention_in needs is_state_beside true"),
        ({"multipliers": MultiplierSpec(mlp_out=2.0), "is_gated": False}, "multipliers.mlp_out needs is_gated true"),
        ({"multipliers": MultiplierSpec(state_parts=(1.0,) * 5)}, "5 entries, of mamba2, given 5"),
        (
            {
                "delta_net": DeltaNetSpec(
                    num_key_heads=3, num_value_heads=6, key_dim=8, value_dim=8, conv_width=4, rank=0
                )
            },
            "delta_net.rank must be within 1..8192, given 0",
        ),
        ({"state_layers": (), "delta_net": None, "has_mlp": False}, "has_mlp false needs state_layers"),
        (
            {"norm_placement": NormPlacement.WITHIN, "state_norm_placement": NormPlacement.PRE},
            "norm_placement within needs state_norm_placement empty",
        ),
        ({"is_parallel": True}, "state_layers need is_parallel false"),
    ],
)
def test_a_written_spec_is_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        check_spec(replace(spec_from("qwen3_5"), **changes))


def test_states_beyond_any_memory_are_refused() -> None:
    huge = {"linear_num_key_heads": 8192, "linear_num_value_heads": 65536, "linear_key_head_dim": 8192}
    with pytest.raises(UnsupportedModel, match="bytes for the states of a sequence, at most"):
        spec_from("qwen3_next", **huge, linear_value_head_dim=8192)
