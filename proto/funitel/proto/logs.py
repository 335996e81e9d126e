"""One logging setup for every process: text lines for people, JSON lines for machines, always on stderr."""

import json
import logging
import sys
import time

LEVELS = ("debug", "info", "warning", "error")


class _TextFormatter(logging.Formatter):
    converter = staticmethod(time.gmtime)

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03dZ %(levelname)s {process} %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        event = {
            "timestamp": round(record.created, 3),
            "level": record.levelname,
            "process": self.process,
            "target": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, ensure_ascii=False)


def parse_level(text: str) -> int:
    """Turn `info`, `WARN`, or a TGI filter such as `info,text_generation_router=debug` into a logging level."""
    word = text.split(",")[0].strip().upper()
    word = {"WARN": "WARNING", "TRACE": "DEBUG", "OFF": "CRITICAL", "SUCCESS": "INFO"}.get(word, word)
    level = logging.getLevelName(word)
    return level if isinstance(level, int) else logging.INFO


def configure(process: str, *, json_output: bool = False, level: str = "info") -> None:
    """Send the `funitel` loggers, and warnings of everything else, to stderr.

    Args:
        process: shown on every line, such as "router" or "shard-1".
        json_output: one JSON object a line instead of text.
        level: least severe level shown for funitel's own loggers.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process) if json_output else _TextFormatter(process))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("funitel").setLevel(parse_level(level))
    logging.captureWarnings(True)
