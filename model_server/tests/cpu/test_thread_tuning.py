"""The start-up probe: what it settles on by times that are made up, and that it changes nothing but speed."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from funitel.model_server.cpu.build import cpu_flags
from funitel.model_server.cpu.precision import Tier
from funitel.model_server.cpu.thread_tuning import (
    MARGIN,
    ROUNDS,
    ThreadSettings,
    ThreadTuner,
    choose,
    settle_threads,
)
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.registry.lookup import spec_of
from funitel_testing.forward_worker import CPU, fused_decoder, step_through
from funitel_testing.threads import Meeting, ThreadParallel
from funitel_testing.tiny import save_tiny

ALONE = TensorParallel()
TWO, ONE = ThreadSettings(2, 15), ThreadSettings(1, 15)


class Times:
    """Visits that take what they are told to."""

    def __init__(self, seconds: Callable[[ThreadSettings, int], tuple[float, float]]) -> None:
        self.visited: list[ThreadSettings] = []
        self._seconds = seconds

    def __call__(self, waiting: ThreadSettings) -> tuple[float, float]:
        self.visited.append(waiting)
        return self._seconds(waiting, self.visited.count(waiting) - 1)


def by_threads(one: dict[int, float], some: dict[int, float] | None = None) -> Times:
    return Times(lambda waiting, _: (one[waiting.num_threads], (some or one)[waiting.num_threads]))


def test_candidates_take_turns_in_both_orders() -> None:
    times = by_threads({2: 1e-3, 1: 1e-3})
    assert ThreadTuner(times, ALONE).best([TWO, ONE]) == 0
    assert times.visited == ([TWO, ONE, ONE, TWO] * ROUNDS)[: 2 * ROUNDS]


@pytest.mark.parametrize(
    ("one", "some", "best"),
    [
        ({2: 1.0, 1: 1.01}, None, 0),
        ({2: 1.0, 1: MARGIN + 0.01}, None, 0),  # not by a clear margin
        ({2: 1.0, 1: MARGIN - 0.01}, None, 1),
        ({2: 1.0, 1: 0.1}, {2: 1.0, 1: 1.1}, 0),  # not at the cost of many rows
        ({2: 1.0, 1: 1.0}, {2: 1.0, 1: 0.7}, 1),
    ],
)
def test_another_than_the_first_must_be_clearly_faster(
    one: dict[int, float], some: dict[int, float] | None, best: int
) -> None:
    assert ThreadTuner(by_threads(one, some), ALONE).best([TWO, ONE]) == best


def test_a_neighbour_who_leaves_one_round_alone_changes_nothing() -> None:
    def beside(waiting: ThreadSettings, number: int) -> tuple[float, float]:
        usual = 1.0 if waiting == TWO else 1.5
        return (usual * 40, usual * 40) if waiting == TWO and number != 1 else (usual, usual)

    assert ThreadTuner(Times(beside), ALONE).best([TWO, ONE]) == 0


def test_threads_are_settled_before_the_spin() -> None:
    def seconds(waiting: ThreadSettings, _: int) -> tuple[float, float]:
        return (1.0 if waiting.num_threads == 4 else 2.0) * (0.5 if waiting.spin_us == 0 else 1.0), 1.0

    chosen, tried = choose(Times(seconds), ALONE, 8, None, None)
    assert chosen == ThreadSettings(4, 0)
    assert [each.partition(":")[0] for each in tried] == [
        *("8x15us", "4x15us", "2x15us"),
        *("4x15us", "4x0us"),
    ]


def test_what_is_given_is_not_tried() -> None:
    times = Times(lambda waiting, _: (1.0, 1.0))
    assert choose(times, ALONE, 8, 3, None)[0] == ThreadSettings(3, 15)
    assert {waiting.num_threads for waiting in times.visited} == {3}
    times = Times(lambda waiting, _: (float(waiting.num_threads), 1.0))
    assert choose(times, ALONE, 8, None, 40)[0] == ThreadSettings(2, 40)
    assert {waiting.spin_us for waiting in times.visited} == {40}


@pytest.mark.parametrize(("most", "asked", "spin"), [(1, None, None), (8, 1, None), (8, 3, 0)])
def test_where_there_is_nothing_to_choose_nothing_is_tried(most: int, asked: int | None, spin: int | None) -> None:
    times = Times(lambda waiting, _: (1.0, 1.0))
    chosen, tried = choose(times, ALONE, most, asked, spin)
    assert chosen == ThreadSettings(asked or most, 15 if spin is None else spin)
    assert (times.visited, tried) == ([], [])


class Rank(ThreadParallel):
    """Two ranks with the collectives of a start."""

    def smallest(self, value: int) -> int:
        return min(int(x.item()) for x in self.meeting.exchange(self.rank, torch.tensor(int(value))))

    def share(self, text: str, source: int = 0) -> str:
        return str(int(self.meeting.exchange(self.rank, torch.tensor(int(text)))[source].item()))


def on_both(work: Callable[[TensorParallel], ThreadSettings]) -> list[ThreadSettings]:
    meeting = Meeting(2)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, [Rank(rank, 2, meeting) for rank in range(2)]))


def test_ranks_do_what_rank_0_found() -> None:
    def work(parallel: TensorParallel) -> ThreadSettings:
        # Half of the threads are better on rank 0, all of them on rank 1, which has half as many.
        most, better = (8, 4) if parallel.rank == 0 else (2, 2)
        times = Times(lambda waiting, _: (0.5 if waiting.num_threads == better else 1.0, 1.0))
        return choose(times, parallel, most, None, None)[0]

    assert on_both(work) == [ThreadSettings(4, 15), ThreadSettings(1, 15)]


def test_a_rank_that_was_told_holds_the_other_back() -> None:
    def work(parallel: TensorParallel) -> ThreadSettings:
        times = Times(lambda waiting, _: (float(waiting.num_threads), float(waiting.spin_us)))
        return choose(times, parallel, 4, 3 if parallel.rank == 1 else None, 7 if parallel.rank == 0 else None)[0]

    assert on_both(work) == [ThreadSettings(4, 7), ThreadSettings(3, 15)]


@pytest.mark.skipif("avx2" not in cpu_flags(), reason="needs AVX2")
@pytest.mark.parametrize(("asked", "spin"), [(None, None), (3, None), (2, 0), (None, 30)])
def test_a_model_has_the_same_bits_after_the_probe(
    asked: int | None, spin: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny("llama", tmp_path)
    spec = spec_of(read_json(folder / "config.json"))
    decoder = fused_decoder(folder, Tier.INT8, ALONE, num_threads=4)

    def logits() -> torch.Tensor:
        heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
        cache = KVCache(spec, heads, 40, decoder.block_size, decoder.kv_dtype, CPU)
        return step_through(decoder, cache, [list(range(20)), list(range(7))], 4)[0]

    before = logits()
    with caplog.at_level(logging.INFO, "funitel"):
        settle_threads(decoder, spec, ALONE, max_threads=4, num_threads=asked, spin_us=spin)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("threads ")]
    assert f"num_threads={decoder.num_threads} " in line
    assert ("tried=nothing" in line) == (asked is not None and spin is not None)
    if asked is not None:
        assert decoder.num_threads == asked
    if spin is not None:
        assert f"spin_us={spin} " in line
    assert torch.equal(logits(), before)
