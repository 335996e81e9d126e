"""Put the control plane of a server together: its state, its models, its socket."""

import logging
from collections.abc import Mapping, Sequence

from funitel.launcher.config.child_commands import Commands, download_environ
from funitel.launcher.config.resolve import listed_gpus, visible_gpus
from funitel.launcher.control_plane.api.server import ControlServer
from funitel.launcher.control_plane.folders import Folders
from funitel.launcher.control_plane.model_settings import settings_of
from funitel.launcher.control_plane.model_tools import ModelTools
from funitel.launcher.control_plane.records import LaunchRequest
from funitel.launcher.control_plane.registry import Registry
from funitel.launcher.control_plane.store import StateStore, StateThread
from funitel.launcher.lifecycle.fleet import ModelFleet
from funitel.launcher.lifecycle.machines import MachinePlacement
from funitel.launcher.lifecycle.resources.gpu_shares import GpuShares
from funitel.launcher.lifecycle.resources.machine_memory import DEFAULT_SHARE, machine_memory
from funitel.launcher.lifecycle.server import ServerFacts
from funitel.launcher.lifecycle.service import FleetService
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.tenants.api.app import app_of
from funitel.launcher.tenants.service import Tenants

logger = logging.getLogger(__name__)


class ControlPlane:
    """Everything that manages the models of a server, in the event loop it was made in."""

    def __init__(
        self,
        settings: LauncherSettings,
        environ: Mapping[str, str],
        folders: Folders,
        commands: Commands,
        *,
        outlives: bool,
    ) -> None:
        """Open the state.

        Args:
            settings: of the server; what they say of models holds for each that says nothing else.
            environ: of child processes.
            folders: of files.
            commands: of child processes.
            outlives: whether these outlive this process.

        Raises:
            SettingsError, StorageFailed: the state cannot be opened.
        """
        self.state = StateThread(StateStore(settings.database or folders.database))
        registry = Registry(self.state, folders.files / "registrations")
        gpus = () if settings.device == "cpu" else visible_gpus(settings.device, environ)
        gpus = (listed_gpus() or ()) if gpus is None else gpus
        tools = ModelTools(download_environ(settings, environ), settings.cache_dir, commands.model_server)

        def settings_of_request(request: LaunchRequest) -> LauncherSettings:
            registration = registry.find(request.model)
            files = None if registration is None else registry.files(registration)
            return settings_of(settings, request, registration, files)

        self._placement = MachinePlacement(settings, gpus)
        facts = ServerFacts(
            settings_of=settings_of_request,
            defaults=settings,
            environ=environ,
            commands=commands,
            placement=self._placement,
            gpus=GpuShares(gpus),
            run_folder=folders.run,
            log_folder=folders.logs,
            max_restarts=settings.max_restarts,
            grace_seconds=float(settings.graceful_termination_timeout),
            wait_seconds=settings.wait_for_load,
            outlives=outlives,
        )
        budget = settings.memory_budget or int(machine_memory() * DEFAULT_SHARE)
        self.fleet = ModelFleet(facts, self.state, registry, tools, memory_bytes=budget)
        self.service = FleetService(self.fleet, self.state)
        self.tenants = Tenants(self.state)
        self._needs_users = settings.users
        self._control = ControlServer(app_of(settings, self.fleet, tools, self.tenants), folders.control_socket)

    async def start(self, configured: Sequence[LaunchRequest] = (), *, has_router: bool = False) -> int:
        """Adopt or load what is stored and configured, and answer on the control socket.

        Returns:
            The number of replicas that were adopted.

        Raises:
            StartupError, StorageFailed: the socket or the state cannot be used.
        """
        await self.tenants.start()
        await self._placement.start()
        num_adopted = await self.service.start(configured, has_router=has_router)
        await self._control.start()
        if self._needs_users and not self.tenants.has_users:
            logger.warning(
                "no request is answered before there is a user: funitel user new NAME --role admin --url unix://%s",
                self._control.path,
            )
        return num_adopted

    async def stop(self) -> None:
        """Stop every model, then the socket; call it once the router has ended."""
        await self.service.stop()
        await self._placement.stop()
        await self._control.stop()
        self.tenants.close()
        await self.state.close()

    async def until_router_watches(self) -> None:
        """Return once a router has connected."""
        await self.fleet.router_came.wait()
