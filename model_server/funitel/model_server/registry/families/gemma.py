"""Rows of Gemma."""

from typing import Any

from funitel.model_server.registry.rules.common import ATTENTION_BIASES, SANDWICH_NAMES, TIED
from funitel.model_server.registry.rules.row import ArchitectureRow, activation, first, rotary, row, when, windows
from funitel.model_server.spec.model_spec import Activation, NormPlacement, QkNorm

_GEMMA: dict[str, Any] = (
    TIED
    | ATTENTION_BIASES
    | {
        "head_dim": first("head_dim", default=256),
        "norm_offset": 1.0,
        "activation": activation("hidden_activation", default="gelu_pytorch_tanh"),
        "embedding_scale": lambda c: c["hidden_size"] ** 0.5,
    }
)
_GEMMA2: dict[str, Any] = _GEMMA | {
    "norm_placement": NormPlacement.BOTH,
    "attention_scale": lambda c: first("query_pre_attn_scalar", default=256)(c) ** -0.5,
    "attention_softcap": first("attn_logit_softcapping", default=None),
    "logit_softcap": first("final_logit_softcapping", default=None),
}

ROWS: dict[str, ArchitectureRow] = {
    "GemmaForCausalLM": row(
        **_GEMMA
        | {
            "activation": when(  # what its first checkpoints call gelu is the approximation
                lambda c: c.get("hidden_act") == "gelu",
                Activation.GELU_TANH,
                activation("hidden_act", default="gelu_pytorch_tanh"),
            )
        }
    ),
    "Gemma2ForCausalLM": row(**_GEMMA2, sliding_windows=windows(pattern=2, default=4096), names=SANDWICH_NAMES),
    "VaultGemmaForCausalLM": row(
        **_GEMMA2 | {"norm_placement": NormPlacement.PRE},
        sliding_windows=windows(pattern=2, default=4096),
        names={"mlp_norm": "layers.{i}.pre_feedforward_layernorm"},
    ),
    "Gemma3ForCausalLM": row(
        **_GEMMA2,
        qk_norm=QkNorm.HEAD,
        rotary=rotary(base=1e6),
        window_rotary=rotary(
            base_keys=("rope_local_base_freq",), scaling_keys=("rope_parameters",), layers="sliding_attention"
        ),
        sliding_windows=windows(pattern=6, default=4096),
        names=SANDWICH_NAMES,
    ),
}
