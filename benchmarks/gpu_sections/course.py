"""Run each section of the GPU benchmark in its own process with its own timeout, so that failures are isolated."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from queue import Queue
from threading import Thread

from funitel_testing.servers import alive, descendants
from gpu_sections.figures import Facts, Line
from gpu_sections.plan import Plan

GRACE_SECONDS = 15.0  # for a section that was told to end, before it is killed
KILL_SECONDS = 10.0  # for killed processes to be gone
LOG_CHARS = 400  # of a section's last words


@dataclass(frozen=True)
class Section:
    """A section of this package; `seconds` is the most it may take, `module` is called as the section where empty."""

    name: str
    seconds: float
    module: str = ""


STAGES: tuple[tuple[Section, ...], ...] = (
    (Section("kernels", 150), Section("equality", 150), Section("checkpoint", 90)),  # nothing there is timed
    (Section("decode", 120),),
    (Section("serve", 150),),
    (Section("peer", 120),),
    (Section("vllm", 200, "peer_vllm"),),
    (Section("pool", 220),),
    (Section("precision", 150),),
    (Section("extras", 90),),
    (Section("experts", 150),),
)
"""In their order; those of one stage run side by side."""

MODULES = {section.name: section.module or section.name for stage in STAGES for section in stage}
NAMES = tuple(MODULES)


@dataclass
class Course:
    """One run of some sections.

    Args:
        command: starts the process of a section; its name is appended.
        folder: where each section's log is kept.
        seconds: the most that all may take together; None: each its own time alone.
        patience: times its own seconds that a section may take.
        facts: figures of an earlier call, by the keys of their lines, for sections that hold theirs against them.
    """

    command: Sequence[str]
    folder: Path
    seconds: float | None
    patience: float
    facts: Facts = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    taken: dict[str, float] = field(default_factory=dict)

    def run(self, names: Sequence[str]) -> Iterator[Line]:
        """Run sections by name; their lines as they come. What went wrong is in `errors` then."""
        end = None if self.seconds is None else time.monotonic() + self.seconds
        for stage in STAGES:
            chosen = [section for section in stage if section.name in names]
            told: Queue[Line | None] = Queue()
            threads = [Thread(target=self._run_one, args=(section, end, told.put)) for section in chosen]
            for thread in threads:
                thread.start()
            running = len(threads)
            while running:
                line = told.get()
                if line is None:
                    running -= 1
                    continue
                self.lines.append(line)
                yield line

    def _run_one(self, section: Section, end: float | None, put: Callable[[Line | None], None]) -> None:
        begin = time.monotonic()
        with ExitStack() as done:
            done.callback(put, None)
            try:
                seconds = section.seconds * self.patience
                seconds = seconds if end is None else min(seconds, end - begin)
                error = self._watch(section, seconds, put) if seconds > 0 else "no time was left for it"
            except (OSError, ValueError) as failure:
                error = f"{type(failure).__name__}: {failure}"
            self.taken[section.name] = round(time.monotonic() - begin, 1)
            if error is not None:
                self.errors[section.name] = error

    def _watch(self, section: Section, seconds: float, put: Callable[[Line | None], None]) -> str | None:
        """Run one section; returns what went wrong."""
        log = self.folder / f"{section.name}.log"
        own = {line.key: line.measured for line in self.lines if line.measured is not None}
        facts = {**self.facts, **own}
        command = [*self.command, "--section", section.name, "--facts", json.dumps(facts)]
        with (
            log.open("wb") as file,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True) as process,
        ):
            assert process.stdout is not None
            reader = Thread(target=_read, args=(process.stdout, put))
            reader.start()
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                _end(process)
                return f"not done after {seconds:.0f} s"
            finally:
                reader.join(GRACE_SECONDS)
        if code == 0:
            return None
        said = log.read_text(errors="replace").strip().splitlines() or ["nothing"]
        return f"ended with {code}: {said[-1][-LOG_CHARS:]}"


def _read(lines: Iterator[str], put: Callable[[Line | None], None]) -> None:
    for line in lines:
        put(Line(**json.loads(line)))


def _end(process: subprocess.Popen[str]) -> None:
    """End a section that takes too long, and whatever it has started."""
    started = descendants(process.pid)
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in alive(started):
        os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + KILL_SECONDS
    while alive(started) and time.monotonic() < end:  # a signal is delivered when its process is next scheduled
        time.sleep(0.01)


def run_section(name: str, plan: Plan, facts: Facts) -> None:
    """Be the process of a section: its lines go to stdout, and all that others print there to stderr."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        for line in import_module(f"gpu_sections.{MODULES[name]}").measure(plan, facts):
            print(json.dumps(asdict(line)), file=out, flush=True)
