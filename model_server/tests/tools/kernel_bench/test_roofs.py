"""Kernels against roofs: the arithmetic on made-up numbers, the measurement on a tiny model."""

import json
from pathlib import Path

import pytest

from funitel.model_server.cpu import build as build_module
from funitel.model_server.cpu.build import build, cpu_flags
from funitel.model_server.cpu.compiler import INSTRUCTION_SETS, CannotBuild
from funitel.model_server.cpu.precision import MatrixKind
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.settings import KernelSettings
from funitel.model_server.tools.kernel_bench import matmul
from funitel.model_server.tools.kernel_bench.matmul import measure_kernels, shapes_of
from funitel.model_server.tools.kernel_bench.roofs import Roofs, held_against, largest_cache_bytes
from funitel.proto.errors import SettingsError, StartupError
from funitel.proto.settings.options import Counts
from funitel_testing.tiny import save_tiny, save_tokenizer
from funitel_testing.zoo import ZOO

pytestmark = pytest.mark.skipif("avx2" not in cpu_flags(), reason="needs AVX2")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def roofs(cache: Path) -> Roofs:
    return Roofs(cache, num_threads=2, num_bytes=8 << 20)


def test_a_share_is_of_the_roof_that_is_nearer() -> None:
    roof = {"read_bytes_s": 10e9, "multiply_s": 100e9}
    few = held_against("up 10->100", 1, 2e-3, num_bytes=10_000_000, num_weights=10_000_000, **roof)
    assert (few.roof, few.share) == ("reads", pytest.approx(0.5))
    assert (few.microseconds, few.gb_s, few.gmac_s) == pytest.approx((2000, 5, 5))
    many = held_against("up 10->100", 20, 4e-3, num_bytes=10_000_000, num_weights=10_000_000, **roof)
    assert (many.roof, many.share, many.gmac_s) == ("multiplies", pytest.approx(0.5), pytest.approx(50))


def test_every_matrix_of_a_model_is_measured(tmp_path: Path) -> None:
    spec = spec_of(json.loads((save_tiny("llama", tmp_path) / "config.json").read_text()))
    heads = spec.num_heads * spec.head_dim
    assert shapes_of(spec) == {
        "qkv": (heads + 2 * spec.num_kv_heads * spec.head_dim, spec.hidden_size),
        "out": (spec.hidden_size, heads),
        "up": (2 * spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
        "head": (spec.vocab_size, spec.hidden_size),
    }


def test_roofs_only_rise(roofs: Roofs) -> None:
    for kind in MatrixKind:
        roofs.multiply_s = 0.0
        before = roofs.read_bytes_s
        roofs.measure(kind, passes=1)
        assert roofs.read_bytes_s >= before
        # A core adds 16 products at least every other cycle, however slow; and no processor does a hundred at a time.
        assert 1e9 < roofs.multiply_s < 1e14
    assert 1e8 < roofs.read_bytes_s < 1e13
    assert largest_cache_bytes() >= 0


@pytest.mark.parametrize("name", [name for name, _, _ in INSTRUCTION_SETS])
def test_roofs_are_built_for_every_instruction_set(cache: Path, name: str) -> None:
    if not next(needs for other, needs, _ in INSTRUCTION_SETS if other == name) <= cpu_flags():
        pytest.skip(f"the CPU lacks {name}")
    assert build(cache, name, source="roofs.cpp").is_file()


def test_kernels_of_a_tiny_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "SECONDS", 0.01)
    model = str(save_tiny("llama", tmp_path))
    measure_kernels(KernelSettings(model_id=model, rows=Counts("1,5"), num_threads=2, footprint_mib=1))
    *lines, last = capsys.readouterr().out.splitlines()
    summary = json.loads(last)
    assert lines[0].startswith("int8, 2 threads: reads ")
    assert len(lines) == 1 + 11 + 1
    assert lines[-1].startswith("whole step ")
    step = summary["step"]
    assert step["median_microseconds"] >= step["microseconds"] > 0
    assert step["share"] > 0
    assert [(row["shape"].split()[0], row["rows"]) for row in summary["shapes"]] == [
        *((name, rows) for name in ("qkv", "out", "up", "down", "head") for rows in (1, 5)),
        ("attention", 1),
    ]
    for row in summary["shapes"]:
        assert 0 < row["share"] < 2  # more than 1 is a roof measured too low, which a busy machine may do
        assert row["gb_s"] > 0


def test_what_the_fused_step_does_not_run_is_measured_but_for_the_whole_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "SECONDS", 0.01)
    ZOO["llama_dynamic"].save(tmp_path)
    save_tokenizer(tmp_path)
    measure_kernels(KernelSettings(model_id=str(tmp_path), rows=Counts("1"), num_threads=1, footprint_mib=1))
    *lines, last = capsys.readouterr().out.splitlines()
    words = "not measured: the fused step leaves this model to torch: rotary scaling dynamic"
    assert lines[-1].split(maxsplit=2) == ["whole", "step", words]
    assert len(lines) == 1 + 6 + 1
    summary = json.loads(last)
    assert (summary["step"], len(summary["shapes"])) == (None, 6)


def test_the_table_is_printed_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*arguments: object) -> None:
        raise StartupError("no memory")

    monkeypatch.setattr(matmul, "SECONDS", 0.01)
    monkeypatch.setattr(matmul, "measure_step", none)
    settings = KernelSettings(
        model_id=str(save_tiny("llama", tmp_path)), rows=Counts("1"), num_threads=1, footprint_mib=1
    )
    with pytest.raises(StartupError, match="no memory"):
        measure_kernels(settings)
    assert len(capsys.readouterr().out.splitlines()) == 1 + 6


def test_no_compiler_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise CannotBuild("there is no C++ compiler")

    monkeypatch.setattr(build_module, "find_compiler", none)
    settings = KernelSettings(model_id=str(save_tiny("llama", tmp_path)), cache_dir=str(tmp_path))
    with pytest.raises(StartupError, match="^the fused CPU step cannot be measured: there is no C.. compiler$"):
        measure_kernels(settings)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rows": Counts("0")}, "--rows must be within 1..4096, given 0"),
        ({"num_threads": 0}, "--num-threads must be within 1..1024, given 0"),
        ({"footprint_mib": 0}, "--footprint-mib must be within 1..65536, given 0"),
    ],
)
def test_settings_that_make_no_sense(given: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=f"^{message}$"):
        KernelSettings(**given)  # type: ignore[arg-type]
