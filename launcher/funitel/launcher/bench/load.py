"""Generate load on one server, closed-loop by concurrency or open-loop by rate, and measure the client's own CPU."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from funitel.launcher.bench.figures import Timeline, percentile
from funitel.launcher.bench.target import PreparedRequest, Target

TICK_SECONDS = 0.05
BUSY_SHARE = 0.5  # of one core: above it, events wait for the client
LATE_MS = 20.0  # of its own timers, 99th percentile


@dataclass(frozen=True, slots=True)
class Level:
    """A load level: a number of concurrent streams, or requests per second at random instants."""

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g}/s"
        return f"{self.concurrency} stream{'' if self.concurrency == 1 else 's'}"


@dataclass(slots=True)
class ClientLoad:
    """Load of the load generator itself: its share of one core, and the delays of its timers."""

    cpu_share: float = 0.0
    lags: list[float] = field(default_factory=list)

    @property
    def lag_ms_p99(self) -> float | None:
        """99th percentile of the delays of the client's timers, in milliseconds."""
        lag = percentile(self.lags, 99)
        return None if lag is None else lag * 1000


@dataclass(frozen=True, slots=True)
class Run:
    """All requests of one level in one round."""

    timelines: list[Timeline]
    client: ClientLoad


Report = Callable[[Timeline], None]


async def run_level(
    target: Target, level: Level, prompts: Sequence[PreparedRequest], instants: Iterable[float], report: Report
) -> Run:
    """Send every prompt and wait for the last answer.

    Args:
        instants: seconds from the start at which each prompt is sent, for levels with a rate.
        report: called with each answer.
    """
    client = ClientLoad()
    ticker = asyncio.create_task(_tick(client.lags))
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        if level.concurrency is not None:
            timelines = await _closed(target, level.concurrency, prompts, report)
        else:
            timelines = await _open(target, prompts, instants, report)
    finally:
        ticker.cancel()
    client.cpu_share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    return Run(timelines, client)


async def _closed(
    target: Target, concurrency: int, prompts: Sequence[PreparedRequest], report: Report
) -> list[Timeline]:
    """Closed loop: each stream sends its next request when the last one is answered."""
    timelines: list[Timeline] = []
    left = iter(prompts)

    async def stream() -> None:
        for prompt in left:
            timelines.append(await target.ask(prompt))
            report(timelines[-1])

    async with asyncio.TaskGroup() as streams:
        for _ in range(min(concurrency, len(prompts))):
            streams.create_task(stream())
    return timelines


async def _open(
    target: Target, prompts: Sequence[PreparedRequest], instants: Iterable[float], report: Report
) -> list[Timeline]:
    """Open loop: time counts from the scheduled instant of a request, so a late client shows in the latencies."""
    timelines: list[Timeline] = []
    begin = time.perf_counter()

    async def ask(prompt: PreparedRequest, due: float) -> None:
        timelines.append(await target.ask(prompt, due))
        report(timelines[-1])

    async with asyncio.TaskGroup() as requests:
        for prompt, instant in zip(prompts, instants, strict=True):
            await asyncio.sleep(begin + instant - time.perf_counter())
            requests.create_task(ask(prompt, begin + instant))
    return timelines


async def _tick(lags: list[float]) -> None:
    """Record the delay of each of a series of short sleeps."""
    while True:
        begin = time.perf_counter()
        await asyncio.sleep(TICK_SECONDS)
        lags.append(time.perf_counter() - begin - TICK_SECONDS)
