"""Configure logging of every process: text lines or JSON lines, with structured fields.

Everything goes to stderr except the JSON of shards and downloads, which the launcher reads from their stdout. Quoted
text cannot forge a log line: unprintable characters are escaped, long text is cut, and lines of a traceback are
indented. JSON is ASCII.

A line may have fields: those given with it (`log_fields`), and those of the caller's context (`log_context`), such as
the id of a request. In text they follow the message; in JSON they are keys.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from funitel.proto.printable import printable, shortened

MAX_CHARACTERS = 8192  # of a line of text, or of a message
MAX_FIELD_CHARACTERS = 500

LEVELS = ("debug", "info", "warning", "error")

Field = str | int | float | bool

_PLAIN = re.compile(r"[\w.:/@+-]+", re.ASCII)
_context: ContextVar[Mapping[str, Field]] = ContextVar("log_context", default=MappingProxyType({}))


@contextmanager
def log_context(**fields: Field) -> Iterator[None]:
    """Add fields to every line logged within the `with`, also by tasks started there."""
    token = _context.set({**_context.get(), **fields})
    try:
        yield
    finally:
        _context.reset(token)


def log_fields(logger: logging.Logger, message: str, level: int = logging.INFO, /, **fields: Field | None) -> None:
    """Log a line with fields; those that are None are left out."""
    if logger.isEnabledFor(level):
        given = {name: value for name, value in fields.items() if value is not None}
        logger.log(level, message, extra={"fields": given}, stacklevel=2)


def fields_of(record: logging.LogRecord) -> dict[str, Field]:
    """The fields of a log record."""
    return {**_context.get(), **getattr(record, "fields", {})}


def _formatted(value: Field) -> str:
    """A field's value as text, quoted as JSON unless it is plain, without control characters."""
    if not isinstance(value, str):
        return str(value)
    text = shortened(value, MAX_FIELD_CHARACTERS)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


@lru_cache(maxsize=1)
def _instant(second: int, form: str | None) -> str:
    """A second since the epoch, of UTC."""
    return time.strftime(form or "", time.gmtime(second))


class _TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03dZ %(levelname)s {process} %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _instant(int(record.created), datefmt)

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = printable(shortened(super().formatMessage(record).rstrip("\n"), MAX_CHARACTERS))
        return line + "".join(f" {name}={_formatted(value)}" for name, value in fields_of(record).items())

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"  {printable(shortened(line, MAX_CHARACTERS))}" for line in lines)


class _JsonFormatter(logging.Formatter):
    """One object a line with the keys of TGI's router; the launcher's also have TGI's nested message."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        more: dict[str, Any] = {**fields_of(record), "filename": record.filename, "line_number": record.lineno}
        if record.exc_info:
            more["exception"] = self.formatException(record.exc_info)
        message = shortened(record.getMessage(), MAX_CHARACTERS)
        return json_event(record.created, record.levelno, self._process, record.name, message, **more)


class _LoguruFormatter(logging.Formatter):
    """One object a line in loguru's form, which TGI's launcher reads from shards and downloads."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._text = _TextFormatter(process)

    def format(self, record: logging.LogRecord) -> str:
        instant = datetime.fromtimestamp(record.created, UTC)
        described = {
            "elapsed": {"seconds": record.relativeCreated / 1000},
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
            "extra": fields_of(record),
            "file": {"name": record.filename, "path": record.pathname},
            "function": record.funcName,
            "level": {"name": record.levelname, "no": record.levelno},
            "line": record.lineno,
            "message": shortened(record.getMessage(), MAX_CHARACTERS),
            "module": record.module,
            "name": record.name,
            "process": {"id": record.process, "name": record.processName},
            "thread": {"id": record.thread, "name": record.threadName},
            "time": {"repr": instant.isoformat(sep=" "), "timestamp": record.created},
        }
        return json.dumps({"text": self._text.format(record) + "\n", "record": described})


def json_event(seconds: float, level: int, process: str, target: str, message: str, /, **more: Any) -> str:
    """Write one event as a JSON object; `seconds` are since the epoch, `level` is that of `logging`."""
    instant = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    nested = {"fields": {"message": message}} if process == "launcher" else {}
    event = {"timestamp": instant, "level": _TRACING_NAMES.get(level, "INFO"), "message": message, **nested}
    return json.dumps(event | {"target": target, "process": process} | more)


_TRACING_NAMES = {logging.DEBUG: "DEBUG", logging.INFO: "INFO", logging.WARNING: "WARN", logging.ERROR: "ERROR"}
_TRACING_NAMES[logging.CRITICAL] = "ERROR"


def parse_level(text: str, process: str = "") -> int:
    """Convert a level, or a filter in TGI's form, to a logging level.

    Args:
        text: `info`, `WARN`, or `warn,text_generation_router=debug`: a general level, and one for a program.
        process: this program, such as "router"; levels of other programs are ignored.
    """
    general, own = "", ""
    for part in text.split(","):
        name, separator, word = part.strip().partition("=")
        if not separator:
            general = general or name
        elif process and name.split("::")[0] in (f"text_generation_{process}", f"funitel.{process}"):
            own = word
    word = (own or general).strip().upper()
    word = {"WARN": "WARNING", "TRACE": "DEBUG", "OFF": "CRITICAL", "SUCCESS": "INFO"}.get(word, word)
    level = logging.getLevelName(word)
    return level if isinstance(level, int) else logging.INFO


def configure(process: str, *, json_output: bool = False, level: str = "info") -> None:
    """Configure the `funitel` loggers, and the warnings of all others.

    Args:
        process: shown on every line, such as "router" or "shard-1".
        json_output: one JSON object a line instead of text.
        level: minimum level of the `funitel` loggers.
    """
    is_read_by_launcher = json_output and process.startswith(("shard-", "download"))
    handler = logging.StreamHandler(sys.stdout if is_read_by_launcher else sys.stderr)
    as_json = _LoguruFormatter(process) if is_read_by_launcher else _JsonFormatter(process)
    handler.setFormatter(as_json if json_output else _TextFormatter(process))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("funitel").setLevel(parse_level(level, process))
    logging.captureWarnings(True)
