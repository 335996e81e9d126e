"""Pack a quantised matrix for the Triton kernels: words that hold a few inputs of an output, and scales by groups.

Inputs come in *spans*, all of one group; a *chunk* is as many spans as a word has codes. Word j of a chunk holds input
j of each of its spans, the first span's in the lowest bits, so a tile of words is one span after the other by a shift.
Of groups that do not lie one after the other, or that a cut between ranks leaves with odd ends, the inputs are put in
an order in which they do, and each group is filled up to whole spans; `order` is then where an input comes from.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch

from funitel.model_server.quantized.bit_packing import WORD_BITS, Codes

_SPANS = (32, 16)  # inputs; the longer one where groups are multiples of it. tl.dot takes no fewer than 16
NOWHERE = -1  # where an input comes from that fills a span up


class CodeKind(IntEnum):
    """What a code is, as the kernels number it."""

    INT4 = 0
    INT8 = 1
    FLOAT8 = 2  # e4m3, the exponents of which go down to -6
    FLOAT4 = 3  # e2m1, of which e4m3 has every number

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 if self in (CodeKind.INT4, CodeKind.FLOAT4) else 8

    @property
    def middle(self) -> int:
        """The zero point of a matrix that has no zero points of its own."""
        return 0 if self in (CodeKind.FLOAT8, CodeKind.FLOAT4) else 1 << (self.bits - 1)


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """Weights [outputs, inputs] of `kind`; see the module for how they lie."""

    kind: CodeKind
    num_inputs: int
    span: int
    group_spans: int  # of a group, where all have as many and lie one after the other; else 0
    words: torch.Tensor  # [num_chunks * span, outputs] int32
    scales: torch.Tensor  # [num_groups, outputs] floating point
    zeros: torch.Tensor | None  # [num_groups, outputs] uint8; None: all are `middle`
    bases: torch.Tensor | None  # [num_groups, outputs] floating point, added to weights; None: 0
    order: torch.Tensor | None  # [num_chunks * inputs of a chunk] int32, NOWHERE for those that fill up
    groups: torch.Tensor | None  # [num_spans] int32, where `group_spans` does not say it

    @classmethod
    def of(cls, codes: Codes, kind: CodeKind) -> "PackedMatrix":
        """Pack codes where they are, on whatever device."""
        span, order, span_groups = _laid_out(codes.groups.cpu(), WORD_BITS // kind.bits)
        num_inputs, device = codes.codes.shape[1], codes.codes.device
        is_plain = torch.equal(order[:num_inputs], torch.arange(num_inputs)) and bool((order[num_inputs:] < 0).all())
        group_spans = _even(span_groups, -(-num_inputs // span)) if is_plain else 0
        has_zeros = codes.bases is None and bool((codes.zeros != kind.middle).any())
        return cls(
            kind=kind,
            num_inputs=num_inputs,
            span=span,
            group_spans=group_spans,
            words=_words(_as_integers(codes.codes, kind), order.to(device), span, kind.bits),
            scales=codes.scales.t().contiguous(),
            zeros=codes.zeros.t().contiguous() if has_zeros else None,
            bases=None if codes.bases is None else codes.bases.t().contiguous(),
            order=None if is_plain else order.to(device, torch.int32),
            groups=None if group_spans else span_groups.to(device, torch.int32),
        )

    @property
    def num_outputs(self) -> int:
        """Rows of the matrix."""
        return self.words.shape[1]

    @property
    def middle(self) -> int:
        """The zero point of all groups, where `zeros` do not say it."""
        return self.kind.middle if self.bases is None else 0

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        parts = (self.words, self.scales, self.zeros, self.bases, self.order, self.groups)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def is_float4(codes: torch.Tensor) -> bool:
    """Whether codes in e4m3 are all numbers of e2m1."""
    return bool((_FLOAT4_CODES.to(codes.device)[codes.view(torch.uint8).int()] != NOWHERE).all())


def _as_integers(codes: torch.Tensor, kind: CodeKind) -> torch.Tensor:
    """The bits of codes, of e2m1 four of them."""
    integers = codes.view(torch.uint8)
    return _FLOAT4_CODES.to(codes.device)[integers.int()].to(torch.uint8) if kind is CodeKind.FLOAT4 else integers


def _float4_codes() -> torch.Tensor:
    """For each number of e4m3 its bits in e2m1, NOWHERE where that has none."""
    found = torch.full((256,), NOWHERE, dtype=torch.int16)
    for sign in (0, 8):
        values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]).copysign(torch.tensor(-1.0 if sign else 1.0))
        found[values.to(torch.float8_e4m3fn).view(torch.uint8).int()] = torch.arange(8, dtype=torch.int16) + sign
    return found


_FLOAT4_CODES = _float4_codes()


def _laid_out(groups: torch.Tensor, per_word: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    """How the inputs of these groups are laid out: a span's size, where each input comes from, the group of a span."""
    sizes = groups.bincount()
    span = next((each for each in _SPANS if not bool((sizes[:-1] % each).any())), _SPANS[-1])
    by_group = torch.split(groups.argsort(stable=True), sizes.tolist())
    places, span_groups = [], []
    for group, members in enumerate(by_group):
        num_spans = -(-len(members) // span)
        filled = torch.full((num_spans * span,), NOWHERE)
        filled[: len(members)] = members
        places.append(filled)
        span_groups.append(torch.full((num_spans,), group))
    num_spans = sum(map(len, span_groups))
    missing = -num_spans % per_word
    places.append(torch.full((missing * span,), NOWHERE))
    span_groups.append(torch.zeros(missing, dtype=torch.int64))
    return span, torch.cat(places), torch.cat(span_groups)


def _even(span_groups: torch.Tensor, num_spans: int) -> int:
    """Spans of each group, where groups lie one after the other and all but the last have as many; else 0."""
    count = int((span_groups[:num_spans] == span_groups[0]).sum())
    is_even = torch.equal(span_groups[:num_spans], torch.arange(num_spans) // count)
    return count if is_even else 0


def _words(codes: torch.Tensor, order: torch.Tensor, span: int, bits: int) -> torch.Tensor:
    """Codes [outputs, inputs] in this order as words [num_chunks * span, outputs]."""
    per_word = WORD_BITS // bits
    num_chunks = len(order) // (span * per_word)
    places = order.clamp(min=0).view(num_chunks, per_word, span)
    words = torch.zeros((num_chunks * span, codes.shape[0]), dtype=torch.int32, device=codes.device)
    for i in range(per_word):
        words |= codes[:, places[:, i].flatten()].t().int() << (bits * i)
    return words
