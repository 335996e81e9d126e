"""One page of metrics for several models: each family once, each series with a label `model`.

With one model the page is that of its own `Metrics`, without the label, so TGI's dashboards keep working.
"""

import asyncio
from collections.abc import Iterable, Mapping

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from funitel.router.telemetry.metrics import Metrics, with_names_of_tgi

# Families that say something of the router, not of one model. They have no label `model`.
OF_THE_ROUTER = frozenset(
    {
        "funitel_responses",
        "funitel_connections",
        "funitel_cut_connections",
        "funitel_key_requests",
        "funitel_key_refused",
        "funitel_key_tokens",
        "funitel_batch_requests",
        "funitel_batches",
        "funitel_batch_running_requests",
        "funitel_tasks",
        "funitel_model_state",
    }
)


async def merged_text(
    models: Mapping[str, Metrics], router: Metrics | None = None, *, has_several: bool | None = None
) -> bytes:
    """Render the metrics of some models in Prometheus' text format; other tasks run meanwhile.

    Args:
        models: by names; one that is not loaded has none.
        router: of what is not about one model: connections, answers, API keys, states of models. What it has counted of
            requests, such as those for a model that there is not, is shown without the label. None where each model
            counts that for itself.
        has_several: whether the router knows several models, so that series have the label; by default whether there
            are several here.
    """
    is_labelled = len(models) > 1 if has_several is None else has_several
    if not is_labelled and len(models) <= 1:
        only = next(iter(models.values()), router)
        if only is not None and router in (None, only):
            return only.exposition()
    families = await merged_families(models, router, is_labelled=is_labelled)
    parts = []
    for family in families:
        parts.append(generate_latest(_Page([family])))
        await asyncio.sleep(0)  # with many models a page takes longer than a stream may stand still
    return with_names_of_tgi(b"".join(parts))


async def merged_families(models: Mapping[str, Metrics], router: Metrics | None, *, is_labelled: bool) -> list[Metric]:
    """Return the families of `merged_text`; arguments as there."""
    merged: dict[str, Metric] = {}
    if router is not None:
        is_apart = all(metrics is not router for metrics in models.values())
        for family in router.registry.collect():
            has_counted = is_apart and (not models or any(sample.value for sample in family.samples))
            if has_counted or family.name in OF_THE_ROUTER:
                _add(merged, family, {})
    for name, metrics in tuple(models.items()):
        await asyncio.sleep(0)
        for family in metrics.registry.collect():
            if family.name not in OF_THE_ROUTER:
                _add(merged, family, {"model": name} if is_labelled else {})
            elif router is None:
                _add(merged, family, {})
    return [_without_repetition(family) for family in merged.values()]


def _add(merged: dict[str, Metric], family: Metric, labels: Mapping[str, str]) -> None:
    """Add the samples of a family, each with further labels."""
    target = merged.get(family.name)
    if target is None:
        target = merged[family.name] = Metric(family.name, family.documentation, family.type, family.unit)
    target.samples.extend(sample._replace(labels={**labels, **sample.labels}) for sample in family.samples)


def _without_repetition(family: Metric) -> Metric:
    """Add up what several registries have under one name and the same labels."""
    by_series: dict[tuple[str, frozenset[tuple[str, str]]], Sample] = {}
    for sample in family.samples:
        series = sample.name, frozenset(sample.labels.items())
        known = by_series.get(series)
        by_series[series] = sample if known is None else known._replace(value=known.value + sample.value)
    family.samples = list(by_series.values())
    return family


class _Page(Collector):
    """Families as what `generate_latest` asks for them."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Yield them."""
        return self._families
