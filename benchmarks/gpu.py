"""Measure the figures of docs/gpu.md against the limits of the GPU, in one call of some minutes on one card.

Ceilings are what this card does: a copy within its memory, a product of large bfloat16 matrices. The model has the
shape of Llama-3.1-8B and random weights, so nothing is fetched. Sections, in their order:

    kernels     attention kernels against the reference, over random shapes
    equality    greedy tokens of the demo model here and in float32 on the CPU (a random one where it is not there)
    checkpoint  the random weights as a folder that a server loads
    decode      decoding steps and a long prompt against the ceilings, and a profile of steps
    serve       the launcher, the router and a shard: many streams over HTTP
    peer        transformers' continuous batching on the same weights
    vllm        vLLM's offline engine on the same weights; skipped where it is not installed
    pool        the executor in process, then with every block of the pool in use
    precision   4-bit, int8 and fp8 weights and fp8 KV: what they gain and what they cost
    extras      LoRA adapters and drafts: what they add to a decoding step
    experts     decoding steps and a prompt of a mixture of experts, in kernels and expert by expert

Each runs in a process of its own and within a time of its own; one that fails leaves the others as they are. Figures
are printed as they come, then what failed, and as the last line a short JSON object; the whole report grows in
FOLDER/report.json beside the sections' logs. The exit status is 1 where an aim is missed or a section failed.

    python benchmarks/gpu.py                              # all of it, on cuda:0
    python benchmarks/gpu.py --sections decode serve      # some of it
    python benchmarks/gpu.py --rehearse                   # the same code without a GPU, on a tiny shape

Needs this project's sources on PYTHONPATH (proto, router, model_server, launcher, testing) and what they import.
`benchmarks/gpu_pack.py` packs that for a machine without a network.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(sys.path.pop(0))  # last: scripts beside this one have names that packages have too
if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch
from gpu_sections import figures
from gpu_sections.course import NAMES, Course, run_section
from gpu_sections.plan import FULL, REHEARSAL, Plan

MAX_MINUTES = 7.9
REHEARSAL_PATIENCE = 5.0  # times a section's own seconds: a CPU is slow, and not alone
IN_MEMORY, LARGE = Path("/dev/shm"), 40 << 30  # bytes: a checkpoint, and what else is kept there


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="run without a GPU, on a tiny shape")
    parser.add_argument("--sections", nargs="+", choices=NAMES, default=list(NAMES), metavar="SECTION")
    parser.add_argument("--minutes", type=float, help=f"most that all may take; {MAX_MINUTES:g} when not given")
    parser.add_argument("--demo", help="the demo model: a folder, a GGUF file or a name of the catalogue")
    parser.add_argument(
        "--vllm-site",
        type=Path,
        default=os.environ.get("FUNITEL_VLLM_SITE") or None,
        metavar="FOLDER",
        help="folder of vLLM's packages, which no other section sees; FUNITEL_VLLM_SITE when not given",
    )
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="where to keep random checkpoints")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where report and logs go; a new folder otherwise")
    parser.add_argument("--section", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--facts", type=json.loads, default={}, help="figures of an earlier call: a JSON object by key")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    plan = REHEARSAL if arguments.rehearse else FULL
    plan = plan if arguments.demo is None else replace(plan, demo=arguments.demo)
    if arguments.vllm_site is not None and not arguments.vllm_site.is_dir():
        raise SystemExit(f"error: --vllm-site {arguments.vllm_site} is no folder")
    plan = replace(plan, vllm_site=arguments.vllm_site and arguments.vllm_site.absolute())
    if plan.is_gpu and not torch.cuda.is_available():
        raise SystemExit("error: there is no CUDA device; --rehearse runs without one")
    if arguments.section is not None:
        run_section(arguments.section, replace(plan, folder=arguments.checkpoints), arguments.facts)
        return 0
    out = arguments.out or Path(tempfile.mkdtemp(prefix="funitel-gpu-"))
    out.mkdir(parents=True, exist_ok=True)
    if arguments.checkpoints is not None:
        return run(arguments, replace(plan, folder=arguments.checkpoints), out)
    with tempfile.TemporaryDirectory(prefix="funitel-gpu-", dir=_place()) as folder:
        return run(arguments, replace(plan, folder=Path(folder)), out)


def _place() -> Path | None:
    """Memory, where it has room for a large checkpoint, else wherever temporary files go."""
    has_room = IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > LARGE
    return IN_MEMORY if has_room else None


def run(arguments: argparse.Namespace, plan: Plan, out: Path) -> int:
    """Run the sections asked for; returns the exit status."""
    own = ["--rehearse"] * arguments.rehearse + ["--demo", plan.demo, "--checkpoints", str(plan.folder)]
    own += [] if plan.vllm_site is None else ["--vllm-site", str(plan.vllm_site)]
    command = [sys.executable, __file__, *own]
    minutes = arguments.minutes or (MAX_MINUTES if plan.is_gpu else None)
    course = Course(command, out, minutes and minutes * 60, 1.0 if plan.is_gpu else REHEARSAL_PATIENCE, arguments.facts)

    def report() -> dict[str, Any]:
        full = figures.report(course.lines, course.errors, course.taken, is_rehearsal=not plan.is_gpu)
        (out / "report.json").write_text(json.dumps(full))
        return full

    print(figures.HEADER, flush=True)
    for line in course.run(arguments.sections):
        print(f"{line}{'' if line.is_met or not plan.is_gpu else '  MISSED'}", flush=True)
        report()
    for section, error in course.errors.items():
        print(f"{section} FAILED: {error}")
    print(json.dumps(figures.summary(report())))
    is_right = not course.errors and (not plan.is_gpu or all(line.is_met for line in course.lines))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
