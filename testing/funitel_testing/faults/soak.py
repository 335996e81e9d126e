"""Soak test: an hour of mixed load on a deployment with repeated kills; no request may be lost, nothing may grow.

    python -m funitel_testing.faults.soak --minutes 60 --out FOLDER [--kills all]

Clients ask what `asks` knows, hang up at random, and pause at random, all drawn from one seed. In every period they
fall silent once, a crowd fills the pools of threads and processes that grow on demand, and what is held then is a
sample. A process is killed in the middle of some periods: a shard each time, or, with `--kills all`, one kind after the
other, beside further clients that compare every byte. A sample of processes that are killed counts only when it is the
last one before that, so that all come from processes of the same age. FOLDER gets soak.csv and soak.png; the last line
on stdout is one JSON object, the exit code says whether all was well.
"""

import argparse
import asyncio
import csv
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx

from funitel_testing.faults import growth
from funitel_testing.faults.asks import Ask, Kind
from funitel_testing.faults.growth import Growth
from funitel_testing.faults.kills import EVERY_KIND, SHARD, Kill
from funitel_testing.faults.load import MIXED, Load, Outcome, asks_of, seconds_to_answer, undisturbed
from funitel_testing.faults.model import save_endless
from funitel_testing.faults.scenes import Launched, launching
from funitel_testing.faults.soak_plot import plot
from funitel_testing.faults.soak_report import Pace, Report, Sample
from funitel_testing.faults.vitals import IN_USE, vitals
from funitel_testing.figures import spread
from funitel_testing.servers import wait_until
from funitel_testing.takeovers.load import Reference, disturbed
from funitel_testing.takeovers.load import undisturbed as undisturbed_bytes

MIN_MINUTES = 2  # in less there is nothing but warming up
MAX_RESTARTS = 1000
NUM_ASKS = 48
NUM_TOKENS = 120
LEAVING = 0.2  # of the requests are left by their clients
SAMPLE_SECONDS = 5.0  # between samples under load
SETTLE_SECONDS = 60.0  # for what clients that hung up have left to be dropped, on a busy machine
NUM_LOOKS, LOOK_SECONDS = 3, 0.2  # at what is held while idle: what is closed meanwhile is not held
# A pool starts a thread or a process when all that it has are busy: requests of these kinds at once make it whole.
CROWDING = (Kind.GRAMMAR, Kind.CHAT)
CROWD, NUM_CROWDS = 32, 2
# Clients that compare bytes, and their pause between two rounds.
NUM_COMPARING, COMPARING_TOKENS, COMPARING_PAUSE = 20, 160, 3.0
KILLED_WITHIN = 1.0  # seconds of a round's beginning


class Soak:
    """The clients, the killer and the sampler."""

    def __init__(self, scene: Launched, scratch: Path, pace: Pace, num_clients: int, pause: float, seed: int) -> None:
        self.report = Report()
        self._scene, self._scratch, self._pace = scene, scratch, pace
        self._num_clients, self._pause = num_clients, pause
        self._dice = random.Random(seed)
        self._asks = asks_of(MIXED, NUM_ASKS, NUM_TOKENS)
        self._began = time.monotonic()

    async def run(self) -> Report:
        """Ask, kill and look, period after period."""
        answers = await undisturbed(self._scene.url, self._asks, self._num_clients)
        known = await self._compared()
        for period in range(self._pace.num_periods):
            ends = time.monotonic() + self._pace.period_seconds
            sampling = asyncio.create_task(self._sample_until(ends))
            clients = [
                asyncio.create_task(self._ask_until(ends, client, period)) for client in range(self._num_clients)
            ]
            kill = self._pace.kill_of(period) if self._pace.is_killing(period) else None
            await self._compare_until(ends, known, kill)
            for outcomes in await asyncio.gather(*clients):
                self.report.count(outcomes, answers)
            await sampling
            await asyncio.to_thread(self._scene.until_whole)
            for number in range(NUM_CROWDS):
                # Grammars that the shard has not compiled since it was started, and the router knows after a while.
                salt = f"crowd {period % self._pace.kill_every} {number}"
                self.report.hold(await self._crowd(salt), answers)
            await asyncio.to_thread(self._settle)
            await asyncio.to_thread(self._sample, period)
            print(self._line(period), file=sys.stderr, flush=True)
        return self.report

    async def _ask_until(self, ends: float, client: int, period: int) -> list[Outcome]:
        """One client's requests of a period, one after the other."""
        dice = random.Random(f"{self._dice.random()} {client}")
        outcomes: list[Outcome] = []
        while time.monotonic() < ends:
            ask = self._drawn(dice, f"{period} {client} {len(outcomes)}")
            outcomes += await Load(self._scene.url, [ask], 1).run()
            await asyncio.sleep(min(dice.expovariate(1 / self._pause), max(ends - time.monotonic(), 0.0)))
        return outcomes

    async def _crowd(self, salt: str) -> list[Outcome]:
        """Ask for the beginnings of many answers at once."""
        asks = [ask for ask in self._asks if ask.kind in CROWDING]
        places = range(CROWD)
        crowd = [replace(asks[place % len(asks)], leave_after=1, salt=f"{salt} {place}") for place in places]
        return await Load(self._scene.url, crowd, CROWD).run()

    def _drawn(self, dice: random.Random, salt: str) -> Ask:
        ask = replace(dice.choice(self._asks), leave_after=None, salt=salt)
        return replace(ask, leave_after=dice.randrange(1, NUM_TOKENS // 2)) if dice.random() < LEAVING else ask

    async def _compared(self) -> Reference:
        """What clients that compare bytes compare with; nothing where only shards are killed."""
        if len(self._pace.kills) == 1:
            return {}
        return await undisturbed_bytes(self._scene.server.port, NUM_COMPARING, COMPARING_TOKENS)

    async def _compare_until(self, ends: float, known: Reference, kill: Kill | None) -> None:
        """Rounds of clients that compare bytes; in the middle of the time something is killed during one."""
        middle = ends - self._pace.period_seconds / 2
        while kill is not None or time.monotonic() < ends:
            is_killing = kill is not None and time.monotonic() >= middle
            strike = partial(self._kill, kill if is_killing else None)
            kill = None if is_killing else kill
            port = self._scene.server.port
            await disturbed(port, len(known), COMPARING_TOKENS, known, strike, self.report.bytes)
            until = min(ends, middle) if kill is not None else ends
            await asyncio.sleep(max(min(COMPARING_PAUSE, until - time.monotonic()), 0.0))

    async def _kill(self, kill: Kill | None) -> None:
        if kill is None:
            return
        await asyncio.sleep(self._dice.uniform(0, KILLED_WITHIN))
        instant = time.monotonic()
        await kill.strike(self._scene)
        self.report.kills.append(instant - self._began)
        self.report.recoveries.append(await seconds_to_answer(self._scene.url, instant))
        print(f"killed: {kill.name}; an answer after {self.report.recoveries[-1]:.1f} s", file=sys.stderr, flush=True)

    async def _sample_until(self, ends: float) -> None:
        while (left := ends - time.monotonic()) > 0:
            await asyncio.sleep(min(SAMPLE_SECONDS, left))
            await asyncio.to_thread(self._sample, None)

    def _sample(self, period: int | None) -> None:
        try:
            values = vitals(self._scene.server, self._scratch) if period is None else self._least()
        except (OSError, httpx.TransportError, httpx.HTTPStatusError) as error:
            if period is not None or not _is_of_a_kill(error):
                raise
            return  # the next sample will do
        seconds = time.monotonic() - self._began
        self.report.samples.append(Sample(seconds, period, len(self.report.kills), values))

    def _least(self) -> dict[str, float]:
        """The least of each quantity in a few looks: what clients have closed is still open for an instant."""
        looks: list[dict[str, float]] = []
        deadline = time.monotonic() + SETTLE_SECONDS
        while len(looks) < NUM_LOOKS:
            time.sleep(LOOK_SECONDS)
            try:
                looks.append(vitals(self._scene.server, self._scratch))
            except OSError:  # a process that ended meanwhile
                if time.monotonic() > deadline:
                    raise
        return {name: min(look[name] for look in looks) for name in looks[0]}

    def _settle(self) -> None:
        """Give what clients left the time to be dropped; what is still there is reported by the sample."""

        def is_silent() -> bool:
            metrics = self._scene.server.metrics()
            return not any(metrics[series] for series in IN_USE.values())

        try:
            wait_until(is_silent, SETTLE_SECONDS)
        except AssertionError:
            pass

    def _line(self, period: int) -> str:
        report, values = self.report, self.report.samples[-1].values
        return (
            f"period {period + 1} of {self._pace.num_periods}: requests={report.num_requests} lost={len(report.lost)} "
            f"wrong={len(report.wrong)} compared={report.bytes.num_answers} differ={len(report.bytes.problems)} "
            f"refused={report.bytes.num_refused} kills={len(report.kills)} router={values['router own MiB']:.1f} MiB "
            f"shards={values['shards own MiB']:.1f} MiB tasks={values['router tasks']:g}"
        )


def _is_of_a_kill(error: Exception) -> bool:
    """Whether a process was killed, or the router refused with 503 what came in meanwhile."""
    return not isinstance(error, httpx.HTTPStatusError) or error.response.status_code == 503


def soak(
    minutes: int,
    out: Path,
    *,
    num_clients: int = 6,
    pause: float = 1.0,
    seed: int = 1,
    kills: Sequence[Kill] = (SHARD,),
    flags: Sequence[str] = (),
) -> tuple[Report, list[Growth]]:
    """Run it and write the figures and the plot to `out`; `flags` are further ones of the launcher."""
    pace = Pace.of(minutes, kills)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model, scratch = Path(folder) / "model", Path(folder) / "scratch"
        scratch.mkdir()
        save_endless(model)
        own = ("--shard-uds-path", str(scratch / "shard"), "--max-restarts", str(MAX_RESTARTS))
        with launching(out, model, *own, *flags, TMPDIR=str(scratch)) as scene:
            report = asyncio.run(Soak(scene, scratch, pace, num_clients, pause, seed).run())
    growths = report.growths(pace)
    _write(out / "soak.csv", report)
    plot(out / "soak.png", report)
    return report, growths


def _write(path: Path, report: Report) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        names = list(report.samples[0].values)
        table.writerow(["seconds", "is_silent", "kills", *names])
        for sample in report.samples:
            values = [f"{sample.values[name]:.10g}" for name in names]
            table.writerow([f"{sample.seconds:.1f}", int(sample.period is not None), sample.num_kills, *values])


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("soak"))
    parser.add_argument("--clients", type=int, default=6, help="clients that ask at once")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds a client waits between requests, on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", choices=("shard", "all"), default="shard", help="what is killed")
    options, flags = parser.parse_known_args()
    if options.minutes < MIN_MINUTES:
        parser.error(f"--minutes must be >= {MIN_MINUTES}, given {options.minutes}")
    report, growths = soak(
        options.minutes,
        options.out,
        num_clients=options.clients,
        pause=options.pause,
        seed=options.seed,
        kills=EVERY_KIND if options.kills == "all" else (SHARD,),
        flags=flags,
    )
    print("\n".join([growth.HEAD, *map(str, growths)]))
    summary = {
        "minutes": options.minutes,
        "requests": report.num_requests,
        "cancelled": report.num_cancelled,
        "kills": len(report.kills),
        "slowest_recovery_seconds": round(max(report.recoveries, default=0.0), 1),
        "lost": report.lost,
        "wrong": len(report.wrong),
        "compared": report.bytes.num_answers,
        "refused": report.bytes.num_refused,
        "differ": report.bytes.problems,
        "silence_seconds": spread(report.bytes.silences, 2) if report.bytes.silences else None,
        "left_behind": report.left_behind(),
        "grows": [growth.name for growth in growths if not growth.is_none],
    }
    print(json.dumps(summary))
    sys.exit(1 if any(summary[name] for name in ("lost", "wrong", "differ", "left_behind", "grows")) else 0)


if __name__ == "__main__":
    main()
