"""Rows of EXAONE."""

from typing import Any

from funitel.model_server.registry.rules.common import SANDWICH_NAMES
from funitel.model_server.registry.rules.experts import CORRECTED, OTHER_CORRECTION, dense_by_kind, experts
from funitel.model_server.registry.rules.row import NUM_LAYERS, ArchitectureRow, Config, first, row, windows
from funitel.model_server.spec.model_spec import NormPlacement, QkNorm

_EXAONE_WINDOWS = windows(pattern=4, default=4096)


def _exaone_unrotated(config: Config) -> tuple[int, ...]:
    """Layers without rotary positions: those without a window, in models that have windows."""
    if config.get("sliding_window", 4096) is None:
        return ()
    found = _EXAONE_WINDOWS(config) or (None,) * NUM_LAYERS(config)
    return tuple(i for i, window in enumerate(found) if window is None)


_EXAONE: dict[str, Any] = {
    "norm_eps": first("rms_norm_eps", default=1e-5),
    "qk_norm": QkNorm.HEAD,
    "sliding_windows": _EXAONE_WINDOWS,
    "unrotated_layers": _exaone_unrotated,
}

ROWS: dict[str, ArchitectureRow] = {
    "Exaone4ForCausalLM": row(**_EXAONE, norm_placement=NormPlacement.POST, names=SANDWICH_NAMES),
    "ExaoneMoeForCausalLM": row(
        **_EXAONE,
        experts=experts(
            **CORRECTED,
            dense_layers=dense_by_kind(1),
            scale=lambda c: float(c.get("routed_scaling_factor", 2.5)),
            shared_size=lambda c: c.get("num_shared_experts", 1) * c["moe_intermediate_size"],
        ),
        names=OTHER_CORRECTION | {"ignored": (r"rotary_emb\.inv_freq$", r"^mtp\.")},
    ),
}
