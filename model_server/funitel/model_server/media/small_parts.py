"""Compute in small parts: functions of torch that take long are cut, and something is called between all of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from funitel.model_server.media.interface import Yield

MAX_OPERATIONS = 1 << 28
"""Multiplications and additions of a part: some milliseconds of two cores."""
MIN_ROWS = 16  # of a matrix product: fewer would read the weights too often


class SmallParts(TorchFunctionMode):
    """Inside, `pause` is called before each function of torch, and between the parts of long ones.

    Matrix products with weights, attention and convolutions of patches are cut along their rows: the results are the
    same up to rounding, and the same wherever they are computed, for the cuts depend on shapes alone.
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
        cut = _CUTS.get(func)
        parts = None if cut is None else cut(*args, **kwargs)
        if parts is None:
            return func(*args, **kwargs)
        dim, calls = parts
        found = []
        for own_args, own_kwargs in calls:
            self._pause()
            found.append(func(*own_args, **own_kwargs))
        return torch.cat(found, dim)


_Parts = tuple[int, list[tuple[Sequence[Any], Mapping[str, Any]]]]
"""The dimension along which results are joined, and the arguments of the parts."""


def _rows_of(num_rows: int, operations_of_row: int) -> int | None:
    """Rows of a part; None where all of them are one."""
    rows = max(MIN_ROWS, MAX_OPERATIONS // max(1, operations_of_row))
    return None if num_rows <= rows else rows


def _cut_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> _Parts | None:
    """Along the longest of the dimensions before the last."""
    if input.dim() < 2:
        return None
    dim = max(range(input.dim() - 1), key=lambda each: input.shape[each])
    others = input.shape[:-1].numel() // max(1, input.shape[dim])
    rows = _rows_of(input.shape[dim], 2 * weight.numel() * others)
    return None if rows is None else (dim, [((part, weight, bias), {}) for part in torch.split(input, rows, dim)])


def _cut_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: Any,
) -> _Parts | None:
    if is_causal or dropout_p:
        return None
    heads = query.shape[:-2].numel()
    num_rows, size = query.shape[-2:]
    rows = _rows_of(num_rows, 4 * heads * size * key.shape[-2])
    if rows is None:
        return None
    queries = torch.split(query, rows, -2)
    masks = [attn_mask] * len(queries)
    if attn_mask is not None and attn_mask.dim() > 1 and attn_mask.shape[-2] == num_rows:
        masks = list(torch.split(attn_mask, rows, -2))
    return -2, [((part, key, value), {"attn_mask": mask, **others}) for part, mask in zip(queries, masks, strict=True)]


def _cut_convolution(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> _Parts | None:
    """One of patches: along images, or of one image along its rows of patches."""
    size = tuple(weight.shape[2:])
    steps = tuple(stride) if isinstance(stride, list | tuple) else (stride,) * len(size)
    if input.dim() != weight.dim() or groups != 1:
        return None
    more = {"stride": stride, "padding": padding, "dilation": dilation}
    num_places = input.shape[2:].numel() // max(1, weight.shape[2:].numel())
    if len(input) > 1:
        rows = max(1, MAX_OPERATIONS // max(1, 2 * weight.numel() * num_places))
        return None if rows >= len(input) else (0, [((part, weight, bias), more) for part in torch.split(input, rows)])
    is_plain = padding in (0, (0, 0), [0, 0], "valid") and dilation in (1, (1, 1), [1, 1])
    if input.dim() != 4 or size != steps or not is_plain:
        return None
    rows = max(1, MAX_OPERATIONS // max(1, 2 * weight.numel() * (input.shape[3] // size[1])))
    num_rows = input.shape[2] // size[0]
    if num_rows <= rows:
        return None
    whole = input[:, :, : num_rows * size[0]]
    return 2, [((part, weight, bias), more) for part in torch.split(whole, rows * size[0], 2)]


def _cut_channels(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *others: Any, **named: Any
) -> _Parts | None:
    """One along a sound: by the channels that come out."""
    if input.dim() != 3 or named.get("groups", 1) != 1 or len(others) > 3:
        return None
    rows = max(MIN_ROWS, MAX_OPERATIONS // max(1, 2 * weight[0].numel() * input.shape[2] * len(input)))
    if len(weight) <= rows:
        return None
    weights = torch.split(weight, rows)
    biases = [None] * len(weights) if bias is None else list(torch.split(bias, rows))
    return 1, [((input, part, own, *others), named) for part, own in zip(weights, biases, strict=True)]


_CUTS: Mapping[Any, Callable[..., _Parts | None]] = {
    functional.linear: _cut_linear,
    functional.scaled_dot_product_attention: _cut_attention,
    functional.conv1d: _cut_channels,
    functional.conv2d: _cut_convolution,
    functional.conv3d: _cut_convolution,
}
