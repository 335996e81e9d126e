"""An encoder beside steps: at most one computes, gaps between steps are bounded, and the encoder gets on."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import pytest

from funitel.model_server.media.time_slices import MIN_SLICE_SECONDS, SLICE_SHARE, TimeSlices

PART = 0.001


class Exclusive:
    """Fails where two threads compute at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.clashes = 0

    def compute(self, seconds: float) -> None:
        if not self.lock.acquire(blocking=False):
            self.clashes += 1
            return
        time.sleep(seconds)
        self.lock.release()


def encode(slices: TimeSlices, cores: Exclusive, num_parts: int) -> float:
    """Seconds that an encoding of so many parts takes."""
    begin = time.monotonic()
    with slices.encoding():
        for _ in range(num_parts):
            slices.pause()
            cores.compute(PART)
    return time.monotonic() - begin


def run_steps(slices: TimeSlices, cores: Exclusive, seconds: float, is_over: Callable[[], bool]) -> list[float]:
    """Steps back to back until something is over; the seconds from the end of each to the beginning of the next."""
    gaps, end = [], time.monotonic()
    while not is_over():
        with slices.step():
            gaps.append(time.monotonic() - end)
            cores.compute(seconds)
            end = time.monotonic()
    return gaps


@pytest.mark.parametrize("step", [0.01, 0.03])
def test_gaps_of_steps_are_bounded_and_several_encodings_finish(step: float) -> None:
    slices, cores = TimeSlices(), Exclusive()
    seconds: list[float] = []
    encoder = threading.Thread(target=lambda: seconds.extend(encode(slices, cores, 100) for _ in range(3)))
    encoder.start()
    gaps = run_steps(slices, cores, step, lambda: not encoder.is_alive())
    encoder.join()
    assert cores.clashes == 0
    assert len(seconds) == 3
    within = sorted(gaps)[: int(len(gaps) * 0.9)]  # sleeps of a busy machine may be longer
    assert within[-1] < SLICE_SHARE * step + 4 * PART
    assert sum(gaps) > 0.2 * step * len(gaps)  # the encoder has its share


def gap_behind(last: float, others: Sequence[float]) -> float:
    """Seconds between the end of a step of `last` seconds, behind others, and the next, while something is encoded."""
    slices, cores, is_over = TimeSlices(), Exclusive(), threading.Event()

    def work() -> None:
        while not is_over.is_set():
            encode(slices, cores, 1000)

    encoder = threading.Thread(target=work, daemon=True)
    encoder.start()
    for seconds in (*others, last):
        with slices.step():
            cores.compute(seconds)
            end = time.monotonic()
    with slices.step():
        gap = time.monotonic() - end
    is_over.set()
    encoder.join(10)
    assert cores.clashes == 0
    return gap


def test_a_long_step_among_short_ones_is_not_followed_by_a_long_slice() -> None:
    assert gap_behind(0.4, [0.01] * 4) < 0.1  # a share of it would be 0.3


def test_a_short_step_among_long_ones_leaves_the_encoder_the_usual_slice() -> None:
    assert gap_behind(0.0, [0.1] * 4) > 0.7 * SLICE_SHARE * 0.1


def test_steps_that_are_all_long_leave_the_encoder_its_share() -> None:
    assert gap_behind(0.2, [0.2] * 3) > 0.7 * SLICE_SHARE * 0.2


def test_an_encoder_alone_never_waits() -> None:
    slices, cores = TimeSlices(), Exclusive()
    begin = time.monotonic()
    for _ in range(50):
        cores.compute(PART)
    alone = time.monotonic() - begin
    assert encode(slices, cores, 50) < 2 * alone


def test_a_step_waits_for_one_part_at_most_where_no_step_was_before() -> None:
    slices = TimeSlices()
    is_begun, goes_on = threading.Event(), threading.Event()

    def work() -> None:
        with slices.encoding():
            slices.pause()
            is_begun.set()
            goes_on.wait(10)
            slices.pause()  # the step comes in between

    encoder = threading.Thread(target=work)
    encoder.start()
    assert is_begun.wait(10)
    order: list[str] = []

    def step() -> None:
        with slices.step():
            order.append("step")

    stepping = threading.Thread(target=step)
    stepping.start()
    time.sleep(0.02)
    assert order == []
    goes_on.set()
    stepping.join(10)
    encoder.join(10)
    assert order == ["step"]


def test_even_steps_of_no_duration_leave_a_slice() -> None:
    slices, cores = TimeSlices(), Exclusive()
    seconds: list[float] = []
    encoder = threading.Thread(target=lambda: seconds.append(encode(slices, cores, 50)))
    encoder.start()
    for _ in itertools.takewhile(lambda _: encoder.is_alive(), itertools.count()):
        with slices.step():
            pass
    assert MIN_SLICE_SECONDS > PART
    assert seconds[0] < 10


def test_an_encoding_that_fails_gives_the_turn_back() -> None:
    slices = TimeSlices()

    def fail(turn: AbstractContextManager[None]) -> None:
        with turn:
            raise ValueError("broken")

    for turn in (slices.encoding, slices.step) * 2:
        with pytest.raises(ValueError, match="broken"):
            fail(turn())
    with slices.step():
        pass
    with slices.encoding():
        slices.pause()
