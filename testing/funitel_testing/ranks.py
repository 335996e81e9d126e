"""Ranks in processes of their own, forked from one process that has imported what all of them need."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

MODULES = (
    "forward_worker",
    "adapter_worker",
    "fallback_worker",
    "memory_worker",
    "seq2seq_worker",
    "draft_worker",
)
TIMEOUT_SECONDS = 120.0

Main = Callable[[Path, int], None]


def run_ranks(main: Main, work: Path, size: int) -> None:
    """Run `main(work, rank)` on every rank; what the ranks wrote to stderr is the message when one fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"funitel_testing.{name}" for name in MODULES])
    ranks = [context.Process(target=_serve, args=(main, work, rank)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT_SECONDS)
    exit_codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert exit_codes == [0] * size, "\n".join(_log(work, rank).read_text() for rank in range(size))


def _serve(main: Main, work: Path, rank: int) -> None:
    with _log(work, rank).open("w") as log:
        os.dup2(log.fileno(), 2)
    main(work, rank)


def _log(work: Path, rank: int) -> Path:
    return work / f"{rank}.log"
