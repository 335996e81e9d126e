"""The limit on open files of this process, and with it the limit on connections."""

import logging
import resource

from funitel.proto.errors import SettingsError

logger = logging.getLogger(__name__)

USUAL_CONNECTIONS = 16_384
OTHER_FILES = 256  # listeners, shards, workers, logs and temporary files
OTHER_SHARE = 0.75  # of few files that may be open: at most that much is kept for them
LEAST_FILES = 48  # 26 are open in a router of one shard, and more while requests are answered
MAX_FILES = 1 << 20  # where the system has no limit


def allow_open_files() -> int:
    """Raise the limit on open files to the highest this process may have; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # the kernel has a lower limit
            return soft
    return wanted


def max_connections(wanted: int | None, num_files: int) -> int:
    """Return the limit on connections, where so many files may be open.

    Raises:
        SettingsError: `wanted` exceeds the limit, or the files are too few for a router.
    """
    if num_files < LEAST_FILES:
        raise SettingsError(f"{num_files} files may be open (ulimit -Hn), a router needs at least {LEAST_FILES}")
    other_files = min(OTHER_FILES, int(num_files * OTHER_SHARE))
    possible = num_files - other_files
    if wanted is None:
        if possible < USUAL_CONNECTIONS:
            logger.warning("%d files may be open (ulimit -Hn): at most %d connections", num_files, possible)
        return min(USUAL_CONNECTIONS, possible)
    if wanted > possible:
        raise SettingsError(
            f"--max-connections {wanted} needs {wanted + other_files} open files, at most {num_files} are allowed "
            "(ulimit -Hn)"
        )
    return wanted
