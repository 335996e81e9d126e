"""Adapters of the fused step: their weights as the engine reads them, which a step is told by address."""

import ctypes
from array import array
from collections.abc import Mapping

import torch

from funitel.model_server.adapters.peft_folder import AdapterTensors
from funitel.model_server.adapters.registry import AdapterBase
from funitel.model_server.adapters.sites import Site, SiteTensors, base_modules, max_elements, tensors_of
from funitel.model_server.cpu.huge_pages import HugePages
from funitel.model_server.cpu.native import AdapterRecord, PieceRecord, SiteRecord, TableRecord
from funitel.model_server.cpu.precision import MatrixKind
from funitel.model_server.cpu.program import Program
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.spec.model_spec import ModelSpec

_KINDS = {
    torch.float32: MatrixKind.FLOAT32,
    torch.float16: MatrixKind.FLOAT16,
    torch.bfloat16: MatrixKind.BFLOAT16,
}
PANEL_OUTPUTS = 16  # outputs that a panel of a matrix has
SiteParts = Mapping[int, tuple[Site, ...]]


class FusedAdapter:
    """An adapter's weights in the precision of its file, and the record that the engine reads.

    Args:
        sites: the parts of matrices that take adapters, by the index of the matrix.
        table: the embedding.
        adapter: what was read.
    """

    def __init__(self, sites: SiteParts, table: Site, adapter: AdapterTensors) -> None:
        self.num_bytes = 0
        self._dtype = adapter.dtype
        padding = sum(2 * PANEL_OUTPUTS * pair.a.shape[0] for pair in adapter.low_ranks.values())
        self._numbers = HugePages((adapter.num_elements + padding) * self._dtype.itemsize)
        self._kept: list[object] = []  # what the record points to
        records = (SiteRecord * (max(sites) + 1))()
        for index, parts in sites.items():
            found = [tensors_of(site, adapter) for site in parts]
            if any(each is not None for each in found):
                records[index] = self._site(found)
        self._kept.append(records)
        kept_table = self._table(tensors_of(table, adapter))
        record = AdapterRecord(ctypes.addressof(records), kept_table, _KINDS[adapter.dtype])
        self._kept.append(record)
        self.address = ctypes.addressof(record)

    def _site(self, parts: list[SiteTensors | None]) -> SiteRecord:
        """One matrix: its parts, such as gate and up, have ranks one after the other."""
        rows: list[torch.Tensor] = []
        pieces: list[PieceRecord] = []
        scales: list[float] = []
        whole: torch.Tensor | None = None
        for number, part in enumerate(parts):
            if part is None:
                continue
            whole = part.whole if whole is None else whole
            first = sum(map(len, rows))
            rows += [] if part.a is None else [part.a]
            scales += [0.0] * (0 if part.a is None else len(part.a))
            for piece in part.pieces:
                panels = panels_of(piece.b, piece.first_output)
                num_panels, rank, _ = panels.shape
                first_panel = piece.first_output // PANEL_OUTPUTS
                b = self._hold(panels)
                begin = first + piece.first_rank
                pieces.append(PieceRecord(b, begin, rank, number, first_panel, num_panels))
                scales[begin : begin + rank] = [piece.scale] * rank
        listed, scaled = (PieceRecord * len(pieces))(*pieces), (ctypes.c_float * len(scales))(*scales)
        self._kept += [listed, scaled]
        a = torch.cat([row.to(self._dtype) for row in rows]) if rows else None
        num_ranks = 0 if a is None else a.shape[0]
        places = self._hold(a), ctypes.addressof(scaled), ctypes.addressof(listed), self._hold(whole)
        return SiteRecord(*places, num_ranks, len(pieces))

    def _table(self, tensors: SiteTensors | None) -> TableRecord:
        if tensors is None:
            return TableRecord()
        if tensors.a is None:
            return TableRecord(whole=self._hold(tensors.whole))
        [piece] = tensors.pieces
        a, b = self._hold(tensors.a.t()), self._hold(piece.b.t())
        return TableRecord(a, b, self._hold(tensors.whole), piece.scale, piece.b.shape[1])

    def _hold(self, tensor: torch.Tensor | None) -> int | None:
        """The address of a tensor's numbers in memory of its own."""
        if tensor is None:
            return None
        own = tensor.to(self._dtype)
        self.num_bytes += own.numel() * own.element_size()
        return self._numbers.place(own)


def panels_of(b: torch.Tensor, first_output: int) -> torch.Tensor:
    """Returns `b` [outputs, rank] in panels of the matrix, [panels, rank, 16]; outputs that are not its own have zeros.

    Args:
        b: the outputs of a matrix from `first_output` on.
        first_output: of the matrix.
    """
    count, rank = b.shape
    before = first_output % PANEL_OUTPUTS
    num_panels = -(-(before + count) // PANEL_OUTPUTS)
    padded = torch.nn.functional.pad(b, (0, 0, before, num_panels * PANEL_OUTPUTS - before - count))
    return padded.view(num_panels, PANEL_OUTPUTS, rank).transpose(1, 2)


def addresses(batch: ForwardBatch) -> "array[int]":
    """Where the record of each row's adapter is; 0 for rows without one."""
    found = array("Q")
    for row in batch.rows:
        weights = None if row.adapter is None else row.adapter.weights
        assert weights is None or isinstance(weights, FusedAdapter)
        found.append(0 if weights is None else weights.address)
    return found


def adapter_base(spec: ModelSpec, program: Program, parallel: TensorParallel, prefix: str) -> AdapterBase:
    """What takes adapters of a fused decoder; `prefix` is that of its tensors' names."""
    rows = parallel.split(spec.vocab_size)
    head = Site(((spec.names.head, spec.vocab_size, rows),), spec.hidden_size, is_head=True)
    embedding = (prefix + spec.names.embedding, spec.hidden_size, (0, spec.hidden_size))
    table = Site((embedding,), spec.vocab_size, rows, is_table=True)
    sites = program.sites | ({program.head: (head,)} if spec.is_last else {})
    every = [site for parts in sites.values() for site in parts]
    every += [table] if spec.is_first else []
    padding = 2 * PANEL_OUTPUTS * sum(len(site.parts) for site in every)
    return AdapterBase(
        modules=base_modules(every, prefix),
        place=lambda adapter: FusedAdapter(sites, table, adapter),
        max_bytes=lambda rank: (max_elements(every, rank) + padding * rank) * torch.float32.itemsize,
    )
