"""Weights that lie far from the others of their blocks, kept apart from these in a sparse tensor of differences.

Blocks without them have smaller ranges, and so smaller errors. What is kept apart of a weight is its difference from
what its block stands for, as float16. The idea is that of Inferflow's `delta_tensor_ratio`; layout and choice are
funitel's own.
"""

from dataclasses import dataclass

import torch

from funitel.model_server.quantized.block_formats import BlockFormat

MAX_INPUTS = 1 << 16
"""Inputs of the widest matrix that has outliers: places are 16 bits."""
_LEAST_TOP = 255  # of codes of eight bits


def has_outliers(block_format: BlockFormat, num_inputs: int) -> bool:
    """Whether matrices of a format may have outliers: not those of 8 bits, where errors are small without."""
    return block_format.top < _LEAST_TOP and not block_format.is_symmetric and num_inputs <= MAX_INPUTS


def num_outliers(fraction: float, num_outputs: int, num_inputs: int) -> int:
    """How many weights of a matrix are kept apart."""
    return round(fraction * num_outputs * num_inputs)


@dataclass(frozen=True, slots=True, eq=False)
class Outliers:
    """Differences of some weights of a matrix [outputs, inputs], output by output.

    Attributes:
        starts: [outputs + 1] int64, where those of each output begin, and the end.
        columns: [count] uint16, the input of each, ascending within an output.
        deltas: [count] float16.
    """

    starts: torch.Tensor
    columns: torch.Tensor
    deltas: torch.Tensor

    @property
    def count(self) -> int:
        """How many there are."""
        return self.columns.numel()

    def within(self, first: int, last: int) -> "Outliers":
        """Those of inputs [first, last), which are counted from `first` on."""
        places = self.columns.to(torch.int64)
        is_in = (places >= first) & (places < last)
        before = torch.cat([torch.zeros(1, dtype=torch.int64), is_in.cumsum(0)])
        return Outliers(before[self.starts], (places[is_in] - first).to(torch.uint16), self.deltas[is_in])

    def add_to(self, weights: torch.Tensor) -> None:
        """Add them to weights [outputs, inputs] float32, in place."""
        outputs = torch.repeat_interleave(torch.arange(len(weights)), self.starts.diff())
        weights[outputs, self.columns.to(torch.int64)] += self.deltas.float()


def split(
    weights: torch.Tensor, block_format: BlockFormat, count: int, *, is_inferflow: bool = False
) -> tuple[torch.Tensor, Outliers]:
    """Weights [outputs, inputs] as blocks, see `BlockFormat.encode`, and `count` outliers.

    The error of a block grows with the square of the range of its weights. So many weights at either end of each block
    are left out that the squares of all ranges together become as small as they can; they have the place of the
    nearest of the others where the block is encoded. Inputs are whole blocks of a format that `has_outliers`.
    """
    size = block_format.num_inputs
    blocks = weights.float().reshape(-1, size)
    ordered, order = blocks.sort(dim=1, stable=True)
    most = max(4, size // 16)  # outliers of a block that are thought of: in the mean there is one of twenty weights
    squares = torch.stack([_ranges(ordered, out).amin(0).square_() for out in range(most + 1)], dim=1)
    chosen = _slopes(squares[:, :1] - squares).flatten().argsort(descending=True, stable=True)[:count]
    counts = torch.bincount(chosen // most, minlength=len(blocks))
    below = torch.zeros_like(counts)  # of those of a block, how many are its smallest
    for out in range(1, most + 1):
        which = (counts == out).nonzero()[:, 0]
        below[which] = _ranges(ordered[which], out).argmin(0)
    ranks = torch.empty_like(order).scatter_(1, order, torch.arange(size).expand_as(order))
    last = size - 1 - (counts - below)
    is_apart = (ranks < below[:, None]) | (ranks > last[:, None])
    inner = blocks.clamp(ordered.gather(1, below[:, None]), ordered.gather(1, last[:, None]))
    encoded = block_format.encode(inner.reshape(weights.shape), is_inferflow=is_inferflow)
    outputs, columns = is_apart.reshape(weights.shape).nonzero(as_tuple=True)
    deltas = weights[outputs, columns].float() - block_format.decode(encoded, weights.shape[1])[outputs, columns]
    starts = torch.zeros(len(weights) + 1, dtype=torch.int64)
    starts[1:] = torch.bincount(outputs, minlength=len(weights)).cumsum(0)
    return encoded, Outliers(starts, columns.to(torch.uint16), deltas.half())


def _ranges(ordered: torch.Tensor, out: int) -> torch.Tensor:
    """The range of blocks, in order, without the i smallest and out - i largest weights: [out + 1, blocks]."""
    size = ordered.shape[1]
    return torch.stack([ordered[:, size - 1 - (out - below)] - ordered[:, below] for below in range(out + 1)])


def _slopes(savings: torch.Tensor) -> torch.Tensor:
    """What each further outlier of a block saves, where the next ones count with it that only save together.

    Args:
        savings: of none, one, two and so on, [blocks, most + 1].

    Returns:
        [blocks, most], not ascending: the slopes of the least concave function above the savings.
    """
    most, found = savings.shape[1] - 1, []

    def slope(start: int, end: int) -> torch.Tensor:
        return (savings[:, end] - savings[:, start]) / (end - start)

    for place in range(1, most + 1):
        ends = range(place, most + 1)
        steepest = [torch.stack([slope(start, end) for end in ends]).amax(0) for start in range(place)]
        found.append(torch.stack(steepest).amin(0))
    return torch.stack(found, dim=1)
