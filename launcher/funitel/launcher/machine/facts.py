"""What this machine has: cores, memory, GPUs, and the network interface of an address."""

import fcntl
import ipaddress
import os
import socket
import struct
import subprocess
from contextlib import suppress
from pathlib import Path

from funitel.proto.errors import SettingsError
from funitel.proto.process.control_groups import control_groups, lines_of

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
_SIOCGIFADDR = 0x8915
_ROOT = Path("/")


def memory_bytes(root: Path = _ROOT) -> int:
    """Memory of this machine, or of the smallest control group that this process is in."""
    return min([_meminfo("MemTotal", root), *(limit for limit, _ in _groups(root))])


def available_bytes(root: Path = _ROOT) -> int:
    """Memory that processes of this machine can still take, within every control group."""
    return max(0, min([_meminfo("MemAvailable", root), *(limit - used for limit, used in _groups(root))]))


def _meminfo(name: str, root: Path) -> int:
    lines = (line.split() for line in lines_of(root / "proc/meminfo"))
    return next((int(words[1]) * 1024 for words in lines if words[0] == f"{name}:"), 0)


def _groups(root: Path) -> list[tuple[int, int]]:
    """(limit, use without what the kernel can drop) of each control group with a limit."""
    found = []
    for group in control_groups("memory", root):
        limit_file, use_file, cache = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if group.is_v1
            else ("memory.max", "memory.current", "inactive_file")
        )
        limit, used = (" ".join(lines_of(group.folder / name)) for name in (limit_file, use_file))
        if limit.isdigit() and used.isdigit():
            stat = (line.split() for line in lines_of(group.folder / "memory.stat"))
            dropped = next((int(words[1]) for words in stat if words[0] == cache), 0)
            found.append((int(limit), max(0, int(used) - dropped)))
    return found


def visible_gpus() -> tuple[str, ...]:
    """GPUs as CUDA names them: those of CUDA_VISIBLE_DEVICES, else all that nvidia-smi lists."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return tuple(name.strip() for name in listed.split(",") if name.strip() not in ("", "-1", "none"))
    with suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=30, check=True)
        return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip())
    return ()


def interface_of(address: str) -> str | None:
    """The network interface that has an address of this machine; None where none has."""
    wanted = _resolved(address)
    if wanted is None:
        return None
    if wanted.version == 6:
        lines = (line.split() for line in lines_of(Path("/proc/net/if_inet6")))
        return next((words[5] for words in lines if int(words[0], 16) == int(wanted)), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if answer[20:24] == wanted.packed:
                    return name
    return None


def _resolved(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0]
        return ipaddress.ip_address(str(found).partition("%")[0])
    except (OSError, ValueError):
        return None


def check_own_address(address: str, flag: str) -> None:
    """Raise SettingsError, which names `flag`, unless programs of this machine can listen on an address."""
    try:
        family, kind, _, _, found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(found)
    except OSError as error:
        raise SettingsError(f"{flag} {address} is not an address of this machine: {error.strerror}") from error


def port_for(address: str, wanted: int) -> int:
    """A port that is free on an address of this machine: the wanted one if it is, unless that is 0."""
    family, kind, _, _, found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    for port in (wanted, 0):
        with socket.socket(family, kind) as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((found[0], port))
            return int(probe.getsockname()[1])
    raise SettingsError(f"no port is free on {address}")
