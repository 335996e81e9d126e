"""Compute in small parts: functions of torch that take long are cut, and something is called between all of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from funitel.model_server.media.interface import Yield

MAX_OPERATIONS = 1 << 27
"""Multiplications and additions of a part: about a millisecond of two cores."""
MAX_ELEMENTS = 1 << 19  # of a part of an activation function: as long
TILE_ROWS = 256
"""Rows of a part of a matrix product, with some of its columns: few rows with all of them take a fifth longer."""
TILE_COLUMNS = 128  # a multiple of which a part has
MIN_QUERIES = 16  # of a part of attention: fewer would read the keys too often


class SmallParts(TorchFunctionMode):
    """Inside, `pause` is called before each function of torch, and between the parts of long ones. Inference only.

    Matrix products with weights, attention, convolutions and activations are cut: the results are the same up to
    rounding, and the same wherever they are computed, for the cuts depend on shapes alone.
    """

    def __init__(self, pause: Yield) -> None:
        super().__init__()
        self._pause = pause

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute one function."""
        kwargs = kwargs or {}
        self._pause()
        compute = _CUTS.get(func)
        found = None if compute is None else compute(self._pause, *args, **kwargs)
        return func(*args, **kwargs) if found is None else found


def _tiles(num_rows: int, num_columns: int, num_inputs: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of the parts of a product of matrices."""
    rows = min(num_rows, TILE_ROWS)
    columns = max(1, MAX_OPERATIONS // (2 * num_inputs * rows) // TILE_COLUMNS) * TILE_COLUMNS
    for column in range(0, num_columns, columns):
        for row in range(0, num_rows, rows):
            yield slice(row, row + rows), slice(column, column + columns)


def _linear(
    pause: Yield, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    if input.dim() < 2 or weight.dim() != 2 or input.device.type != "cpu":
        return None
    rows = input.reshape(-1, input.shape[-1])
    if 2 * len(rows) * weight.numel() <= MAX_OPERATIONS:
        return None
    found = rows.new_empty(len(rows), len(weight))
    for own, columns in _tiles(len(rows), *weight.shape):
        pause()
        part = weight[columns].t()
        if bias is None:
            torch.mm(rows[own], part, out=found[own, columns])
        else:
            torch.addmm(bias[columns], rows[own], part, out=found[own, columns])
    return found.view(*input.shape[:-1], len(weight))


def _attention(
    pause: Yield,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: Any,
) -> torch.Tensor | None:
    """By heads, and by the queries of a head."""
    if is_causal or dropout_p or query.dim() != 4 or query.shape[1] != key.shape[1]:
        return None
    num_batches, num_heads, num_queries, size = query.shape
    of_query = 4 * size * key.shape[-2]  # operations
    most = 2 * MAX_OPERATIONS  # a head that is as long is faster whole
    rows = min(num_queries, max(MIN_QUERIES, most // of_query))
    heads = min(num_heads, max(1, most // (of_query * rows)))
    if num_batches * num_heads * num_queries * of_query <= most:
        return None
    found = query.new_empty(num_batches, num_queries, num_heads, value.shape[-1]).transpose(
        1, 2
    )  # as one that is whole
    for batch in range(num_batches):
        for head in range(0, num_heads, heads):
            for row in range(0, num_queries, rows):
                pause()
                one, some, own = slice(batch, batch + 1), slice(head, head + heads), slice(row, row + rows)
                mask = None if attn_mask is None else _mask_of(attn_mask, one, some, own)
                found[one, some, own] = functional.scaled_dot_product_attention(
                    query[one, some, own], key[one, some], value[one, some], mask, **others
                )
    return found


def _mask_of(mask: torch.Tensor, batches: slice, heads: slice, queries: slice) -> torch.Tensor:
    """The part of a mask that is broadcast to [batches, heads, queries, keys]."""
    mask = mask[(None,) * (4 - mask.dim())]
    for dim, part in enumerate((batches, heads, queries)):
        if mask.shape[dim] > 1:
            mask = mask.narrow(dim, part.start, min(part.stop, mask.shape[dim]) - part.start)
    return mask


def _convolution(
    function: Callable[..., torch.Tensor],
    pause: Yield,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> torch.Tensor | None:
    """One of patches becomes a matrix product, with the channels side by side; others are cut along images."""
    size = tuple(weight.shape[2:])
    steps = tuple(stride) if isinstance(stride, list | tuple) else (stride,) * len(size)
    if input.dim() != weight.dim() or groups != 1:
        return None
    places = [length // step for length, step in zip(input.shape[2:], steps, strict=True)]
    operations = 2 * weight.numel() * prod(places)  # of an image
    if operations * len(input) <= MAX_OPERATIONS:
        return None
    is_plain = padding in (0, (0,) * len(size), [0] * len(size), "valid")
    if size == steps and is_plain and dilation in (1, (1,) * len(size), [1] * len(size)):
        rows = _patches(input, places, size)
        found = _linear(pause, rows, weight.flatten(1), bias)
        return None if found is None else found.view(len(input), *places, len(weight)).movedim(-1, 1)
    images = max(1, MAX_OPERATIONS // operations)
    if images >= len(input):
        return None
    parts = []
    for part in torch.split(input, images):
        pause()
        parts.append(function(part, weight, bias, stride, padding, dilation))
    return torch.cat(parts)


def _patches(input: torch.Tensor, places: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """The patches of images, row by row: [images * places, values of a patch]."""
    num_dims = len(size)
    for dim, (count, length) in enumerate(zip(places, size, strict=True), 2):
        input = input.narrow(dim, 0, count * length)
    shape = [each for pair in zip(places, size, strict=True) for each in pair]
    first = range(2, 2 + 2 * num_dims, 2)
    cut = input.reshape(*input.shape[:2], *shape).permute(0, *first, 1, *[each + 1 for each in first])
    return cut.reshape(-1, input.shape[1] * prod(size))


def _channels(
    pause: Yield,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *others: Any,
    **named: Any,
) -> torch.Tensor | None:
    """A convolution along sounds: by the channels that come out."""
    if input.dim() != 3 or named.get("groups", 1) != 1 or len(others) > 3:
        return None
    rows = max(16, MAX_OPERATIONS // max(1, 2 * weight[0].numel() * input.shape[2] * len(input)))
    if len(weight) <= rows:
        return None
    found = []
    for first in range(0, len(weight), rows):
        pause()
        own = slice(first, first + rows)
        found.append(functional.conv1d(input, weight[own], None if bias is None else bias[own], *others, **named))
    return torch.cat(found, 1)


def _gelu(pause: Yield, input: torch.Tensor, approximate: str = "none") -> torch.Tensor | None:
    """That by tanh takes as long as a matrix product."""
    if input.numel() <= MAX_ELEMENTS or not input.is_contiguous():
        return None
    found = torch.empty_like(input)
    parts = [torch.split(each.view(-1), MAX_ELEMENTS) for each in (input, found)]
    for part, out in zip(*parts, strict=True):
        pause()
        torch.ops.aten.gelu.out(part, approximate=approximate, out=out)
    return found


_CUTS: Mapping[Any, Callable[..., torch.Tensor | None]] = {
    functional.linear: _linear,
    functional.scaled_dot_product_attention: _attention,
    functional.conv1d: _channels,
    functional.conv2d: partial(_convolution, functional.conv2d),
    functional.conv3d: partial(_convolution, functional.conv3d),
    functional.gelu: _gelu,
}
