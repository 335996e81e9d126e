"""Shares of sequences by weight: within one of what the weights say, after any number of them."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funitel.router.engine.interface import ReplicaLoad
from funitel.router.replica_set.load_balancer import MAX_LEAD, LoadBalancer
from funitel.router.replica_set.weighted_choice import WeightedChoice

POSITIVE = st.floats(0.001, 1000) | st.integers(1, 9).map(float)
IDLE = ReplicaLoad(0, 0)


def chosen(balancer: LoadBalancer, loads: list[ReplicaLoad]) -> int:
    index = balancer.choose(loads)
    balancer.count(index)
    return index


@given(st.lists(POSITIVE, min_size=2, max_size=8, unique=True), st.integers(1, 300))
def test_shares_follow_weights_within_one(weights: list[float], num_sequences: int) -> None:
    balancer, counts = LoadBalancer(weights), Counter[int]()
    for number in range(1, num_sequences + 1):
        counts[chosen(balancer, [IDLE] * len(weights))] += 1
        for index, weight in enumerate(weights):
            assert abs(counts[index] - number * weight / sum(weights)) < 1, (number, counts)


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0]), min_size=1, max_size=8), st.integers(1, 200))
def test_replicas_of_one_weight_share_what_the_weight_gets(weights: list[float], num_sequences: int) -> None:
    """Each has the load of what it has got: the least loaded of its weight is next."""
    balancer, counts = LoadBalancer(weights), Counter[int]()
    for _ in range(num_sequences):
        counts[chosen(balancer, [ReplicaLoad(counts[index], 0) for index in range(len(weights))])] += 1
    total = sum(weights)
    for index, weight in enumerate(weights):
        if total:
            assert abs(counts[index] - num_sequences * weight / total) < 2, counts
            assert weight or not counts[index]


@given(st.lists(POSITIVE, min_size=1, max_size=6), st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_a_choice_is_deterministic_and_counts_nothing(weights: list[float], cached: list[int]) -> None:
    first, second = LoadBalancer(weights), LoadBalancer(weights)
    for tokens in cached:
        loads = [ReplicaLoad(0, tokens if index == tokens else 0) for index in range(len(weights))]
        places = {first.choose(loads) for _ in range(3)} | {second.choose(loads)}
        assert len(places) == 1
        first.count(min(places))
        second.count(min(places))


def test_a_cached_prefix_comes_before_the_share_until_it_has_led_too_far() -> None:
    balancer, loads = LoadBalancer([9.0, 1.0]), [IDLE, ReplicaLoad(0, 16)]
    places = [chosen(balancer, loads) for _ in range(40)]
    first = places.index(0)
    assert set(places[:first]) == {1}
    assert MAX_LEAD <= first * 0.9 < MAX_LEAD + 1
    assert 0.08 * 200 <= sum(chosen(balancer, loads) for _ in range(200)) <= 0.12 * 200


def test_a_prefix_that_all_prompts_share_does_not_keep_a_new_replica_from_its_share() -> None:
    balancer, cached = LoadBalancer([0.9, 0.1]), [100, 0]
    counts = Counter[int]()
    for _ in range(1000):
        index = chosen(balancer, [ReplicaLoad(0, tokens) for tokens in cached])
        cached[index] = 100
        counts[index] += 1
    assert abs(counts[1] - 100) <= MAX_LEAD + 1


def test_an_overloaded_replica_has_no_advantage_by_its_prefix() -> None:
    balancer = LoadBalancer([1.0, 3.0])
    assert [chosen(balancer, [ReplicaLoad(1000, 16), IDLE]) for _ in range(4)].count(0) == 1


@pytest.mark.parametrize("weights", [[0.0, 0.0], [0.0]])
def test_replicas_of_weight_0_are_for_when_there_are_no_others(weights: list[float]) -> None:
    assert LoadBalancer(weights).choose([IDLE] * len(weights)) == 0
    assert LoadBalancer([*weights, 0.1]).choose([*[IDLE] * len(weights), ReplicaLoad(10**9, 0)]) == len(weights)


def test_batches_of_many_are_made_up_for() -> None:
    choice, got = WeightedChoice([2.0, 1.0]), Counter[float]()
    for size in (1, 7, 30, 2, 5, 16, 1, 9, 30, 4) * 30:
        weight = choice.next_weight()
        choice.count(weight, size)
        got[weight] += size
    assert abs(got[1.0] - sum(got.values()) / 3) <= 31
