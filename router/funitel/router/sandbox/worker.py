"""The main loop of a sandbox process, which `sandbox.pool` may kill at any moment.

It reads frames from stdin, as `sandbox.process` describes them, and answers each with a frame. The first one sets it
up; the answer is what is wrong with that, or null, and the layers of confinement that the kernel lacks. It ends with
its stdin, with its parent, and when it is out of memory. `confinement` says what it cannot do.
"""

import json
import os
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from funitel.proto.errors import FunitelError
from funitel.proto.process.parent import stop_with_parent
from funitel.router.sandbox.confinement import confine

_HEAD = struct.Struct(">II")  # bytes of JSON, and of the attachment

Answer = Callable[[Any], Any]
AttachedAnswer = Callable[[Any, bytes], tuple[Any, bytes]]
"""Takes a task and the bytes that came with it; returns the answer and the bytes that go with it."""


def serve(prepare: Callable[[Any], Answer]) -> None:
    """Answer tasks until stdin ends; `prepare` makes the answering function of the setup, or raises FunitelError."""

    def prepare_attached(setup: Any) -> AttachedAnswer:
        answer = prepare(setup)
        return lambda task, _: (answer(task), b"")

    serve_attached(prepare_attached)


def serve_attached(prepare: Callable[[Any], AttachedAnswer]) -> None:
    """`serve` for tasks and answers with bytes of any content."""
    parent, memory_limit, cpu_limit, niceness, *readable = sys.argv[1:]
    stop_with_parent(int(parent))
    os.nice(int(niceness))
    missing = confine(int(memory_limit), readable)
    tasks, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        try:
            answer = prepare(json.loads(_read(tasks)[0]))
        except FunitelError as error:
            _write(answers, [error.message, missing])
            return
        _write(answers, [None, missing])
        while (task := _read(tasks))[0]:
            signal.setitimer(signal.ITIMER_PROF, float(cpu_limit))  # SIGPROF ends the process; 0 is no limit
            found = answer(json.loads(task[0]), task[1])
            signal.setitimer(signal.ITIMER_PROF, 0)
            _write(answers, *found)
    except MemoryError:
        os._exit(1)  # the state of the process is unknown


def _read(tasks: BinaryIO) -> tuple[bytes, bytes]:
    """Return the JSON of the next frame, empty at the end, and its attachment."""
    head = tasks.read(_HEAD.size)
    size, attached = _HEAD.unpack(head) if head else (0, 0)
    return tasks.read(size), tasks.read(attached)


def _write(answers: BinaryIO, answer: Any, attached: bytes = b"") -> None:
    payload = json.dumps(answer).encode()
    answers.write(_HEAD.pack(len(payload), len(attached)) + payload)
    answers.write(attached)
    answers.flush()
