"""Where the ranks of a replica go, and why not elsewhere."""

from typing import Any

import pytest

from funitel.launcher.executors.choose import Place, PlaceChoice, Wanted, choose

GIB = 2**30


def place(name: str, gib: float = 8.0, **more: Any) -> Place:
    executor = name if name in ("local", "ray") else "worker"
    return Place(**{"name": name, "executor": executor, "cores": 8, "free_bytes": int(gib * GIB), **more})


def chosen(places: list[Place], num_ranks: int = 1, gib: float = 1.0, **more: Any) -> PlaceChoice:
    return choose(Wanted(num_ranks=num_ranks, rank_bytes=int(gib * GIB), **more), places)


def reasons(choice: PlaceChoice) -> dict[str, str]:
    return {refusal.place: refusal.reason for refusal in choice.refusals}


def test_this_machine_comes_first_then_the_worker_with_the_most_free_memory() -> None:
    places = [place("a", 9), place("b", 20), place("local", 4)]
    assert chosen(places).workers == ("local",)
    choice = chosen(places, gib=6)
    assert (choice.executor, choice.workers) == ("worker", ("b",))
    assert reasons(choice) == {"local": "1 rank needs 6.0 GiB, 4.0 GiB are free"}


def test_a_replica_goes_whole_to_one_worker_before_it_is_spread() -> None:
    places = [place("a", 30, cores=1), place("b", 8), place("c", 30, cores=1)]
    choice = chosen(places, 2, 4)
    assert choice.workers == ("b", "b")
    assert reasons(choice) == {
        "a": "2 ranks need 2 cores, there are 1",
        "c": "2 ranks need 2 cores, there are 1",
    }


def test_a_replica_that_fits_nowhere_whole_is_spread_over_the_fewest_workers_in_rank_order() -> None:
    places = [place("a", 5), place("b", 9), place("c", 2), place("local", 3)]
    choice = chosen(places, 4, 2)
    assert choice.workers == ("b", "b", "b", "b"), "it fits there"
    choice = chosen(places, 6, 2)
    assert choice.workers == ("b", "b", "b", "b", "a", "a")
    assert "local" in reasons(choice)


def test_what_fits_nowhere_says_why_for_every_place() -> None:
    places = [place("local", 1), place("a", 2), place("b", obstacle="it is away"), place("ray")]
    choice = chosen(places, 2, 4)
    assert (choice.executor, choice.workers) == (None, ())
    assert reasons(choice) == {
        "local": "2 ranks need 8.0 GiB, 1.0 GiB are free",
        "a": "2 ranks need 8.0 GiB, 2.0 GiB are free",
        "b": "it is away",
        "ray": "Ray is used where executor ray is asked for",
    }
    assert choice.reasons.count(";") == 3


@pytest.mark.parametrize(
    ("asked", "executor", "workers"),
    [
        ({"executor": "worker"}, "worker", ("a", "a")),
        ({"executor": "local"}, "local", ("local", "local")),
        ({"executor": "ray"}, "ray", ()),
        ({"worker": "b"}, "worker", ("b", "b")),
        ({"worker": "local"}, "local", ("local", "local")),
        ({"worker": "c"}, None, ()),
        ({"worker": "b", "executor": "local"}, None, ()),
    ],
)
def test_what_was_asked_for_rules_other_places_out(asked: dict[str, Any], executor: str, workers: Any) -> None:
    places = [place("local", 50), place("a", 9), place("b", 8), place("ray", 100)]
    choice = chosen(places, 2, 2, **asked)
    assert (choice.executor, choice.workers) == (executor, workers)
    if executor is None:
        assert all(refusal.reason for refusal in choice.refusals)


def test_an_unknown_worker_and_an_executor_without_places_are_named() -> None:
    assert reasons(chosen([], worker="x")) == {"x": "no worker of that name has joined"}
    assert reasons(chosen([place("local")], executor="worker"))["worker"] == "no worker has joined"
    assert chosen([]).reasons == "there is no place"


def test_a_worker_that_was_asked_for_is_not_helped_by_others() -> None:
    choice = chosen([place("a", 3), place("b", 9)], 2, 2, worker="a")
    assert choice.executor is None
    assert reasons(choice)["a"] == "2 ranks need 4.0 GiB, 3.0 GiB are free"


def test_gpus_are_counted_where_they_would_be_used() -> None:
    places = [place("local"), place("a", num_gpus=2, free_gpus=2), place("b", num_gpus=4, free_gpus=1)]
    assert chosen(places, 2, device="cpu").workers == ("local", "local")
    assert chosen(places, 2, device="auto").workers == ("a", "a")
    choice = chosen(places, 2, device="cuda")
    assert choice.workers == ("a", "a")
    assert reasons(choice)["b"] == "2 ranks need 2 GPUs, 1 are free"
    assert reasons(choice)["local"] == "2 ranks need 2 GPUs, 0 are free"
    assert chosen(places, 3, device="cuda").workers == ("a", "a", "b")


def test_ranks_on_gpus_and_ranks_on_cpus_are_never_mixed() -> None:
    places = [place("a", 4, num_gpus=1, free_gpus=1), place("b", 4, cores=1), place("c", 4, cores=1)]
    assert chosen(places, 2, 2, device="auto").workers == ("b", "c")
    assert chosen(places, 3, 2, device="auto").executor is None
