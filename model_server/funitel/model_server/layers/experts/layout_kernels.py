"""Sort the rows of a step by expert on the device: tiles of rows that all pass one expert.

A pair is a token and one of its chosen experts; pair i belongs to token i // num_chosen. The pairs of an expert begin a
tile of their own, and what they leave of their last tile is -1. The number of tiles is the worst case for that number
of pairs, so launches depend on shapes alone; tiles without pairs are marked.
Source: `moe_align_block_size` of vLLM.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from funitel.model_server.device.dependent_kernels import dependent, wait_for_previous

_MAX_KERNEL_PAIRS = 2048  # each program reads all of them; torch sorts more
_COUNTED = 8192  # comparisons of a turn of the loop that counts the pairs of each expert
_FEW_PAIRS, _PAIRS_AT_ONCE = 64, 1024  # of a turn of the other loops; two sizes, as each is compiled


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLayout:
    """Pairs of tokens and experts, sorted by expert."""

    pairs: torch.Tensor  # [num_tiles, rows] int32: the pair in each row of a tile, or -1
    experts: torch.Tensor  # [num_tiles] int32: the expert of a tile, counted from the first held one, or -1

    @property
    def num_rows(self) -> int:
        """Rows of a tile."""
        return self.pairs.shape[1]


def max_tiles(num_pairs: int, num_experts: int, num_rows: int) -> int:
    """Tiles of `num_rows` pairs that are needed at most: whole ones, and one that is not whole for each expert."""
    return min(num_pairs, num_experts) + num_pairs // num_rows


def lay_out(chosen: torch.Tensor, held: range, num_rows: int) -> ExpertLayout:
    """Sort pairs by expert; of one expert, by their numbers.

    Args:
        chosen: experts of the tokens, [num_tokens, num_chosen] int64.
        held: the experts of this rank, at least one; pairs of others are in no tile.
        num_rows: of a tile.
    """
    num_pairs = chosen.numel()
    num_tiles = max_tiles(num_pairs, len(held), num_rows)
    if num_pairs > _MAX_KERNEL_PAIRS:
        return sort_pairs(chosen, held, num_rows)
    pairs = torch.empty((num_tiles, num_rows), dtype=torch.int32, device=chosen.device)
    experts = torch.empty(num_tiles, dtype=torch.int32, device=chosen.device)
    padded = triton.next_power_of_2(len(held))
    lay_out_expert[(len(held),)](
        chosen,
        pairs,
        experts,
        num_pairs,
        num_tiles,
        held.start,
        NUM_EXPERTS=len(held),
        PADDED_EXPERTS=padded,
        ROWS=num_rows,
        COUNTED_AT_ONCE=max(1, min(_COUNTED // padded, _FEW_PAIRS)),
        PAIRS_AT_ONCE=_FEW_PAIRS if num_pairs <= _FEW_PAIRS else _PAIRS_AT_ONCE,
        IS_DENSE=num_pairs >= len(held),
        **dependent(),
    )
    return ExpertLayout(pairs, experts)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles", "first_held"])
def lay_out_expert(
    chosen,
    pairs,
    tile_experts,
    num_pairs,
    num_tiles,
    first_held,
    NUM_EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COUNTED_AT_ONCE: tl.constexpr,
    PAIRS_AT_ONCE: tl.constexpr,
    IS_DENSE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """The tiles of one expert.

    With fewer pairs than experts, tiles follow one another, so each program counts the pairs of every expert. Otherwise
    there is a tile to spare for each expert: expert e begins at tile s // ROWS + e, where s are the pairs of experts
    before it, and ends before the next one begins, as ceil(n / ROWS) <= (s + n) // ROWS - s // ROWS + 1.
    """
    expert = tl.program_id(0)
    wait_for_previous(IS_DEPENDENT)
    if IS_DENSE:
        before = tl.zeros([PAIRS_AT_ONCE], tl.int32)
        same = tl.zeros([PAIRS_AT_ONCE], tl.int32)
        for at in range(0, num_pairs, PAIRS_AT_ONCE):
            each = _experts_of(chosen, at + tl.arange(0, PAIRS_AT_ONCE), num_pairs, first_held)
            before += ((each >= 0) & (each < expert)).to(tl.int32)
            same += (each == expert).to(tl.int32)
        num_before, num_own = tl.sum(before, 0), tl.sum(same, 0)
        first = num_before // ROWS + expert
        own = (num_own + ROWS - 1) // ROWS
        end = (num_before + num_own) // ROWS + expert + 1
    else:
        experts = tl.arange(0, PADDED_EXPERTS)
        is_hit = tl.zeros([COUNTED_AT_ONCE, PADDED_EXPERTS], tl.int32)
        for at in range(0, num_pairs, COUNTED_AT_ONCE):
            each = _experts_of(chosen, at + tl.arange(0, COUNTED_AT_ONCE), num_pairs, first_held)
            is_hit += (each[:, None] == experts[None, :]).to(tl.int32)
        tiles = (tl.sum(is_hit, 0) + ROWS - 1) // ROWS
        first = tl.sum(tl.where(experts < expert, tiles, 0), 0)
        own = tl.sum(tl.where(experts == expert, tiles, 0), 0)
        end = first + own
    if expert == NUM_EXPERTS - 1:
        end = num_tiles
    target = pairs + first * ROWS
    num_placed = 0
    for at in range(0, num_pairs, PAIRS_AT_ONCE):
        place = at + tl.arange(0, PAIRS_AT_ONCE)
        is_own = (_experts_of(chosen, place, num_pairs, first_held) == expert).to(tl.int32)
        tl.store(target + num_placed + tl.cumsum(is_own, 0) - 1, place, mask=is_own > 0)
        num_placed += tl.sum(is_own, 0)
    row = (own - 1) * ROWS + tl.arange(0, ROWS)  # of the last tile
    tl.store(target + row, tl.full([ROWS], -1, tl.int32), mask=row >= num_placed)
    for tile in range(first, first + own):
        tl.store(tile_experts + tile, expert)
    for tile in range(first + own, end):
        tl.store(tile_experts + tile, -1)


@triton.jit
def _experts_of(chosen, place, num_pairs, first_held):
    """The experts of pairs, counted from the first held one; negative beyond the last pair and for those before it."""
    each = tl.load(chosen + place, mask=place < num_pairs, other=-1).to(tl.int32)
    return tl.where(each >= 0, each - first_held, -1)


def sort_pairs(chosen: torch.Tensor, held: range, num_rows: int) -> ExpertLayout:
    """What the kernel computes, by torch's operations; arguments as of `lay_out`.

    Rows of tiles without pairs are -1 here, and any number where the kernel computes.
    """
    num_pairs, device = chosen.numel(), chosen.device
    sorted_experts, order = chosen.flatten().sort(stable=True)
    starts = torch.searchsorted(sorted_experts, torch.arange(held.start, held.stop + 1, device=device))
    sizes = starts.diff()
    ends = ((sizes + num_rows - 1) // num_rows).cumsum(0)  # of the tiles of each expert
    tiles = torch.arange(max_tiles(num_pairs, len(held), num_rows), device=device)
    experts = torch.searchsorted(ends, tiles, right=True)
    is_used = experts < len(held)
    own = experts.clamp(max=len(held) - 1)
    first = tiles - (ends[own] - (sizes[own] + num_rows - 1) // num_rows)  # tiles of the expert before
    rows = first[:, None] * num_rows + torch.arange(num_rows, device=device)
    is_pair = (rows < sizes[own, None]) & is_used[:, None]
    places = (starts[own, None] + rows).clamp(max=num_pairs - 1)
    pairs = torch.where(is_pair, order[places], -1).to(torch.int32)
    return ExpertLayout(pairs, torch.where(is_used, experts, -1).to(torch.int32))
