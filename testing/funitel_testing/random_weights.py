"""A model's weights without a checkpoint: whatever tensor is asked for, drawn by its name."""

from collections.abc import Sequence
from zlib import crc32

import torch

from funitel.model_server.checkpoint.storage import Range
from funitel.model_server.checkpoint.weights import Weights


class RandomWeights(Weights):
    """Tensors of whatever name and shape is asked for, the same for every rank, made on `device`.

    `deviation` is theirs; None: such that a layer keeps the size of its inputs, with norms near one.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        device: torch.device = torch.device("cpu"),  # noqa: B008
        deviation: float | None = 0.3,
    ) -> None:
        self.dtype, self.device, self.prefix, self.quantization = dtype, device, "model.", None
        self.held_bytes = self.sharded_bytes = self.total_sharded_bytes = 0
        self.takes_blocks, self.scales_kv, self.products = (lambda kind: False), False, None
        self._files, self._storages, self._blocks = {}, {}, None
        self._deviation = deviation

    def read(
        self,
        name: str,
        shape: Sequence[int],
        *,
        rows: Range | None = None,
        columns: Range | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See Weights."""
        generator = torch.Generator(self.device).manual_seed(crc32(name.encode()))
        values = torch.randn(*shape, generator=generator, device=self.device, dtype=dtype or self.dtype)
        if self._deviation is not None:
            values *= self._deviation
        elif len(shape) == 1:
            values = 1 + 0.1 * values
        else:
            values *= shape[-1] ** -0.5
        values = values if rows is None else values[slice(*rows)]
        values = (values if columns is None else values[:, slice(*columns)]).contiguous()
        self.held_bytes += values.numel() * values.element_size()
        return values

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Every shape is right."""

    def finish(self, ignored: Sequence[str]) -> None:
        """There are no others."""
