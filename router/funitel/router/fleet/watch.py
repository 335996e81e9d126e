"""Follow what the control plane says: a stream of snapshots, asked for again whenever it breaks."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from pydantic import ValidationError

from funitel.proto.errors import NotReady
from funitel.router.fleet.control import ControlSocket
from funitel.router.fleet.snapshot import FleetSnapshot

logger = logging.getLogger(__name__)

WATCH = "/v1/fleet/watch"
RECONNECT_SECONDS = 0.2


async def watch(control: ControlSocket, take: Callable[[FleetSnapshot], None], on_connect: Callable[[], None]) -> None:
    """Give every snapshot to `take`, until cancelled; what was said last holds while the control plane is away.

    A loss is logged once, none before the first snapshot: beside one model the control plane starts after the router.

    Args:
        control: the control plane.
        take: is given each snapshot.
        on_connect: called after the first snapshot of each connection.
    """
    has_answered = is_lost = False
    while True:
        is_first = True
        try:
            async with aclosing(control.lines(WATCH)) as lines:
                async for line in lines:
                    snapshot = _snapshot(line)
                    if snapshot is None:
                        continue
                    take(snapshot)
                    if is_first:
                        on_connect()
                        if is_lost:
                            logger.warning("the control plane answers again")
                        is_first = is_lost = False
                        has_answered = True
        except NotReady as error:
            if has_answered and not is_lost:
                logger.warning("the models stay as they are: %s", error.message)
        is_lost = has_answered
        await asyncio.sleep(RECONNECT_SECONDS)


def _snapshot(line: bytes) -> FleetSnapshot | None:
    """Read a line; one that is no snapshot is logged and left out."""
    try:
        return FleetSnapshot.model_validate_json(line)
    except ValidationError as error:
        logger.error("the control plane sent a line that is no snapshot: %s", error.errors(include_url=False)[0])
        return None
