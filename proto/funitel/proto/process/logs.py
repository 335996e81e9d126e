"""One logging setup for every process: text lines for people, JSON lines for machines.

Everything goes to stderr, but the JSON of shards and downloads: a launcher reads that from their stdout. Whatever an
event quotes, its line cannot pass for another one: what cannot be printed is escaped, what is long is cut, and the
lines of a traceback are indented. JSON is ASCII.

A line may have facts besides its words: those that are given with it (`tell`), and those of what the caller works for
(`concerning`), such as the id of a request. In text they stand behind the words, in JSON they are keys of their own.
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
from types import MappingProxyType
from typing import Any

from funitel.proto.printable import printable, shortened

MAX_CHARACTERS = 8192  # of a line of text, or of a message
MAX_FACT_CHARACTERS = 500

LEVELS = ("debug", "info", "warning", "error")

Fact = str | int | float | bool

_PLAIN = re.compile(r"[\w.:/@+-]+", re.ASCII)
_concern: ContextVar[Mapping[str, Fact]] = ContextVar("concern", default=MappingProxyType({}))


@contextmanager
def concerning(**facts: Fact) -> Iterator[None]:
    """Put facts on every line that is logged within the `with`, by tasks begun there too."""
    token = _concern.set({**_concern.get(), **facts})
    try:
        yield
    finally:
        _concern.reset(token)


def tell(logger: logging.Logger, message: str, level: int = logging.INFO, /, **facts: Fact | None) -> None:
    """Log a line with facts; those that are None are left out."""
    if logger.isEnabledFor(level):
        known = {name: fact for name, fact in facts.items() if fact is not None}
        logger.log(level, message, extra={"facts": known}, stacklevel=2)


def facts_of(record: logging.LogRecord) -> dict[str, Fact]:
    """The facts of a line that is being logged."""
    return {**_concern.get(), **getattr(record, "facts", {})}


def _worded(fact: Fact) -> str:
    """A fact as text: what is not plain is quoted, and holds no character that a terminal obeys."""
    text = shortened(str(fact), MAX_FACT_CHARACTERS)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


class _TextFormatter(logging.Formatter):
    converter = staticmethod(time.gmtime)

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03dZ %(levelname)s {process} %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = printable(shortened(super().formatMessage(record).rstrip("\n"), MAX_CHARACTERS))
        return line + "".join(f" {name}={_worded(fact)}" for name, fact in facts_of(record).items())

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"  {printable(shortened(line, MAX_CHARACTERS))}" for line in lines)


class _JsonFormatter(logging.Formatter):
    """One object a line with the keys of TGI's router; the launcher's have TGI's nested message besides."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        more: dict[str, Any] = {**facts_of(record), "filename": record.filename, "line_number": record.lineno}
        if record.exc_info:
            more["exception"] = self.formatException(record.exc_info)
        message = shortened(record.getMessage(), MAX_CHARACTERS)
        return json_event(record.created, record.levelno, self._process, record.name, message, **more)


class _LoguruFormatter(logging.Formatter):
    """One object a line as loguru serializes it, which is what TGI's launcher reads from shards and downloads."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._text = _TextFormatter(process)

    def format(self, record: logging.LogRecord) -> str:
        instant = datetime.fromtimestamp(record.created, UTC)
        described = {
            "elapsed": {"seconds": record.relativeCreated / 1000},
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
            "extra": facts_of(record),
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
    """Write one event as a JSON object; `seconds` are those of the epoch, `level` is logging's."""
    instant = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    nested = {"fields": {"message": message}} if process == "launcher" else {}
    event = {"timestamp": instant, "level": _TRACING_NAMES.get(level, "INFO"), "message": message, **nested}
    return json.dumps(event | {"target": target, "process": process} | more)


_TRACING_NAMES = {logging.DEBUG: "DEBUG", logging.INFO: "INFO", logging.WARNING: "WARN", logging.ERROR: "ERROR"}
_TRACING_NAMES[logging.CRITICAL] = "ERROR"


def parse_level(text: str, process: str = "") -> int:
    """Turn a level, or a filter as TGI takes it, into a logging level.

    Args:
        text: `info`, `WARN`, or `warn,text_generation_router=debug`: a level for all, and for one program.
        process: the program that asks, such as "router"; what names another is passed over.
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
    """Send the `funitel` loggers, and warnings of everything else, to where they belong.

    Args:
        process: shown on every line, such as "router" or "shard-1".
        json_output: one JSON object a line instead of text.
        level: least severe level shown for funitel's own loggers.
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
