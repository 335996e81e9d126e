"""This server and others, each at its best, on the same files and prompts: the table of docs/benchmarks.md.

Builds or installs each peer once (`--build`), makes the models (the demo model, and shapes of 0.5 to 8 billion
parameters and a mixture with random weights), finds the options with which each peer is fastest at one stream, many
streams and prefill, and then measures both servers in turns. Everything lies in a cache folder; what was measured is in
a file of results, and a grid that was interrupted goes on there. `benchmarks/peers.md` describes what is measured.

    python benchmarks/peers.py --list                          every cell: model/format/peer/workload
    python benchmarks/peers.py --build                         build and install peers, and end
    python benchmarks/peers.py --short --dry-run               what the short grid runs, and about how long it takes
    python benchmarks/peers.py --short --label "B, quiet" --write docs/benchmarks.md
    python benchmarks/peers.py --only 1b/q4_0 --only demo/q8_0/llama.cpp/16
    python benchmarks/peers.py --only demo/q8_0/llama.cpp/16 --neutral
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from peer_grid.builds import BUILDS, build, find
from peer_grid.folders import GIB, Folders, default_root
from peer_grid.plan import Cell, choose, estimate_seconds, rounds_of
from peer_grid.recipes import PEERS
from peer_grid.results import Results, describe_machine
from peer_grid.runner import Runner
from peer_grid.table import table, write_into

from funitel.proto.errors import FunitelError

READ_RATE, MULTIPLY_RATE = 10e9, 60e9  # of both servers on the average, on two cores; for estimates only


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; what does not fit ends the program in one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="cells, or their first parts: 1b/q4_0; repeatable",
    )
    parser.add_argument("--short", action="store_true", help="demo and 1B, 1 and 16 streams, llama.cpp and vLLM")
    parser.add_argument("--rounds", type=_count, default=5, help="of each cell (default: 5; 8B: at most 3)")
    parser.add_argument("--list", action="store_true", help="print the cells, and how far each one is")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and about how long it takes")
    parser.add_argument("--build", action="store_true", help="build or install the peers of the cells, and end")
    parser.add_argument("--jobs", type=_count, default=1, help="compilers at once (default: 1)")
    parser.add_argument("--make-models", action="store_true", help="make the models of the cells that fit, and end")
    parser.add_argument("--neutral", action="store_true", help="measure with guidellm instead, into a table of its own")
    parser.add_argument(
        "--again", action="store_true", help="forget what was measured of the cells; options stay tuned"
    )
    parser.add_argument("--retune", action="store_true", help="forget the tuned options of the cells")
    parser.add_argument("--cache", type=Path, default=default_root(), help="folder of peers, models and results")
    parser.add_argument("--disk-gib", type=_count, default=16, help="most that models take (default: 16)")
    parser.add_argument("--results", type=Path, help="file of results (default: results.json in the cache folder)")
    parser.add_argument("--label", default="", help="the machine's letter on the page, and whether it was quiet")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table of all results into this page")
    arguments = parser.parse_args(argv)
    arguments.cells = choose(arguments.only, is_short=arguments.short)
    if not arguments.cells:
        parser.error(f"--only: no cell is named {' or '.join(arguments.only)}; --list prints all")
    return arguments


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, given {value}")
    return value


def report(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)


def list_cells(arguments: argparse.Namespace, results: Results) -> None:
    """Print the cells and their rounds."""
    for cell in arguments.cells:
        record = results.cells.get(cell.key)
        done = record.num_rounds() if record is not None else 0
        problem = f"  {record.problem}" if record is not None and record.problem else ""
        print(f"{cell.key:<36} {done} of {rounds_of(cell, arguments.rounds)} rounds{problem}")


def dry_run(arguments: argparse.Namespace, folders: Folders, results: Results) -> None:
    """Print what would be built and measured, and about how long it takes."""
    left = [cell for cell in arguments.cells if not results.is_done(cell.key, rounds_of(cell, arguments.rounds))]
    for name in dict.fromkeys(cell.peer for cell in left):
        found = find(PEERS[name].build, folders)
        print(f"{name}: {found.version if found is not None else 'would be built'}")
    for pair in dict.fromkeys(cell.pair for cell in left):
        workloads = [cell.workload.name for cell in left if cell.pair == pair]
        print(f"{pair}: {', '.join(workloads)}")
    seconds = estimate_seconds(left, arguments.rounds, read_rate=READ_RATE, multiply_rate=MULTIPLY_RATE)
    print(f"{len(left)} cells, about {seconds / 3600:.1f} hours on two cores, without building")


def build_all(arguments: argparse.Namespace, folders: Folders) -> None:
    """Build the peers of the cells; one that cannot be built is named, and the others are built.

    Raises:
        FunitelError: one cannot be built.
    """
    wanted = [name for name in BUILDS if name in {PEERS[cell.peer].build for cell in arguments.cells}]
    problems = []
    for name in [*wanted, *(["guidellm"] if arguments.neutral else [])]:
        try:
            report(f"{name}: {build(name, folders, jobs=arguments.jobs, report=report).version}")
        except FunitelError as error:
            problems.append(f"{name}: {error.message}")
    if problems:
        raise FunitelError("; ".join(problems))


def forget(arguments: argparse.Namespace, results: Results) -> None:
    """Drop what `--again` and `--retune` name."""
    cells: list[Cell] = arguments.cells
    if arguments.again:
        for cell in cells:
            results.cells.pop(cell.key, None)
            results.neutral.pop(cell.key, None)
    if arguments.retune:
        pairs = {cell.peer_key for cell in cells}
        results.tuned = {key: tuned for key, tuned in results.tuned.items() if key.rpartition("/")[0] not in pairs}


def run(arguments: argparse.Namespace) -> None:
    """Do what the command line says.

    Raises:
        FunitelError: a peer cannot be built, or a file of results is damaged.
    """
    folders = Folders(arguments.cache, arguments.disk_gib * GIB)
    results = Results(arguments.results or arguments.cache / "results.json")
    cores = len(os.sched_getaffinity(0))
    runner = Runner(folders, results, arguments.rounds, arguments.jobs, cores, report)
    if arguments.list:
        list_cells(arguments, results)
    elif arguments.dry_run:
        dry_run(arguments, folders, results)
    elif arguments.build:
        build_all(arguments, folders)
    elif arguments.make_models:
        runner.make_models(arguments.cells)
    else:
        forget(arguments, results)
        results.machine = describe_machine(arguments.label or results.machine.get("label", ""))
        (runner.run_neutral if arguments.neutral else runner.run)(arguments.cells)
        section = table(results, choose([], is_short=False))
        print(section)
        if arguments.write is not None:
            arguments.write.write_text(write_into(arguments.write.read_text(), section, results.machine))


def main(argv: Sequence[str] | None = None) -> None:
    """Run, and say in one line what is wrong."""
    arguments = parse(argv)
    try:
        run(arguments)
    except (FunitelError, OSError) as error:
        raise SystemExit(f"error: {error.message if isinstance(error, FunitelError) else error}") from error


if __name__ == "__main__":
    main()
