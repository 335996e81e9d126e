"""Decide the address on which the HTTP port listens."""

import ipaddress
import logging
import socket

from funitel.proto.settings.fields import require
from funitel.proto.settings.variables import is_address

logger = logging.getLogger(__name__)

EVERY_ADDRESS = "0.0.0.0"
LOOPBACK = "127.0.0.1"


def listen_address(hostname: str | None, default: str | None, *, is_guarded: bool) -> str:
    """Decide the address to bind.

    A server without authentication of its own listens on loopback by default. The machine's own name counts as not
    given. Any other name that is no address means all addresses, as with TGI.

    Args:
        hostname: as given, or None.
        default: address when `hostname` is not given, as the container image sets it; or None.
        is_guarded: whether clients must authenticate, by settings made for this server.

    Raises:
        SettingsError: `default` is no address.
    """
    if hostname is None or _is_default(hostname):
        require(default is None or is_address(default), f"--default-hostname must be like 0.0.0.0, given {default!r}")
        return default or (EVERY_ADDRESS if is_guarded else LOOPBACK)
    if hostname == "localhost":
        return LOOPBACK
    if not is_address(hostname):
        logger.warning("--hostname %s is not an address: listening on %s", hostname, EVERY_ADDRESS)
        return EVERY_ADDRESS
    return hostname


def is_local_by_default(hostname: str | None, default: str | None, *, is_guarded: bool) -> bool:
    """Whether `listen_address` falls back to loopback, which must then be logged."""
    return _is_default(hostname) and default is None and not is_guarded


def _is_default(hostname: str | None) -> bool:
    return hostname is None or hostname == socket.gethostname()


def is_loopback(host: str) -> bool:
    """Whether a host, as written in `host:port`, is loopback."""
    host = host.strip("[]")
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)
