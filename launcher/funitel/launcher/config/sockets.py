"""Claim the addresses of a deployment: Unix sockets under a lock, free TCP ports, listening sockets."""

import errno
import glob
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import product
from pathlib import Path

from funitel.launcher.config.port_owner import owner_of
from funitel.proto import step_socket
from funitel.proto.errors import SettingsError
from funitel.proto.process.deployment_file import file_of, logs_of, path_of_file, processes_in, read, runs
from funitel.proto.process.locks import lock_of, try_lock
from funitel.proto.settings.fields import require

DEFAULT_PATH = "/tmp/text-generation-server"
BACKLOG = 2048  # connections not yet accepted by a router
MAX_PATH_BYTES = 107  # bytes of sun_path without its final zero, see unix(7)


def socket_of(path: str, rank: int) -> str:
    """Name the Unix socket of one shard."""
    return f"{path}-{rank}"


def path_of_replica(path: str, replica: int) -> str:
    """Socket path of one replica's shards; the first replica uses the deployment's, as with TGI."""
    return f"{path}-replica-{replica}" if replica else path


def path_of_deployment(path: str, number: int) -> str:
    """Socket path of the shards of one deployment; each upgrade starts another."""
    return f"{path}-upgrade-{number}" if number else path


def keeper_path(path: str) -> str:
    """Socket path of the keeper of a launcher."""
    return f"{path}.keeper"


@contextmanager
def claim(path: str | None, num_shard: int, num_replicas: int = 1, port: int = 0) -> Iterator[str]:
    """Lock a socket path for the length of a `with`; stale sockets are removed before and after.

    Without `path`, the default is taken, or one named after this process when another launcher holds the default, or
    has left processes there that another launcher may adopt: one with its port, which gets its path. The sockets of a
    launcher that has died are left where there is its deployment file, since its processes may run.
    """
    _check_length(path or DEFAULT_PATH, num_shard, num_replicas)
    if path is None:
        _sweep()
    base, lock = _lock([path] if path else _default_paths(port))
    try:
        if not os.path.exists(file_of(base)):
            remove_sockets(base, num_shard, num_replicas)
        yield base
    finally:
        remove_sockets(base, num_shard, num_replicas)
        remove_beside(base)
        Path(lock_of(base)).unlink(missing_ok=True)
        os.close(lock)


def remove_beside(base: str) -> None:
    """Remove what a launcher has beside the sockets of its shards."""
    for name in (keeper_path(base), file_of(base)):
        with suppress(OSError):
            os.unlink(name)
    shutil.rmtree(logs_of(base), ignore_errors=True)


def _sweep() -> None:
    """Remove files of killed launchers: those named after a process id that is not running and not locked."""
    for lock in glob.glob(f"{DEFAULT_PATH}-*.lock"):
        base = lock.removesuffix(".lock")
        owner = base.removeprefix(f"{DEFAULT_PATH}-")
        if not owner.isdecimal() or _is_running(int(owner)) or (descriptor := try_lock(lock)) is None:
            continue
        if not _has_processes(base):
            with suppress(OSError):  # not ours
                for name in [*glob.glob(f"{base}-*"), lock]:
                    os.unlink(name)
            remove_beside(base)
        os.close(descriptor)


def _has_processes(base: str) -> bool:
    """Whether processes of a launcher that has died wait for another one."""
    return any(map(runs, processes_in(read(file_of(base)))))


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _default_paths(port: int) -> list[str]:
    """Socket paths to try where none is given: first that of a launcher on this port which has died."""
    left: dict[str, object] = {}
    for name in glob.glob(file_of(f"{DEFAULT_PATH}*")):
        content = read(name)
        if any(map(runs, processes_in(content))):
            left[path_of_file(name)] = None if content is None else content.get("port")
    fresh = [path for path in (DEFAULT_PATH, f"{DEFAULT_PATH}-{os.getpid()}") if path not in left]
    return [*(path for path, its_port in left.items() if its_port == port), *fresh]


def _lock(candidates: Sequence[str]) -> tuple[str, int]:
    for candidate in candidates:
        descriptor = try_lock(lock_of(candidate))
        if descriptor is not None:
            return candidate, descriptor
    path = candidates[0]
    raise SettingsError(f"--shard-uds-path {path}: {path}.lock is held by another instance or not writable")


def _check_length(base: str, num_shard: int, num_replicas: int) -> None:
    longest = socket_of(path_of_replica(base, num_replicas - 1), num_shard - 1) + step_socket.SUFFIX
    require(
        len(os.fsencode(longest)) <= MAX_PATH_BYTES,
        f"--shard-uds-path {base} is too long: a Unix socket path has at most {MAX_PATH_BYTES} bytes",
    )


def remove_sockets(base: str, num_shard: int, num_replicas: int) -> None:
    """Remove the sockets of shards that have ended; raises SettingsError where another user owns them."""
    for replica, rank, suffix in product(range(num_replicas), range(num_shard), ("", step_socket.SUFFIX)):
        name = socket_of(path_of_replica(base, replica), rank) + suffix
        try:
            Path(name).unlink(missing_ok=True)
        except OSError as error:
            raise SettingsError(
                f"cannot remove the stale socket {name} ({error.strerror}): choose another --shard-uds-path"
            ) from error


def is_free(port: int) -> bool:
    """Whether a TCP port can be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """Find a free TCP port."""
    return free_ports(1)[0]


def free_ports(count: int) -> tuple[int, ...]:
    """Find `count` different free TCP ports."""
    with ExitStack() as stack:  # all stay bound until the last is found
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        return tuple(probe.getsockname()[1] for probe in probes)


def listen(hostname: str, port: int, flag: str = "--port") -> socket.socket:
    """Listen on the port that `flag` gave.

    Raises:
        SettingsError: it is in use, or needs other privileges.
    """
    check_port(hostname, port, flag)
    try:
        family = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((hostname, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SettingsError(_cannot_listen(hostname, port, flag, error)) from error


def check_port(hostname: str, port: int, flag: str = "--port") -> None:
    """Raise SettingsError when the router could not listen on `hostname` and `port`, which `flag` gave."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise SettingsError(f"--hostname {hostname} is not an address of this machine: {error.strerror}") from error
    except OSError as error:
        raise SettingsError(_cannot_listen(hostname, port, flag, error)) from error


def _cannot_listen(hostname: str, port: int, flag: str, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return f"{flag} {port} needs privileges this process lacks: choose a port from 1024 up"
    if error.errno == errno.EADDRINUSE:
        owner = owner_of(port)
        by = f" by {owner}" if owner else ""
        return f"{flag} {port} is already in use on {hostname}{by}: stop that process or choose another {flag}"
    return f"cannot listen on --hostname {hostname} {flag} {port}: {error.strerror}"
