"""On which address the HTTP port is opened."""

import ipaddress
import logging
import socket

from funitel.proto.settings.fields import require

logger = logging.getLogger(__name__)

EVERY_ADDRESS = "0.0.0.0"
LOOPBACK = "127.0.0.1"
LOCAL_ONLY = (
    f"there is no API key: listening on {LOOPBACK}, for this machine only; to be reached from others give --api-key, "
    f"or --hostname {EVERY_ADDRESS} to let everybody in"
)


def listen_address(hostname: str | None, usual: str | None, *, is_guarded: bool) -> str:
    """Decide on an address to bind.

    A server that lets everybody in is for its own machine unless somebody says otherwise. The name of the machine says
    nothing: containers and some shells export it as HOSTNAME. Any other name that is no address is every address, as
    with TGI.

    Args:
        hostname: what was asked for, if anything.
        usual: the address when nothing is, where the installation has chosen one, as the container image does.
        is_guarded: whether clients must show who they are.

    Raises:
        SettingsError: `usual` is no address.
    """
    if hostname is None or _is_nobodys_choice(hostname):
        require(usual is None or _is_address(usual), f"--default-hostname must be like 0.0.0.0, given {usual!r}")
        return usual or (EVERY_ADDRESS if is_guarded else LOOPBACK)
    if hostname == "localhost":
        return LOOPBACK
    if not _is_address(hostname):
        logger.warning("--hostname %s is not an address: listening on %s", hostname, EVERY_ADDRESS)
        return EVERY_ADDRESS
    return hostname


def is_local_by_default(hostname: str | None, usual: str | None, *, is_guarded: bool) -> bool:
    """Whether `listen_address` keeps others out because nobody was asked: `LOCAL_ONLY` is then to be said."""
    return _is_nobodys_choice(hostname) and usual is None and not is_guarded


def _is_nobodys_choice(hostname: str | None) -> bool:
    return hostname is None or hostname == socket.gethostname()


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host, as it is written in `host:port`."""
    host = host.strip("[]")
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
