"""Blocks of weights with a scale and a base: the formats that funitel writes, and makes of floating point on loading.

Some inputs of an output share a scale and a base; a weight is code x scale + base. Names say bits, inputs of a block
and the way of rounding: `t1a` has its levels from the smallest to the largest weight of a block, `t1b` in the middles
of equal parts between them, `t2` around zero. Layouts are those of Inferflow, byte for byte. With `is_inferflow` so are
the levels of 4, 5 and 6 bits in blocks of 64, the last of which is never used; blocks with tiny scales are constant.

Groups of any size with a floating-point zero are those of DashInfer: a weight is (code - zero) x scale. Groups of 512
inputs, and of all inputs of an output, are stored as blocks of at most 256 that repeat their scale and zero.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch

from funitel.model_server.quantized.block_types import BlockType
from funitel.model_server.quantized.config import BLOCKS, Quantization
from funitel.model_server.settings.block_names import A16_GROUPS, A16_WIDE_GROUPS, ALIASES
from funitel.proto.errors import SettingsError

_HALF_BYTES = 4  # of a scale and a base in float16
CHUNK_WEIGHTS = 4 << 20  # made blocks of at a time: what is computed on the way takes about 16 bytes for each
_TINY_SCALE = 1e-5  # below which Inferflow has constant blocks
_LEVELS_OF_Q3H, _PAIRS_OF_Q3H = 11, 32
_WHOLE_OUTPUT = -1  # a group of all inputs
_MOST_OF_HALF, _LEAST_OF_HALF = 65504.0, 2.0**-24  # what float16 holds

Pack = Callable[[torch.Tensor], torch.Tensor]
"""Codes [blocks, inputs] uint8 to and from their bytes [blocks, bytes]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """One format of blocks.

    Attributes:
        name: of the format.
        num_inputs: of a block.
        num_bytes: of a block.
        top: the largest code.
        inferflow_top: the same as Inferflow has it.
        is_middle: levels are in the middles of parts, as many as there are codes.
        is_symmetric: codes are signed, levels lie around zero, and there is no base.
        has_zero: a zero in place of the base: a weight is (code - zero) x scale.
        group: inputs that share a scale where those are not the inputs of a block but of several; -1 for all of an
            output.
        scale_first: the scale comes before the base.
        pack, unpack: codes to and from the bytes behind scale and base.
        kind: the type of its blocks, which several formats may share.
    """

    name: str
    num_inputs: int
    num_bytes: int
    top: int
    pack: Pack
    unpack: Pack
    inferflow_top: int | None = None
    is_middle: bool = False
    is_symmetric: bool = False
    has_zero: bool = False
    group: int | None = None
    scale_first: bool = False
    kind: BlockType

    @property
    def bits(self) -> float:
        """Bits of a weight, scale and base included."""
        return self.num_bytes * 8 / self.num_inputs

    @property
    def kept(self) -> Quantization:
        """What kernels for codes of 4 and 8 bits have of it: groups with a scale, and a base if there are some."""
        bits = 4 if self.top < 1 << 4 else 8
        base_bytes = 0 if self.is_symmetric else torch.float32.itemsize if self.has_zero else torch.float16.itemsize
        return Quantization(
            method=BLOCKS,
            bits=bits,
            group_size=self.num_inputs,
            group_bytes=torch.float16.itemsize + base_bytes,
            formats=(("", self.name),),
        )

    def can_hold(self, num_inputs: int) -> bool:
        """Whether outputs with so many inputs are whole blocks, where groups have several blocks of any size."""
        return num_inputs % (self.num_inputs if self.group is None else A16_GROUPS[0]) == 0

    def stored(self, num_inputs: int) -> "BlockFormat":
        """The format with the blocks that outputs with so many inputs have in a file.

        Groups of several blocks have the largest blocks that are whole, or the smallest; other formats have one size.
        """
        return self if self.group is None else self.fitted(num_inputs) or self._with_blocks(A16_GROUPS[0])

    def fitted(self, *cuts: int) -> "BlockFormat | None":
        """The format with the largest blocks that no cut divides; None where there are none.

        Args:
            cuts: inputs at which an output begins, ends or is divided between ranks.

        Blocks with a zero are divided into smaller ones, which repeat it; others have one size.
        """
        sizes = [size for size in reversed(A16_GROUPS) if size <= self.num_inputs] if self.has_zero else []
        found = next((size for size in sizes or [self.num_inputs] if not any(cut % size for cut in cuts)), None)
        return None if found is None else self._with_blocks(found)

    def _with_blocks(self, size: int) -> "BlockFormat":
        if size == self.num_inputs:
            return self
        smaller = FORMATS[f"{self.name.partition('_')[0]}_g{size}"]
        return replace(smaller, name=self.name, group=self.group or self.num_inputs)

    def divided(self, blocks: torch.Tensor, smaller: "BlockFormat") -> torch.Tensor:
        """Blocks [outputs, bytes] of this format, which has a zero, as those that `fitted` found."""
        if smaller.num_inputs == self.num_inputs:
            return blocks
        count = self.num_inputs // smaller.num_inputs
        each = blocks.reshape(-1, self.num_bytes)
        head = each[:, None, : self._head_bytes].expand(-1, count, -1)
        codes = each[:, self._head_bytes :].reshape(len(each), count, -1)
        return torch.cat([head, codes], dim=2).reshape(len(blocks), -1)

    def shared_inputs(self, num_inputs: int) -> int:
        """Inputs that share a scale, of outputs with so many inputs: a number of whole blocks."""
        if self.group == _WHOLE_OUTPUT:
            return -(-num_inputs // self.num_inputs) * self.num_inputs
        return self.group or self.num_inputs

    def row_bytes(self, num_inputs: int) -> int:
        """Bytes of an output."""
        return -(-num_inputs // self.num_inputs) * self.num_bytes

    def encode(self, weights: torch.Tensor, *, is_inferflow: bool = False) -> torch.Tensor:
        """Weights [outputs, inputs] as blocks [outputs, bytes] uint8.

        A last block that is not full repeats its last input, and a last group does.

        Args:
            weights: finite; computed in float32.
            is_inferflow: see the module.
        """
        rows = max(1, CHUNK_WEIGHTS // max(weights.shape[1], 1))
        parts = [weights[first : first + rows] for first in range(0, len(weights), rows)]
        return torch.cat([self._encode_rows(part, is_inferflow=is_inferflow) for part in parts])

    def _encode_rows(self, weights: torch.Tensor, *, is_inferflow: bool) -> torch.Tensor:
        num_outputs, num_inputs = weights.shape
        shared = self.shared_inputs(num_inputs)
        missing = -num_inputs % shared
        wide = weights.float()
        if missing:
            wide = torch.cat([wide, wide[:, -1:].expand(-1, missing)], dim=1)
        scales, bases, codes = self._rounded(wide.reshape(-1, shared), is_inferflow=is_inferflow)
        halves = [scales] if self.is_symmetric else [scales, bases] if self.scale_first else [bases, scales]
        head = torch.stack(halves, dim=1).contiguous().view(torch.uint8).reshape(len(scales), -1)
        head = head.repeat_interleave(shared // self.num_inputs, dim=0)
        blocks = torch.cat([head, self.pack(codes.reshape(-1, self.num_inputs))], dim=1).reshape(num_outputs, -1)
        return blocks[:, : self.row_bytes(num_inputs)].contiguous()

    def _rounded(self, blocks: torch.Tensor, *, is_inferflow: bool) -> tuple[torch.Tensor, ...]:
        """Scales and bases [blocks] float16, codes [blocks, inputs] uint8, made by scales that are not rounded yet."""
        top = self.inferflow_top if is_inferflow and self.inferflow_top is not None else self.top
        low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
        if self.is_symmetric:
            scale, base = blocks.abs().amax(1, keepdim=True) / self.top, torch.zeros_like(low)
        elif self.is_middle:
            scale = (high - low) / (self.top + 1)
            base = low + scale / 2
        else:
            scale, base = (high - low) / top, low
        is_constant = scale < _TINY_SCALE if is_inferflow else scale == 0
        divisor = torch.where(is_constant, torch.ones_like(scale), scale)
        if self.is_symmetric:
            codes = (blocks / divisor + 0.5).floor().clamp(-128, 127)
        elif self.has_zero:
            # Where weights are far from zero and alike, so much larger a scale that float16 holds the zero.
            scale = scale.maximum(low.abs() / _MOST_OF_HALF).clamp(min=_LEAST_OF_HALF)
            scale = torch.where(is_constant, torch.ones_like(scale), scale)
            base = -low / scale  # the zero
            codes = (blocks / scale + base).round().clamp(0, self.top)
            return scale.half()[:, 0], base.half()[:, 0], codes.to(torch.uint8)
        elif self.is_middle:
            codes = ((blocks - low) / divisor + 1e-4).floor().clamp(0, self.top)
        else:
            codes = ((blocks - low) / divisor + 0.5).floor().clamp(0, top)
        codes = torch.where(is_constant, torch.zeros_like(codes), codes)
        return scale.half()[:, 0], base.half()[:, 0], codes.to(torch.int8 if self.is_symmetric else torch.uint8)

    def parts(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Blocks [outputs, bytes] as codes [outputs, blocks, inputs] float32, scales and bases [outputs, blocks].

        Bases are what codes of zero stand for.
        """
        each = blocks.reshape(len(blocks), -1, self.num_bytes)
        size = self._head_bytes
        codes = self.unpack(each[..., size:].reshape(-1, self.num_bytes - size))
        codes = codes.view(torch.int8) if self.is_symmetric else codes
        return codes.reshape(*each.shape[:2], self.num_inputs).float(), *self.scales(blocks)

    def scales(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales and bases of blocks alone, see `parts`; codes are not unpacked."""
        each = blocks.reshape(len(blocks), -1, self.num_bytes)
        head = each[..., : self._head_bytes].contiguous().view(torch.float16).float()
        if self.is_symmetric:
            return head[..., 0], torch.zeros_like(head[..., 0])
        scales, bases = (head[..., 0], head[..., 1]) if self.scale_first else (head[..., 1], head[..., 0])
        return scales, -bases * scales if self.has_zero else bases

    @property
    def _head_bytes(self) -> int:
        """Of the scale, and of the base if there is one."""
        return _HALF_BYTES // 2 if self.is_symmetric else _HALF_BYTES

    def decode(self, blocks: torch.Tensor, num_inputs: int) -> torch.Tensor:
        """The weights [outputs, num_inputs] float32 that blocks [outputs, bytes] stand for."""
        codes, scales, bases = self.parts(blocks)
        return (codes * scales[..., None] + bases[..., None]).flatten(1)[:, :num_inputs]


# Fields of codes: [blocks, inputs] uint8 <-> [blocks, bytes] ---------------------------------------------------------


def _join(parts: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers [blocks, bytes, 8 / bits] of so many bits as bytes, the first in the lowest bits."""
    shifts = torch.arange(0, 8, bits, dtype=torch.int16)
    return torch.bitwise_left_shift(parts.to(torch.int16), shifts).sum(-1).to(torch.uint8)


def _split(data: torch.Tensor, bits: int) -> torch.Tensor:
    """The way back: bytes [blocks, bytes] as numbers [blocks, 8 / bits * bytes], in their order."""
    shifts = torch.arange(0, 8, bits, dtype=torch.int16)
    parts = torch.bitwise_right_shift(data.to(torch.int16)[..., None], shifts)
    return torch.bitwise_and(parts, 2**bits - 1).flatten(-2).to(torch.uint8)


def _pack_field(codes: torch.Tensor, bits: int, first: int) -> torch.Tensor:
    """Bits [first, first + bits) of all codes, neighbours together."""
    field = codes >> first & (2**bits - 1)
    return _join(field.reshape(len(codes), -1, 8 // bits), bits)


def _fields(num_inputs: int, high: int, low: int) -> tuple[Pack, Pack]:
    """`high` upper bits of all codes, then `low` lower ones, each with neighbours together."""
    size = num_inputs * high // 8

    def pack(codes: torch.Tensor) -> torch.Tensor:
        upper = [_pack_field(codes, high, low)] if high else []
        return torch.cat([*upper, _pack_field(codes, low, 0)], dim=1)

    def unpack(data: torch.Tensor) -> torch.Tensor:
        codes = _split(data[:, size:], low)
        return codes | _split(data[:, :size], high) << low if high else codes

    return pack, unpack


def _halves(high: int) -> tuple[Pack, Pack]:
    """Of 32 codes `high` upper bits, then nibbles: byte j has those of inputs j and j + 16."""

    def pack(codes: torch.Tensor) -> torch.Tensor:
        nibbles = torch.stack([codes[:, :16], codes[:, 16:]], dim=2) & 15
        return torch.cat([_pack_field(codes, high, 4), _join(nibbles, 4)], dim=1)

    def unpack(data: torch.Tensor) -> torch.Tensor:
        nibbles = _split(data[:, 4 * high :], 4).reshape(len(data), 16, 2).transpose(1, 2).flatten(1)
        return nibbles | _split(data[:, : 4 * high], high) << 4

    return pack, unpack


def _pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Of 64 codes below 11 pairs as numbers of 7 bits, even + 11 x odd: bit 6, then bits 4 and 5, then bits 0 to 3."""
    pairs = codes[:, 0::2] + _LEVELS_OF_Q3H * codes[:, 1::2]
    return torch.cat([_pack_field(pairs, 1, 6), _pack_field(pairs, 2, 4), _pack_field(pairs, 4, 0)], dim=1)


def _unpack_pairs(data: torch.Tensor) -> torch.Tensor:
    count = _PAIRS_OF_Q3H
    high, middle, low = torch.split(data, [count // 8, count // 4, count // 2], dim=1)
    pairs = _split(low, 4) | _split(middle, 2) << 4 | _split(high, 1) << 6
    return torch.stack([pairs % _LEVELS_OF_Q3H, pairs // _LEVELS_OF_Q3H], dim=2).flatten(1)


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)


def _format(name: str, num_inputs: int, high: int, low: int, **fields: object) -> BlockFormat:
    pack, unpack = _fields(num_inputs, high, low)
    made = BlockFormat(
        name=name,
        num_inputs=num_inputs,
        num_bytes=_HALF_BYTES + num_inputs * (high + low) // 8,
        top=(1 << high + low) - 1,
        pack=pack,
        unpack=unpack,
        kind=BlockType[name.upper().removesuffix("A").removesuffix("B")],
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def _of_inferflow() -> list[BlockFormat]:
    pack, unpack = _halves(1)
    return [
        _format("q8_b32t1", 32, 0, 8),
        BlockFormat(
            name="q8_b32t2",
            num_inputs=32,
            num_bytes=34,
            top=127,
            pack=_bytes,
            unpack=_bytes,
            is_symmetric=True,
            kind=BlockType.Q8_0,
        ),
        _format("q6_b64t1", 64, 2, 4, inferflow_top=62),
        _format("q5_b64t1", 64, 1, 4, inferflow_top=30),
        BlockFormat(
            name="q5_b32t1",
            num_inputs=32,
            num_bytes=24,
            top=31,
            pack=pack,
            unpack=unpack,
            scale_first=True,
            kind=BlockType.Q5_1,
        ),
        _format("q4_b32t1a", 32, 0, 4),
        _format("q4_b32t1b", 32, 0, 4, is_middle=True),
        _format("q4_b64t1", 64, 0, 4, inferflow_top=14),
        BlockFormat(
            name="q3h_b64t1",
            num_inputs=64,
            num_bytes=32,
            top=_LEVELS_OF_Q3H - 1,
            pack=_pack_pairs,
            unpack=_unpack_pairs,
            kind=BlockType.Q3H_B64T1,
        ),
        _format("q3_b32t1a", 32, 1, 2),
        _format("q3_b32t1b", 32, 1, 2, is_middle=True),
        _format("q2_b32t1a", 32, 0, 2),
        _format("q2_b32t1b", 32, 0, 2, is_middle=True),
    ]


def _of_dashinfer() -> list[BlockFormat]:
    found = []
    for bits in (8, 4):
        blocks = [_format(f"a16w{bits}_g{size}", size, 0, bits, has_zero=True) for size in A16_GROUPS]
        wide = [replace(blocks[-1], name=f"a16w{bits}_g{size}", group=size) for size in A16_WIDE_GROUPS]
        found += [*blocks, *wide]
    return found


FORMATS: Mapping[str, BlockFormat] = {each.name: each for each in (*_of_inferflow(), *_of_dashinfer())}
"""By their names."""


def format_of(name: str) -> BlockFormat | None:
    """The format of a name or an alias; None for another word."""
    return FORMATS.get(ALIASES.get(name, name))


@dataclass(frozen=True, slots=True)
class BlockRules:
    """Which format each matrix has: `usual`, or that of the first of `others` of which a pattern is in its name.

    Embeddings and head have `table` where no pattern says another. `flag` is where the patterns were given.
    """

    usual: BlockFormat
    others: tuple[tuple[str, BlockFormat], ...] = ()
    table: BlockFormat = FORMATS["q8_b32t2"]
    flag: str = "--tensor"

    @classmethod
    def parse(cls, usual: str, others: str | None, *, flag: str = "--tensor") -> "BlockRules":
        """`usual` is a name; `others` are `pattern=name`, parted by commas, the value of `flag`.

        Raises:
            SettingsError: a name is not that of a format.
        """
        found = [cls._rule(each.strip(), flag) for each in (others or "").split(",") if each.strip()]
        return cls(cls._named(usual, ""), tuple(found), flag=flag)

    @classmethod
    def _rule(cls, text: str, flag: str) -> tuple[str, BlockFormat]:
        pattern, separator, name = text.partition("=")
        if not separator or not pattern.strip():
            raise SettingsError(f"{flag} {text!r} must be PATTERN=FORMAT, such as down_proj=q6")
        return pattern.strip(), cls._named(name.strip(), f"{flag} {text!r}: ")

    @staticmethod
    def _named(name: str, given: str) -> BlockFormat:
        found = format_of(name)
        if found is None:
            raise SettingsError(f"{given}{name!r} is no format of blocks; there are {', '.join((*ALIASES, *FORMATS))}")
        return found

    def check_used(self, stems: Collection[str]) -> None:
        """Raise SettingsError for a pattern that is part of the name of no matrix, or after others of none."""
        left = list(stems)
        for pattern, _ in self.others:
            if not any(pattern in stem for stem in stems):
                ends = ", ".join(sorted({stem.rpartition(".")[2] for stem in stems}))
                raise SettingsError(f"{self.flag}: {pattern!r} is part of the name of no matrix; names end in {ends}")
            if not any(pattern in stem for stem in left):
                raise SettingsError(
                    f"{self.flag}: {pattern!r} decides nothing: an earlier pattern fits all its matrices"
                )
            left = [stem for stem in left if pattern not in stem]

    def of(self, stem: str, num_inputs: int, *, is_table: bool) -> BlockFormat | None:
        """The format of a matrix, with the blocks that it has there; None where its inputs are no whole blocks of it.

        Groups with a zero become smaller until they are whole, those of several blocks may have a smaller last one.

        Args:
            stem: name of the matrix.
            num_inputs: of the matrix.
            is_table: it is the embedding or the head.
        """
        found = next((each for pattern, each in self.others if pattern in stem), None)
        found = found or (self.table if is_table else self.usual)
        family = [found]
        if found.has_zero and found.group is None:
            stem_of = found.name.partition("_")[0]
            family += [FORMATS[f"{stem_of}_g{size}"] for size in reversed(A16_GROUPS) if size < found.num_inputs]
        return next((each.stored(num_inputs) for each in family if each.can_hold(num_inputs)), None)
