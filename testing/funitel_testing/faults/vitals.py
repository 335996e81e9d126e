"""What a deployment holds right now: memory, descriptors, sockets and threads of its processes, and what is in use."""

from collections.abc import Iterable
from pathlib import Path

from funitel_testing.servers import Server, shared_memory

MIB = 1 << 20

# Zero when idle.
IN_USE = {
    "blocks": 'funitel_blocks{state="used"}',
    "waiting": 'funitel_sequences{state="waiting"}',
    "running": 'funitel_sequences{state="running"}',
    "batches": "funitel_cached_batches",
}
TASKS = "funitel_tasks"


def vitals(server: Server, scratch: Path) -> dict[str, float]:
    """Every quantity by its name; `scratch` is where the deployment has its sockets and temporary files.

    Raises:
        OSError: a process ended meanwhile.
    """
    metrics = server.metrics()
    held = {name: metrics[series] for name, series in IN_USE.items()}
    held["router tasks"] = metrics[TASKS]
    held["temporary files"] = sum(1 for _ in scratch.rglob("*"))
    held["shared memory"] = len(shared_memory())
    for role, pids in _roles(server).items():
        held |= {f"{role} {name}": value for name, value in _footprint(pids).items()}
    return held


def _roles(server: Server) -> dict[str, list[int]]:
    launcher, keeper, router = server.process.pid, server.keeper_pid(), server.router_pid()
    shards = server.shard_pids()
    workers = sorted(server.processes() - {keeper, router, *shards})
    return {"launcher": [launcher], "keeper": [keeper], "router": [router], "shards": shards, "workers": workers}


def _footprint(pids: Iterable[int]) -> dict[str, float]:
    """The sum over some processes, and how many they are."""
    held = dict.fromkeys(("processes", "own MiB", "rss MiB", "pss MiB", "files", "sockets", "threads"), 0.0)
    for pid in pids:
        process = Path(f"/proc/{pid}")
        sizes = _sizes((process / "smaps_rollup").read_text())
        links = [_target(link) for link in (process / "fd").iterdir()]
        held["processes"] += 1
        held["own MiB"] += sizes["Anonymous"] / MIB  # without files, which other processes of the same code share
        held["rss MiB"] += sizes["Rss"] / MIB
        held["pss MiB"] += sizes["Pss"] / MIB
        held["files"] += len(links)
        held["sockets"] += sum(target.startswith("socket:") for target in links)
        held["threads"] += sum(1 for _ in (process / "task").iterdir())
    return held


def _sizes(rollup: str) -> dict[str, int]:
    """Sizes in bytes by their name. Source: proc_pid_smaps(5)."""
    lines = (line.split() for line in rollup.splitlines()[1:])
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines}


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""  # closed meanwhile
