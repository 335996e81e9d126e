"""The command `funitel-server bench-kernels`: compare matrix products of the fused step with the machine's roofline.

A product of few rows is bound by reading weights, one of many rows by arithmetic. Every shape of the model is held
against both roofs of `roofs`, with as many threads and the same amount of memory: its weights are repeated until
they fill the footprint. Attention of one row over a long context is held against the reading of its keys and values.
At last comes what a user gets, where the fused step runs the model: one row through all of it with its own weights,
waiting included. A share is the time that the nearer roof needs, of the time that was taken.
"""

import ctypes
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from funitel.model_server.checkpoint.gguf_file import GgufTensorFile
from funitel.model_server.cpu.compiler import CannotBuild
from funitel.model_server.cpu.coverage import missing
from funitel.model_server.cpu.footprint import matrix_bytes
from funitel.model_server.cpu.native import (
    Batch,
    Buffer,
    Code,
    Mode,
    NativeEngine,
    NativeOperation,
    Shape,
    load_library,
)
from funitel.model_server.cpu.precision import ActivationDtype, KvKind, MatrixKind, Tier
from funitel.model_server.files.gguf_pointer import POINTER
from funitel.model_server.files.integrity import read_json
from funitel.model_server.hub.resolve import cache_folder, resolve
from funitel.model_server.quantized.block_types import BlockType
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.settings import KernelSettings
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.tools.kernel_bench.attention import BLOCK_SIZE, CONTEXT, measure_attention, measure_step
from funitel.model_server.tools.kernel_bench.roofs import RoofRow, Roofs, held_against, largest_cache_bytes
from funitel.proto.errors import StartupError
from funitel.proto.process.usable_cores import count_usable_cores

MIN_FOOTPRINT, MAX_FOOTPRINT = 256 << 20, 1 << 30
SECONDS, MIN_PASSES = 0.5, 3


class BenchedProduct:
    """The product of some rows with matrices of one shape, one after the other."""

    def __init__(self, engine: NativeEngine, kind: MatrixKind, num_outputs: int, num_inputs: int, count: int) -> None:
        self._engine, self._num_inputs, self._count = engine, num_inputs, count
        program: list[NativeOperation] = []
        weight = _random_weight(kind, num_outputs, num_inputs)
        engine.reserve(count * matrix_bytes(kind, num_outputs, num_inputs))
        for _ in range(count):
            matrix, _ = engine.add_matrix(kind, num_outputs, num_inputs, [[(weight, None)]])
            program.append(NativeOperation(Code.PREPARE, Buffer.X, 0, matrix))
            program.append(NativeOperation(Code.LINEAR, matrix, Mode.STORE, Buffer.HIDDEN))
        engine.set_program(program)

    def seconds(self, num_rows: int) -> float:
        """Least time of one product, laying out its rows included."""
        x = torch.randn(num_rows, self._num_inputs)
        ints = {name: np.zeros(1, dtype=np.int32) for name in ("starts", "blocks", "table_starts")}
        lengths = np.array([num_rows], dtype=np.int32)
        batch = Batch(num_tokens=num_rows, num_rows=1, x=x.data_ptr(), lengths=lengths.ctypes.data)
        for name, values in ints.items():
            setattr(batch, name, values.ctypes.data)
        times: list[float] = []
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end or len(times) < MIN_PASSES:
            begin = time.perf_counter()
            self._engine.run(batch, 0)
            times.append(time.perf_counter() - begin)
        return min(times) / self._count


def shapes_of(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Every matrix of the model, unsplit: outputs and inputs."""
    heads, hidden, units = spec.num_heads * spec.head_dim, spec.hidden_size, spec.intermediate_size
    return {
        "qkv": (heads + 2 * spec.num_kv_heads * spec.head_dim, hidden),
        "out": (hidden, heads),
        "up": (units * (2 if spec.is_gated else 1), hidden),
        "down": (hidden, units),
        "head": (spec.vocab_size, hidden),
    }


def kinds_of(tier: Tier, spec: ModelSpec, folder: Path) -> dict[str, MatrixKind]:
    """How each matrix of `shapes_of` is kept: of a GGUF as the blocks of the first layer.

    Raises:
        StartupError: there are no blocks.
    """
    names, first = spec.names, spec.names.prefix
    layers = {
        "qkv": first + (names.qkv or names.q).format(i=0),
        "out": first + names.out.format(i=0),
        "up": first + names.up.format(i=0),
        "down": first + names.down.format(i=0),
        "head": first + names.embedding if spec.is_tied else names.head,
    }
    if tier is not Tier.GGUF:
        return dict.fromkeys(layers, tier.kind)
    if not (folder / POINTER).is_file():
        raise StartupError(f"--tier gguf: {folder} was not made of a GGUF")
    file = GgufTensorFile(folder / POINTER)
    types = {shape: file.type_of(f"{layer}.weight") for shape, layer in layers.items()}
    return {shape: MatrixKind.of_blocks(found) or tier.kind for shape, found in types.items()}


def measure_kernels(settings: KernelSettings) -> None:
    """Print a line for each shape and number of rows; the last line is one JSON object.

    Raises:
        StartupError: there is no fused step on this machine, or no such model.
    """
    tier = Tier[settings.tier.upper()]
    folder = resolve(settings.model_id, cache_dir=settings.cache_dir).folder
    spec = spec_of(read_json(folder / "config.json"))
    kinds = kinds_of(tier, spec, folder)
    num_threads = settings.num_threads or count_usable_cores()
    footprint = settings.footprint_mib << 20 if settings.footprint_mib else _footprint()
    libraries = cache_folder(settings.cache_dir)
    try:
        roofs = Roofs(libraries, num_threads=num_threads, num_bytes=footprint)
        library = load_library(libraries)
        kv_kind = tier.kv_kind(spec, BLOCK_SIZE, ActivationDtype.INT8)
        table = list(_rows(kinds, kv_kind, spec, settings.rows, library, roofs, num_threads, footprint))
    except CannotBuild as error:
        raise StartupError(f"the fused CPU step cannot be measured: {error}") from error
    print(
        f"{tier.label}, {num_threads} threads: reads {roofs.read_bytes_s / 1e9:.1f} GB/s of {footprint >> 20} MiB, "
        f"multiplies {roofs.multiply_s / 1e9:.0f} GMAC/s"
    )
    for row in table:
        print(
            f"{row.shape:20} rows {row.rows:4}  {row.microseconds:9.1f} us  {row.gb_s:6.1f} GB/s  "
            f"{row.gmac_s:6.1f} GMAC/s  {row.share:5.0%} of what it {row.roof}"
        )
    summary = {
        "tier": tier.label,
        "num_threads": num_threads,
        "footprint_mib": footprint >> 20,
        "read_gb_s": roofs.read_bytes_s / 1e9,
        "multiply_gmac_s": roofs.multiply_s / 1e9,
        "shapes": [asdict(row) for row in table],
    }
    step = _tell_step(library, folder, spec, tier, num_threads, roofs, kinds["up"])
    print(json.dumps(summary | {"step": step}))


def _tell_step(
    library: ctypes.CDLL, folder: Path, spec: ModelSpec, tier: Tier, num_threads: int, roofs: Roofs, kind: MatrixKind
) -> dict[str, Any] | None:
    """Measure a whole step and print its line; what the JSON has of it, None where the fused step is not run."""
    reason = missing(spec)
    if reason is not None:
        print(f"{'whole step':20} not measured: the fused step leaves this model to torch: {reason}")
        return None
    cost = measure_step(library, folder, spec, tier, num_threads, SECONDS)
    roofs.measure(kind)
    *layer, head = (num_outputs * num_inputs for num_outputs, num_inputs in shapes_of(spec).values())
    step = held_against(
        "whole step",
        1,
        cost.seconds,
        num_bytes=cost.weight_bytes + cost.kv_bytes,
        num_weights=spec.num_layers * sum(layer) + head,
        read_bytes_s=roofs.read_bytes_s,
        multiply_s=roofs.multiply_s,
    )
    print(
        f"{step.shape:20} rows {step.rows:4}  {step.microseconds:9.1f} us  {step.gb_s:6.1f} GB/s of "
        f"{cost.weight_bytes / 1e6:.1f} MB of weights and {cost.kv_bytes / 1e6:.1f} MB of context, "
        f"{step.share:5.0%} of what it {step.roof}; usually {cost.median_seconds * 1e6:.1f} us"
    )
    return asdict(step) | {"median_microseconds": cost.median_seconds * 1e6}


def _rows(
    kinds: Mapping[str, MatrixKind],
    kv_kind: KvKind,
    spec: ModelSpec,
    all_rows: tuple[int, ...],
    library: ctypes.CDLL,
    roofs: Roofs,
    threads: int,
    footprint: int,
) -> Iterator[RoofRow]:
    """Measure all, then hold it against the best that the roofs have been."""
    taken: list[tuple[str, int, float, int, int]] = []
    for name, (num_outputs, num_inputs) in shapes_of(spec).items():
        kind = kinds[name]
        label = f"{name} {num_inputs}->{num_outputs}" + (f" {kind.name}" if kind.has_blocks else "")
        if sys.stderr.isatty():
            print(f"\r\x1b[K{label}", end="", file=sys.stderr, flush=True)
        # Roofs are measured again beside every shape: on a shared machine one moment says little.
        roofs.measure(kind)
        num_bytes = matrix_bytes(kind, num_outputs, num_inputs)
        engine = NativeEngine(library, _shape(num_outputs, num_inputs, threads))
        product = BenchedProduct(engine, kind, num_outputs, num_inputs, -(-footprint // num_bytes))
        for rows in all_rows:
            taken.append((label, rows, product.seconds(rows), num_bytes, num_outputs * num_inputs))
    attention = measure_attention(
        library,
        spec,
        kv_kind=kv_kind,
        num_threads=threads,
        footprint=footprint,
        seconds=SECONDS,
    )
    taken.append((f"attention over {CONTEXT}", 1, attention.seconds, attention.num_bytes, attention.num_products))
    roofs.measure(kind)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    for each in taken:
        yield held_against(*each, read_bytes_s=roofs.read_bytes_s, multiply_s=roofs.multiply_s)


def _random_weight(kind: MatrixKind, num_outputs: int, num_inputs: int) -> torch.Tensor:
    """Weights as `NativeEngine.add_matrix` takes them; blocks of any codes with one scale: no sum is infinite."""
    if not kind.has_blocks:
        return torch.randn(num_outputs, num_inputs)
    block = BlockType[kind.name]
    blocks = torch.randint(0, 256, (num_outputs, num_inputs // block.num_inputs, block.num_bytes), dtype=torch.uint8)
    if block is BlockType.MXFP4:
        blocks[..., 0] = 120  # an exponent of two
    for at in block.scales:
        blocks[..., at : at + 2] = torch.full([1], 0.01, dtype=torch.float16).view(torch.uint8)
    return blocks.flatten(1)


def _shape(num_outputs: int, num_inputs: int, threads: int) -> Shape:
    """A model of nothing but this matrix."""
    return Shape(
        hidden_size=num_inputs,
        head_dim=2,
        num_heads=1,
        num_kv_heads=1,
        intermediate_size=num_outputs,
        num_layers=1,
        block_size=BLOCK_SIZE,
        num_threads=threads,
        level_bits=8 * ActivationDtype.INT8,
    )


def _footprint() -> int:
    """Bytes that no cache holds, within bounds."""
    return min(max(2 * largest_cache_bytes(), MIN_FOOTPRINT), MAX_FOOTPRINT)
