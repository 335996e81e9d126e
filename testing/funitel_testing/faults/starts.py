"""Faults of a start: one line says why it ends, nothing is left half done, and without the fault it works."""

import asyncio
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from funitel_testing.cache import share_engines
from funitel_testing.faults.load import STREAMS, asks_of, undisturbed
from funitel_testing.faults.resources import SmallDisk, no_mount
from funitel_testing.faults.scenes import LIMITS
from funitel_testing.faults.table import Cost, Run
from funitel_testing.servers import run_launcher, serving
from funitel_testing.tiny_gguf import TINY_GGUFS

REPOSITORY, COMMIT = "nobody/tiny", "0" * 40
NUM_ASKS = 4


@dataclass
class Hindered:
    """A start that cannot succeed until `undo` was called."""

    flags: tuple[str, ...]
    undo: Callable[[], None]
    leftovers: Callable[[], list[Path]]  # half done
    environ: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StartFault:
    """A fault there is before the first process starts; `line` is what the only line of error must match."""

    name: str
    line: str
    hindered: Callable[[Path, Path], AbstractContextManager[Hindered]]
    obstacle: Callable[[], str] = lambda: ""
    cost: Cost = Cost.NOTHING


def try_to_start(fault: StartFault, model: Path, folder: Path) -> Run:
    """Start in vain, undo the fault, start again and ask."""
    with fault.hindered(model, folder) as hindered:
        ended = run_launcher(*hindered.flags, *LIMITS, environ=hindered.environ)
        lines = [line for line in ended.err.splitlines() if line.startswith("error: ")]
        assert (ended.code, len(lines)) == (1, 1), ended.err
        assert re.search(fault.line, lines[0]), lines[0]
        assert "Traceback" not in ended.err
        assert not hindered.leftovers()
        hindered.undo()
        began = time.monotonic()
        with serving(folder, *hindered.flags, *LIMITS, environ=hindered.environ) as server:
            asyncio.run(undisturbed(server.url, asks_of(STREAMS, NUM_ASKS, 16), NUM_ASKS))
            seconds = time.monotonic() - began
    return Run(num_requests=NUM_ASKS, seconds_to_recover=seconds)


@contextmanager
def _on_full_disk(model: Path, folder: Path) -> Iterator[Hindered]:
    """A GGUF that is to be converted into a cache on a full disk."""
    gguf = folder / "tiny.gguf"
    TINY_GGUFS["llama"].write(gguf, "llama")
    disk = SmallDisk(folder / "cache")
    try:
        share_engines(disk.folder)
        disk.fill()
        yield Hindered(
            flags=("--model-id", str(gguf)),
            undo=disk.free,
            leftovers=lambda: [*disk.folder.glob("tiny*"), *disk.folder.glob(".tiny*")],
            environ={"FUNITEL_CACHE": str(disk.folder)},
        )
    finally:
        disk.unmount()


@contextmanager
def _nameless_hub(model: Path, folder: Path) -> Iterator[Hindered]:
    """A repository of a hub with a name that does not resolve, at first or later; later it is in the hub's cache."""
    cache = folder / "hub"
    repository = cache / f"models--{REPOSITORY.replace('/', '--')}"

    def keep() -> None:
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text(COMMIT)
        shutil.copytree(model, repository / "snapshots" / COMMIT)

    yield Hindered(
        flags=("--model-id", REPOSITORY),
        undo=keep,
        leftovers=lambda: list(repository.glob("snapshots/*")),
        environ={"HF_ENDPOINT": "http://hub.test", "HUGGINGFACE_HUB_CACHE": str(cache), "HF_HUB_CACHE": str(cache)},
    )


STARTS = (
    StartFault(
        name="a full disk under the cache of models",
        line="No space left on device",
        hindered=_on_full_disk,
        obstacle=no_mount,
    ),
    StartFault(
        name="the name of the hub does not resolve",
        line=f"{REPOSITORY}",
        hindered=_nameless_hub,
    ),
)
