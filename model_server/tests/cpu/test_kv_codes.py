"""Pools of codes and of float8 in the fused step: what lies in them, how much, and what is computed on it."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu import build as building
from funitel.model_server.cpu import compiler
from funitel.model_server.cpu.decoder import KV_DTYPES, FusedDecoder
from funitel.model_server.cpu.native import NativeEngine, Shape
from funitel.model_server.cpu.precision import KvKind, Tier, asked_kv_kind
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.key_frames import Frames, frames_of, num_sums
from funitel.model_server.kv_cache.pool import KVCache, SpecPools
from funitel.model_server.kv_cache.precision import KvCodes
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.models.key_frames import frame_keys
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.proto.errors import SettingsError
from funitel_testing import forward_worker
from funitel_testing.executors import load_executor
from funitel_testing.forward_worker import CPU, fused_decoder, fused_library, step_through
from funitel_testing.threads import on_ranks
from funitel_testing.tiny import save_tiny, save_tokenizer
from funitel_testing.zoo import ZOO

CODES = pytest.mark.parametrize("kind", [KvKind.INT8, KvKind.UINT4], ids=lambda kind: kind.label)
FLOAT8 = {KvKind.FP8_E4M3FN: torch.float8_e4m3fn, KvKind.FP8_E5M2: torch.float8_e5m2}
ALL = pytest.mark.parametrize("kind", [KvKind.INT8, KvKind.UINT4, *FLOAT8], ids=lambda kind: kind.label)
Floats = npt.NDArray[np.float64]


def make_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, 288, (length,), generator=generator).tolist() for length in lengths]


def save(name: str, folder: Path, **changes: object) -> Path:
    """A tiny model by its name, with a tokenizer."""
    if name not in ZOO:
        return save_tiny(name, folder, **changes)
    replace(ZOO[name], config=ZOO[name].config | changes).save(folder)
    save_tokenizer(folder)
    return folder


def decoder_of(folder: Path, kind: KvKind, block_size: int = 4, instruction_set: str | None = None) -> FusedDecoder:
    decoder = fused_decoder(
        folder,
        Tier.FLOAT32,
        TensorParallel(),
        block_size=block_size,
        kv_kind=kind,
        instruction_set=instruction_set,
    )
    spec = spec_of(read_json(folder / "config.json"))
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
    frame_keys(decoder, SpecPools(spec, heads, block_size, decoder.kv_dtype, CPU), TextCodec(folder), 256)
    return decoder


def cache_for(folder: Path, decoder: FusedDecoder, num_blocks: int = 400) -> KVCache:
    spec = spec_of(read_json(folder / "config.json"))
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
    return KVCache(spec, heads, num_blocks, decoder.block_size, decoder.kv_dtype, CPU)


def logits_of(folder: Path, decoder: FusedDecoder, prompts: list[list[int]], chunk: int = 11) -> list[torch.Tensor]:
    return step_through(decoder, cache_for(folder, decoder), prompts, 6, chunk)


def assert_same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


# How much -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(KV_DTYPES), ids=lambda kind: kind.label)
def test_a_layer_takes_what_is_planned(kind: KvKind) -> None:
    for dim, size, heads in product((4, 16, 22, 64, 80, 96, 128, 256), (1, 4, 6, 16, 48), (1, 3)):
        if kind is KvKind.BFLOAT16 and size % 2:
            continue
        shape = Shape(head_dim=dim, num_heads=heads, num_kv_heads=heads, num_layers=1, block_size=size, num_threads=1)
        shape.kv_kind = kind
        engine = NativeEngine(fused_library(), shape)
        dtype = KV_DTYPES[kind]
        each = dtype.head_bytes(size, dim) if isinstance(dtype, KvCodes) else 2 * size * dim * dtype.itemsize
        assert engine.layer_bytes == heads * each, (dim, size, heads)


@pytest.mark.parametrize(("codes", "ratio"), [(KvCodes.INT8, 1.88), (KvCodes.UINT4, 3.5)])
def test_a_pool_holds_more_tokens_than_float16(codes: KvCodes, ratio: float) -> None:
    for size in (4, 16, 32, 64, 128):
        assert 2 * 2 * 64 * size / codes.head_bytes(size, 64) >= ratio
        assert codes.head_bytes(size, 64) == 2 * size * (64 * codes.value // 8 + 4)


# What lies there ------------------------------------------------------------------------------------------------------


def hadamard(dim: int) -> Floats:
    """The transform of a head, of the largest powers of two in it one after the other."""
    found = np.zeros((dim, dim))
    first = 0
    while first < dim:
        part = 1 << ((dim - first).bit_length() - 1)
        matrix = np.ones((1, 1))
        while len(matrix) < part:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        found[first : first + part, first : first + part] = matrix / np.sqrt(part)
        first += part
    return found


def read_codes(pool: torch.Tensor, bits: int, size: int, heads: int, dim: int, offset: int) -> tuple[Floats, Floats]:
    """Keys and values [blocks, size, heads, dim] of a layer, transformed, by the layout that `kv_codes.h` describes.

    Without VNNI: there codes of 8 bits are signed bytes, with it they lie 128 higher.
    """
    unit, per_byte = 16 * 8 // bits, 8 // bits
    padded, rows = -(-dim // unit) * unit, -(-size // 4)
    key_bytes, value_bytes, scales = padded // per_byte * size, padded // per_byte * rows * 4, 4 * size
    memory = pool.numpy()
    keys, values = (np.zeros((len(memory), size, heads, dim)) for _ in range(2))

    def code(byte: int, is_high: bool) -> int:
        if bits == 4:
            return byte >> 4 if is_high else byte & 15
        return (byte ^ 128) - 128

    for block, head, token, d in product(range(len(memory)), range(heads), range(size), range(dim)):
        at = offset + head * (key_bytes + scales)
        group, rest = divmod(d, 4 * per_byte)
        half, place = divmod(rest, 4)
        byte = int(memory[block, at + (group * size + token) * 4 + place])
        scale, zero = memory[block, at + key_bytes : at + key_bytes + scales].view(np.float16)[[token, size + token]]
        keys[block, token, head, d] = code(byte, half == 1) * float(scale) + float(zero)
        at = offset + heads * (key_bytes + scales) + head * (value_bytes + scales)
        group, rest = divmod(d, unit)
        half, lane = divmod(rest, 16)
        byte = int(memory[block, at + (token // 4) * padded // per_byte * 4 + group * 64 + lane * 4 + token % 4])
        scale, zero = memory[block, at + value_bytes : at + value_bytes + scales].view(np.float16)[
            [token, size + token]
        ]
        values[block, token, head, d] = code(byte, half == 1) * float(scale) + float(zero)
    return keys, values


def rounded(numbers: Floats, bits: int) -> tuple[Floats, Floats]:
    """Numbers [..., dim] as codes stand for them, and the scales [..., 1]: the largest and the smallest have codes."""
    low, high = numbers.min(-1, keepdims=True), numbers.max(-1, keepdims=True)
    best: Floats | None = None
    for share in (1.0,) if bits == 8 else (1.0, 0.95, 0.9, 0.85, 0.8):
        middle, reach = (low + high) / 2, (high - low) / 2 * share
        scale = (2 * reach / (2**bits - 1)).astype(np.float16).astype(np.float64)
        offset = 128 if bits == 8 else 0
        zero = (middle - reach + offset * scale).astype(np.float16).astype(np.float64)
        codes = np.clip(np.rint((numbers - zero) / np.maximum(scale, 1e-30)), -offset, 2**bits - 1 - offset)
        found = codes * scale + zero
        if best is None:
            best, scales = found, scale
        better = ((found - numbers) ** 2).sum(-1, keepdims=True) < ((best - numbers) ** 2).sum(-1, keepdims=True)
        best, scales = np.where(better, found, best), np.where(better, scale, scales)
    assert best is not None
    return best, scales


@CODES
@pytest.mark.parametrize(("dim", "size"), [(16, 4), (22, 6), (80, 16), (64, 1)])
def test_a_pool_holds_what_its_layout_says(kind: KvKind, dim: int, size: int, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path, head_dim=dim, num_attention_heads=6, num_key_value_heads=3)
    (prompt,) = make_prompts(2 * size + 3)
    table = np.arange(1, 7, dtype=np.int32)
    pools = {}
    for each in (KvKind.FLOAT32, kind):
        decoder = fused_decoder(
            folder, Tier.FLOAT32, TensorParallel(), block_size=size, kv_kind=each, instruction_set="avx2"
        )
        cache = cache_for(folder, decoder, 7)
        decoder(ForwardBatch.build([RowSpan(prompt, 0, table)], size, CPU), cache)
        pools[each] = cache.pool
    half = 3 * size * dim
    exact = pools[KvKind.FLOAT32][:, : 2 * half].double().numpy()
    keys = exact[:, :half].reshape(7, 3, dim, size).transpose(0, 3, 1, 2)
    values = exact[:, half:].reshape(7, 3, size, dim).transpose(0, 2, 1, 3)
    bits = 8 if kind is KvKind.INT8 else 4
    matrix = hadamard(dim)
    places = [divmod(i, size) for i in range(len(prompt))]
    for numbers, found in zip((keys, values), read_codes(pools[kind], bits, size, 3, dim, 0), strict=True):
        for block, offset in places:
            transformed = numbers[block + 1, offset] @ matrix.T
            expected, scales = rounded(transformed, bits)
            # Sums in float32 may fall on the other side of a half.
            assert (np.abs(found[block + 1, offset] - expected) <= 1.01 * scales).all()
            assert np.abs(found[block + 1, offset] - expected).mean() < 0.05 * scales.mean()


class FakeCodes(KVCache):
    """A pool in float32 that keeps what codes stand for."""

    bits = 8

    def write(self, layer: int, slots: object, keys: torch.Tensor, values: torch.Tensor | None = None) -> None:
        """See KVCache."""
        assert values is not None
        matrix = hadamard(keys.shape[-1])
        kept = [torch.from_numpy(rounded(x.double().numpy() @ matrix.T, self.bits)[0] @ matrix) for x in (keys, values)]
        super().write(layer, slots, *(each.float() for each in kept))  # type: ignore[arg-type]


@CODES
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "bloom", "qwen3"])
def test_the_step_computes_what_torch_computes_on_what_codes_stand_for(
    kind: KvKind, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = "n_layer" if family == "bloom" else "num_hidden_layers"
    folder = save(family, tmp_path, **{layers: 1})  # of several, a code that differs changes all that follow
    prompts = make_prompts(43, 20)
    decoder = fused_decoder(folder, Tier.FLOAT32, TensorParallel(), kv_kind=kind)
    found = logits_of(folder, decoder, prompts)
    exact = forward_worker.run(folder, TensorParallel(), prompts, 6)
    monkeypatch.setattr(FakeCodes, "bits", 8 if kind is KvKind.INT8 else 4)
    monkeypatch.setattr(forward_worker, "KVCache", FakeCodes)
    expected = forward_worker.run(folder, TensorParallel(), prompts, 6)
    for ours, theirs, float32 in zip(found, expected, exact, strict=True):
        lost = (theirs - float32).norm()
        assert lost > 0
        assert (ours - theirs).norm() < 0.1 * lost + 1e-5 * float32.norm()


class FramedCodes(FakeCodes):
    """The same with frames of keys; what is written together begins with the first token of a sequence."""

    bits = 4
    frames: Frames

    def write(self, layer: int, slots: object, keys: torch.Tensor, values: torch.Tensor | None = None) -> None:
        """See KVCache."""
        assert values is not None
        shifts, first_shifts, key_maps, query_maps = (each[layer].double() for each in self.frames)
        moved = shifts.expand(keys.shape).clone()
        moved[0] = first_shifts
        matrix = torch.from_numpy(hadamard(keys.shape[-1]))
        mapped = torch.einsum("hij,thj->thi", key_maps, keys.double() - moved) @ matrix.T
        kept = torch.from_numpy(rounded(mapped.numpy(), self.bits)[0]) @ matrix
        turned = torch.from_numpy(rounded(values.double().numpy() @ matrix.numpy().T, self.bits)[0]) @ matrix
        left = torch.einsum("hji,thj->thi", query_maps, kept) + moved
        KVCache.write(self, layer, slots, left.float(), turned.float())  # type: ignore[arg-type]


def frames_for(folder: Path) -> Frames:
    """Frames of any kind: their first tokens are far from the others."""
    spec = spec_of(read_json(folder / "config.json"))
    generator = torch.Generator().manual_seed(2)
    shape = spec.num_layers, spec.num_kv_heads, spec.head_dim
    maps = torch.eye(spec.head_dim) + 0.05 * torch.randn(*shape, spec.head_dim, generator=generator)
    shifts, first_shifts = (torch.randn(*shape, generator=generator) for _ in range(2))
    return Frames(shifts, 5 * first_shifts, maps, torch.linalg.inv(maps).transpose(-1, -2).contiguous())


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "bloom", "qwen3"])
def test_frames_change_nothing_but_what_codes_stand_for(family: str, tmp_path: Path) -> None:
    """With windows that the first token leaves, soft-caps and slopes; whatever is taken from the first token's key."""
    layers = "n_layer" if family == "bloom" else "num_hidden_layers"
    folder = save(family, tmp_path, **{layers: 1})
    (prompt,) = make_prompts(300)  # more than a part of the context
    size, spec = 4, spec_of(read_json(folder / "config.json"))
    batch = ForwardBatch.build([RowSpan(prompt, 0, np.arange(1, 76, dtype=np.int32), "all")], size, CPU)
    decoder = fused_decoder(folder, Tier.FLOAT32, TensorParallel(), block_size=size, kv_kind=KvKind.UINT4)
    frames = frames_for(folder)
    decoder.program.engine.set_key_frames(*frames)
    found = decoder(batch, cache_for(folder, decoder, 80))
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
    weights = Weights(folder, torch.float32, CPU, spec.names.prefix)
    reference = Decoder(spec, weights, TensorParallel(), TorchAttention(size, CPU))
    framed = FramedCodes(spec, heads, 80, size, torch.float32, CPU)
    framed.frames = frames
    expected = reference(batch, framed)
    exact = reference(batch, KVCache(spec, heads, 80, size, torch.float32, CPU))
    assert found is not None
    assert expected is not None
    assert exact is not None
    lost = (expected - exact).norm()
    assert lost > 0
    assert (found - expected).norm() < 0.1 * lost + 1e-5 * exact.norm()


# A row's bits ---------------------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_a_row_has_the_same_bits_alone_in_company_and_in_any_chunks(family: str, kind: KvKind, tmp_path: Path) -> None:
    folder = save(family, tmp_path)
    decoder = decoder_of(folder, kind)
    prompts = make_prompts(43, 11, 76, 7, 20)
    expected = logits_of(folder, decoder, prompts)
    assert_same_bits([logits_of(folder, decoder, [prompt])[0] for prompt in prompts], expected)
    for chunk in (1, 2, 13, 100):
        assert_same_bits(logits_of(folder, decoder, prompts, chunk), expected)


@CODES
@pytest.mark.parametrize("block_size", [1, 6, 16, 48])
def test_long_contexts_and_every_block_size_give_one_result(block_size: int, kind: KvKind, tmp_path: Path) -> None:
    folder = save_tiny("smollm", tmp_path, max_position_embeddings=1024, num_hidden_layers=2)
    prompts = make_prompts(700, 260)
    decoder = decoder_of(folder, kind, block_size)
    cache = cache_for(folder, decoder, 2000 // block_size + 10)
    expected = step_through(decoder, cache, prompts, 300, 128)  # decodes over the border of two parts
    assert_same_bits(step_through(decoder, cache, prompts, 1, 331), expected)
    assert_same_bits(step_through(decoder, cache, prompts[1:], 5, 64), expected[1:])


@ALL
def test_bits_are_the_same_on_any_number_of_threads_and_every_instruction_set(kind: KvKind, tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path)
    prompts = make_prompts(43, 11, 76)
    expected = logits_of(folder, decoder_of(folder, kind), prompts)
    for name, needs, _ in compiler.INSTRUCTION_SETS:
        if needs <= building.cpu_flags():
            decoder = decoder_of(folder, kind, instruction_set=name)
            assert_same_bits(logits_of(folder, decoder, prompts), expected)
            decoder.program.engine.set_threads(5, 0)
            assert_same_bits(logits_of(folder, decoder, prompts), expected)


@pytest.mark.parametrize("group", [(24, 1), (6, 6), (12, 2)])
@CODES
def test_any_number_of_query_heads_may_share_a_key_head(kind: KvKind, group: tuple[int, int], tmp_path: Path) -> None:
    heads = {"num_attention_heads": group[0], "num_key_value_heads": group[1]}
    folder = save_tiny("llama", tmp_path, head_dim=8, num_hidden_layers=1, **heads)
    prompts = make_prompts(30, 9)
    exact = logits_of(folder, decoder_of(folder, KvKind.FLOAT32), prompts)
    found = logits_of(folder, decoder_of(folder, kind), prompts)
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < (0.02 if kind is KvKind.INT8 else 0.3)


@ALL
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_one_row_holds_does_not_reach_another(poison: float, kind: KvKind, tmp_path: Path) -> None:
    """Stale blocks hold anything: bytes of a former owner, scales that are no numbers."""
    folder = save_tiny("mistral", tmp_path)
    decoder = decoder_of(folder, kind)
    prompts = make_prompts(21, 9)
    expected = logits_of(folder, decoder, prompts)
    cache = cache_for(folder, decoder)
    if kind in FLOAT8:
        cache.pool.view(torch.uint8).fill_(0x7F)
    else:
        cache.pool.view(torch.float16).fill_(poison)
    assert_same_bits(step_through(decoder, cache, prompts, 6), expected)


@CODES
def test_a_key_that_is_no_number_shows_in_the_logits(kind: KvKind, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    decoder = decoder_of(folder, kind)
    cache = cache_for(folder, decoder)
    (prompt,) = make_prompts(9)
    table = np.arange(1, 5, dtype=np.int32)
    decoder(ForwardBatch.build([RowSpan(prompt[:8], 0, table)], 4, CPU), cache)
    cache.pool[1].view(torch.float16).fill_(torch.nan)
    logits = decoder(ForwardBatch.build([RowSpan(prompt[8:], 8, table)], 4, CPU), cache)
    assert logits is not None
    assert logits.isnan().all()


@CODES
def test_a_copied_block_is_as_good_as_the_first(kind: KvKind, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    decoder = decoder_of(folder, kind)
    cache = cache_for(folder, decoder)
    (prompt,) = make_prompts(9)
    first, second = np.array([1, 2, 3], np.int32), np.array([7, 8, 9], np.int32)
    decoder(ForwardBatch.build([RowSpan(prompt[:8], 0, first)], 4, CPU), cache)
    for source, target in zip(first, second, strict=True):
        cache.copy(int(source), int(target))
    rows = [RowSpan(prompt[8:], 8, table) for table in (first, second)]
    logits = decoder(ForwardBatch.build(rows, 4, CPU), cache)
    assert logits is not None
    assert torch.equal(logits[0], logits[1])


@ALL
def test_ranks_give_what_one_process_gives(kind: KvKind, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=1)
    spec = spec_of(read_json(folder / "config.json"))
    prompts = make_prompts(43, 11)

    def forward(parallel: TensorParallel) -> list[torch.Tensor]:
        decoder = fused_decoder(folder, Tier.FLOAT32, parallel, kv_kind=kind, num_threads=1)
        heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
        frame_keys(decoder, SpecPools(spec, heads, decoder.block_size, decoder.kv_dtype, CPU), TextCodec(folder), 256)
        cache = KVCache(spec, heads, 100, decoder.block_size, decoder.kv_dtype, CPU)
        return step_through(decoder, cache, prompts, 6)

    alone, together = on_ranks(1, forward), on_ranks(2, forward)
    for ours, theirs in zip(together, alone, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 1e-3


# Float8 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(FLOAT8), ids=lambda kind: kind.label)
def test_float8_is_rounded_as_torch_rounds_it(kind: KvKind, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path, num_hidden_layers=1)
    (prompt,) = make_prompts(300)
    table = np.arange(1, 76, dtype=np.int32)
    pools = []
    for each in (KvKind.FLOAT32, kind):
        decoder = fused_decoder(folder, Tier.FLOAT32, TensorParallel(), kv_kind=each)
        cache = cache_for(folder, decoder, 80)
        decoder(ForwardBatch.build([RowSpan(prompt, 0, table)], 4, CPU), cache)
        pools.append(cache.pool)
    expected = pools[0].to(FLOAT8[kind])
    assert torch.equal(pools[1].view(torch.uint8), expected.view(torch.uint8))
    assert len(expected.view(torch.uint8).unique()) > 100


# Frames ---------------------------------------------------------------------------------------------------------------


def test_frames_leave_products_what_they_are_and_make_errors_small() -> None:
    generator = torch.Generator().manual_seed(5)
    dim, count, group = 16, 4000, 3
    spread = torch.logspace(-1, 1, dim, dtype=torch.float64)
    turned = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))[0]
    keys = torch.randn(count, dim, generator=generator, dtype=torch.float64) * spread @ turned + 5
    queries = torch.randn(group * count, dim, generator=generator, dtype=torch.float64) / spread @ turned
    first = torch.randn(5, dim, generator=generator, dtype=torch.float64) + 100
    sums = torch.cat([first.sum(0), keys.sum(0), (keys.T @ keys).flatten(), (queries.T @ queries).flatten()])
    frames = frames_of(sums.view(1, 1, -1), count, 5, dim)
    shifts, first_shifts, key_maps, query_maps = (each[0, 0].double() for each in frames)
    torch.testing.assert_close(first_shifts, first.mean(0), rtol=1e-5, atol=0)
    mapped, asked = (keys - shifts) @ key_maps.T, queries[:count] @ query_maps.T
    exact = (queries[:count] * (keys - shifts)).sum(-1)
    torch.testing.assert_close((mapped * asked).sum(-1), exact, rtol=1e-4, atol=1e-4)
    plain = torch.from_numpy(rounded(keys.numpy(), 4)[0])
    framed = torch.from_numpy(rounded(mapped.numpy() @ hadamard(dim).T, 4)[0] @ hadamard(dim))
    error = (framed * asked).sum(-1) - exact
    plain_error = (queries[:count] * plain).sum(-1) - (queries[:count] * keys).sum(-1)
    assert error.square().mean() < 0.1 * plain_error.square().mean()


def test_keys_of_first_tokens_are_added_up_apart(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    spec, size = spec_of(read_json(folder / "config.json")), 4
    heads, dim = spec.num_kv_heads, spec.head_dim
    decoder = fused_decoder(folder, Tier.FLOAT32, TensorParallel(), block_size=size, kv_kind=KvKind.FLOAT32)
    cache = cache_for(folder, decoder, 8)
    sums = torch.zeros(spec.num_layers, heads, num_sums(dim), dtype=torch.float64)
    decoder.program.engine.observe(sums)
    (prompt,) = make_prompts(11)
    one, two = np.array([1, 2, 3], np.int32), np.array([4], np.int32)
    decoder(ForwardBatch.build([RowSpan(prompt[:6], 0, one), RowSpan(prompt[-1:], 0, two)], size, CPU), cache)
    decoder(ForwardBatch.build([RowSpan(prompt[6:], 6, one)], size, CPU), cache)  # none of these is a first token
    decoder.program.engine.observe(None)
    pool = cache.pool.view(8, spec.num_layers, 2, heads, dim, size)[:, :, 0].double()
    keys = pool[1:4].permute(1, 2, 0, 4, 3).flatten(2, 3)[:, :, :11]  # of the first row, [layers, heads, tokens, dim]
    first, total, products, queries = torch.split(sums, [dim, dim, dim * dim, dim * dim], dim=-1)
    torch.testing.assert_close(first, keys[:, :, 0] + pool[4, ..., 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(total, keys[:, :, 1:].sum(2), rtol=1e-4, atol=1e-5)
    expected = keys[:, :, 1:].transpose(-1, -2) @ keys[:, :, 1:]
    torch.testing.assert_close(products.view(expected.shape), expected, rtol=1e-4, atol=1e-5)
    assert queries.view(expected.shape).diagonal(dim1=-2, dim2=-1).gt(0).all()


def test_frames_are_the_same_each_time(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    digests = {decoder_of(folder, KvKind.UINT4).frames_digest for _ in range(2)}
    assert len(digests) == 1
    assert digests != {""}
    assert decoder_of(folder, KvKind.INT8).frames_digest == ""


# What is asked for ----------------------------------------------------------------------------------------------------


def test_what_a_model_cannot_have_is_refused(tmp_path: Path) -> None:
    spec = spec_of(read_json(save_tiny("llama", tmp_path) / "config.json"))
    assert asked_kv_kind(spec, 16, "fp8") is KvKind.FP8_E4M3FN
    with pytest.raises(SettingsError, match="--kv-cache-dtype bfloat16 is not for this model: pairs need even sizes"):
        asked_kv_kind(spec, 3, "bfloat16")
    with pytest.raises(SettingsError, match="heads have 1024 elements, codes are made of at most 512"):
        asked_kv_kind(replace(spec, head_dim=1024), 16, "int8")
    latents = spec_of(read_json(save("deepseek_v2", tmp_path / "latent") / "config.json"))
    with pytest.raises(SettingsError, match="the model keeps latents"):
        asked_kv_kind(latents, 16, "uint4")


def test_a_model_in_torch_takes_what_torch_has(tmp_path: Path) -> None:
    folder = save("mamba2", tmp_path)
    with pytest.raises(SettingsError, match="--kv-cache-dtype int8 needs the fused CPU step, this model runs in torch"):
        load_executor(folder, kv_cache_dtype="int8")
