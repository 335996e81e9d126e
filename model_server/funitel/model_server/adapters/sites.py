"""Where adapters act: the matrices of this rank, made of the checkpoint's, and the parts of adapters for them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from funitel.model_server.adapters.peft_folder import AdapterTensors, BaseModules, LowRank
from funitel.model_server.checkpoint.storage import Part, Range


@dataclass(frozen=True, slots=True)
class Site:
    """A matrix of this rank: rows of layers of the checkpoint side by side, on the same inputs.

    `num_inputs` are those of the whole layers, `columns` this rank's where they are split. A table has the vocabulary
    as inputs. A table and a head may be saved whole.
    """

    parts: tuple[Part, ...]
    num_inputs: int
    columns: Range | None = None
    is_table: bool = False
    is_head: bool = False

    @property
    def modules(self) -> dict[str, int]:
        """The layers, each with the outputs it has whole."""
        return {name: num_outputs for name, num_outputs, _ in self.parts}


@dataclass(frozen=True, slots=True)
class SitePiece:
    """Some outputs of a site and the rows of `a` that they grow by: `b` is [outputs, rank]."""

    first_output: int
    first_rank: int
    b: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class SiteTensors:
    """What an adapter has of a site.

    Attributes:
        a: [ranks, inputs], of all modules of the site; None where there is none.
        pieces: which outputs grow by which ranks.
        whole: what takes the place of the weights: [outputs, inputs], of a table [inputs, outputs].
    """

    a: torch.Tensor | None
    pieces: tuple[SitePiece, ...]
    whole: torch.Tensor | None


def tensors_of(site: Site, adapter: AdapterTensors) -> SiteTensors | None:
    """This rank's part of an adapter for a site; None where the adapter has nothing of it."""
    names = [name for name in site.modules if name in adapter.low_ranks]
    whole = _whole(site, adapter)
    if not names and whole is None:
        return None
    columns = slice(*(site.columns or (None, None)))
    rows: list[torch.Tensor] = []
    first_ranks: dict[str, int] = {}
    for name in names:
        first_ranks[name] = sum(map(len, rows))
        rows.append(adapter.low_ranks[name].a[:, columns])
    return SiteTensors(torch.cat(rows) if rows else None, _pieces(site, adapter.low_ranks, first_ranks), whole)


def _pieces(site: Site, low_ranks: Mapping[str, LowRank], first_ranks: dict[str, int]) -> tuple[SitePiece, ...]:
    pieces: list[SitePiece] = []
    first_output = 0
    for name, _, (begin, end) in site.parts:
        if name in first_ranks:
            b = low_ranks[name].b[begin:end]
            pieces.append(SitePiece(first_output, first_ranks[name], b, low_ranks[name].scale))
        first_output += end - begin
    return tuple(pieces)


def _whole(site: Site, adapter: AdapterTensors) -> torch.Tensor | None:
    """Tables and heads are one layer each."""
    name, _, rows = site.parts[0]
    if name not in adapter.saved or not (site.is_table or site.is_head):
        return None
    return adapter.saved[name][slice(*(site.columns or rows))]


def base_modules(sites: Iterable[Site], prefix: str) -> BaseModules:
    """The layers of all sites, by name."""
    shapes: dict[str, tuple[int, int]] = {}
    tables, heads = set(), set()
    for site in sites:
        for name, num_outputs in site.modules.items():
            shapes[name] = num_outputs, site.num_inputs
            tables |= {name} if site.is_table else set()
            heads |= {name} if site.is_table or site.is_head else set()
    return BaseModules(shapes, frozenset(tables), frozenset(heads), prefix)


def max_elements(sites: Iterable[Site], rank: int) -> int:
    """Elements that an adapter of this rank has at most on this rank, where it saves nothing whole."""
    total = 0
    for site in sites:
        first, last = site.columns or (0, site.num_inputs)
        outputs = sum(end - begin for _, _, (begin, end) in site.parts)
        total += rank * (len(site.modules) * (last - first) + outputs)
    return total
