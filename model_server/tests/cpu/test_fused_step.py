"""The fused CPU step: a row's bits depend on nothing but the row; its library is built once; torch is the fallback."""

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from funitel.model_server.cpu import build as building
from funitel.model_server.cpu import compiler
from funitel.model_server.cpu.build import build
from funitel.model_server.cpu.compiler import CannotBuild
from funitel.model_server.cpu.decoder import FusedDecoder
from funitel.model_server.cpu.footprint import matrix_bytes
from funitel.model_server.cpu.precision import ActivationDtype, KvKind, MatrixKind, Tier, choose_tier
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.files.manifest import MANIFEST, VERIFIED
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.loading.decoder import load
from funitel.model_server.quantized.config import Quantization
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import SettingsError
from funitel_testing import forward_worker
from funitel_testing.executors import ids_of, load_executor, run_alone, start
from funitel_testing.forward_worker import CPU, fused_decoder, run, sets_that_add_alike, step_through
from funitel_testing.ranks import run_ranks
from funitel_testing.tiny import save_tiny

NUM_DECODE = 6
TIERS = pytest.mark.parametrize(
    "tier", [Tier.FLOAT32, Tier.FLOAT16, Tier.BFLOAT16, Tier.INT8], ids=lambda tier: tier.label
)
Prompts = list[list[int]]


def make_prompts(*lengths: int) -> Prompts:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, 288, (length,), generator=generator).tolist() for length in lengths]


def make_cache(folder: Path, decoder: FusedDecoder, num_blocks: int = 400) -> KVCache:
    spec = spec_of(read_json(folder / "config.json"))
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
    return KVCache(spec, heads, num_blocks, decoder.block_size, decoder.kv_dtype, CPU)


def logits_of(folder: Path, decoder: FusedDecoder, prompts: Prompts, chunk: int = 11) -> list[torch.Tensor]:
    return step_through(decoder, make_cache(folder, decoder), prompts, NUM_DECODE, chunk)


def assert_same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


# A row's bits ---------------------------------------------------------------------------------------------------------


@TIERS
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_a_row_has_the_same_bits_alone_in_company_and_in_any_chunks(family: str, tier: Tier, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path)
    decoder = fused_decoder(folder, tier, TensorParallel())
    prompts = make_prompts(43, 11, 76, 7, 20)
    expected = logits_of(folder, decoder, prompts)
    assert_same_bits([logits_of(folder, decoder, [prompt])[0] for prompt in prompts], expected)
    for chunk in (1, 2, 13, 100):
        assert_same_bits(logits_of(folder, decoder, prompts, chunk), expected)


@TIERS
def test_bits_are_the_same_on_any_number_of_threads_and_every_instruction_set(tier: Tier, tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path)
    prompts = make_prompts(43, 11, 76)
    expected = logits_of(folder, fused_decoder(folder, tier, TensorParallel(), num_threads=1), prompts)
    for num_threads in (2, 5):
        decoder = fused_decoder(folder, tier, TensorParallel(), num_threads=num_threads)
        assert decoder.num_threads == num_threads
        assert_same_bits(logits_of(folder, decoder, prompts), expected)
    best, *_ = groups = sets_that_add_alike(tier)
    for names in groups:
        decoders = [fused_decoder(folder, tier, TensorParallel(), instruction_set=name) for name in names]
        found = [logits_of(folder, decoder, prompts) for decoder in decoders]
        for each in found:
            assert_same_bits(each, expected if names is best else found[0])


@TIERS
@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_long_contexts_and_every_block_size_give_one_result(block_size: int, tier: Tier, tmp_path: Path) -> None:
    """Contexts of several attention parts: split between items when decoding, walked by one item in a chunk."""
    folder = save_tiny("smollm", tmp_path, max_position_embeddings=1024, num_hidden_layers=2)
    prompts = make_prompts(700, 260)
    decoder = fused_decoder(folder, tier, TensorParallel(), block_size=block_size)
    cache = make_cache(folder, decoder, 2000 // block_size + 10)
    expected = step_through(decoder, cache, prompts, 300, 128)  # decodes over the border of two parts
    assert_same_bits(step_through(decoder, cache, prompts, 1, 331), expected)
    assert_same_bits(step_through(decoder, cache, prompts[1:], 5, 64), expected[1:])
    oracle = run(folder, TensorParallel(), prompts[1:], 1)
    tolerance = {Tier.FLOAT32: 1e-5, Tier.FLOAT16: 1e-2, Tier.BFLOAT16: 5e-2, Tier.INT8: 0.15}[tier]
    assert (expected[1] - oracle[0]).norm() / oracle[0].norm() < tolerance


@TIERS
def test_odd_sizes_are_no_special_case(tier: Tier, tmp_path: Path) -> None:
    sizes = {"hidden_size": 45, "intermediate_size": 37, "head_dim": 22, "num_attention_heads": 3}
    folder = save_tiny("llama_bias", tmp_path, num_key_value_heads=1, vocab_size=301, **sizes)
    prompts = make_prompts(30, 9)
    decoder = fused_decoder(folder, tier, TensorParallel())
    expected = run(folder, TensorParallel(), prompts, NUM_DECODE)
    tolerance = {Tier.FLOAT32: 1e-5, Tier.FLOAT16: 1e-2, Tier.BFLOAT16: 5e-2, Tier.INT8: 0.15}[tier]
    for ours, theirs in zip(logits_of(folder, decoder, prompts), expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() / theirs.norm() < tolerance


@TIERS
def test_many_query_heads_may_share_a_key_head(tier: Tier, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path, num_attention_heads=24, num_key_value_heads=1, head_dim=4)
    prompts = make_prompts(30, 9)
    expected = run(folder, TensorParallel(), prompts, NUM_DECODE)
    found = logits_of(folder, fused_decoder(folder, tier, TensorParallel()), prompts)
    tolerance = {Tier.FLOAT32: 1e-5, Tier.FLOAT16: 1e-2, Tier.BFLOAT16: 5e-2, Tier.INT8: 0.15}[tier]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < tolerance


@TIERS
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e-42])
def test_what_one_row_holds_does_not_reach_another(poison: float, tier: Tier, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    decoder = fused_decoder(folder, tier, TensorParallel())
    cache = make_cache(folder, decoder)
    tables = torch.arange(1, 61, dtype=torch.int32).view(2, 30).numpy()
    prompts = make_prompts(40, 40)

    def step(which: list[int], start: int, end: int) -> torch.Tensor:
        spans = [RowSpan(prompts[i][start:end], start, tables[i], "all") for i in which]
        logits = decoder(ForwardBatch.build(spans, decoder.block_size, CPU), cache)
        assert logits is not None
        return logits

    step([0, 1], 0, 20)
    clean = step([0], 20, 40)
    cache.pool[31:] = poison  # the blocks of row 1, the unused part of its last one included
    together = step([0, 1], 20, 40)
    assert torch.equal(together[:20], clean)
    if poison != poison:
        assert together[20:].isnan().all()


def test_int8_sums_stay_within_32_bits_however_wide_the_layer(tmp_path: Path) -> None:
    """Equal weights and activations make the largest sums there can be; a sum that wraps would be far off."""
    folder = save_tiny("llama", tmp_path, hidden_size=48, intermediate_size=20_000, num_hidden_layers=1)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"model.layers.0.mlp.{name}.weight"].fill_(0.02)
    save_file(tensors, path)
    prompts = make_prompts(12)
    expected = run(folder, TensorParallel(), prompts, NUM_DECODE)[0]
    found = logits_of(folder, fused_decoder(folder, Tier.INT8, TensorParallel()), prompts)[0]
    assert (found - expected).norm() / expected.norm() < 0.05


@TIERS
def test_weights_take_the_memory_that_is_reported(tier: Tier, tmp_path: Path) -> None:
    program = fused_decoder(save_tiny("qwen2", tmp_path), tier, TensorParallel()).program
    biases = 3 * (48 + 2 * 24) * 4
    assert program.sharded_bytes == program.total_sharded_bytes + biases
    assert program.held_bytes == program.sharded_bytes + 7 * 48 * 4
    assert matrix_bytes(MatrixKind.INT8, 17, 5) == 32 * (32 + 4)


# Threads --------------------------------------------------------------------------------------------------------------


def test_threads_end_with_the_decoder(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    tasks = Path("/proc/self/task")
    before = len(list(tasks.iterdir()))
    decoder = fused_decoder(folder, Tier.FLOAT32, TensorParallel(), num_threads=4)
    assert len(list(tasks.iterdir())) == before + 3
    del decoder
    assert len(list(tasks.iterdir())) == before


def test_a_forked_child_computes_alone(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    run_ranks(forward_worker.serve_forked, tmp_path, 1)


# Building -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Something quick to compile in place of the engine."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "engine.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(compiler, "SOURCES", folder)
    return folder


def test_a_library_is_built_once_and_anew_when_its_source_changes(small_source: Path, tmp_path: Path) -> None:
    library = build(tmp_path / "cache")
    built = library.stat().st_mtime_ns
    assert build(tmp_path / "cache") == library
    assert library.stat().st_mtime_ns == built
    (small_source / "more.h").write_text("// more\n")
    assert build(tmp_path / "cache") != library


def test_sources_that_belong_together_are_compiled_each_by_itself_into_one_library(
    small_source: Path, tmp_path: Path
) -> None:
    more = small_source / "engine_more.cpp"
    (small_source / "engine.cpp").write_text('int more();\nextern "C" int answer() { return 40 + more(); }\n')
    more.write_text("int more() { return 2; }\n")
    library = build(tmp_path / "cache")
    assert ctypes.CDLL(str(library)).answer() == 42
    assert {path.name for path in library.parent.iterdir()} <= {building.LIBRARY, MANIFEST, VERIFIED}
    more.write_text("int more() { return 3; }\n")
    assert ctypes.CDLL(str(build(tmp_path / "cache"))).answer() == 43
    more.write_text("int more( {\n")
    with pytest.raises(CannotBuild, match=r"failed: .*engine_more\.cpp:1.*error"):
        build(tmp_path / "cache")


def test_a_cache_that_cannot_be_written_does_without(small_source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    script = f"""
from pathlib import Path
from funitel.model_server.cpu import build, compiler
compiler.SOURCES = Path({str(small_source)!r})
print(build.build(Path({str(tmp_path / "cache")!r})).is_file())
"""
    environ = os.environ | {"TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environ, timeout=60)
    assert done.stdout == "True\n", done.stderr
    assert list(temporary.iterdir()) == []


def test_what_was_built_is_used_where_there_is_no_compiler(
    small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build(tmp_path / "cache")
    monkeypatch.setattr(compiler, "COMPILERS", ("no-such-compiler",))
    assert build(tmp_path / "cache") == library
    (small_source / "more.h").write_text("// another source\n")
    with pytest.raises(CannotBuild, match="there is no C"):
        build(tmp_path / "cache")


def test_shards_that_start_together_build_once(small_source: Path, tmp_path: Path) -> None:
    script = f"""
import logging, sys
from pathlib import Path
from funitel.model_server.cpu import build, compiler
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
compiler.SOURCES = Path({str(small_source)!r})
print(build.build(Path({str(tmp_path / "cache")!r})))
"""
    shards = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [shard.communicate(timeout=60)[0] for shard in shards]
    assert [shard.returncode for shard in shards] == [0, 0, 0]
    assert len({text.splitlines()[-1] for text in said}) == 1
    assert sum("built the fused CPU step" in text for text in said) == 1


def _damaged(content: bytes, kind: str) -> bytes:
    middle = len(content) // 2
    return {
        "empty": b"",
        "cut": content[: len(content) // 3],
        "0xff": content[:middle] + b"\xff" * (len(content) - middle),
        "one bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
    }[kind]


@pytest.mark.parametrize("kind", ["empty", "cut", "0xff", "one bit"])
@pytest.mark.parametrize("name", [building.LIBRARY, MANIFEST])
def test_a6_a_damaged_library_is_built_again_and_never_opened(
    name: str, kind: str, small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build(tmp_path / "cache")
    right = library.read_bytes()
    held = ctypes.CDLL(str(library))  # as a shard that runs has it
    spoiled = library.with_name(name)
    content = spoiled.read_bytes()
    spoiled.rename(spoiled.with_name("other"))  # the shard's own bytes stay
    spoiled.write_bytes(_damaged(content, kind))
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "COMPILERS", ("no-such-compiler",))
        with pytest.raises(CannotBuild, match="there is no C"):
            build(tmp_path / "cache")
    assert build(tmp_path / "cache") == library
    assert library.read_bytes() == right
    assert ctypes.CDLL(str(library)).answer() == held.answer() == 42
    assert {path.name for path in library.parent.iterdir()} == {building.LIBRARY, MANIFEST, VERIFIED}
    assert {path.name for path in library.parent.parent.iterdir()} == {".locks", library.parent.name}


def test_a6_a_library_without_checksums_is_of_an_older_version_and_built_again(
    small_source: Path, tmp_path: Path
) -> None:
    library = build(tmp_path / "cache")
    library.write_bytes(b"not this")
    library.with_name(MANIFEST).unlink()
    assert build(tmp_path / "cache") == library
    assert ctypes.CDLL(str(library)).answer() == 42


def test_a_full_cache_does_without(small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The linker only says that it failed."""
    compile_, cache = building._compile, tmp_path / "cache"

    def full(command: str, target: compiler.CompileTarget, library: Path) -> Path:
        if library.is_relative_to(cache):
            raise CannotBuild("g++ failed: collect2: error: ld returned 1 exit status")
        return compile_(command, target, library)

    monkeypatch.setattr(building, "_compile", full)
    with pytest.raises(CannotBuild, match="ld returned 1"):
        build(cache)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(building.shutil, "disk_usage", lambda _: usage._replace(free=4096))
    assert ctypes.CDLL(str(build(cache))).answer() == 42


def test_what_cannot_be_built_says_why(small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (small_source / "engine.cpp").write_text("int f( {\n")
    with pytest.raises(CannotBuild, match=r"failed: .*engine\.cpp:1.*error"):
        build(tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "COMPILERS", ("no-such-compiler",))
        with pytest.raises(CannotBuild, match=r"there is no C\+\+ compiler \(no-such-compiler\)"):
            build(tmp_path / "cache")
    monkeypatch.setattr(building, "cpu_flags", lambda: frozenset({"sse2"}))
    with pytest.raises(CannotBuild, match="the CPU lacks AVX2, FMA or F16C"):
        build(tmp_path / "cache")


# Choosing -------------------------------------------------------------------------------------------------------------


GPTQ = Quantization(method="gptq", bits=4, group_size=32)
INT8 = Quantization(method="compressed-tensors", bits=8, group_size=-1)


@pytest.mark.parametrize(
    ("dtype", "quantize", "quantization", "tier"),
    [
        (None, None, None, Tier.INT8),
        (None, None, INT8, Tier.INT8),
        (None, None, GPTQ, Tier.FLOAT16),
        ("float32", None, None, Tier.FLOAT32),
        ("float16", None, None, Tier.FLOAT16),
        ("bfloat16", None, None, Tier.BFLOAT16),
        (None, "int8", None, Tier.INT8),
        ("float16", "int8", None, Tier.INT8),
        ("float32", "int8", INT8, Tier.FLOAT32),
        ("float32", "gguf", GPTQ, Tier.FLOAT32),
        ("float32", "gptq", GPTQ, Tier.FLOAT32),
    ],
)
def test_settings_and_checkpoint_choose_the_tier(
    dtype: str | None, quantize: str | None, quantization: Quantization | None, tier: Tier | None
) -> None:
    assert choose_tier(dtype, quantize, quantization) is tier


@pytest.mark.parametrize(
    ("tier", "activations", "block_size", "kind"),
    [
        (Tier.FLOAT32, ActivationDtype.INT8, 16, KvKind.FLOAT32),
        (Tier.FLOAT16, ActivationDtype.INT8, 16, KvKind.FLOAT16),
        (Tier.BFLOAT16, ActivationDtype.INT16, 16, KvKind.BFLOAT16),
        (Tier.INT8, ActivationDtype.INT8, 16, KvKind.BFLOAT16),
        (Tier.INT8, ActivationDtype.INT16, 16, KvKind.FLOAT16),
        (Tier.GGUF, ActivationDtype.INT8, 48, KvKind.BFLOAT16),
        (Tier.GGUF, ActivationDtype.INT8, 1, KvKind.FLOAT16),
    ],
)
def test_keys_and_values_are_bfloat16_where_activations_are_rounded_and_sizes_are_even(
    tier: Tier, activations: ActivationDtype, block_size: int, kind: KvKind, tmp_path: Path
) -> None:
    spec = spec_of(read_json(save_tiny("llama", tmp_path) / "config.json"))
    assert tier.kv_kind(spec, block_size, activations) is kind


@TIERS
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_what_the_pool_holds_elsewhere_changes_nothing(family: str, tier: Tier, tmp_path: Path) -> None:
    """Not even where it is no number: tokens whose values lie beside those of another one are seen alone."""
    folder = save_tiny(family, tmp_path)
    decoder = fused_decoder(folder, tier, TensorParallel())
    prompts = make_prompts(43, 11, 76, 1)
    expected = logits_of(folder, decoder, prompts)
    cache = make_cache(folder, decoder)
    cache.pool.fill_(torch.nan)
    for chunk in (1, 11):
        assert_same_bits(step_through(decoder, cache, prompts, NUM_DECODE, chunk), expected)
        cache.pool.fill_(torch.inf)


def test_exact_and_quantised_weights_are_not_both_given() -> None:
    with pytest.raises(SettingsError, match="--quantize int8 makes int8 of the weights, --dtype float32 keeps float32"):
        choose_tier("float32", "int8", None)


def test_blocks_that_no_matrix_has_are_named() -> None:
    with pytest.raises(SettingsError, match=r"^--quantize q3h: no matrix of this model has whole blocks of inputs"):
        choose_tier(None, "q3h", None)
    with pytest.raises(SettingsError, match=r"^--quantize gguf: this model is no GGUF file"):
        choose_tier(None, "gguf", None)


def test_the_default_tier_is_reported_with_the_way_to_exact_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny("llama", tmp_path)
    caplog.set_level(logging.INFO)
    settings = ModelServerSettings(model_id=str(folder), device="cpu", num_threads=1)
    executor, info = load(settings, folder)
    assert (info.dtype, executor.options.dtype) == ("int8", torch.bfloat16)
    assert "weights are kept as int8, the default on a CPU; --dtype float32 keeps them exact" in caplog.messages
    assert info.weight_bytes < 48 * 1024 * 4
    _, exact = load(replace(settings, dtype="float32"), folder)
    assert exact.dtype == "torch.float32"
    assert exact.weight_bytes > 2.8 * info.weight_bytes
    with pytest.raises(SettingsError, match="--quantize gptq: the weights of this checkpoint are not quantised"):
        load(replace(settings, quantize="gptq"), folder)


def test_without_a_compiler_torch_computes_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny("llama", tmp_path)
    fused = load_executor(folder, dtype="float32")
    assert isinstance(fused.runner.decoder, FusedDecoder)
    monkeypatch.setattr(compiler, "COMPILERS", ("no-such-compiler",))
    caplog.set_level(logging.WARNING)
    cache_dir = str(tmp_path / "nothing built")
    plain = load_executor(folder, dtype="float32", cache_dir=cache_dir)
    assert not isinstance(plain.runner.decoder, FusedDecoder)
    assert [record.getMessage() for record in caplog.records] == [
        "the model runs in torch, without the fused CPU step: there is no C++ compiler (no-such-compiler)"
    ]
    sequence = start(3, [5, 6, 7, 8], max_new_tokens=12)
    assert ids_of(run_alone(fused, sequence)) == ids_of(run_alone(plain, sequence))
    with pytest.raises(SettingsError, match=r"--quantize int8 needs the fused CPU step: there is no C\+\+ compiler"):
        load_executor(folder, dtype=None, quantize="int8", cache_dir=cache_dir)


def test_every_source_file_is_in_the_build() -> None:
    names = {path.name for path in compiler.SOURCES.iterdir() if path.suffix in (".h", ".cpp")}
    targets = [compiler.CompileTarget(source, "avx2") for source in ("engine.cpp", "encoder.cpp", "roofs.cpp")]
    found, waiting = set(), {path.name for target in targets for path in target.paths}
    while waiting:
        found.add(source := waiting.pop())
        lines = (compiler.SOURCES / source).read_text().splitlines()
        waiting |= {line.split('"')[1] for line in lines if '#include "' in line} - found
    assert names == found
    assert os.access(compiler.find_compiler(), os.X_OK)
