"""The link to the tenants of the control plane: follows what it says of them, and sends it what they use."""

import asyncio
import json
import logging
from contextlib import aclosing
from pathlib import Path

from pydantic import ValidationError

from funitel.proto.errors import NotReady
from funitel.proto.settings.fields import require
from funitel.router.auth.accounts import Accounts
from funitel.router.fleet.control import ControlSocket
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics
from funitel.router.tenants.charges import Charges
from funitel.router.tenants.directory import TenantDirectory
from funitel.router.tenants.minute_log import MinuteLog
from funitel.router.tenants.snapshot import TenantSnapshot

logger = logging.getLogger(__name__)

WATCH = "/v1/fleet/tenants"
TAKEN = "/v1/fleet/tenants/taken"
RECONNECT_SECONDS = 0.2
MINUTES = "minutes"  # beside the control socket


class TenantLink:
    """What a router with tenants runs beside its requests."""

    def __init__(self, control: ControlSocket, metrics: Metrics) -> None:
        self.charges = Charges(control)
        self._minutes = MinuteLog(Path(control.path).with_name(MINUTES))
        self.directory = TenantDirectory(metrics, self.charges, self._minutes)
        self._control = control

    async def run(self) -> None:
        """Follow the control plane until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self.charges.run())

    async def _watch(self) -> None:
        is_lost = False
        while True:
            try:
                async with aclosing(self._control.lines(WATCH)) as lines:
                    async for line in lines:
                        await self._take(line)
                        is_lost = False
            except NotReady as error:
                if not is_lost:
                    logger.warning("users and keys stay as they are: %s", error.message)
                is_lost = True
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _take(self, line: bytes) -> None:
        try:
            state = TenantSnapshot.model_validate(json.loads(line))
        except ValidationError as error:
            logger.error("the control plane sent a line that is no state of tenants: %s", error.error_count())
        except (ValueError, RecursionError) as error:
            logger.error("the control plane sent a line that is no state of tenants: %s", type(error).__name__)
        else:
            self.directory.take(state)
            await self._control.tell(TAKEN, {"watcher": state.watcher, "version": state.version})

    async def close(self) -> None:
        """Send what was used last."""
        await self.charges.flush()
        self._minutes.close()


def accounts_of(
    settings: RouterSettings, metrics: Metrics, control: ControlSocket | None
) -> tuple[Accounts, TenantLink | None]:
    """The accounts of all keys, and the link to the tenants where the server has users.

    Raises:
        SettingsError: the file of keys cannot be read, or there is no control plane that has the users.
    """
    require(control is not None or not settings.users, "--users needs --control-socket")
    link = None if control is None or not settings.users else TenantLink(control, metrics)
    directory = None if link is None else link.directory
    bans = (settings.max_wrong_keys, settings.ban_seconds)
    return Accounts(settings.api_key, settings.api_key_file, metrics, *bans, tenants=directory), link
