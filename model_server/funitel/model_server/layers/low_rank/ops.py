"""Adapters in torch: what the rows of a step that have one add to the outputs of a layer, grouped by adapter."""

from collections.abc import Sequence
from typing import Protocol

import torch

from funitel.model_server.adapters.sites import Site
from funitel.model_server.forward.batch import AdapterGroup, ForwardBatch
from funitel.model_server.layers.low_rank.recorded import RecordedLowRank
from funitel.model_server.layers.low_rank.weights import LowRankSite, weights_of


class LowRankOps(Protocol):
    """What computes the adapters of a step."""

    def add(self, number: int, x: torch.Tensor, y: torch.Tensor, *, is_head: bool) -> torch.Tensor:
        """Change outputs `y` of a site for inputs `x`, in place; the rows of the head are those with logits."""


class TorchLowRankOps:
    """Adds the adapters of a step's rows, one adapter after the other. A row's result does not depend on the others."""

    groups: Sequence[AdapterGroup] = ()
    is_recordable = False  # whether `recorded` gives anything

    def recorded(self, sites: Sequence[Site], num_rows: int, device: torch.device) -> RecordedLowRank | None:
        """What computes adapters in recorded steps of at most `num_rows` rows; None where nothing does."""
        return None

    def begin(self, groups: Sequence[AdapterGroup]) -> None:
        """A step begins, with these rows."""
        self.groups = groups

    def end(self) -> None:
        """The step is over: hold no adapter any longer."""
        self.groups = ()

    def add(self, number: int, x: torch.Tensor, y: torch.Tensor, *, is_head: bool) -> torch.Tensor:
        """See LowRankOps."""
        for group in self.groups:
            own = weights_of(group.adapter).sites.get(number)
            if own is not None and len(group.logit_places if is_head else group.token_places):
                rows = group.logits if is_head else group.tokens
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
    """The step that is computed: the layers of a decoder share it. `sites` are those of the decoder."""

    def __init__(self, ops: TorchLowRankOps, sites: Sequence[Site]) -> None:
        self.ops = ops
        self.sites = sites
        self.active: LowRankOps | None = None  # None: no row has an adapter

    def begin(self, batch: ForwardBatch, recorded: LowRankOps | None = None) -> None:
        """A step begins; `recorded` computes the adapters of a recorded step."""
        self.active = recorded
        if recorded is None and batch.adapters:
            self.ops.begin(batch.adapters)
            self.active = self.ops

    def end(self) -> None:
        """The step is over, or has failed: adapters that are unloaded now are free."""
        self.active = None
        self.ops.end()


class LowRankDelta:
    """The `OutputDelta` of one site."""

    def __init__(self, step: LowRankStep, number: int, site: Site) -> None:
        self._step = step
        self._number = number
        self._is_head = site.is_head

    @property
    def is_on(self) -> bool:
        """See OutputDelta."""
        return self._step.active is not None

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See OutputDelta."""
        active = self._step.active
        return y if active is None else active.add(self._number, x, y, is_head=self._is_head)
