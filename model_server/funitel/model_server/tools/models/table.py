"""List every architecture that is served with its features, read off the tables and the code that serve them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from funitel.model_server.cpu.coverage import missing
from funitel.model_server.cpu.precision import MADE
from funitel.model_server.registry.decoders import FAMILIES
from funitel.model_server.registry.encoder_decoders import SEQ2SEQ
from funitel.model_server.registry.encoders import ENCODERS
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.settings import DTYPES
from funitel.proto.errors import UnsupportedModel

# What configurations say at least, for families of which transformers has no class with defaults.
_PLAIN: Mapping[str, Any] = {
    "vocab_size": 32000,
    "padded_vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_channels": 128,
    "intermediate_size": 8192,
    "ffn_hidden_size": 8192,
    "max_position_embeddings": 2048,
    "seq_length": 2048,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedArchitecture:
    """One architecture, and of its usual configuration whether the fused CPU step computes it, or why not."""

    architecture: str
    kind: str  # decoder, encoder-decoder, encoder
    is_split: bool  # over shards
    shares_prefixes: bool
    precisions: tuple[str, ...]
    fused: str


def served_architectures() -> Iterator[ServedArchitecture]:
    """Those of our tables."""
    transformers.utils.logging.set_verbosity_error()  # of its own defaults
    for architecture in FAMILIES:
        fused = _fused(architecture)
        yield ServedArchitecture(
            architecture=architecture,
            kind="decoder",
            is_split=True,
            shares_prefixes=True,
            precisions=DTYPES if fused.startswith("no") else (*DTYPES, *MADE),
            fused=fused,
        )
    for architecture in SEQ2SEQ:
        yield ServedArchitecture(
            architecture=architecture,
            kind="encoder-decoder",
            is_split=True,
            shares_prefixes=False,
            precisions=DTYPES,
            fused="no: it is for decoders",
        )
    for architecture in ENCODERS:
        yield ServedArchitecture(
            architecture=architecture,
            kind="encoder",
            is_split=False,
            shares_prefixes=False,
            precisions=DTYPES,
            fused="no: it is for decoders",
        )


def through_transformers() -> list[str]:
    """Causal language models that transformers has and the tables have not; loading tries whether one can be served."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) - FAMILIES.keys() - SEQ2SEQ.keys() - ENCODERS.keys())


def _fused(architecture: str) -> str:
    """Whether the fused step computes an architecture, by the defaults of its configuration."""
    kinds = (kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == architecture)
    kind = next(kinds, None)
    config = _PLAIN if kind is None else CONFIG_MAPPING[kind]().to_dict()
    try:
        reason = missing(spec_of({**config, "architectures": [architecture]}))
    except UnsupportedModel:  # the defaults alone are no model
        return "no: a mixture of experts" if "experts" in FAMILIES[architecture].fields else "as configured"
    if reason is not None:
        return f"no: {reason}"
    return "as configured" if kind is None else "yes"
