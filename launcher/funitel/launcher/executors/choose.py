"""Choose where the ranks of a replica run: an executor and a worker for each rank. Pure.

A replica goes whole to one place if it fits; else it is spread over workers, as few as hold it. Places with GPUs come
first where a replica would use them, then this machine, then the workers with the most free memory. Ray chooses nodes
by itself; it is told only how much is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LOCAL, WORKER, RAY = "local", "worker", "ray"
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a replica needs.

    Attributes:
        num_ranks: processes.
        rank_bytes: memory of each; 0 where it is unknown.
        device: `cuda` for a GPU of each rank; `auto` for one where the place has any; `cpu` for none.
        executor: the one that was asked for; None for any but Ray.
        worker: the worker that was asked for.
    """

    num_ranks: int
    rank_bytes: int = 0
    device: str = "auto"
    executor: str | None = None
    worker: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A machine, or a Ray cluster as a whole.

    Attributes:
        name: of the worker; `local`; `ray`.
        executor: that starts ranks there.
        cores: that there are.
        free_bytes: of memory.
        num_gpus: that there are.
        free_gpus: of those, not in use.
        obstacle: why nothing can be started there now; empty if something can.
    """

    name: str
    executor: str
    cores: int
    free_bytes: int
    num_gpus: int = 0
    free_gpus: int = 0
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a place does not take the whole replica, in one line."""

    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class PlaceChoice:
    """Where a replica runs: `workers` has the place of each rank; `executor` is None where it fits nowhere."""

    executor: str | None
    workers: tuple[str, ...]
    refusals: tuple[Refusal, ...]

    @property
    def reasons(self) -> str:
        """Every refusal, in one line."""
        return "; ".join(f"{refusal.place}: {refusal.reason}" for refusal in self.refusals) or "there is no place"


def choose(wanted: Wanted, places: Sequence[Place]) -> PlaceChoice:
    """Choose the place of each rank."""
    refusals: list[Refusal] = []
    fitting: list[Place] = []
    partial: list[tuple[Place, int]] = []  # places that take some of the ranks, with how many
    for place in sorted(places, key=lambda place: _order(wanted, place)):
        reason = _unwanted(wanted, place) or place.obstacle
        room = 0 if reason else _room(wanted, place)
        if not reason and room >= wanted.num_ranks:
            fitting.append(place)
            continue
        refusals.append(Refusal(place.name, reason or _lack(wanted, place)))
        if room and place.executor == WORKER:
            partial.append((place, room))
    refusals += _absent(wanted, places)
    if fitting:
        chosen = fitting[0]
        names = () if chosen.executor == RAY else (chosen.name,) * wanted.num_ranks
        return PlaceChoice(chosen.executor, names, tuple(refusals))
    for with_gpus in (True, False):  # the ranks of a replica all compute on the same kind of device
        alike = [(place, room) for place, room in partial if _uses_gpus(wanted, place) is with_gpus]
        if wanted.worker is None and (spread := _spread(wanted.num_ranks, alike)):
            return PlaceChoice(WORKER, spread, tuple(refusals))
    return PlaceChoice(None, (), tuple(refusals))


def _order(wanted: Wanted, place: Place) -> tuple[bool, bool, int, str]:
    """Places with GPUs come first where they would be used, then this machine."""
    return (not _uses_gpus(wanted, place), place.executor != LOCAL, -place.free_bytes, place.name)


def _uses_gpus(wanted: Wanted, place: Place) -> bool:
    """Whether each rank would have a GPU there."""
    return wanted.device == "cuda" or (wanted.device == "auto" and place.num_gpus > 0)


def _unwanted(wanted: Wanted, place: Place) -> str:
    """Why the request rules a place out."""
    if wanted.executor is not None and place.executor != wanted.executor:
        return f"executor {wanted.executor} was asked for"
    if wanted.executor is None and place.executor == RAY:
        return "Ray is used where executor ray is asked for"
    if wanted.worker is not None and place.name != wanted.worker:
        return f"worker {wanted.worker} was asked for"
    return ""


def _absent(wanted: Wanted, places: Sequence[Place]) -> list[Refusal]:
    """What was asked for and does not exist."""
    if wanted.worker is not None and all(place.name != wanted.worker for place in places):
        return [Refusal(wanted.worker, "no worker of that name has joined")]
    if wanted.executor is not None and all(place.executor != wanted.executor for place in places):
        return [Refusal(wanted.executor, "no worker has joined" if wanted.executor == WORKER else "it is not there")]
    return []


def _room(wanted: Wanted, place: Place) -> int:
    """Number of ranks that fit in a place."""
    limits = [place.cores]
    if wanted.rank_bytes:
        limits.append(place.free_bytes // wanted.rank_bytes)
    if _uses_gpus(wanted, place):
        limits.append(place.free_gpus)
    return max(0, min(limits))


def _lack(wanted: Wanted, place: Place) -> str:
    """What a place has too little of for the whole replica."""
    count = "1 rank needs" if wanted.num_ranks == 1 else f"{wanted.num_ranks} ranks need"
    needed = wanted.rank_bytes * wanted.num_ranks
    if needed > place.free_bytes:
        return f"{count} {needed / _GIB:.1f} GiB, {place.free_bytes / _GIB:.1f} GiB are free"
    if _uses_gpus(wanted, place) and place.free_gpus < wanted.num_ranks:
        return f"{count} {wanted.num_ranks} GPUs, {place.free_gpus} are free"
    return f"{count} {wanted.num_ranks} cores, there are {place.cores}"


def _spread(num_ranks: int, partial: Sequence[tuple[Place, int]]) -> tuple[str, ...]:
    """Workers of consecutive ranks, those with the most room first; empty where they do not hold all."""
    names: list[str] = []
    for place, room in sorted(partial, key=lambda each: (-each[1], -each[0].free_bytes, each[0].name)):
        names += [place.name] * min(room, num_ranks - len(names))
    return tuple(names) if len(names) == num_ranks else ()
