"""Print the output of `funitel models`, what is served and what a model needs: text, or one JSON object."""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from funitel.model_server.cpu.coverage import missing
from funitel.model_server.cpu.precision import MADE
from funitel.model_server.hub import resolve
from funitel.model_server.registry.decoders import FAMILIES
from funitel.model_server.registry.encoder_decoders import SEQ2SEQ
from funitel.model_server.registry.encoders import ENCODERS
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.registry.wrapped import WRAPPED
from funitel.model_server.settings import DTYPES, ModelsSettings
from funitel.model_server.settings.catalogue import CATALOGUE
from funitel.model_server.tools.models.estimate import needs_of
from funitel.model_server.tools.models.explanation import tell_options
from funitel.model_server.tools.models.needs import Needs
from funitel.proto.errors import UnsupportedModel

_LINE = 120  # characters

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
    for kind, table in (("decoder", [*FAMILIES, *WRAPPED]), ("encoder-decoder", SEQ2SEQ), ("encoder", ENCODERS)):
        for architecture in table:
            fused = _fused(architecture) if kind == "decoder" else "no: it is for decoders"
            yield ServedArchitecture(
                architecture=architecture,
                kind=kind,
                is_split=kind != "encoder",
                shares_prefixes=kind == "decoder",
                precisions=DTYPES if fused.startswith("no") else (*DTYPES, *MADE),
                fused=fused,
            )


def through_transformers() -> list[str]:
    """Causal language models that transformers has and the tables have not; loading tries whether one can be served."""
    served = {*FAMILIES, *WRAPPED, *SEQ2SEQ, *ENCODERS}
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) - served)


def _fused(architecture: str) -> str:
    """Whether the fused step computes an architecture, by the defaults of its configuration."""
    if architecture in WRAPPED:
        return "as configured"
    kinds = (kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == architecture)
    kind = next(kinds, None)
    config = _PLAIN if kind is None else CONFIG_MAPPING[kind]().to_dict()
    try:
        reason = missing(spec_of({**config, "architectures": [architecture]}))
    except UnsupportedModel:  # the defaults alone are no model
        return "as configured"
    if reason is not None:
        return f"no: {reason}"
    return "as configured" if kind is None else "yes"


def list_all(*, is_json: bool) -> str:
    """The catalogue, the architectures of the tables with their features, and those that transformers serves."""
    served, others = list(served_architectures()), through_transformers()
    if is_json:
        catalogue = {name: [str(source) for source in sources] for name, sources in CATALOGUE.items()}
        architectures = [asdict(each) for each in served]
        return json.dumps({"catalogue": catalogue, "architectures": architectures, "through_transformers": others})
    names = _table(
        ("in the catalogue", "from"), [(name, "; or ".join(map(str, sources))) for name, sources in CATALOGUE.items()]
    )
    heads = ("architecture", "kind", "split over shards", "prefix cache", "precisions", "fused C++ step")
    rest = (
        f"{len(others)} more run through transformers in floating point, split over shards where it has a plan for it:"
    )
    named = textwrap.fill(", ".join(others), _LINE, break_long_words=False)
    return "\n\n".join((names, _table(heads, [_row(each) for each in served]), f"{rest}\n{named}"))


def _row(each: ServedArchitecture) -> tuple[str, ...]:
    return (
        each.architecture,
        each.kind,
        _yes(each.is_split),
        _yes(each.shares_prefixes),
        " ".join(each.precisions),
        each.fused,
    )


def _yes(claim: bool) -> str:
    return "yes" if claim else "no"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in (heads, *rows))


def tell(settings: ModelsSettings) -> tuple[str, bool]:
    """What serving a model takes, or with `--explain` every option; and whether one fits. Raises: StartupError."""
    return tell_options(settings) if settings.explain else tell_needs(settings)


def tell_needs(settings: ModelsSettings) -> tuple[str, bool]:
    """What serving a model takes on this machine, and whether that fits. Fetches the model where it is not here.

    Raises:
        StartupError: it cannot be served, or not with these settings.
    """
    folder = resolve.resolve(settings.model_id, revision=settings.revision, cache_dir=settings.cache_dir).folder
    needs = needs_of(settings, folder)
    if settings.json:
        return json.dumps(asdict(needs) | {"model": str(folder), "fits": needs.fits}), needs.fits
    return "\n".join(f"{name:<16}{text}" for name, text in _lines(needs, folder)), needs.fits


def _lines(needs: Needs, folder: Path) -> list[tuple[str, str]]:
    why = f" ({needs.why})" if needs.why else ""
    weights = ", ".join(map(_size, needs.weights))
    lines = [
        ("model", f"{folder}, {needs.architecture}"),
        ("served by", f"{needs.served_by}{why}"),
        ("weights", f"{weights}{' on each of the ranks' if len(needs.weights) > 1 else ''}, {needs.precision}"),
        ("context", f"{needs.context:,} tokens"),
    ]
    for part in needs.parts:
        kept = f"{_size(part.weights)} of weights, {part.precision}; {_size(part.block)} of a block"
        lines.append((f"layers {part.layers}", f"on {part.device}: {kept}"))
    if needs.blocks:
        each = ", ".join(_size(size) for size in needs.blocks)
        lines.append(("kept in blocks", f"{each} for each {needs.block_size:,} tokens, {needs.kv_precision}"))
    elif needs.kv_precision:
        lines.append(("kept in blocks", "known once it is loaded"))
    if needs.states:
        lines.append(("states", f"{', '.join(map(_size, needs.states))} for each sequence, float32"))
    lines.append(("memory free", _size(needs.free)))
    if needs.blocks:
        beside = f", beside a state pool of {needs.state_slots:,} slots" if needs.states else ""
        lines.append(("pool", f"{needs.pool:,} tokens{beside}"))
    lines.append(("fits", _yes(needs.fits)))
    return lines


def _size(num_bytes: int) -> str:
    """Bytes in the unit that people would use."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
