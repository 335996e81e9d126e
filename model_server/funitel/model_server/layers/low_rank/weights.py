"""An adapter's weights in torch, in the precision and on the device of the base."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from funitel.model_server.adapters.peft_folder import AdapterTensors
from funitel.model_server.adapters.registry import PlacedAdapter
from funitel.model_server.adapters.sites import Site, SiteTensors, tensors_of
from funitel.model_server.layers.linear import Matmul


@dataclass(frozen=True, slots=True)
class LowRankSite:
    """An adapter's weights of a site."""

    shrink: Matmul | None
    table: torch.Tensor | None  # [inputs, ranks] in place of `shrink`, of a table
    expand: tuple[tuple[slice, slice, Matmul], ...]  # outputs, ranks and the matrix between
    whole: Matmul | None
    whole_table: torch.Tensor | None

    @classmethod
    def of(cls, tensors: SiteTensors, dtype: torch.dtype, device: torch.device, *, is_table: bool) -> "LowRankSite":
        """The weights in the precision of the base, on its device."""

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device=device, dtype=dtype).contiguous()

        a, whole = tensors.a, tensors.whole
        pieces = tensors.pieces if a is not None else ()
        return cls(
            None if a is None or is_table else Matmul(kept(a)),
            kept(a.t()) if a is not None and is_table else None,
            tuple(
                (
                    slice(piece.first_output, piece.first_output + piece.b.shape[0]),
                    slice(piece.first_rank, piece.first_rank + piece.b.shape[1]),
                    Matmul(kept(piece.b.float() * piece.scale)),
                )
                for piece in pieces
            ),
            None if whole is None or is_table else Matmul(kept(whole)),
            kept(whole) if whole is not None and is_table else None,
        )

    def base(self, x: torch.Tensor) -> torch.Tensor | None:
        """What takes the place of the base's outputs of rows, if anything."""
        if self.whole_table is not None:
            return F.embedding(x, self.whole_table)
        return None if self.whole is None else self.whole(x)

    def shrunk(self, x: torch.Tensor) -> torch.Tensor | None:
        """Rows times `a`, [rows, ranks]."""
        if self.table is not None:
            return F.embedding(x, self.table)
        return None if self.shrink is None else self.shrink(x)


class LowRankWeights:
    """An adapter's weights by the number of their site, of `num_sites` sites in all.

    `records` are addresses and sizes of the weights for kernels, where they were made (`records.records_of`).
    """

    def __init__(self, sites: Mapping[int, LowRankSite], num_sites: int, num_bytes: int) -> None:
        self.sites = sites
        self.num_sites = num_sites
        self.num_bytes = num_bytes
        self.records: torch.Tensor | None = None


def weights_of(adapter: PlacedAdapter) -> LowRankWeights:
    """The weights of an adapter of the torch decoder."""
    weights = adapter.weights
    assert isinstance(weights, LowRankWeights)
    return weights


def place(sites: Sequence[Site], adapter: AdapterTensors, dtype: torch.dtype, device: torch.device) -> LowRankWeights:
    """An adapter's weights of this rank."""
    found: dict[int, LowRankSite] = {}
    num_elements = 0
    for number, site in enumerate(sites):
        tensors = tensors_of(site, adapter)
        if tensors is not None:
            found[number] = LowRankSite.of(tensors, dtype, device, is_table=site.is_table)
            kept = [tensors.a, tensors.whole, *(piece.b for piece in tensors.pieces)]
            num_elements += sum(each.numel() for each in kept if each is not None)
    return LowRankWeights(found, len(sites), num_elements * dtype.itemsize)
