"""Put a model to sleep, so that its shards keep the weights and give everything else back; and wake it."""

import asyncio
from contextlib import suppress

from funitel.launcher.control_plane.records import ModelState, ReplicaStage
from funitel.launcher.executors import shard_calls
from funitel.launcher.lifecycle.launch import LOADED, become_ready, until_attached
from funitel.launcher.lifecycle.model import ManagedModel
from funitel.launcher.lifecycle.replica import IDLE_GRACE_SECONDS
from funitel.launcher.lifecycle.resources.budget import shown_bytes
from funitel.proto.errors import Conflict, FunitelError, WrongState


async def put_to_sleep(model: ManagedModel) -> None:
    """Have the router release every replica of a model that is ready, and have their shards sleep.

    Raises:
        Conflict: the model is not ready, or its shards cannot sleep; it serves on.
        FunitelError: a shard failed; the model is stopped, and `failed`.
    """
    async with model.turn:
        if model.state is ModelState.SLEEPING:
            return
        if model.state is not ModelState.READY:
            raise Conflict(f"{model.name} is {model.state}: only a model that is ready can sleep")
        replicas = tuple(model.replicas.values())
        model.enter(ModelState.DRAINING, "is put to sleep")
        await model.drain(replicas, ReplicaStage.SLEEPING)
        try:
            freed = sum(
                await asyncio.gather(*(shard_calls.sleep([each.entry.address], model.server.tls) for each in replicas))
            )
        except WrongState as error:  # it serves on; ranks that sleep already are woken
            await _serve_on(model)
            raise Conflict(f"{model.name} cannot sleep: {error.message}") from error
        except FunitelError as error:
            await model.stop_replicas(IDLE_GRACE_SECONDS)
            model.fail(error.message)
            raise
        model.bytes_awake = model.entry.bytes
        num_bytes = max(0, (model.entry.bytes or 0) - freed)
        model.memory.put(model.name, num_bytes)
        model.enter(ModelState.SLEEPING, f"sleeps; {shown_bytes(freed)} are free", bytes=num_bytes)


async def _serve_on(model: ManagedModel) -> None:
    """Have replicas serve again that could not all sleep."""
    model.gone_reason = None
    try:
        for replica in model.replicas.values():
            with suppress(WrongState):  # it has no sleep to wake from
                await shard_calls.wake([replica.entry.address], model.server.tls)
            replica.change(state=ReplicaStage.READY)
        await until_attached(model)
    except FunitelError as error:
        await model.stop_replicas(IDLE_GRACE_SECONDS)
        model.fail(error.message)
        raise
    become_ready(model, "serves on")


async def wake(model: ManagedModel) -> None:
    """Have the shards of a model that sleeps serve again; returns once the router uses them.

    Raises:
        FunitelError: a shard failed, or there is no memory; the model is then stopped.
    """
    full = model.bytes_awake or model.entry.bytes or 0
    model.is_wanted, model.gone_reason = True, None
    try:
        await model.memory.claim(model.name, full, model.server.wait_seconds, model.note)
        model.enter(ModelState.LOADING, "wakes", progress=LOADED, bytes=full, error=None)
        replicas = tuple(model.replicas.values())
        await asyncio.gather(*(shard_calls.wake([each.entry.address], model.server.tls) for each in replicas))
        for replica in replicas:
            replica.attached.clear()
            replica.change(state=ReplicaStage.READY)
        await until_attached(model)
    except FunitelError as error:
        await model.stop_replicas(IDLE_GRACE_SECONDS)
        model.fail(error.message)
        raise
    except BaseException:
        await model.stop_replicas(IDLE_GRACE_SECONDS)
        model.memory.give_back(model.name)
        raise
    become_ready(model, "ready again")
