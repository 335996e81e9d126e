"""Run cells: build, make the model, tune the peer, then measure both servers in turns, round after round."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from funitel.proto.errors import FunitelError

from . import neutral
from .builds import Built, build
from .folders import GIB, Folders, size_of
from .measure import Round, Server, number_of, prompts_for, run_bench
from .models import Models
from .plan import FORMATS, Cell, Workload, rounds_of
from .processes import free_port, running
from .recipes import OURS, PEERS, Command, Launch, Options, Recipe
from .results import BENCH, PEER, Record, Results, commit
from .results import OURS as OURS_SIDE
from .tuning import Trial, tune

SHORT_PROMPT, SHORT_TOKENS = 32, 32
TUNED_BY: Mapping[str, Workload] = {
    "one": Workload("tune-one", 1, SHORT_PROMPT, SHORT_TOKENS, "one"),
    "many": Workload("tune-many", 16, SHORT_PROMPT, SHORT_TOKENS, "many"),
    "prefill": Workload("tune-prefill", 1, 512, 1, "prefill"),
}
TUNING_REQUESTS = {"one": 2, "many": 16, "prefill": 2}
TUNING_REPEATS = 2  # of a small model; the better counts
LARGE_BYTES = GIB // 2  # of a model; its runs are long enough to be measured once
BENCH_APART_BYTES = 3 * GIB  # of a model: llama-bench would not fit beside both servers
IDLE_SHARE = 0.05  # of a core; above it the server that waits disturbs the one that is measured


@dataclass(frozen=True, slots=True)
class Runner:
    """Measures cells into `results`."""

    folders: Folders
    results: Results
    rounds: int
    jobs: int
    cores: int
    report: Callable[[str], None]

    @property
    def models(self) -> Models:
        """Where files come from."""
        return Models(self.folders, self.report)

    def run(self, cells: Sequence[Cell]) -> None:
        """Measure the cells that are not complete; what a peer cannot do is recorded as its problem."""
        for pair, of_pair in groupby(cells, key=lambda cell: cell.pair):
            open_cells = [cell for cell in of_pair if not self.results.is_done(cell.key, rounds_of(cell, self.rounds))]
            if open_cells:
                try:
                    self._run_pair(open_cells)
                except (FunitelError, OSError) as error:
                    self._fail(pair, open_cells, error)
                self.folders.forget_converted()

    def make_models(self, cells: Sequence[Cell]) -> None:
        """Make the files of some cells, so that a later run only measures."""
        for model, file in dict.fromkeys((cell.model, FORMATS[cell.form].file) for cell in cells):
            self.report(str(self.models.get(model, file)))

    def run_neutral(self, cells: Sequence[Cell]) -> None:
        """Measure cells with guidellm, the peer with the options that were tuned for it.

        Raises:
            FunitelError: guidellm cannot be installed, or a server does not start.
        """
        generator = build("guidellm", self.folders, jobs=self.jobs, report=self.report)
        tokenizer = self.models.tokenizer()
        for cell in cells:
            recipe = PEERS[cell.peer]
            built = build(recipe.build, self.folders, jobs=self.jobs, report=self.report)
            model = self.models.get(cell.model, FORMATS[cell.form].file)
            options = self._tuned(cell, recipe, built, model, cell.workload.kind)
            launch = Launch(model, FORMATS[cell.form], cell.workload, options, 0)
            ours = Built("funitel", commit(), self.folders.ours)
            with ExitStack() as stack:
                sides = {
                    OURS_SIDE: self._start(stack, "funitel", OURS, ours, launch).process,
                    PEER: self._start(stack, cell.peer, recipe, built, launch).process,
                }
                found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
                for number in range(-1, rounds_of(cell, self.rounds)):  # the first one is a warm-up
                    for side in sides if number % 2 == 0 else reversed(sides):
                        figures = neutral.measure(
                            generator, sides[side], cell, tokenizer, self.folders.root / "guidellm-report", number + 1
                        )
                        if number >= 0:
                            found[side].append(figures)
                            self.report(f"{cell.key} by guidellm, round {number + 1}: {side} {figures}")
            self.results.neutral[cell.key] = {"commit": commit(), "generator": generator.version, "rounds": found}
            self.results.save()

    def _fail(self, pair: str, cells: Sequence[Cell], error: FunitelError | OSError) -> None:
        problem = error.message if isinstance(error, FunitelError) else str(error)
        self.report(f"{pair}: {problem}")
        for cell in cells:
            if not self.results.is_done(cell.key, rounds_of(cell, self.rounds)):
                self.results.cell(cell.key, commit(), rounds_of(cell, self.rounds)).problem = problem
        self.results.save()

    def _run_pair(self, cells: Sequence[Cell]) -> None:
        """The cells of one model, format and peer; servers start anew for each, as caches count as memory."""
        first = cells[0]
        recipe = PEERS[first.peer]
        built = build(recipe.build, self.folders, jobs=self.jobs, report=self.report)
        model = self.models.get(first.model, FORMATS[first.form].file)
        tuned = {kind: self._tuned(first, recipe, built, model, kind) for kind in {c.workload.kind for c in cells}}
        bench = {
            cell.key: self._tuned_bench(cell, recipe, built, model)
            for cell in cells
            if recipe.bench is not None and cell.workload.streams == 1
        }
        ours = Built("funitel", commit(), self.folders.ours)
        for cell in cells:
            launch = Launch(model, FORMATS[first.form], cell.workload, tuned[cell.workload.kind], 0)
            with ExitStack() as stack:
                server = self._start(stack, "funitel", OURS, ours, replace(launch, options={}))
                peer = self._start(stack, cell.peer, recipe, built, launch)
                record = self._record(cell, recipe, built, launch)
                in_turn = bench.get(cell.key) if size_of(model) <= BENCH_APART_BYTES else None
                self._measure(cell, server, peer, in_turn, record)
        for cell in cells:
            if cell.key in bench and size_of(model) > BENCH_APART_BYTES:
                self._bench_apart(cell, bench[cell.key])

    def _start(self, stack: ExitStack, name: str, recipe: Recipe, built: Built, launch: Launch) -> Server:
        launch = Launch(launch.model, launch.form, launch.workload, launch.options, free_port())
        log = self.folders.logs / f"{name}-{launch.model.stem}-{launch.workload.name}.log"
        command = recipe.command(built, launch)
        return Server.of(name, stack.enter_context(running(command, launch.port, log, is_ours=recipe is OURS)))

    def _tuned(self, cell: Cell, recipe: Recipe, built: Built, model: Path, kind: str) -> dict[str, str]:
        """The best options of a peer for a kind of workload, found once."""
        workload, form = TUNED_BY[kind], FORMATS[cell.form]
        repeats = 1 if size_of(model) > LARGE_BYTES else TUNING_REPEATS

        def speed_of(options: Options) -> float:
            with ExitStack() as stack:
                server = self._start(stack, cell.peer, recipe, built, Launch(model, form, workload, options, 0))
                server.warm_up(prompts_for(server, workload, 1, "warm-up"), 1)
                speeds = []
                for number in range(repeats):
                    prompts = prompts_for(server, workload, TUNING_REQUESTS[kind], "tuning", number)
                    speeds.append(_speed(server.measure(prompts, workload), kind))
            return max(speeds)

        return self._tune(f"{cell.peer_key}/{kind}", recipe, kind, speed_of)

    def _tuned_bench(self, cell: Cell, recipe: Recipe, built: Built, model: Path) -> Command:
        """The command of `llama-bench` at its best for a cell."""
        assert recipe.bench is not None
        make, kind = recipe.bench, cell.workload.kind
        repeats = 1 if size_of(model) > LARGE_BYTES else TUNING_REPEATS

        def command(options: Options, workload: Workload) -> Command:
            return make(built, Launch(model, FORMATS[cell.form], workload, options, 0))

        def speed_of(options: Options) -> float:
            workload = TUNED_BY[kind]
            runs = [run_bench(command(options, workload), workload) for _ in range(repeats)]
            return max(_speed(run, kind) for run in runs)

        return command(self._tune(f"{cell.peer_key}/{BENCH}-{kind}", recipe, kind, speed_of), cell.workload)

    def _tune(
        self, key: str, recipe: Recipe, kind: str, speed_of: Callable[[Mapping[str, str]], float]
    ) -> dict[str, str]:
        if key in self.results.tuned:
            return dict(self.results.tuned[key]["options"])

        def tell(trial: Trial) -> None:
            said = f"{trial.speed:.2f}" if trial.speed is not None else f"refused: {trial.problem}"
            self.report(f"tuning {key}: {_line(trial.options)}: {said}")

        tuned = tune(recipe.defaults(self.cores), recipe.values(kind, self.cores), speed_of, tell)
        self.results.keep_tuned(key, tuned)
        return tuned.options

    def _record(self, cell: Cell, recipe: Recipe, built: Built, launch: Launch) -> Record:
        record = self.results.cell(cell.key, commit(), rounds_of(cell, self.rounds))
        record.versions = {cell.peer: built.version}
        record.options = dict(launch.options)
        record.commands[PEER] = list(recipe.command(built, launch).arguments)
        return record

    def _measure(self, cell: Cell, ours: Server, peer: Server, bench: Command | None, record: Record) -> None:
        """The rounds of a cell; every other one begins with the peer."""
        workload = cell.workload
        warm = prompts_for(ours, workload, workload.streams, cell.key, "warm-up")
        for server in (ours, peer):
            server.warm_up(warm, workload.streams)
        sides = {OURS_SIDE: ours, PEER: peer}
        for number in range(record.num_rounds(), rounds_of(cell, self.rounds)):
            prompts = prompts_for(ours, workload, cell.num_requests, cell.key, number)
            found: dict[str, Round] = {}
            for side in sides if number % 2 == 0 else reversed(sides):
                other = sides[PEER if side == OURS_SIDE else OURS_SIDE]
                before = other.process.usage().cpu_seconds
                figures = sides[side].measure(prompts, workload)
                idle = (other.process.usage().cpu_seconds - before) / number_of(figures, "seconds")
                found[side] = figures | {"other_cpu_share": idle}
                if idle > IDLE_SHARE:
                    self.report(f"{cell.key}: {other.name} uses {idle:.0%} of a core while it waits")
            if bench is not None:
                found[BENCH] = run_bench(bench, workload)
                record.commands[BENCH] = list(bench.arguments)
            for side, figures in found.items():  # a round that one side has not finished is none
                record.rounds.setdefault(side, []).append(figures)
            self.results.save()
            self.report(_round_line(cell, record, number))

    def _bench_apart(self, cell: Cell, bench: Command) -> None:
        """Rounds of `llama-bench` without the servers, where memory does not hold all."""
        record = self.results.cells[cell.key]
        record.commands[BENCH] = list(bench.arguments)
        record.rounds[BENCH] = [run_bench(bench, cell.workload) for _ in range(rounds_of(cell, self.rounds))]
        self.results.save()


def _speed(figures: Round, kind: str) -> float:
    """What tuning makes larger: tokens a second of many streams, the inverse of a time for one or for a prefill."""
    if kind == "many":
        return number_of(figures, "output_tokens_s")
    return 1000 / number_of(figures, "tpot_ms_p50" if kind == "one" else "ttft_ms_p50")


def _line(options: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value or 'default'}" for name, value in options.items())


def _round_line(cell: Cell, record: Record, number: int) -> str:
    parts = []
    for side, rounds in record.rounds.items():
        figures = rounds[number]
        shown = {
            name: figures.get(name) for name in ("output_tokens_s", "tpot_ms_p50", "ttft_ms_p50", "client_cpu_share")
        }
        parts.append(f"{side} {json.dumps({k: round(v, 3) for k, v in shown.items() if isinstance(v, float)})}")
    return f"{cell.key} round {number + 1}: " + "; ".join(parts)
