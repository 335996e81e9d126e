"""Texts of different lengths one behind the other: a batch without padding, sorted so that equal lengths meet."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from funitel.proto.step import EncoderInput


@dataclass(frozen=True, slots=True)
class Group:
    """Texts of the same length that lie one behind the other: from token `start` on, `count` of `length` tokens."""

    start: int
    count: int
    length: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all of them."""
        return self.count * self.length


@dataclass(frozen=True, slots=True)
class Packed:
    """The tokens of a batch, longest texts first.

    `order` is, for each text given, its place here; `starts` [texts] are first tokens, by place here.
    """

    input_ids: torch.Tensor  # [num_tokens]
    type_ids: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens], from 0 in each text
    starts: torch.Tensor
    lengths: torch.Tensor
    order: torch.Tensor
    groups: tuple[Group, ...]


def pack(inputs: Sequence[EncoderInput], device: torch.device) -> Packed:
    """Lay texts out; none may be empty."""
    places = sorted(range(len(inputs)), key=lambda place: -len(inputs[place].input_ids))
    sorted_inputs = [inputs[place] for place in places]
    lengths = [len(text.input_ids) for text in sorted_inputs]
    groups, start = [], 0
    for length, members in groupby(lengths):
        group = Group(start, len(list(members)), length)
        groups.append(group)
        start += group.num_tokens
    lens = torch.tensor(lengths, dtype=torch.int64)
    ends = lens.cumsum(0)
    starts = ends - lens
    positions = torch.arange(int(ends[-1])) - starts.repeat_interleave(lens)
    order = torch.empty(len(inputs), dtype=torch.int64)
    order[torch.tensor(places)] = torch.arange(len(inputs))
    ids = [token_id for text in sorted_inputs for token_id in text.input_ids]
    types = torch.zeros(start, dtype=torch.int64)
    if any(text.type_ids for text in inputs):
        types = torch.tensor([t for text in sorted_inputs for t in text.type_ids or (0,) * len(text.input_ids)])
    return Packed(
        torch.tensor(ids, dtype=torch.int64).to(device),
        types.to(device),
        positions.to(device),
        starts.to(device),
        lens.to(device),
        order.to(device),
        tuple(groups),
    )
