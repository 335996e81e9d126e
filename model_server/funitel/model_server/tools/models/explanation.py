"""`funitel models MODEL --explain`: every option for a model with its reason, and the one to take; a table or JSON."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table
from rich.text import Text

from funitel.model_server.hub import resolve
from funitel.model_server.hub.headers import fetch_headers
from funitel.model_server.settings import ModelsSettings
from funitel.model_server.settings.catalogue import CATALOGUE
from funitel.model_server.tools.models.options import Option, Suggestion, options_of, size, suggest

_WIDTH = 160  # columns of the table where it is not for a terminal


@dataclass(frozen=True, slots=True)
class Explanation:
    """The options for a model, and the one to take if any is usable."""

    model: str
    suggested: Suggestion | None
    options: Sequence[Option]

    def as_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self))


def explain(settings: ModelsSettings) -> Explanation:
    """Explain the options for a model, from headers: weights are neither read nor fetched from the hub.

    Raises:
        StartupError: there is no such model, its files are damaged, or the hub cannot be reached.
    """
    with _headers(settings) as folder:
        options = options_of(settings, folder)
    return Explanation(settings.model_id, suggest(options, settings.num_shard), options)


def suggestion_of(settings: ModelsSettings) -> Suggestion | None:
    """What `--engine`, `--quantize` and `--dtype` are to be where a user gives none; None where nothing is usable.

    Raises: as `explain`.
    """
    return explain(settings).suggested


def tell_options(settings: ModelsSettings) -> tuple[str, bool]:
    """The page or the JSON object, and whether any option is usable."""
    found = explain(settings)
    return found.as_json() if settings.json else _page(found), found.suggested is not None


@contextmanager
def _headers(settings: ModelsSettings) -> Iterator[Path]:
    """A folder with the headers of a model: its own, or one made of the hub's. A catalogue's model is fetched once."""
    if Path(settings.model_id).expanduser().exists() or settings.model_id in CATALOGUE:
        yield resolve.resolve(settings.model_id, revision=settings.revision, cache_dir=settings.cache_dir).folder
        return
    with TemporaryDirectory(prefix="funitel-headers-") as folder:
        yield fetch_headers(settings.model_id, settings.revision, Path(folder))


def _page(found: Explanation) -> str:
    console = Console(width=_WIDTH, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("engine", "format", "quantize", "dtype", "device", "usable", "memory", "reason"):
        table.add_column(head, overflow="fold", no_wrap=head != "reason")
    for each in found.options:
        table.add_row(
            each.engine,
            each.format,
            each.quantize or "-",
            each.dtype or "-",
            each.device,
            "yes" if each.usable else "no",
            "-" if each.bytes is None else size(each.bytes),
            Text(each.reason),  # brackets are no markup
        )
    with console.capture() as captured:
        console.print(table)
        console.print(Text(_advice(found)), soft_wrap=True)
    return captured.get().rstrip()


def _advice(found: Explanation) -> str:
    best = found.suggested
    if best is None:
        return "suggested: nothing, no option is usable"
    flags = [f"--engine {best.engine}", f"--device {best.device}"]
    flags += [f"--quantize {best.quantize}"] if best.quantize else []
    flags += [f"--dtype {best.dtype}"] if best.dtype else []
    return f"suggested: {' '.join(flags)}: {best.reason}"
