"""The page of several models: valid, each family once, each series with its model; of one model nothing changes."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from fleets import request, run, running
from prometheus_client import Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector

from funitel.proto.errors import Overloaded
from funitel.router.telemetry.merge import OF_THE_ROUTER, merged_families, merged_text
from funitel.router.telemetry.metrics import Metrics
from funitel.router.telemetry.model_states import STATES


class Given(Collector):
    """Families as what renders asks for them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self.families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self.families


def used(num_requests: int) -> Metrics:
    metrics = Metrics()
    for _ in range(num_requests):
        metrics.count_request()
        metrics.observe_first_token(0.01, 1)
    metrics.count_response("/generate", 200)
    metrics.set_connections(2)
    metrics.set_weights(0, 100, 60)
    return metrics


def parsed(text: bytes) -> dict[str, Metric]:
    """The families of a page, each once."""
    families = list(parse_text(text.decode()))
    names = Counter(family.name for family in families)
    assert [name for name, count in names.items() if count > 1] == []
    lines = [line.rpartition(" ")[0] for line in text.decode().splitlines() if line[0] != "#"]
    assert [line for line, count in Counter(lines).items() if count > 1] == []
    return {family.name: family for family in families}


def samples(family: Metric) -> dict[frozenset[tuple[str, str]], float]:
    return {frozenset(sample.labels.items()): sample.value for sample in family.samples}


async def test_one_model_is_shown_as_ever() -> None:
    metrics = used(3)
    assert await merged_text({"a": metrics}) == metrics.exposition()
    assert await merged_text({"a": metrics}, metrics) == metrics.exposition()
    assert await merged_text({}, metrics) == metrics.exposition()


async def test_several_models_have_a_label() -> None:
    page = parsed(await merged_text({"a": used(3), "b": used(1)}, used(0)))
    assert samples(page["tgi_request_count"]) == {frozenset({("model", "a")}): 3, frozenset({("model", "b")}): 1}
    weights = {frozenset({("model", name), ("rank", "0")}): 100.0 for name in "ab"}
    assert samples(page["funitel_weight_bytes"]) == weights | {frozenset({("rank", "0")}): 100.0}
    assert samples(page["funitel_connections"]) == {frozenset(): 2}, "it is the router's"
    assert page.keys() == {family.name for family in parse_text(Metrics().exposition().decode())}


async def test_what_the_router_counted_for_no_model_is_not_lost() -> None:
    router = Metrics()
    with pytest.raises(Overloaded), router.counting_failures():
        raise Overloaded("")
    page = parsed(await merged_text({"a": used(3), "b": used(1)}, router))
    assert samples(page["tgi_request_failure"]) == {frozenset({("err", "overloaded")}): 1}
    assert frozenset() not in samples(page["tgi_request_count"]), "it has counted none"


async def test_of_several_without_a_router_what_is_the_routers_is_added_up() -> None:
    page = parsed(await merged_text({"a": used(3), "b": used(1)}))
    assert samples(page["funitel_connections"]) == {frozenset(): 4}
    assert samples(page["funitel_responses"]) == {frozenset({("route", "/generate"), ("status", "200")}): 2}


async def test_the_label_stays_where_one_of_several_models_is_loaded() -> None:
    page = parsed(await merged_text({"a": used(3)}, Metrics(), has_several=True))
    assert samples(page["tgi_request_count"]) == {frozenset({("model", "a")}): 3}
    page = parsed(await merged_text({"a": used(3)}, used(1)))
    assert samples(page["tgi_request_count"]) == {frozenset(): 4}
    assert samples(page["funitel_connections"]) == {frozenset(): 2}, "the router's counts, not both"


async def test_models_that_are_gone_leave_nothing() -> None:
    router = Metrics()
    router.models.set({"a": "ready", "b": "loading"})
    page = await merged_text({"a": used(1)}, router, has_several=True)
    states = samples(parsed(page)["funitel_model_state"])
    assert len(states) == 2 * len(STATES)
    assert {labels for labels, value in states.items() if value} == {
        frozenset({("model", "a"), ("state", "ready")}),
        frozenset({("model", "b"), ("state", "loading")}),
    }
    router.models.set({"b": "ready"})
    assert b'"a"' not in await merged_text({"b": used(1)}, router, has_several=True)


async def test_names_with_any_characters() -> None:
    name = 'or"g/na\\me\nü'
    page = parsed(await merged_text({name: used(1), "b": used(2)}, Metrics()))
    assert samples(page["tgi_request_count"])[frozenset({("model", name)})] == 1


def test_families_of_the_router_exist() -> None:
    assert {family.name for family in Metrics().registry.collect()} >= OF_THE_ROUTER


async def test_x17_a_scrape_under_load(tmp_path: Path) -> None:
    """Two models of two replicas, under load and while a replica joins and leaves: every page is valid."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with running(tmp_path / "a") as a, running(tmp_path / "b") as b:
        for replica in (*a.replicas, *b.replicas):
            replica[0].delay = lambda: 0.002
        models, router = {"a": a.metrics, "b": b.metrics}, Metrics()
        load = [asyncio.create_task(run(each.fleet, request(5, 60, first=9 * i))) for i in range(20) for each in (a, b)]
        added = asyncio.create_task(a.fleet.add(2, await a.start()))
        num_pages = 0
        while not all(task.done() for task in load):
            page = parsed(await merged_text(models, router))
            assert {"a", "b"} == {sample.labels["model"] for sample in page["tgi_batch_current_size"].samples}
            families = await merged_families(models, router, is_labelled=True)
            text = generate_latest(Given(families)).decode()  # type: ignore[no-untyped-call]
            read = parse_openmetrics(text.replace("vllm_lora", "vllm:lora"))  # the library changes colons of samples
            assert [family.name for family in read] == [family.name for family in families]
            num_pages += 1
            if added.done() and len(a.fleet.replicas) == 3:
                await a.fleet.drain(2)
        assert num_pages > 3
        await asyncio.gather(*load)
        page = parsed(await merged_text(models, router))
        for name, of in (("a", a), ("b", b)):
            found = {
                sample.labels["replica"]: sample.value
                for sample in page["funitel_replica_generated_tokens"].samples
                if sample.labels["model"] == name
            }
            assert found.keys() == {"0", "1"}, "the one that has drained has vanished"
            assert 0 < sum(found.values()) <= 20 * 60
            assert sum(found.values()) == 20 * 60 or name == "a", "b has no replica that has vanished"
            up = {frozenset({("model", name), ("replica", str(each.replica_id))}): 1 for each in of.fleet.replicas}
            assert up.items() <= samples(page["funitel_replica_up"]).items()
        (load_a, load_b) = page["funitel_model_load_seconds"].samples
        assert load_a.value > 0
        assert load_b.value > 0
        assert page["funitel_time_to_first_token_seconds"].type == "histogram"
