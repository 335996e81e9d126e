"""Adapters in torch: what the rows of a step that have one add to the outputs of a layer, grouped by adapter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from funitel.model_server.adapters.peft_folder import AdapterTensors
from funitel.model_server.adapters.sites import Site, SiteTensors, tensors_of
from funitel.model_server.forward.batch import AdapterGroup, ForwardBatch
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
    """An adapter's weights by the number of their site; `records` is what kernels are told of them."""

    def __init__(self, sites: Mapping[int, LowRankSite], num_bytes: int) -> None:
        self.sites = sites
        self.num_bytes = num_bytes
        self.records: torch.Tensor | None = None


def weights_of(group: AdapterGroup) -> LowRankWeights:
    """The weights of a group's adapter."""
    weights = group.adapter.weights
    assert isinstance(weights, LowRankWeights)
    return weights


class TorchLowRankOps:
    """Adds the adapters of a step's rows, one adapter after the other. A row's result does not depend on the others."""

    groups: Sequence[AdapterGroup] = ()

    def begin(self, groups: Sequence[AdapterGroup]) -> None:
        """A step begins, with these rows."""
        self.groups = groups

    def end(self) -> None:
        """The step is over: hold no adapter any longer."""
        self.groups = ()

    def add(self, number: int, x: torch.Tensor, y: torch.Tensor, *, is_head: bool) -> torch.Tensor:
        """Change outputs `y` of a site for inputs `x`, in place; the rows of the head are those with logits."""
        for group in self.groups:
            own = weights_of(group).sites.get(number)
            rows = group.logits if is_head else group.tokens
            if own is not None and len(rows):
                y[rows] = self._changed(own, x[rows], y[rows])
        return y

    def _changed(self, own: LowRankSite, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        base = own.base(x)
        y = y if base is None else base.to(y.dtype)
        shrunk = own.shrunk(x)
        if shrunk is not None:
            for outputs, ranks, matmul in own.expand:
                y[:, outputs] += matmul(shrunk[:, ranks].contiguous()).to(y.dtype)
        return y


class LowRankStep:
    """The step that is computed: the layers of a decoder share it."""

    def __init__(self, ops: TorchLowRankOps) -> None:
        self.ops = ops
        self.is_on = False  # some row has an adapter

    def begin(self, batch: ForwardBatch) -> None:
        """A step begins."""
        self.is_on = bool(batch.adapters)
        if self.is_on:
            self.ops.begin(batch.adapters)

    def end(self) -> None:
        """The step is over, or has failed: adapters that are unloaded now are free."""
        self.is_on = False
        self.ops.end()


class LowRankDelta:
    """The `Delta` of one site."""

    def __init__(self, step: LowRankStep, number: int, site: Site) -> None:
        self._step = step
        self._number = number
        self._is_head = site.is_head

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        step = self._step
        return step.ops.add(self._number, x, y, is_head=self._is_head) if step.is_on else y


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
    return LowRankWeights(found, num_elements * dtype.itemsize)
