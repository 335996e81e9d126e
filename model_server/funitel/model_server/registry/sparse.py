"""Rows of latent attention with an indexer: DeepSeek-V3.2 and GLM-5."""

from dataclasses import replace
from typing import Any

from funitel.model_server.registry.row import NUM_LAYERS, ArchitectureRow, Config, Rule
from funitel.model_server.spec.model_spec import IndexerSpec


def _indexer(*, num_heads: int, is_interleaved: bool, sharing: Rule) -> Rule:
    return lambda config: IndexerSpec(
        num_heads=config.get("index_n_heads", num_heads),
        head_dim=config.get("index_head_dim", 128),
        num_chosen=config.get("index_topk", 2048),
        is_interleaved=is_interleaved,
        sharing_layers=sharing(config),
    )


def _sharing_layers(config: Config) -> tuple[int, ...]:
    """Of GLM-5: layers that are listed as sharing, or in a pattern, or all but each so-many-th from an offset on."""
    count = NUM_LAYERS(config)
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    if kinds is None:
        step, offset = max(config.get("index_topk_freq", 1), 1), config.get("index_skip_topk_offset", 2)
        kinds = ["shared" if max(i - offset + 1, 0) % step else "full" for i in range(count)]
    return tuple(i for i, kind in enumerate(kinds[:count]) if kind in ("shared", "S"))


def sparse_rows(deepseek_v3: ArchitectureRow, dense_layers: Rule) -> dict[str, ArchitectureRow]:
    """The rows, which differ from that of DeepSeek-V3; `dense_layers` are the layers without experts."""

    def row(indexer: Rule, **fields: Any) -> ArchitectureRow:
        def experts(config: Config) -> Any:
            return replace(deepseek_v3.fields["experts"](config), dense_layers=dense_layers(config))

        own = {"has_mlp_bias": False, "experts": experts, "indexer": indexer}
        return replace(deepseek_v3, fields={**deepseek_v3.fields, **own, **fields}, fixed={})

    return {
        "DeepseekV32ForCausalLM": row(_indexer(num_heads=64, is_interleaved=False, sharing=lambda config: ())),
        "GlmMoeDsaForCausalLM": row(_indexer(num_heads=32, is_interleaved=True, sharing=_sharing_layers)),
    }
