"""Load a model: fetch it, find memory and places for its replicas, start them, wait for the router; or enlarge it."""

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from funitel.launcher.control_plane.records import LaunchRequest, ModelState, ModelType, ReplicaEntry, ReplicaStage
from funitel.launcher.executors.interface import ReplicaJob
from funitel.launcher.lifecycle.jobs import (
    LOCAL,
    folder_of,
    job_of,
    log_of,
    remove_old_logs,
    resolved_of,
    router_fields,
)
from funitel.launcher.lifecycle.model import ManagedModel
from funitel.launcher.lifecycle.model_folder import FetchProgress, fetch
from funitel.launcher.lifecycle.replica import IDLE_GRACE_SECONDS, ManagedReplica, to_its_end
from funitel.launcher.lifecycle.resources import need as memory_need
from funitel.launcher.lifecycle.resources.budget import shown_bytes
from funitel.launcher.lifecycle.resources.machine_memory import memory_of
from funitel.launcher.settings import LauncherSettings
from funitel.proto.errors import Conflict, DoesNotFit, FunitelError, InvalidRequest, LaunchFailed

logger = logging.getLogger(__name__)

MAX_RETRY_SECONDS = 60.0
TICK_SECONDS = 0.5
GROWTH = 1.1  # of the memory of a model that has just been loaded: KV that is not used takes none yet
USUAL_LOAD_SECONDS = 20.0  # for the progress of a model that was never loaded
# Progress at the end of each stage.
DOWNLOADED, CONVERTED, LOADED = 0.5, 0.6, 0.9


async def load(model: ManagedModel, least_retries: int = 0) -> None:
    """Load a model, with the retries that its launch asks for, and `least_retries` at least.

    Raises:
        FunitelError: it failed; the model is `failed`, and nothing of it is left.
    """
    request = request_of(model)
    model.is_wanted = True
    retries = max(request.retries, least_retries)
    for attempt in range(retries + 1):
        model.enter(ModelState.QUEUED, "is to be loaded", error=None, progress=0.0)
        try:
            await _load_once(model, request)
            return
        except FunitelError as error:
            await to_its_end(_clear(model))
            is_last = attempt == retries or isinstance(error, DoesNotFit | InvalidRequest)
            if is_last:
                model.fail(error.message)
                raise
            delay = min(2.0**attempt, MAX_RETRY_SECONDS)
            logger.warning("%s: %s; attempt %d follows in %g s", model.name, error.message, attempt + 2, delay)
            model.note(f"{error.message}; attempt {attempt + 2} of {retries + 1} follows in {delay:g} s")
            await asyncio.sleep(delay)
        except BaseException as error:  # cancelled: nothing is left when the caller goes on
            await to_its_end(_clear(model))
            if isinstance(error, Exception):
                model.fail(f"{type(error).__name__}: {' '.join(str(error).split())}")
            raise


async def _clear(model: ManagedModel) -> None:
    """Stop what a load has started."""
    await model.stop_replicas(IDLE_GRACE_SECONDS)
    model.downloaded = None
    model.memory.give_back(model.name)


def request_of(model: ManagedModel) -> LaunchRequest:
    """The request of its launch; that of a registration asks for nothing else."""
    return model.request or LaunchRequest(model=model.entry.model_id, name=model.name)


async def _load_once(model: ManagedModel, request: LaunchRequest) -> None:
    began, model.gone_reason = time.monotonic(), None
    settings = model.server.settings_of(request)
    folder = await _fetch(model, settings)
    resolved = resolved_of(model.server, settings, model.name, 0, folder)
    check_task(request, resolved.task)
    model.change(task=resolved.task)
    try:
        settings = await find_memory(model, request, settings, folder)
    except DoesNotFit:
        there = elsewhere(model, request, settings, folder)
        if there is None:
            raise
        model.note("does not fit here, and runs on workers")
        request = there
    resolved = resolved_of(model.server, settings, model.name, 0, folder)
    model.change(router=router_fields(resolved, model.server.defaults, folder, model.name))
    model.enter(ModelState.LOADING, f"starts {_count(settings.num_replicas, 'replica')}", progress=CONVERTED)
    remove_old_logs(model.server, model.name, model.next_replica)
    ticking = asyncio.create_task(_tick(model, began))
    try:
        for _ in range(settings.num_replicas):
            add(model, request, settings, folder, weight=request.weight)
        await start_all(model.replicas.values())
    finally:
        ticking.cancel()
    await until_attached(model)
    seconds = time.monotonic() - began
    become_ready(model, f"ready after {seconds:.1f} s", load_seconds=seconds)
    model.hooks.loaded(model, seconds)


def become_ready(model: ManagedModel, message: str, *, load_seconds: float | None = None) -> None:
    """Note that the router serves the model, and measure its memory."""
    pids = [pid for each in model.replicas.values() if each.entry.worker == LOCAL for pid in each.entry.pids]
    measured, known = memory_of(pids), model.entry.bytes or 0
    num_bytes = max(measured, known) if model.has_need or not measured else int(measured * GROWTH)
    model.has_need = True
    model.memory.put(model.name, num_bytes)
    model.downloaded = None
    model.enter(
        ModelState.READY,
        message,
        progress=1.0,
        bytes=num_bytes,
        error=None,
        last_used=time.time(),
        load_seconds=load_seconds or model.entry.load_seconds,
    )


def check_task(request: LaunchRequest, task: str) -> None:
    """Raise InvalidRequest where the model is of another type than the client says."""
    if request.model_type is not None and task not in ModelType(request.model_type).tasks:
        reason = f"model_type {request.model_type}: {request.model} is a model of the task {task}"
        raise InvalidRequest(reason, "model_type")


# Files -------------------------------------------------------------------------------------------------------


async def _fetch(model: ManagedModel, settings: LauncherSettings) -> Path:
    """The folder of the model; the stage follows what the download reports."""
    model.enter(ModelState.DOWNLOADING, f"fetches {settings.model_id}")

    def on_progress(found: FetchProgress) -> None:
        if found.converts and model.state is ModelState.DOWNLOADING:
            model.enter(ModelState.CONVERTING, found.label)
        if found.converts:
            progress = DOWNLOADED + (CONVERTED - DOWNLOADED) * found.fraction
        else:
            progress = DOWNLOADED * found.fraction
            model.downloaded = (found.done_bytes, found.total_bytes)
        model.change(is_stored=False, progress=max(model.entry.progress, round(progress, 3)))

    log = log_of(model.server, model.name, "download")
    return await fetch(model.server, settings, model.name, log, on_progress)


async def _tick(model: ManagedModel, began: float) -> None:
    """Raise the progress of a load by the time that it is expected to take."""
    expected = model.entry.expected_load_seconds or USUAL_LOAD_SECONDS
    while True:
        share = 1 - math.exp(-2 * (time.monotonic() - began) / expected)
        progress = round(CONVERTED + (LOADED - CONVERTED) * share, 3)
        model.change(is_stored=False, progress=max(model.entry.progress, progress))
        await asyncio.sleep(TICK_SECONDS)


# Memory ------------------------------------------------------------------------------------------------------


async def find_memory(
    model: ManagedModel, request: LaunchRequest, settings: LauncherSettings, folder: Path
) -> LauncherSettings:
    """Have memory for all replicas, for which others may be evicted; the settings bound the KV pool where it is tight.

    Raises:
        DoesNotFit: there is no room, or none in time; the message says what would fit.
    """
    memory, count = model.memory, settings.num_replicas
    estimator = memory_need.Estimator(model.server.commands, model.server.environ)
    if (request.executor or LOCAL) != LOCAL or request.worker not in (None, LOCAL):
        return settings  # of another machine, which knows its own memory
    resolved = resolved_of(model.server, settings, model.name, 0, folder)
    quick = memory_need.most_bytes(folder, resolved.num_shard) * count
    known = model.entry.bytes if model.has_need else None
    if known is None and quick > memory.free:  # the exact need takes seconds, and matters
        need = await estimator.estimate(resolved, folder)
        if need is not None:
            settings = _bounded(settings, need, memory.most_for(model.name))
            known = need.total * count
            model.has_need = True
    num_bytes = quick if known is None else known
    try:
        memory.check(model.name, num_bytes)
    except DoesNotFit:
        more = await estimator.advice(resolved, folder, memory.most_for(model.name), count)
        memory.check(model.name, num_bytes, more)
    await memory.claim(model.name, num_bytes, model.server.wait_seconds, model.note)
    model.change(bytes=num_bytes)
    return settings


def elsewhere(
    model: ManagedModel, request: LaunchRequest, settings: LauncherSettings, folder: Path
) -> LaunchRequest | None:
    """The request for other machines, where they have the memory that this one lacks."""
    num_shard = resolved_of(model.server, settings, model.name, 0, folder).num_shard
    rank_bytes = memory_need.least_bytes(folder, num_shard) // num_shard
    return model.server.placement.elsewhere(request, num_shard=num_shard, rank_bytes=rank_bytes)


def _bounded(settings: LauncherSettings, need: memory_need.Need, room: int) -> LauncherSettings:
    """The settings with a KV pool that fits beside the weights, where they name none."""
    if settings.max_batch_total_tokens is not None or not need.per_token:
        return settings
    tokens = (room // settings.num_replicas - need.fixed) // need.per_token // settings.block_size * settings.block_size
    if tokens < need.tokens:
        return settings  # refused anyway
    return replace(settings, max_batch_total_tokens=tokens)


def check_at_once(model: ManagedModel, settings: LauncherSettings) -> None:
    """Refuse a model in a folder that cannot fit, before its launch is begun; raises DoesNotFit."""
    folder = Path(settings.model_id).expanduser()
    if folder.is_dir():
        least = memory_need.least_bytes(folder, 1) * settings.num_replicas
        is_too_much = least > model.memory.most_for(model.name)
        if is_too_much and elsewhere(model, request_of(model), settings, folder) is None:
            smaller = "weights with quantize int8 or q4 are smaller" if settings.quantize is None else ""
            model.memory.check(model.name, least, smaller)


# Replicas ----------------------------------------------------------------------------------------------------


def add(
    model: ManagedModel, request: LaunchRequest, settings: LauncherSettings, folder: Path, *, weight: float
) -> ManagedReplica:
    """Add a replica to a model, not started.

    Raises:
        InvalidRequest, DoesNotFit: it has no place.
    """
    server, number = model.server, model.next_replica
    num_shard = resolved_of(server, settings, model.name, number, folder).num_shard
    rank_bytes = (model.entry.bytes or 0) // max(1, settings.num_replicas * num_shard)
    needs_gpu = bool(server.gpus.gpus) and settings.device != "cpu"
    executor, workers = server.placement.choose(
        request, num_shard=num_shard, rank_bytes=rank_bytes, needs_gpu=needs_gpu
    )
    gpus: Sequence[str] = ()
    if executor == LOCAL and needs_gpu:
        gpus = server.gpus.take(f"{model.name}/{number}", num_shard)
    job = job_of(
        server,
        settings,
        model.name,
        number,
        folder,
        workers=workers,
        rank_bytes=rank_bytes,
        gpus=tuple(gpus),
    )
    model.next_replica += 1
    entry = ReplicaEntry(id=number, weight=weight, executor=executor)
    return _manage(model, entry, executor, job, gpus)


def _manage(
    model: ManagedModel, entry: ReplicaEntry, executor: str, job: ReplicaJob, gpus: Sequence[str]
) -> ManagedReplica:
    replica = ManagedReplica(
        entry,
        job,
        model.server.placement.executor(executor),
        facts={"gpus": list(gpus), "workers": list(job.workers)},
        max_restarts=model.server.max_restarts,
        on_change=lambda: model.hooks.changed(model, True),
        on_event=model.note,
        on_restart=lambda: model.hooks.restarted(model),
        on_gone=model.gone,
    )
    model.replicas[entry.id] = replica
    return replica


async def start_all(replicas: Iterable[ManagedReplica]) -> None:
    """Start replicas at once; the first that fails ends the start of the others."""
    starting = [asyncio.create_task(replica.start()) for replica in replicas]
    try:
        await asyncio.gather(*starting)
    finally:
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)


async def until_attached(model: ManagedModel) -> None:
    """Wait until the router uses a replica; raises LaunchFailed where it cannot use any, or one is gone."""
    model.enter(ModelState.WARMING_UP, "its shards answer; the router prepares", progress=LOADED)
    while True:
        model.news.clear()
        replicas = model.replicas.values()
        if model.gone_reason is not None:
            raise LaunchFailed(model.gone_reason)
        if any(replica.attached.is_set() for replica in replicas):
            return
        errors = [replica.attach_error for replica in replicas if replica.attach_error is not None]
        if errors and len(errors) == len(model.replicas):
            raise LaunchFailed(errors[0])
        await model.news.wait()


def _settings_of_loaded(model: ManagedModel) -> LauncherSettings:
    """The settings of a model that was loaded, with the pool that its memory was found for."""
    tokens = model.entry.router.get("max_batch_total_tokens")
    settings = model.server.settings_of(request_of(model))
    return settings if tokens is None else replace(settings, max_batch_total_tokens=tokens)


async def add_replicas(model: ManagedModel, count: int, weight: float | None) -> list[ReplicaEntry]:
    """Start further replicas of a model that serves; they come up on their own.

    Raises:
        DoesNotFit: there is no memory for them.
        InvalidRequest: they have no place.
        Conflict: the model was unloaded while it waited for memory.
    """
    request = request_of(model)
    places = {each.entry.executor for each in model.replicas.values()}
    if request.executor is None and len(places) == 1:
        request = replace(request, executor=places.pop())  # beside the others, wherever these found room
    settings = _settings_of_loaded(model)
    folder = folder_of(model.entry.router)
    assert folder is not None, "a model that serves has a folder"
    of_one = (model.entry.bytes or 0) // max(1, len(model.replicas))
    wanted = of_one * (len(model.replicas) + count)
    await model.memory.claim(model.name, wanted, 0.0, model.note)
    if model.state is not ModelState.READY or model.turn.locked():  # a claim may wait for the end of another model
        if model.state in (ModelState.READY, ModelState.DRAINING, ModelState.SLEEPING):
            model.memory.put(model.name, model.entry.bytes or 0)
        elif not model.is_working:
            model.memory.give_back(model.name)
        raise Conflict(f"{model.name} is not ready any more, but {model.state}: no replica is added")
    before = model.entry.bytes
    model.change(bytes=wanted)
    settings = replace(settings, num_replicas=len(model.replicas) + count)
    added: list[ManagedReplica] = []
    try:
        for _ in range(count):
            added.append(add(model, request, settings, folder, weight=request.weight if weight is None else weight))
    except FunitelError:
        for replica in added:
            del model.replicas[replica.entry.id]
            model.server.gpus.give_back(f"{model.name}/{replica.entry.id}")
        model.change(bytes=before)
        model.memory.put(model.name, before or 0)
        raise
    model.note(f"adds {_count(count, 'replica')}, with {shown_bytes(wanted)} for all")
    model.request = replace(request_of(model), replicas=request.replicas + count)
    model.change()
    for replica in added:
        model.start_beside(replica)
    return [replica.entry for replica in added]


async def adopt(model: ManagedModel, replicas: Sequence[ReplicaEntry], *, has_router: bool) -> bool:
    """Take over the replicas that an earlier control plane has started; return whether any of them runs.

    What died meanwhile is started again. A model that was to be drained is stopped.

    Args:
        model: without replicas.
        replicas: as stored.
        has_router: whether the router runs, and serves what was ready.
    """
    folder = folder_of(model.entry.router)
    if folder is None or not replicas:
        return False
    settings = replace(_settings_of_loaded(model), num_replicas=len(replicas))
    model.next_replica = max(entry.id for entry in replicas) + 1
    missing: list[ManagedReplica] = []
    for entry in replicas:
        gpus = tuple(entry.record.get("gpus", ()))
        if gpus:
            model.server.gpus.put(f"{model.name}/{entry.id}", gpus)
        workers = tuple(entry.record.get("workers", ()))
        job = job_of(model.server, settings, model.name, entry.id, folder, workers=workers, gpus=gpus)
        replica = _manage(model, entry, entry.executor, job, gpus)
        if await replica.adopt():
            if has_router and replica.entry.state is ReplicaStage.READY:
                replica.attached.set()
            model.note(f"replica {entry.id} is adopted, with the processes {', '.join(map(str, replica.entry.pids))}")
        else:
            missing.append(replica)
            model.note(f"replica {entry.id} has ended while there was no control plane")
    if len(missing) == len(replicas) or not model.is_wanted or (missing and model.state is ModelState.SLEEPING):
        await model.stop_replicas(IDLE_GRACE_SECONDS)
        return False
    if model.entry.bytes is not None:
        model.memory.put(model.name, model.entry.bytes)
    for replica in missing:
        replica.change(state=ReplicaStage.STARTING, pids=())
        model.start_beside(replica)
    return True


async def resume(model: ManagedModel) -> None:
    """Go on with a load after the adoption of its replicas."""
    model.gone_reason = None
    try:
        await asyncio.gather(*(replica.resume() for replica in model.replicas.values() if replica.entry.pids))
        await until_attached(model)
    except FunitelError as error:
        await to_its_end(_clear(model))
        model.fail(error.message)
        raise
    except BaseException:
        await to_its_end(_clear(model))
        raise
    become_ready(model, "ready")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
