"""The results of a measurement, and their table and JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from funitel.model_server.tools.perplexity.scores import Distance, Likelihood

NO_DISTANCE = dict.fromkeys(Distance.__dataclass_fields__)  # null in JSON


@dataclass(frozen=True, kw_only=True)
class Row:
    """The figures of a model.

    Attributes:
        name: the tier, or the model.
        model: as it was named.
        precision, kv_precision: of weights, and of keys and values.
        weight_bytes: memory of the weights.
        tokens_per_second: computed, also those that are context only; of the forward alone.
        likelihood: how well it predicts the text.
        distance: from the reference; None of the reference itself, or where there is none.
    """

    name: str
    model: str
    precision: str
    kv_precision: str
    weight_bytes: int
    tokens_per_second: float
    likelihood: Likelihood
    distance: Distance | None


@dataclass(frozen=True, kw_only=True)
class QualityReport:
    """The figures of all models on the same tokens.

    Attributes:
        text: name of the text.
        num_tokens: tokens scored.
        num_bytes: bytes of the text in them.
        window, stride: in tokens.
        reference: name of its row, which is the first; None where nothing is compared.
        rows: in the order of the measurement.
    """

    text: str
    num_tokens: int
    num_bytes: int
    window: int
    stride: int
    reference: str | None
    rows: Sequence[Row]


def json_of(report: QualityReport) -> str:
    """One JSON object; figures that a row has not are null."""
    return json.dumps(
        {
            "text": report.text,
            "tokens": report.num_tokens,
            "bytes": report.num_bytes,
            "window": report.window,
            "stride": report.stride,
            "reference": report.reference,
            "results": [_flat(row) for row in report.rows],
        },
        allow_nan=False,
    )


def _flat(row: Row) -> dict[str, Any]:
    fields = asdict(row)
    likelihood, distance = fields.pop("likelihood"), fields.pop("distance")
    return {**fields, **likelihood, **(distance or NO_DISTANCE)}


def table_of(report: QualityReport) -> str:
    """A table for a terminal: a row for each model, columns of distance where there is a reference."""
    scored = f"{report.num_tokens:,} tokens scored ({report.num_bytes:,} bytes)"
    head = f"{report.text}: {scored}, window {report.window}, stride {report.stride}"
    columns = ["", "weights", "KV", "MB", "perplexity", "bits/byte", "tokens/s"]
    if report.reference is not None:
        columns += ["ratio", "KL mean", "KL p99", "KL max", "same top"]
        head += f"\nratio and KL (nats) against {report.reference}"
    lines = [columns, *(_cells(row)[: len(columns)] for row in report.rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join([head, "", *(_aligned(line, widths) for line in lines)])


def _cells(row: Row) -> list[str]:
    likelihood, distance = row.likelihood, row.distance
    cells = [
        row.name,
        row.precision,
        row.kv_precision,
        f"{row.weight_bytes / 1e6:.0f}",
        f"{likelihood.perplexity:.3f} ± {likelihood.perplexity_error:.3f}",
        f"{likelihood.bits_per_byte:.4f}",
        f"{row.tokens_per_second:.0f}",
    ]
    if distance is None:
        return [*cells, *["-"] * 5]
    return [
        *cells,
        f"{distance.perplexity_ratio:.5f} ± {distance.perplexity_ratio_error:.5f}",
        f"{distance.kl_mean:.2g}",
        f"{distance.kl_p99:.2g}",
        f"{distance.kl_max:.2g}",
        f"{100 * distance.same_top_token:.2f} %",
    ]


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """The first three columns are words, the others numbers."""
    parts = [cell.ljust(w) if i < 3 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))]
    return "  ".join(parts).rstrip()
