"""Measure every bit width: bits of a weight, memory, perplexity and speed, as a table and a picture for the docs.

The demo model is measured as it is, and as a copy that computes the same function with weights on no grid: its own come
from blocks of 4 bits, which formats of 4 bits with 32 inputs find again without an error. A model of 1.2 billion random
weights gives memory and speed alone. `--write` puts the table and the picture into the documentation.

    make ladder                        # or, for some formats and a short text:
    python benchmarks/ladder.py --formats q8,q3h --max-tokens 2000 --skip-random
"""

import argparse
import gc
import json
import math
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
from peer_grid.random_models import write_checkpoint
from peer_grid.shapes import SHAPES
from safetensors.torch import save_file

from funitel.model_server.files.gguf_pointer import POINTER, check_pointer, part_paths
from funitel.model_server.files.integrity import read_json
from funitel.model_server.files.texts import read_texts
from funitel.model_server.hub.resolve import cache_folder, resolve
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.settings import DTYPES, ModelServerSettings
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.tools.perplexity.command import tokenize
from funitel.model_server.tools.perplexity.measurement import Measurement, Source
from funitel.model_server.tools.perplexity.subject import Subject
from funitel.model_server.tools.quantize.job import CheckpointSource

ROOT = Path(__file__).parents[1]
TEXT = ROOT / "benchmarks" / "heldout_long.txt"
PAGE, PICTURE = ROOT / "docs" / "quantization.md", ROOT / "docs" / "images" / "ladder.svg"
BEGIN, END = "<!-- ladder -->", "<!-- end of ladder -->"
DEMO = "smollm2-135m-instruct"
FORMATS = (
    "float32 float16 bfloat16 int8 q8 q6 q5_b32t1 q5 q4 q4_b64t1 a16w8 a16w4_g32 a16w4 a16w4_g128 q3h q3 q2".split()
)
CONTEXT, STEPS = 200, 15
LETTER, LINE = 7.3, 13  # pixels of a label
Box = tuple[float, float, float, float]  # left, top, right, bottom
Factors = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Rung:
    """One format: `bits` of a weight, megabytes, tokens/s of one stream; perplexity and KL where they are measured."""

    name: str
    bits: float
    megabytes: float
    tokens_per_second: float
    perplexity: float | None = None
    error: float | None = None
    kl: float | None = None


def off_grid(folder: Path, target: Path) -> Path:
    """A copy of a Llama that computes the same: channels are scaled where they are made, and back at their readers.

    Its weights are on no grid that the source may come from.
    """
    if (target / "model.safetensors").exists():
        return target
    spec = spec_of(read_json(folder / "config.json"))
    source = CheckpointSource(folder)
    tensors = {name: source.read(name).float() for name in source.names}
    generator = torch.Generator().manual_seed(20)

    def factors(count: int) -> torch.Tensor:
        return torch.exp2(torch.rand(count, generator=generator) - 0.5)

    for layer in range(spec.num_layers):
        _scale_layer(tensors, f"model.layers.{layer}.", spec, factors)
    target.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.json"):
        (target / path.name).write_bytes(path.read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def _scale_layer(tensors: dict[str, torch.Tensor], prefix: str, spec: ModelSpec, factors: Factors) -> None:
    """The norms' outputs, the values of heads and the hidden units of one layer."""
    names = {
        f"{prefix}input_layernorm.weight": [f"{prefix}self_attn.{each}_proj.weight" for each in "qkv"],
        f"{prefix}post_attention_layernorm.weight": [f"{prefix}mlp.{each}_proj.weight" for each in ("gate", "up")],
    }
    for norm, readers in names.items():
        scale = factors(spec.hidden_size)
        tensors[norm] = tensors[norm] * scale
        for reader in readers:
            tensors[reader] = tensors[reader] / scale
    values = factors(spec.num_kv_heads * spec.head_dim)
    tensors[f"{prefix}self_attn.v_proj.weight"] *= values[:, None]
    group = spec.num_heads // spec.num_kv_heads
    of_heads = values.view(spec.num_kv_heads, 1, spec.head_dim).expand(-1, group, -1).reshape(-1)
    tensors[f"{prefix}self_attn.o_proj.weight"] /= of_heads
    units = factors(spec.intermediate_size)
    tensors[f"{prefix}mlp.up_proj.weight"] *= units[:, None]
    tensors[f"{prefix}mlp.down_proj.weight"] /= units


def source_of(folder: Path, name: str, num_threads: int) -> Source:
    """A model in one precision or format."""
    settings = ModelServerSettings(model_id=str(folder), device="cpu", num_threads=num_threads)
    is_exact = name in DTYPES
    settings = replace(settings, dtype=name if is_exact else None, quantize=None if is_exact else name)
    return Source(name, settings, folder)


def speed_of(source: Source) -> tuple[int, float]:
    """Bytes of the weights, and tokens/s of one stream with some context: the median of some steps."""
    subject: Subject = source.load()
    subject.reserve(CONTEXT + STEPS + 3)
    ids = [11 + i % 1000 for i in range(CONTEXT + STEPS + 3)]
    subject.forward(ids, 0, CONTEXT, "none")
    times = []
    for place in range(CONTEXT, CONTEXT + STEPS + 2):
        begin = time.perf_counter()
        subject.forward(ids, place, place + 1, "all")
        times.append(time.perf_counter() - begin)
    found = subject.info.weight_bytes, 1 / median(times[2:])
    subject.close()
    gc.collect()
    return found


def climb(folder: Path, names: Sequence[str], most: int | None, num_threads: int) -> Iterator[Rung]:
    """Every format of a model: quality where there is a text of `most` tokens, 0 for none."""
    source_of_shapes = CheckpointSource(folder)
    exact = sum(math.prod(source_of_shapes.shape(name)[1]) for name in source_of_shapes.names)
    texts = tokenize(folder, read_texts(str(TEXT), "--text"), most) if most != 0 else []
    reference = source_of(folder, "float32", num_threads)
    for name in names:
        source = source_of(folder, name, num_threads)
        num_bytes, speed = speed_of(source)
        rung = Rung(name, 8 * num_bytes / exact, num_bytes / 1e6, speed)
        if texts:
            row = Measurement(TEXT.name, texts, None, None, reference, [source]).run().rows[-1]
            likelihood, distance = row.likelihood, row.distance
            assert distance is not None
            rung = replace(
                rung, perplexity=likelihood.perplexity, error=likelihood.perplexity_error, kl=distance.kl_mean
            )
        print(json.dumps(asdict(rung)), file=sys.stderr, flush=True)
        yield rung


def table_of(ladders: dict[str, list[Rung]]) -> str:
    """The table of the documentation: a row for each format, with the columns of every model."""
    demo, copy, random = (ladders.get(key, []) for key in ("demo", "off-grid", "random"))
    by_name = [{rung.name: rung for rung in rungs} for rungs in (demo, copy, random)]
    lines = [
        "| format | bits | MB | perplexity | KL | off its grid: perplexity | KL | tokens/s | 1.2B: MB | tokens/s |",
        f"|{' --- |' * 10}",
    ]
    for rung in demo:
        other, large = by_name[1].get(rung.name), by_name[2].get(rung.name)
        cells = [f"`{rung.name}`", f"{rung.bits:.2f}", f"{rung.megabytes:.0f}", *_quality(rung), *_quality(other)]
        cells += [f"{rung.tokens_per_second:.0f}"]
        cells += [f"{large.megabytes:.0f}", f"{large.tokens_per_second:.1f}"] if large else ["-", "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _quality(rung: Rung | None) -> list[str]:
    if rung is None or rung.perplexity is None or rung.kl is None:
        return ["-", "-"]
    return [f"{rung.perplexity:.2f}" if rung.perplexity < 1e4 else f"{rung.perplexity:.0f}", f"{rung.kl:.2g}"]


def free_place(px: float, py: float, width: float, taken: Sequence[Box]) -> Box:
    """Where a label of so many pixels covers none of the boxes: beside its point, or a little above or below that."""
    tried = [
        (left, py + down - LINE / 2)
        for down in (0, -11, 11, -18, 18, -28, 28, -40, 40)
        for left in (px + 8, px - 8 - width)
    ]
    boxes = [(left, top, left + width, top + LINE) for left, top in tried]
    return next((box for box in boxes if not any(_overlap(box, other) for other in taken)), boxes[0])


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def picture_of(rungs: Sequence[Rung]) -> str:
    """Bits of a weight against KL divergence on a logarithmic axis, as an SVG in the colours of the reader."""
    shown = [rung for rung in rungs if rung.kl is not None and rung.kl > 0]
    width, height, left, top = 760, 380, 64, 56
    powers = [10.0**e for e in range(-6, 2)]
    low = max(p for p in powers if p <= min(r.kl or 1 for r in shown))
    high = min(p for p in powers if p >= max(r.kl or 1 for r in shown))
    bits = [r.bits for r in shown]
    first, last = math.log2(min(bits)) - 0.1, math.log2(max(bits)) + 0.25

    def x(value: float) -> float:
        return left + (width - left - 30) * (math.log2(value) - first) / (last - first)

    def y(value: float) -> float:
        return top + (height - top - 60) * (math.log10(high) - math.log10(value)) / (math.log10(high) - math.log10(low))

    style = (
        "svg { --surface: #ffffff; --ink: #1b1f24; --muted: #59636e; --grid: #d9dee4; --mark: #1f6feb; } "
        "@media (prefers-color-scheme: dark) { svg { --surface: #0d1117; --ink: #e6edf3; --muted: #9198a1; "
        "--grid: #30363d; --mark: #58a6ff; } } text { font: 12px system-ui, sans-serif; fill: var(--muted); } "
        ".title { font-size: 14px; font-weight: 600; fill: var(--ink); } .name { fill: var(--ink); }"
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>KL divergence by bits of a weight</title>",
        f"<style>{style}</style>",
        f'<rect width="{width}" height="{height}" fill="var(--surface)"/>',
        '<text class="title" x="16" y="28">KL divergence from float32 in nats, by bits of a weight</text>',
    ]
    for power in (p for p in powers if low <= p <= high):
        lines.append(
            f'<line x1="{left}" x2="{width - 30}" y1="{y(power):.1f}" y2="{y(power):.1f}" stroke="var(--grid)"/>'
        )
        lines.append(f'<text x="{left - 8}" y="{y(power) + 4:.1f}" text-anchor="end">{power:g}</text>')
    for mark in (3, 4, 5, 6, 8, 16):
        if min(bits) * 0.93 <= mark <= max(bits) * 1.1:
            lines.append(f'<text x="{x(mark):.1f}" y="{height - 34}" text-anchor="middle">{mark}</text>')
    lines.append(f'<text x="{(left + width) / 2}" y="{height - 12}" text-anchor="middle">bits of a weight</text>')
    taken = [(x(rung.bits) - 5, y(rung.kl or 1) - 5, x(rung.bits) + 5, y(rung.kl or 1) + 5) for rung in shown]
    for rung in shown:
        px, py = x(rung.bits), y(rung.kl or 1)
        lines.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4.5" fill="var(--mark)"/>')
        place = free_place(px, py, LETTER * len(rung.name), taken)
        taken.append(place)
        lines.append(f'<text class="name" x="{place[0]:.1f}" y="{place[3] - 3:.1f}">{rung.name}</text>')
    return "\n".join([*lines, "</svg>", ""])


def random_model(num: str) -> Path:
    """The folder of the shape with random weights, made once."""
    folder = cache_folder(None) / f"ladder-{num}"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        pointer = resolve(DEMO).folder / POINTER
        write_checkpoint(folder, SHAPES[num], part_paths(pointer, check_pointer(pointer))[0])
        (folder / "done").touch()
    return folder


def processor() -> str:
    """Name of the processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(FORMATS), help="parted by commas")
    parser.add_argument("--max-tokens", type=int, default=None, help="of the text; 0 for none")
    parser.add_argument("--skip-random", action="store_true", help="leave the model of 1.2 billion weights out")
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="put table and picture into the documentation")
    arguments = parser.parse_args()
    names, threads = arguments.formats.split(","), arguments.num_threads
    folder = resolve(DEMO).folder
    copy = off_grid(folder, cache_folder(None) / "ladder-off-grid")
    ladders = {
        "demo": list(climb(folder, names, arguments.max_tokens, threads)),
        "off-grid": list(climb(copy, names, arguments.max_tokens, threads)),
    }
    if not arguments.skip_random:
        large = [name for name in names if name != "float32"]
        ladders["random"] = list(climb(random_model("1b"), large, 0, threads))
    table, picture = table_of(ladders), picture_of(ladders["off-grid"])
    print(table)
    print(json.dumps({key: [asdict(rung) for rung in rungs] for key, rungs in ladders.items()}))
    if arguments.write:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        words = f"{arguments.max_tokens:,} tokens" if arguments.max_tokens else "all"
        where = f"commit {commit.stdout.strip()} on {processor()} with {threads} threads"
        note = f"Measured at {where}, {words} of `{TEXT.name}`."
        page = PAGE.read_text(encoding="utf-8")
        new = f"{BEGIN}\n{table}\n\n{note}\n{END}"
        PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: new, page, flags=re.DOTALL), encoding="utf-8")
        PICTURE.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
