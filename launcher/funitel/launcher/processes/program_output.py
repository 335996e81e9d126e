"""Run a program that prints one JSON object."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from funitel.launcher.processes.pid_one import output_of

MAX_SECONDS = 300.0


async def json_of(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Mapping[str, Any] | None, str]:
    """The object on the last line of its stdout; or None, with the reason in one line."""
    try:
        _, output, errors = await output_of(argv, environ, MAX_SECONDS)
    except TimeoutError:
        return None, f"no answer within {MAX_SECONDS:g} s"
    except OSError as error:
        return None, f"it cannot be started: {error.strerror}"
    lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines
    try:
        answer = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        return None, said[-1] if said else "it printed nothing"
    return (answer, "") if isinstance(answer, dict) else (None, "it printed no object")
