"""Write docs/metrics.md from the router's metrics, or with --check say whether it is up to date."""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from generated_page import write_or_check
from prometheus_client import Metric

from funitel.proto.errors import FunitelError
from funitel.router.telemetry.metrics import Metrics

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"

HEAD = """# Metrics

Written by `make pages` from the definitions of the router; change those, not this page. `GET /metrics` answers in
Prometheus' text format on the port of the server and on `--prometheus-port`, without an API key unless
`--protect-all-routes` is given. Times are in seconds, sizes in bytes or tokens as the name says. A histogram has the
series `NAME_bucket`, `NAME_sum` and `NAME_count`. With several replicas a gauge is their sum, and ranks are numbered
across them. A series with a label appears with its first value. A router of several models adds the label `model` to
every series that is about one of them; with one model there is no such label.

What to watch is in [observability](observability.md) and [scheduling](scheduling.md); a dashboard for Grafana is in
`docs/grafana`.
"""

TGI = """Names, labels and buckets of text-generation-inference, so its dashboards keep working. What counts differently
is in [migrate](migrate.md)."""
VLLM = "What a Kubernetes gateway routes by: see [adapters](adapters.md#metrics)."
SECTIONS = (
    ("tgi_", "TGI's", TGI),
    ("funitel_", "funitel's", "Metrics that TGI does not have."),
    ("vllm:", "vLLM's", VLLM),
)


def failures() -> str:
    """What a failed request counts as."""
    kinds, found = [FunitelError], set[str]()
    while kinds:
        kind = kinds.pop()
        found.add(kind.metric)
        kinds += kind.__subclasses__()
    return ", ".join(f"`{name}`" for name in sorted(found))


# The values of each label; those of one metric come before those of any.
LABELS: Mapping[tuple[str, str], str] = {
    ("tgi_request_failure", "err"): f"{failures()}; `dropped`: the client left; `aborted`: by its id",
    ("tgi_batch_concat_duration", "method"): "always `decode`, as in TGI",
    ("tgi_batch_concat", "reason"): "`backpressure`, `wait_exceeded`, `chunking`",
    ("", "method"): "`prefill`, `decode` or `encode`",
    ("", "route"): "the path of the route, `other` for unknown ones",
    ("", "status"): "status of the answer",
    ("", "rank"): "number of the shard, across replicas",
    ("", "key"): "name of the API key",
    ("funitel_cut_connections", "reason"): "the limit: [overload](overload.md#connections)",
    ("funitel_key_refused", "reason"): "`route`, `model`, `requests`, `tokens` or `concurrency`",
    ("funitel_key_tokens", "kind"): "`prompt` or `completion`",
    ("funitel_memory_bytes", "kind"): "`resident` now, or `peak`",
    ("funitel_blocks", "state"): "`used`, `free`, or `cached` (free, and kept for its content)",
    ("funitel_state_slots", "state"): "`used`, `free`, or `cached` (free, and kept as a checkpoint)",
    ("funitel_prefix_cache_tier_hit_tokens", "tier"): "`memory`, `disk`, or on a GPU `host`",
    ("funitel_tier_slots", "state"): "`used` or `free`",
    ("funitel_draft_tokens", "outcome"): "`accepted` or `rejected`",
    ("funitel_sequences", "state"): "`waiting` or `running`",
    ("funitel_replicas", "state"): "`serving`, `lost` or `draining`",
    ("funitel_replica_sequences", "state"): "`waiting` or `running`",
    ("", "replica"): "id of the replica",
    ("funitel_model_state", "model"): "name of the model",
    ("funitel_model_state", "state"): "the [states](replicas.md#metrics) of a model",
    ("funitel_adapter_loads", "outcome"): "`loaded` or `failed`",
    ("vllm:lora_requests_info", "max_lora"): "`--max-loras`",
    ("vllm:lora_requests_info", "running_lora_adapters"): "names of adapters that requests use, comma-separated",
    ("vllm:lora_requests_info", "waiting_lora_adapters"): "names of adapters that requests wait for, comma-separated",
    ("funitel_batch_requests", "state"): "`completed`, `failed`, or `retried`: it will be run again",
    ("funitel_expired", "state"): "`arriving`, `waiting` or `running`",
    ("funitel_refused", "reason"): "the limit: [scheduling](scheduling.md#admission-and-refusal)",
}


def labels_by_name(metrics: Metrics) -> dict[str, list[str]]:
    """The labels of every collector, by the name of its metric."""
    collectors = [each for each in vars(metrics).values() if hasattr(each, "collect")]
    named = {
        each._name: list(getattr(each, "_labelnames", ()) or getattr(each, "_labels", ()))
        for each in collectors
        if hasattr(each, "_name")
    }
    for collector in (metrics.adapters, metrics.replicas, metrics.models):
        named |= {family.name: list(getattr(family, "_labelnames", ())) for family in collector.collect()}
    return named | {family.name: ["rank"] for family in metrics.roofline.collect() if "decode" in family.name}


def families() -> Iterator[tuple[str, Metric, list[str]]]:
    """The name in the exposition of every metric, the metric, and its labels."""
    metrics = Metrics()
    metrics.roofline.roof = 1.0
    labels = labels_by_name(metrics)
    exposed = set(re.findall(r"^# TYPE (\S+) ", metrics.exposition().decode(), re.MULTILINE))
    for family in metrics.registry.collect():
        (name,) = exposed & {family.name, f"{family.name}_total"}
        yield name, family, labels.get(family.name, [])


def meaning(family: Metric, label: str) -> str:
    """The values of a metric's label."""
    return LABELS.get((family.name, label)) or LABELS["", label]


def page() -> str:
    """The whole page."""
    found = sorted(families(), key=lambda each: each[0])
    parts = [HEAD]
    for prefix, title, text in SECTIONS:
        parts.append(f"## {title}\n\n{text}\n\n| metric | type | labels | meaning |\n| --- | --- | --- | --- |")
        for name, family, labels in found:
            if name.startswith(prefix):
                values = "; ".join(f"`{label}`: {meaning(family, label)}" for label in labels)
                parts.append(f"| `{name}` | {family.type} | {values} | {family.documentation} |")
        parts.append("")
    used = {(family.name, label) for _, family, labels in found for label in labels}
    stale = {(name, label) for name, label in LABELS if not {(name, label)} & used and name}
    if stale or len([each for each in found if each[0].startswith(tuple(prefix for prefix, _, _ in SECTIONS))]) != len(
        found
    ):
        raise SystemExit(f"error: scripts/metrics_page.py describes what is not there, or misses a prefix: {stale}")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
