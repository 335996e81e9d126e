"""Find the row of the table that is most like an architecture without one: by what its config counts, and by name."""

import re
from difflib import SequenceMatcher

from funitel.model_server.registry.decoders import FAMILIES
from funitel.model_server.registry.rules.row import Config

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# The plainest row, by whether there are latents and experts.
_USUAL = {
    (False, False): "LlamaForCausalLM",
    (False, True): "Qwen3MoeForCausalLM",
    (True, False): "MiniCPM3ForCausalLM",
    (True, True): "DeepseekV3ForCausalLM",
}
_MIN_LIKENESS = 0.7  # of two names; below, they have no more than syllables in common


def nearest_row(config: Config) -> str:
    """The architecture of the row that comes nearest to what a `config.json` of no row describes.

    Rows with latent attention and experts as the config has them are candidates; of these the one with the most similar
    name, of several versions the last, or the plainest where no name is similar.
    """
    wanted = bool(config.get("kv_lora_rank")), any(config.get(key) for key in _EXPERT_COUNTS)
    given = [_letters(str(name)) for name in (*(config.get("architectures") or ()), config.get("model_type") or "")]
    likeness, _, best = max(
        (max(SequenceMatcher(None, _letters(name), each).ratio() for each in given), _version(name), name)
        for name, row in FAMILIES.items()
        if ("latent" in row.fields, "experts" in row.fields) == wanted
    )
    return best if likeness >= _MIN_LIKENESS else _USUAL[wanted]


def _letters(name: str) -> str:
    """A name without what all architectures are called, and without its version."""
    return re.sub(r"for(causallm|conditionalgeneration)$|lmheadmodel$|model$|_text$|[\W\d_]", "", name.lower())


def _version(name: str) -> int:
    found = re.search(r"\d+", name)
    return int(found[0]) if found else 0
