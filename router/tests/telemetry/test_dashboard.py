"""The Grafana dashboard draws what the server exposes: every name and label it uses exists."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from funitel.router.telemetry.metrics import Metrics

PATH = Path(__file__).parents[3] / "docs" / "grafana" / "funitel.json"
DASHBOARD: dict[str, Any] = json.loads(PATH.read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
EXPRESSIONS += [item["query"]["query"] for item in DASHBOARD["templating"]["list"] if item["type"] == "query"]

_NAME = re.compile(r"\b(?:tgi|funitel)_\w+")
_LABELS_AFTER_BY = re.compile(r"\bby \(([\w, ]+)\)")


def exposed() -> dict[str, tuple[str, ...]]:
    """Every sample's name, with its labels."""
    found: dict[str, tuple[str, ...]] = {}
    text = Metrics().exposition().decode()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        suffixes = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}.get(kind, ("",))
        found |= {name + suffix: () for suffix in suffixes}
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_uses_names_that_exist(expression: str) -> None:
    names = _NAME.findall(expression)
    assert names
    assert set(names) <= exposed().keys()


def test_labels_are_those_of_the_metrics() -> None:
    lists = [found for expression in EXPRESSIONS for found in _LABELS_AFTER_BY.findall(expression)]
    labels = {label for found in lists for label in found.split(", ")}
    known = {"le", "err", "status", "state", "method", "rank", "kind", "reason", "outcome", "replica", "model"}
    assert labels == known


def test_every_panel_can_be_read() -> None:
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert len(titles) == len(set(titles))
    assert all(panel["targets"] for panel in DASHBOARD["panels"])
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(places) == len(set(places)), "panels lie on each other"


def test_what_operators_look_for_is_drawn() -> None:
    drawn = " ".join(EXPRESSIONS)
    for name in (
        "funitel_time_to_first_token_seconds",
        "funitel_inter_token_latency_seconds",
        "tgi_queue_size",
        "funitel_blocks",
        "funitel_prefix_cache_hit_tokens_total",
        "tgi_request_failure",
        "funitel_replica_up",
        "funitel_replica_requests_total",
        "funitel_model_load_seconds",
    ):
        assert name in drawn
