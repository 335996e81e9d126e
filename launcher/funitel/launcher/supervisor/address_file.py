"""Write the address of the server to a file while it serves, for a health check beside it."""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from funitel.launcher.config.resolve import ResolvedSettings
from funitel.launcher.supervisor.health import reachable

logger = logging.getLogger(__name__)


@contextmanager
def address_file(settings: ResolvedSettings) -> Iterator[None]:
    """Keep `--address-file`, if any, for the length of a `with`; one that cannot be written is logged."""
    if settings.address_file is None:
        yield
        return
    path, content = Path(settings.address_file), json.dumps(_address(settings)) + "\n"
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        scratch.write_text(content)
        scratch.replace(path)
    except OSError as error:
        logger.warning("--address-file %s cannot be written: %s", path, error.strerror)
        with suppress(OSError):
            scratch.unlink()
    try:
        yield
    finally:
        with suppress(OSError):  # it is another server's by now, or gone
            if path.read_text() == content:
                path.unlink()


def _address(settings: ResolvedSettings) -> dict[str, str]:
    """URL by which this machine reaches the server, and the client certificate that it asks for."""
    host = reachable(settings.hostname)
    scheme = "http" if settings.tls_pair is None else "https"
    address = {"url": f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"}
    pair = settings.tls_probe_pair
    return address if pair is None else address | {"cert": pair.cert, "key": pair.key}
