"""The main loop of a sandbox process, which `sandbox.pool` may kill at any moment.

It reads frames from stdin, each a length of four bytes and as many bytes of JSON, and answers each with a frame. The
first one sets it up; the answer is what is wrong with that, or null, and the layers of confinement that the kernel
lacks. It ends with its stdin, with its parent, and when it is out of memory. `confinement` says what it cannot do.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from funitel.proto.errors import FunitelError
from funitel.proto.process.parent import stop_with_parent
from funitel.router.sandbox.confinement import confine

Answer = Callable[[Any], Any]


def serve(prepare: Callable[[Any], Answer]) -> None:
    """Answer tasks until stdin ends; `prepare` makes the answering function of the setup, or raises FunitelError."""
    parent, memory_limit, cpu_limit, niceness, *readable = sys.argv[1:]
    stop_with_parent(int(parent))
    os.nice(int(niceness))
    missing = confine(int(memory_limit), readable)
    tasks, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        try:
            answer = prepare(_read(tasks))
        except FunitelError as error:
            _write(answers, [error.message, missing])
            return
        _write(answers, [None, missing])
        while (task := _read(tasks)) is not None:
            signal.setitimer(signal.ITIMER_PROF, float(cpu_limit))  # SIGPROF ends the process; 0 is no limit
            found = answer(task)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _write(answers, found)
    except MemoryError:
        os._exit(1)  # the state of the process is unknown


def _read(tasks: BinaryIO) -> Any:
    """Return the value of the next frame; None at the end."""
    head = tasks.read(4)
    return json.loads(tasks.read(int.from_bytes(head, "big"))) if head else None


def _write(answers: BinaryIO, answer: Any) -> None:
    payload = json.dumps(answer).encode()
    answers.write(len(payload).to_bytes(4, "big") + payload)
    answers.flush()
