"""Name the gRPC address and the step socket of a rank, and remove the files of its Unix sockets. No torch here."""

import logging
from pathlib import Path

from funitel.model_server.settings import ModelServerSettings
from funitel.proto import step_socket
from funitel.proto.errors import SettingsError
from funitel.proto.process.deployment_file import is_launcher_gone, remove_deployment_file
from funitel.proto.process.locks import lock_of, remove_if_free
from funitel.proto.settings.listen_address import is_loopback

logger = logging.getLogger(__name__)

LOCK_RELEASE_SECONDS = 1.0  # for the lock of a launcher that was killed to become free


def listen_address(settings: ModelServerSettings) -> tuple[str, str]:
    """(address to bind, address to announce). Sockets that a killed run left are removed. Raises: `SettingsError`."""
    if settings.listen is not None:
        host, separator, port = settings.listen.rpartition(":")
        if not separator or not host or not port.isdigit():
            raise SettingsError(f"--listen must be host:port, given {settings.listen!r}")
        if settings.shard_tls is None and not is_loopback(host):
            logger.warning(
                "--listen %s without --shard-tls-cert: any client that reaches it can run the model and read requests",
                settings.listen,
            )
        return settings.listen, f"tcp://{settings.listen}"
    _remove_sockets(settings)
    path = _socket(settings)
    return f"unix:{path}", f"unix://{path}"


def step_socket_path(settings: ModelServerSettings) -> str:
    """Path of the step socket; empty for a shard that listens for other machines, which has none."""
    return "" if settings.listen is not None else _socket(settings) + step_socket.SUFFIX


def remove_files(settings: ModelServerSettings) -> None:
    """Remove the sockets, and the lock of a launcher that was killed."""
    _remove_sockets(settings)
    if is_launcher_gone(settings.exit_with_parent, settings.deployment_file):
        if settings.deployment_file is not None:
            remove_deployment_file(settings.deployment_file)
        remove_if_free(lock_of(settings.uds_path), LOCK_RELEASE_SECONDS)


def _socket(settings: ModelServerSettings) -> str:
    return f"{settings.uds_path}-{settings.rank}"


def _remove_sockets(settings: ModelServerSettings) -> None:
    if settings.listen is None:
        for name in (_socket(settings), step_socket_path(settings)):
            Path(name).unlink(missing_ok=True)
