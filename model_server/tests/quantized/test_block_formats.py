"""Formats of blocks: bytes and values equal those of an encoder and a decoder written from the description."""

from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch

from funitel.model_server.quantized.block_formats import FORMATS, BlockRules, format_of
from funitel.model_server.settings.block_names import ALIASES, BLOCK_FORMATS
from funitel.proto.errors import SettingsError
from funitel_testing import inferflow_blocks

INFERFLOW = pytest.mark.parametrize("name", inferflow_blocks.BYTES)
GROUPS = [name for name in FORMATS if name.startswith("a16")]
Floats = npt.NDArray[np.float32]


def drawn(num_outputs: int, num_inputs: int) -> Floats:
    """Weights of several sizes, with blocks that are constant, and some zeros and outliers."""
    random = np.random.default_rng(3)
    weights = (
        random.standard_normal((num_outputs, num_inputs))
        * random.choice([0.001, 0.05, 1.0, 30.0], num_outputs)[:, None]
    )
    weights[random.random(weights.shape) < 0.01] *= 20
    weights[0, :64], weights[1, :64], weights[2, 64:128] = 0.0, 0.25, -3.0
    weights[3, :64] = np.linspace(-1, 1, 64)
    return weights.astype(np.float32)


def test_the_names_are_those_of_the_formats() -> None:
    assert tuple(FORMATS) == BLOCK_FORMATS
    assert {format_of(alias) for alias in ALIASES} <= set(FORMATS.values())
    assert format_of("q9") is None


@INFERFLOW
def test_bytes_are_those_of_the_description(name: str) -> None:
    chosen, weights = FORMATS[name], drawn(40, 512)
    assert chosen.num_bytes == inferflow_blocks.BYTES[name]
    found = chosen.encode(torch.from_numpy(weights)).numpy()
    size = chosen.num_inputs
    for row, block in product(range(len(weights)), range(512 // size)):
        expected = inferflow_blocks.encode(name, weights[row, block * size : (block + 1) * size])
        assert found[row, block * chosen.num_bytes : (block + 1) * chosen.num_bytes].tobytes() == expected, (row, block)


@pytest.mark.parametrize(("name", "divisor"), [("q6_b64t1", 62), ("q5_b64t1", 30), ("q4_b64t1", 14), ("q8_b32t2", 127)])
def test_levels_may_be_those_of_inferflow(name: str, divisor: int) -> None:
    chosen, weights = FORMATS[name], drawn(20, 256)
    weights[4] *= 1e-6
    found = chosen.encode(torch.from_numpy(weights), is_inferflow=True).numpy().reshape(-1, chosen.num_bytes)
    for block, values in zip(found, weights.reshape(-1, chosen.num_inputs), strict=True):
        assert block.tobytes() == inferflow_blocks.encode(name, values, divisor)


@INFERFLOW
def test_what_is_read_is_what_the_description_says(name: str) -> None:
    chosen = FORMATS[name]
    random = np.random.default_rng(9)
    raw = random.integers(0, 256, (30, 4 * chosen.num_bytes), dtype=np.uint8)
    halves = [0] if name == "q8_b32t2" else [0, 2]
    for at in (block * chosen.num_bytes + half for block in range(4) for half in halves):
        raw[:, at : at + 2] = random.uniform(-2, 2, (30, 1)).astype(np.float16).view(np.uint8)
    if name == "q3h_b64t1":  # only 121 of 128 numbers are pairs
        raw = chosen.encode(torch.from_numpy(drawn(30, 256))).numpy()
    found = chosen.decode(torch.from_numpy(raw), 4 * chosen.num_inputs).numpy()
    for row, values in zip(raw, found, strict=True):
        blocks = [row[i : i + chosen.num_bytes].tobytes() for i in range(0, len(row), chosen.num_bytes)]
        assert np.array_equal(np.concatenate([inferflow_blocks.decode(name, block) for block in blocks]), values)


def test_all_pairs_of_the_3_5_bit_scheme_come_back() -> None:
    chosen = FORMATS["q3h_b64t1"]
    for first in range(0, 121, 32):
        numbers = [(first + i) % 121 for i in range(32)]
        codes = torch.tensor([[part for n in numbers for part in (n % 11, n // 11)]], dtype=torch.uint8)
        assert torch.equal(chosen.unpack(chosen.pack(codes)), codes)


def test_a_block_of_the_3_5_bit_scheme_by_hand() -> None:
    """Weights 0, 1, ..., 10, 0, 1, ...: scale 1 and base 0; the first pairs are 0 + 11 x 1 and 2 + 11 x 3."""
    weights = torch.tensor([[float(i % 11) for i in range(64)]])
    found = FORMATS["q3h_b64t1"].encode(weights)[0].numpy().tobytes()
    assert found[:4] == bytes([0x00, 0x00, 0x00, 0x3C])  # base 0.0, scale 1.0
    numbers = [(2 * i) % 11 + 11 * ((2 * i + 1) % 11) for i in range(32)]
    assert numbers[:3] == [11, 35, 59]
    assert found[4] == sum((numbers[i] >> 6) << i for i in range(8))
    assert found[8] == (11 >> 4 & 3) | (35 >> 4 & 3) << 2 | (59 >> 4 & 3) << 4 | (numbers[3] >> 4 & 3) << 6
    assert found[16] == (11 & 15) | (35 & 15) << 4


@pytest.mark.parametrize("name", ["q3h_b64t1", "a16w4_g-1"])
def test_blocks_are_made_some_outputs_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.randn(7, 128, generator=torch.Generator().manual_seed(3))
    whole = FORMATS[name].encode(weights)
    monkeypatch.setattr("funitel.model_server.quantized.block_formats.CHUNK_WEIGHTS", 300)
    assert torch.equal(FORMATS[name].encode(weights), whole)
    assert torch.equal(FORMATS[name].encode(weights[:1]), whole[:1])


@pytest.mark.parametrize("name", FORMATS)
def test_errors_stay_within_half_a_level(name: str) -> None:
    chosen, weights = FORMATS[name], torch.from_numpy(drawn(40, 512))
    found = chosen.decode(chosen.encode(weights), 512)
    _, scales, bases = chosen.parts(chosen.encode(weights))
    rounding = (bases.abs() + scales * chosen.top) * 2**-10 + chosen.top * 2**-24  # of float16
    bound = (scales / 2 * (1 + 1e-3) + rounding).repeat_interleave(chosen.num_inputs, dim=1)
    assert ((found - weights).abs() <= bound + 1e-6).all()
    constant = torch.full((1, 256), 0.3)
    assert (chosen.decode(chosen.encode(constant), 256) - 0.3).abs().max() < 0.3 * 2**-10


def test_error_falls_with_bits() -> None:
    weights = torch.rand(64, 1024, generator=torch.Generator().manual_seed(1)) - 0.5

    def error(name: str) -> float:
        chosen = format_of(name)
        assert chosen is not None
        return float((chosen.decode(chosen.encode(weights), 1024) - weights).abs().mean())

    ladder = ["q8", "q6", "q5", "q4", "q3h", "q3", "q2"]
    errors = [error(name) for name in ladder]
    assert errors == sorted(errors)
    assert error("q4_b64t1") < error("q3h_b64t1") < error("q3_b32t1a")


def of_the_formula(row: Floats, group: int, least: int, most: int) -> list[tuple[Floats, np.float32, np.float32]]:
    """Codes, scale and zero of each group of an output, in the numbers that InstantQuant has.

    scale = (max - min) / (most - least), or 1; zero = least - min / scale; codes = clamp(round(w / scale + zero)).
    A last group is filled up with the last weight.
    """
    size = len(row) if group == -1 else group
    padded = np.concatenate([row, np.repeat(row[-1:], -len(row) % size)])
    found = []
    for start in range(0, len(padded), size):
        part = padded[start : start + size]
        scale = np.float32(part.max() - part.min()) / np.float32(most - least) or np.float32(1)
        zero = np.float32(least) - part.min() / scale
        found.append((np.clip(np.rint(part / scale + zero), least, most), scale, zero))
    return found


@pytest.mark.parametrize("num_inputs", [512, 576, 96, 1100, 32])
@pytest.mark.parametrize("name", GROUPS)
def test_groups_with_zeros_are_those_of_the_formula(name: str, num_inputs: int) -> None:
    """Also where the last group is not full; signed codes of 8 bits are the same ones, 128 less."""
    chosen, weights = FORMATS[name].stored(num_inputs), drawn(12, 1100)[:, :num_inputs]
    group, most = int(name.rpartition("g")[2]), 255 if "w8" in name else 15
    blocks = chosen.encode(torch.from_numpy(weights))
    assert blocks.shape == (12, chosen.row_bytes(num_inputs))
    found = chosen.decode(blocks, num_inputs).numpy()
    codes = chosen.parts(blocks)[0].flatten(1)[:, :num_inputs].numpy()
    for row, values, ours in zip(weights, found, codes, strict=True):
        groups = of_the_formula(row, group, 0, most)
        assert np.array_equal(np.concatenate([part for part, _, _ in groups])[:num_inputs], ours)
        kept = [(part - np.float32(np.float16(zero))) * np.float32(np.float16(scale)) for part, scale, zero in groups]
        assert np.allclose(values, np.concatenate(kept)[:num_inputs], rtol=1e-5, atol=1e-6)
        if most == 255:
            signed = np.concatenate([part for part, _, _ in of_the_formula(row, group, -128, 127)])[:num_inputs]
            assert (np.abs(signed + 128 - ours) <= 1).all()  # a tie may fall the other way
            assert (signed + 128 == ours).mean() > 0.99


@pytest.mark.parametrize(("size", "groups"), [(512, [(0, 512), (512, 576)]), (-1, [(0, 576)])])
def test_groups_of_several_blocks_repeat_their_scale(size: int, groups: list[tuple[int, int]]) -> None:
    weights = torch.from_numpy(drawn(12, 576))
    chosen = FORMATS[f"a16w4_g{size}"].stored(576)
    assert (chosen.num_inputs, chosen.bits, chosen.name) == (64, 4.5, f"a16w4_g{size}")
    scales, _ = chosen.scales(chosen.encode(weights))
    for start, end in groups:
        part = weights[:, start:end]
        expected = ((part.amax(1) - part.amin(1)) / 15).half().float()
        assert (scales[:, start // 64 : end // 64] == torch.where(expected == 0, 1.0, expected)[:, None]).all()


def test_blocks_with_a_zero_are_divided_where_a_cut_is() -> None:
    weights = torch.from_numpy(drawn(12, 1536))
    for name in GROUPS:
        chosen = FORMATS[name]
        blocks, whole = chosen.encode(weights), chosen.decode(chosen.encode(weights), 1536)
        smaller = chosen.fitted(1536, 480)
        assert smaller is not None
        assert smaller.num_inputs == 32
        assert torch.equal(smaller.decode(chosen.divided(blocks, smaller), 1536), whole)
        assert chosen.fitted(1536, 500) is None
    assert FORMATS["q6_b64t1"].fitted(1536, 480) is None
    assert FORMATS["q6_b64t1"].fitted(1536, 512) is FORMATS["q6_b64t1"]


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("spread", [1e-3, 1e-4, 1e-6, 1e-7])
def test_zeros_of_weights_that_are_alike_are_numbers(name: str, spread: float) -> None:
    """Their zero is far from the codes; float16 holds it at a larger scale."""
    weights = 1 + spread * torch.rand(4, 512, generator=torch.Generator().manual_seed(2))
    for turned in (weights, -weights, weights * 1e-5):
        found = FORMATS[name].decode(FORMATS[name].encode(turned), 512)
        assert ((found - turned).abs() <= turned.abs() * 2**-9 + 2**-24).all()


def test_a_last_group_that_is_not_full_repeats_its_last_input() -> None:
    chosen = FORMATS["a16w4_g64"]
    weights = torch.from_numpy(drawn(4, 100))
    padded = torch.cat([weights, weights[:, -1:].expand(-1, 28)], dim=1)
    assert torch.equal(chosen.encode(weights), chosen.encode(padded))
    assert chosen.decode(chosen.encode(weights), 100).shape == (4, 100)


def test_bits_of_the_formats() -> None:
    bits = {name: FORMATS[ALIASES[name]].bits for name in ("q8", "q6", "q5", "q4", "q3h", "q3", "q2")}
    assert bits == {"q8": 8.5, "q6": 6.5, "q5": 5.5, "q4": 5.0, "q3h": 4.0, "q3": 4.0, "q2": 3.0}


# Rules ----------------------------------------------------------------------------------------------------------------


def named(rules: BlockRules, stem: str, *, is_table: bool = False) -> str:
    found = rules.of(stem, 512, is_table=is_table)
    assert found is not None
    return found.name


def test_a_pattern_gives_some_matrices_another_format() -> None:
    rules = BlockRules.parse("q3h", "down_proj=q6, lm_head=q4_b64t1,")
    assert named(rules, "model.layers.3.mlp.up_proj") == "q3h_b64t1"
    assert named(rules, "model.layers.3.mlp.down_proj") == "q6_b64t1"
    assert named(rules, "lm_head", is_table=True) == "q4_b64t1"
    assert named(rules, "model.embed_tokens", is_table=True) == "q8_b32t2"
    unused = "^--tensor: 'lm_head' is part of the name of no matrix; names end in down_proj, embed_tokens$"
    with pytest.raises(SettingsError, match=unused):
        rules.check_used(["model.embed_tokens", "a.down_proj", "b.down_proj"])
    covered = BlockRules.parse("q3h", "mlp=q6,down_proj=q8")
    with pytest.raises(SettingsError, match="^--tensor: 'down_proj' decides nothing: an earlier pattern fits all its "):
        covered.check_used(["a.mlp.up_proj", "a.mlp.down_proj"])
    covered.check_used(["a.mlp.down_proj", "down_proj"])


def test_inputs_that_are_no_whole_groups_get_smaller_groups() -> None:
    rules = BlockRules.parse("a16w8", "up=a16w4_g256,down=q6")
    assert [rules.of("q", size, is_table=False) for size in (512, 576, 96)] == [
        FORMATS["a16w8_g128"],
        FORMATS["a16w8_g64"],
        FORMATS["a16w8_g32"],
    ]
    assert rules.of("q", 100, is_table=False) is None
    assert rules.of("up", 576, is_table=False) is FORMATS["a16w4_g64"]
    assert rules.of("down", 96, is_table=False) is None
    wide = BlockRules.parse("a16w8_g-1", "up=a16w4_g512")
    assert wide.of("q", 576, is_table=False) == FORMATS["a16w8_g-1"].stored(576)
    found = wide.of("up", 96, is_table=False)
    assert found is not None
    assert (found.name, found.num_inputs) == ("a16w4_g512", 32)
    assert wide.of("up", 100, is_table=False) is None


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ("lm_head", "'lm_head' must be PATTERN=FORMAT"),
        ("=q8", "'=q8' must be PATTERN=FORMAT"),
        ("lm_head=q9", "'lm_head=q9': 'q9' is no format of blocks; there are q8, q6"),
    ],
)
@pytest.mark.parametrize("flag", ["--tensor", "--quantize-tensors"])
def test_a_rule_that_makes_no_sense_is_named_with_its_flag(others: str, message: str, flag: str) -> None:
    with pytest.raises(SettingsError, match=f"^{flag} {message}"):
        BlockRules.parse("q4", others, flag=flag)
