"""Parsing of partitions, and the layers of their stages."""

import pytest

from funitel.model_server.settings import ModelServerSettings
from funitel.proto.settings.fields import to_argv
from funitel.proto.settings.options import Counts
from funitel.proto.settings.partition import Partition, check_layers


@pytest.mark.parametrize("text", ["0", "0&1", "0;1", "0&1;2&3", "0&2;1&3", "3;2;1;0"])
def test_the_text_of_a_partition_gives_it_again(text: str) -> None:
    assert str(Partition(text)) == text
    assert Partition(str(Partition(text))) == Partition(text)


def test_a_partition_says_who_is_where() -> None:
    partition = Partition(" 0 & 2 ; 1&3")
    assert partition == ((0, 2), (1, 3))
    assert (partition.num_ranks, partition.num_tensor_ranks) == (4, 2)
    assert [partition.stage_of(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert partition.root == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not ranks with & between and stages with ; between"),
        ("0&;1", "is not ranks"),
        ("a;b", "is not ranks"),
        ("0,1", "is not ranks"),
        ("-1;0", "is not ranks"),
        ("0;0", "has rank 0 twice"),
        ("0&1;1&2", "has rank 1 twice"),
        ("1;2", "rank 0 is missing"),
        ("0;2", "has 2 ranks, which must be 0..1: rank 1 is missing"),
        ("0&1;2", "has stages of 2, 1 ranks: all must have as many"),
    ],
)
def test_other_text_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Partition(text)


@pytest.mark.parametrize(
    ("partition", "layers", "problem"),
    [
        (None, None, None),
        ("0;1", None, None),
        ("0;1", "12,20", None),
        (None, "12,20", "--layers 12,20 is for the stages of --partition, which is not given"),
        ("0;1", "12", "--layers 12 has 1 numbers, --partition 0;1 has 2 stages"),
        ("0;1", "0,4", "--layers 0,4 must have at least one layer for each stage"),
    ],
)
def test_layers_must_be_those_of_the_stages(partition: str | None, layers: str | None, problem: str | None) -> None:
    given = Partition(partition) if partition else None
    assert check_layers(given, Counts(layers) if layers else None) == problem


def test_a_child_gets_both_as_one_text_each() -> None:
    shard = ModelServerSettings(
        model_id="m", sharded=True, world_size=4, partition=Partition("0&1;2&3"), layers=Counts("12,20")
    )
    words = to_argv(shard)
    assert words[words.index("--partition") + 1] == "0&1;2&3"
    assert words[words.index("--layers") + 1] == "12,20"
    assert (shard.num_tensor_ranks, shard.tensor_rank) == (2, 0)
    assert shard.stages == ((0, 1), (2, 3))
