"""Write the address of the server to a file while it serves, for a health check beside it."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from funitel.launcher.config.resolve import ResolvedSettings
from funitel.launcher.processes.health import reachable
from funitel.proto.process.locks import lock_of, try_lock

logger = logging.getLogger(__name__)


@contextmanager
def address_file(settings: ResolvedSettings) -> Iterator[Callable[[ResolvedSettings], None]]:
    """Keep `--address-file`, if any, for the length of a `with`; the result writes it again for other settings.

    A file that cannot be written, or is that of another running server, is left alone, with a warning.
    """
    name = settings.address_file
    if name is None:
        yield lambda _: None
        return
    lock = try_lock(lock_of(name))
    if lock is None:
        reason = "another server keeps it" if os.access(lock_of(name), os.F_OK) else "its folder cannot be written"
        logger.warning("--address-file %s is not written: %s", name, reason)
        yield lambda _: None
        return
    _write(Path(name), settings)
    try:
        yield lambda fresh: _write(Path(name), fresh)
    finally:
        for path in (name, lock_of(name)):
            with suppress(OSError):
                os.unlink(path)
        os.close(lock)


def _write(path: Path, settings: ResolvedSettings) -> None:
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        scratch.write_text(json.dumps(_address(settings)) + "\n")
        scratch.replace(path)
    except OSError as error:
        logger.warning("--address-file %s is not written: %s", path, error.strerror)
        with suppress(OSError):
            scratch.unlink()


def _address(settings: ResolvedSettings) -> dict[str, str]:
    """URL by which this machine reaches the server, and the client certificate that it asks for."""
    host = reachable(settings.hostname)
    scheme = "http" if settings.tls_pair is None else "https"
    address = {"url": f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"}
    pair = settings.tls_probe_pair
    return address if pair is None else address | {"cert": pair.cert, "key": pair.key}
