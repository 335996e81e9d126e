"""A router of this process that ends as if it were killed."""

import asyncio

from funitel.router.replica_set.replica_set import ReplicaSet


async def abandon(fleet: ReplicaSet) -> None:
    """End a router without a word to its shards; what it has begun there goes on."""
    kept, releases = fleet._kept, fleet._releases
    kept._is_settled = True
    if kept._timer is not None:
        kept._timer.cancel()
    members, fleet._serving = fleet._serving, []
    tasks: list[asyncio.Future[object]] = []
    for member in members:
        steps = member.engine._steps
        steps.halt()
        member.engine._halt_caches()
        tasks += [steps._task, steps._clock]
        for call in steps._pipeline._calls:
            call.answer.cancel()
            tasks.append(call.answer)
    if releases._task is not None:
        releases._task.cancel()
        tasks.append(releases._task)
    await asyncio.gather(*tasks, return_exceptions=True)
    await fleet._tasks.cancel()
    for member in members:
        await member.shards.close()
