"""The server of a command, and what all commands write."""

import sys
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.table import Table

from funitel.launcher.cli.fleet.settings import FleetClientSettings
from funitel.launcher.terminal_ui.http_client import LOCAL_URL, Api, context_of
from funitel.launcher.terminal_ui.terminal import console_of, one_line
from funitel.proto.errors import FunitelError

MODELS = "/v1/models"
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_SPANS = ((86_400, "d"), (3_600, "h"), (60, "m"))


def api_of(settings: FleetClientSettings) -> Api:
    """The server that the settings name; raises SettingsError."""
    return Api(settings.url or LOCAL_URL, settings.api_key, context_of(settings), takes_sockets=True)


def path_of(name: str, *rest: str) -> str:
    """The path of a model, or of something below it."""
    return "/".join([MODELS, quote(name, safe=""), *rest])


def object_of(content: Any, api: Api) -> dict[str, Any]:
    """An answer that must be an object; raises FunitelError."""
    if not isinstance(content, dict):
        raise FunitelError(f"{api.url} gives an answer that funitel cannot read")
    return content


def list_of(content: Any, name: str, api: Api) -> list[dict[str, Any]]:
    """A list of objects in an answer; raises FunitelError."""
    found = object_of(content, api).get(name)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise FunitelError(f"{api.url} gives an answer that funitel cannot read: it has no list {name}")
    return found


def bytes_text(count: Any) -> str:
    """`1.5 GiB`; a dash where nothing is known."""
    if not isinstance(count, (int, float)) or isinstance(count, bool):
        return "-"
    return next((f"{count / size:.1f} {unit}" for size, unit in _UNITS if count >= size), f"{count:.0f} B")


def span_text(seconds: Any) -> str:
    """`90s`, `5m`, `2h`; a dash where nothing is known."""
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool):
        return "-"
    return next((f"{seconds / size:.0f}{unit}" for size, unit in _SPANS if seconds >= 2 * size), f"{seconds:.0f}s")


def print_table(console: Console, columns: list[str], rows: list[list[str]]) -> None:
    """A table without lines; what cannot be printed is escaped."""
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="")
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number > 0)
    for row in rows:
        table.add_row(*map(one_line, row))
    if console.is_terminal:
        console.print(table)
        return
    widths = [max(len(each[number]) for each in [columns, *rows]) for number in range(len(columns))]
    for row in [columns, *rows]:
        line = "  ".join(one_line(cell).ljust(width) for cell, width in zip(row, widths, strict=True))
        console.print(line.rstrip(), soft_wrap=True)


def stdout() -> Console:
    """The console of stdout."""
    return console_of(sys.stdout)
