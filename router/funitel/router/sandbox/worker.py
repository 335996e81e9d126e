"""The inside of a process that `killable` starts, and may kill at any moment.

Reads frames from stdin, each a length in four bytes and as many bytes of JSON, and answers each with a frame. The first
one sets it up; the answer says what is wrong with that, or is null. Ends with its stdin, with the process that started
it, and when it is out of memory. Can write no file.
"""

import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from funitel.proto.errors import FunitelError
from funitel.proto.process.parent import stop_with_parent

Answer = Callable[[Any], Any]


def serve(prepare: Callable[[Any], Answer]) -> None:
    """Answer until the questions end; `prepare` makes of the setup what answers, or raises FunitelError."""
    memory_limit, parent = map(int, sys.argv[1:3])
    stop_with_parent(parent)
    _confine(memory_limit)
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        try:
            answer = prepare(_read(questions))
        except FunitelError as error:
            _write(answers, error.message)
            return
        _write(answers, None)
        while (question := _read(questions)) is not None:
            _write(answers, answer(question))
    except MemoryError:
        os._exit(1)  # nothing that is left can be relied on


def _confine(memory_limit: int) -> None:
    """Bound what this process may take, whatever it is made to do."""
    limits = {resource.RLIMIT_AS: memory_limit, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    for limit, most in limits.items():
        resource.setrlimit(limit, (most, most))


def _read(questions: BinaryIO) -> Any:
    """The next frame's value; None at the end."""
    head = questions.read(4)
    return json.loads(questions.read(int.from_bytes(head, "big"))) if head else None


def _write(answers: BinaryIO, answer: Any) -> None:
    payload = json.dumps(answer).encode()
    answers.write(len(payload).to_bytes(4, "big") + payload)
    answers.flush()
