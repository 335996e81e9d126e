"""The start of a process, which tells it from a later process with the same process id. Linux only."""

from pathlib import Path

_STARTED = 19  # of the fields of /proc/PID/stat after the name: field 22 of proc(5)


def start_of(pid: int) -> int | None:
    """Start of a process, in clock ticks since the boot of the machine; None where it has ended."""
    found = state_and_start_of(pid)
    return None if found is None or found[0] in ("Z", "X") else found[1]


def state_and_start_of(pid: int) -> tuple[str, int] | None:
    """State and start of a process, also of one that has ended and was not waited for; None where there is none."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return state, int(fields[_STARTED - 1])
