"""The command `funitel-router`: serve HTTP in front of the model shards, or `print-schema` the OpenAPI document."""

import gc
import json
import logging
import os
import socket
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial

import typer

from funitel.proto.keeper.messages import FINISHED_CODE
from funitel.proto.process import logs
from funitel.proto.process.standard_streams import open_standard_streams
from funitel.proto.settings.command import SettingsCommand
from funitel.proto.settings.fields import as_command, run_app
from funitel.proto.settings.listen_address import is_local_by_default, is_loopback, listen_address
from funitel.proto.tracing.export import export
from funitel.router.api.routes import document
from funitel.router.app import build_app
from funitel.router.connect import connect
from funitel.router.settings import RouterSettings, is_guarded, local_only, opens_port
from funitel.router.transport.connection_limits import allow_open_files, max_connections
from funitel.router.transport.server import Server, bind
from funitel.router.transport.takeover import SEND_BUFFER_BYTES, Takeover

logger = logging.getLogger(__name__)

# Objects of a token are freed by reference counts. The collector of cycles, which is started by the number of objects
# made and not yet freed, would traverse all objects of the running streams several times a step: a fifth of the CPU
# time at 1000 streams. Requests do leave cycles behind, a few hundred objects each.
GARBAGE_THRESHOLDS = (50_000, 20, 20)


def _address(settings: RouterSettings) -> str:
    """Decide on the address to listen on, and log it if no setting names one."""
    asked = (settings.hostname, settings.default_hostname)
    if is_local_by_default(*asked, is_guarded=opens_port(settings)):
        logger.info(local_only(settings))
    return listen_address(*asked, is_guarded=opens_port(settings))


def _is_local(settings: RouterSettings, addresses: Iterable[str]) -> bool:
    """Whether nothing but this machine is to reach the server, which authenticates no client."""
    return not is_guarded(settings) and all(map(is_loopback, addresses))


def collect_garbage_rarely() -> None:
    """Exempt what is imported by now from garbage collection, and collect the rest seldom."""
    gc.freeze()  # with the few objects that imports left as garbage: to look for them takes longer than to keep them
    gc.set_threshold(*GARBAGE_THRESHOLDS)


def serve(settings: RouterSettings) -> None:
    """Run until a signal; raise StartupError when the router cannot start."""
    collect_garbage_rarely()
    with ExitStack() as stack:
        if settings.otlp_endpoint is not None:
            stack.callback(export(settings.otlp_endpoint, settings.otlp_service_name))
        ports = [settings.port, *([settings.prometheus_port] if settings.prometheus_port is not None else [])]
        listeners: list[socket.socket] = []  # the keeper has its own
        if settings.listen_fd:
            listeners = [stack.enter_context(socket.socket(fileno=descriptor)) for descriptor in settings.listen_fd]
        elif settings.keeper is None:
            address = _address(settings)
            listeners = [stack.enter_context(bind(address, port)) for port in ports]
        addresses = [listener.getsockname()[0] for listener in listeners] or [_address(settings)]
        build = partial(build_app, settings, connect, is_local=_is_local(settings, addresses), connect_replicas=connect)
        takeover = None if settings.keeper is None else Takeover(settings.keeper, settings.generation)
        server = Server(settings, build, max_connections(settings.max_connections, allow_open_files()), takeover)
        for descriptor in (*settings.listen_fd, *([] if settings.ready_fd is None else [settings.ready_fd])):
            os.set_inheritable(descriptor, False)  # the launcher's way to pass it leaves it so, and uvloop closes none
        for listener in listeners:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            logger.info("listening on %s port %d", *listener.getsockname()[:2])
        if takeover is not None:  # last: an earlier router ends with it
            takeover.connect()
            stack.callback(takeover.close)
        server.run(sockets=[] if takeover is not None else listeners)
    if server.failure is not None:
        raise server.failure
    if server.is_refused:
        raise typer.Exit(FINISHED_CODE)


def _configure_logs(settings: RouterSettings) -> None:
    logs.configure("router", json_output=settings.json_output, level=settings.log_level)


class RouterCommand(SettingsCommand):
    """The command line of the router."""

    commands = (("print-schema", "Print the OpenAPI document."),)


def main() -> None:
    """Entry point of the console script."""
    open_standard_streams()
    if sys.argv[1:2] == ["print-schema"]:
        print(json.dumps(document(), indent=2))
        return
    app = typer.Typer()
    app.command(cls=RouterCommand)(as_command(RouterSettings, serve, program="router", set_up=_configure_logs))
    run_app(app)


if __name__ == "__main__":
    main()
