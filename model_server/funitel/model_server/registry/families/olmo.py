"""Rows of OLMo."""

from funitel.model_server.registry.rules.common import ATTENTION_BIASES, SANDWICH_NAMES
from funitel.model_server.registry.rules.experts import experts
from funitel.model_server.registry.rules.row import ArchitectureRow, first, rotary, row, windows
from funitel.model_server.spec.model_spec import Norm, NormPlacement, QkNorm

ROWS: dict[str, ArchitectureRow] = {
    "OlmoForCausalLM": row(
        norm=Norm.LAYER,
        norm_eps=1e-5,
        has_norm_weight=False,
        **ATTENTION_BIASES,
        qkv_clip=first("clip_qkv", default=None),
    ),
    "Olmo3ForCausalLM": row(
        norm_placement=NormPlacement.POST,
        norm_eps=first("rms_norm_eps", default=1e-5),
        **ATTENTION_BIASES,
        qk_norm=QkNorm.WHOLE,
        rotary=rotary(base=5e5),
        window_rotary=rotary(base=5e5, base_keys=(), scaling_keys=("rope_parameters",), layers="sliding_attention"),
        sliding_windows=windows(pattern=4, default=4096),
        names=SANDWICH_NAMES,
    ),
    "Olmo2ForCausalLM": row(
        norm_placement=NormPlacement.POST,
        norm_eps=first("rms_norm_eps", default=1e-5),
        **ATTENTION_BIASES,
        qk_norm=QkNorm.WHOLE,
        names=SANDWICH_NAMES,
    ),
    "OlmoeForCausalLM": row(
        **ATTENTION_BIASES,
        norm_eps=first("rms_norm_eps", default=1e-5),
        qk_norm=QkNorm.WHOLE,
        experts=experts(),
        fixed={"clip_qkv": None},
    ),
    "FlexOlmoForCausalLM": row(
        **ATTENTION_BIASES,
        norm_placement=NormPlacement.POST,
        qk_norm=QkNorm.WHOLE,
        rotary=rotary(base=5e5),
        experts=experts(),
        names=SANDWICH_NAMES,
    ),
}
