"""Series of each replica beside the totals, and numbers of ranks."""

from hypothesis import given
from hypothesis import strategies as st

from funitel.router.telemetry.metrics import Metrics
from funitel.router.telemetry.replica_metrics import RankNumbers


def lines(metrics: Metrics) -> list[str]:
    return metrics.exposition().decode().splitlines()


def test_a_replica_beside_the_totals() -> None:
    metrics = Metrics()
    first, second = metrics.child(0, 1), metrics.child(3, 2)
    for child, used in ((first, 10), (second, 30)):
        child.set_up()
        child.set_weight(0.5)
        child.set_sequences(waiting=2, running=3)
        child.set_pool(used=used, free=40 - used, cached=1)
        child.count_given()
        child.count_prefix(7, 4)
        child.count_generated(5)
    text = lines(metrics)
    for line in (
        'funitel_replica_up{replica="3"} 1.0',
        'funitel_replica_weight{replica="3"} 0.5',
        'funitel_replica_sequences{replica="3",state="waiting"} 2.0',
        'funitel_replica_sequences{replica="0",state="running"} 3.0',
        'funitel_replica_kv_cache_utilisation{replica="0"} 0.25',
        'funitel_replica_kv_cache_utilisation{replica="3"} 0.75',
        "funitel_kv_cache_utilisation 0.5",
        'funitel_replica_requests_total{replica="3"} 1.0',
        'funitel_replica_prompt_tokens_total{replica="3"} 7.0',
        'funitel_replica_generated_tokens_total{replica="0"} 5.0',
        "tgi_queue_size 4.0",
    ):
        assert line in text


def test_a_lost_replica_keeps_what_it_has_done() -> None:
    metrics = Metrics()
    child = metrics.child(0, 1)
    child.set_up()
    child.set_sequences(waiting=2, running=3)
    child.set_pool(used=4, free=4, cached=0)
    child.count_given()
    child.retire()
    child.count_loss()
    text = lines(metrics)
    for line in (
        'funitel_replica_up{replica="0"} 0.0',
        'funitel_replica_sequences{replica="0",state="running"} 0.0',
        'funitel_replica_kv_cache_utilisation{replica="0"} 0.0',
        "funitel_kv_cache_utilisation 0.0",
        'funitel_replica_requests_total{replica="0"} 1.0',
        'funitel_replica_losses_total{replica="0"} 1.0',
    ):
        assert line in text


def test_a_removed_replica_leaves_nothing_and_reports_nothing_more() -> None:
    metrics = Metrics()
    before = lines(metrics)
    child = metrics.child(1, 2)
    child.set_up()
    child.set_weights(1, 100, 60)
    child.set_kv(0, 50)
    child.set_reads(1, 100, 1.0)
    child.remove()
    child.remove()
    child.set_kv(0, 50)
    child.set_weights(1, 100, 60)
    child.set_sequences(1, 1)
    labelled = ("rank=", "replica=")
    assert [line for line in lines(metrics) if any(label in line for label in labelled)] == []
    assert [line for line in lines(metrics) if line not in before] == [
        'funitel_sequences{state="waiting"} 0.0',
        'funitel_sequences{state="running"} 0.0',
    ] or len(lines(metrics)) == len(before)


def test_loads_are_shown_once_there_was_one() -> None:
    metrics = Metrics()
    assert not [line for line in lines(metrics) if line.startswith("funitel_model_load_seconds ")]
    metrics.set_load_seconds(12.5)
    metrics.observe_attach(3.0)
    text = lines(metrics)
    assert "funitel_model_load_seconds 12.5" in text
    assert 'funitel_replica_attach_seconds_bucket{le="5.0"} 1.0' in text


@given(st.lists(st.integers(1, 4) | st.integers(-9, -1), max_size=40))
def test_no_two_ranks_have_one_number_and_numbers_are_used_again(steps: list[int]) -> None:
    numbers, held = RankNumbers(), list[range]()
    for step in steps:
        if step > 0:
            first = numbers.take(step)
            held.append(range(first, first + step))
        elif held:
            gone = held.pop(step % len(held))
            numbers.give_back(gone.start, len(gone))
        taken = [number for each in held for number in each]
        assert len(taken) == len(set(taken))
    for each in held:
        numbers.give_back(each.start, len(each))
    assert numbers.take(3) == 0
