"""Open the standard streams that a process was started without: a socket would get their numbers, and so a child's."""

import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_standard_streams() -> None:
    """Connect each standard stream that is closed to /dev/null; call it before anything is opened."""
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is not None or _is_open(number):
            continue
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor != number:
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.set_inheritable(number, True)
        setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
