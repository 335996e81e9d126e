"""Find the row of the table that is most like an architecture without one: by what its config counts, and by name."""

import re
from difflib import SequenceMatcher

from funitel.model_server.registry.decoders import FAMILIES
from funitel.model_server.registry.rules.row import Config

# By field of a ModelSpec, keys of a `config.json` that describe it.
_TRAITS = {
    "latent": ("kv_lora_rank",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "state_layers": ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_L_cache"),
    "indexer": ("index_topk",),
}
# The plainest row of each combination that has one.
_USUAL = {
    (): "LlamaForCausalLM",
    ("experts",): "Qwen3MoeForCausalLM",
    ("latent",): "MiniCPM3ForCausalLM",
    ("latent", "experts"): "DeepseekV3ForCausalLM",
    ("state_layers",): "Qwen3_5ForCausalLM",
    ("experts", "state_layers"): "Qwen3NextForCausalLM",
    ("latent", "experts", "indexer"): "DeepseekV32ForCausalLM",
}
_MIN_LIKENESS = 0.7  # of two names; below, they have no more than syllables in common


def nearest_row(config: Config) -> str:
    """The architecture of the row that comes nearest to what a `config.json` of no row describes.

    Rows with latent attention, experts, states and an indexer as the config has them are candidates; of these the one
    with the most similar name, of several versions the last, or the plainest where no name is similar.
    """
    wanted = tuple(trait for trait, keys in _TRAITS.items() if any(config.get(key) for key in keys))
    given = [_letters(str(name)) for name in (*(config.get("architectures") or ()), config.get("model_type") or "")]
    found = (
        (max(SequenceMatcher(None, _letters(name), each).ratio() for each in given), _version(name), name)
        for name, row in FAMILIES.items()
        if tuple(trait for trait in _TRAITS if trait in row.fields) == wanted
    )
    likeness, _, best = max(found, default=(0.0, 0, ""))
    return best if likeness >= _MIN_LIKENESS else _USUAL.get(wanted, _USUAL[()])


def _letters(name: str) -> str:
    """A name without what all architectures are called, and without its version."""
    return re.sub(r"for(causallm|conditionalgeneration)$|lmheadmodel$|model$|_text$|[\W\d_]", "", name.lower())


def _version(name: str) -> int:
    found = re.search(r"\d+", name)
    return int(found[0]) if found else 0
