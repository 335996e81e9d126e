"""Forward the output of child processes to the log of the launcher, as text or as JSON events."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from funitel.proto.printable import printable
from funitel.proto.process.logs import json_event


def relay(process: str, *, json_output: bool) -> Callable[[str], None]:
    """Make the function that forwards a child's lines to stderr, as text or as JSON events.

    Args:
        process: name of the child in these lines, such as "shard 0".
        json_output: rewrite the events of shards as the launcher's, pass those of the router unchanged, and wrap
            any other line in an event.
    """
    if json_output:
        return lambda line: _write(_event(process.replace(" ", "-"), line))
    return lambda line: _write(f"{process} | {line}")


def parse_record(line: str) -> dict[str, Any] | None:
    """The record of a line in loguru's JSON form, which shards and downloads log; None for any other line."""
    event = _parse(line)
    record = event.get("record") if event else None
    return record if isinstance(record, dict) and {"level", "message", "time", "name"} <= record.keys() else None


def _parse(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _event(process: str, line: str) -> str:
    record = parse_record(line)
    if record is not None:
        level, seconds = logging.getLevelName(record["level"]["name"]), record["time"]["timestamp"]
        more = dict(record["extra"]) if isinstance(record.get("extra"), dict) else {}
        more |= {"exception": record["exception"]} if record.get("exception") else {}
        return json_event(seconds, level, process, record["name"], record["message"], **more)
    if _parse(line) is not None:
        return line
    level = logging.ERROR if line.startswith("error: ") else logging.INFO
    return json_event(time.time(), level, process, "output", line)


def _write(line: str) -> None:
    with suppress(OSError):  # a full disk or a closed pipe: the line is lost, but the child does not block
        print(printable(line), file=sys.stderr, flush=True)


def working_directory() -> str | None:
    """None for the launcher's own; another one where that was removed, since libraries of the children need one."""
    try:
        os.getcwd()
    except OSError:
        return "/"
    return None
