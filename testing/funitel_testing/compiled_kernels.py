"""Triton kernels compiled for real cards on a machine without one: what fits, and what the interpreter never sees.

Usage: python -m funitel_testing.compiled_kernels ARCHITECTURES [LAUNCH ...], as `80,90 chunk-128-bfloat16`. Each launch
of `kernel_launches`, all where none is named, is compiled for those of the architectures that it is for; a line of
JSON, a `CompiledKernel`, for each kernel of it. The compiler of Triton's wheel needs no card, and nothing is run.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from funitel_testing.cache import usual_cache

KIB = 1024
# Architecture -> shared memory that a block can have: A100, H100 and H200.
# Source: CUDA C++ Programming Guide, technical specifications per compute capability.
SHARED_BYTES = {80: 163 * KIB, 90: 227 * KIB}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """What the compiler says of one kernel of one launch; `error` where it refuses."""

    launch: str
    arch: int
    kernel: str = ""
    num_warps: int = 0
    num_stages: int = 0
    shared_bytes: int = 0
    num_registers: int = 0  # of a thread
    spilled_bytes: int = 0  # of a thread
    has_wgmma: bool = False  # multiplies by Hopper's own instructions
    error: str = ""


def compile_launches(names: Sequence[str], archs: Sequence[int] = tuple(SHARED_BYTES)) -> list[CompiledKernel]:
    """Compile launches in a process of their own: in this one Triton may be its interpreter.

    What is compiled is kept in the cache that FUNITEL_CACHE names, by Triton, under a name made of the source, the
    options, the architecture and Triton itself.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "funitel_testing.compiled_kernels", ",".join(map(str, archs)), *names],
        env=environment | {"TRITON_CACHE_DIR": str(usual_cache() / "triton")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [CompiledKernel(**json.loads(line)) for line in run.stdout.splitlines()]


class _Card:
    """A fake driver of the card that is compiled for, with its own device, so that kernels are cached apart."""

    def __init__(self) -> None:
        self.arch = 0

    def get_current_target(self) -> Any:
        """See triton's DriverBase."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        """See triton's DriverBase."""
        return self.arch

    def get_current_stream(self, device: int) -> int:
        """See triton's DriverBase."""
        return device


def _compile(archs: Sequence[int], names: Sequence[str]) -> Iterator[CompiledKernel]:
    # Triton is imported here and not above: tests import this module in processes where it is the interpreter.
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from funitel_testing.kernel_launches import LAUNCHES

    gpu, made = _Card(), []
    driver.set_active(gpu)
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        made.append(kernel)
        return kernel

    JITFunction.run = compile_only
    for name in names or LAUNCHES:
        launch = LAUNCHES[name]
        for gpu.arch in set(archs) & set(launch.archs):
            made.clear()
            try:
                launch.call()
            except Exception as error:
                yield CompiledKernel(launch=name, arch=gpu.arch, error=f"{type(error).__name__}: {error}")
            for kernel in made:
                yield _report(name, gpu.arch, kernel)


def _report(launch: str, arch: int, kernel: Any) -> CompiledKernel:
    log = _ptxas(kernel.asm["ptx"], arch)
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill stores", log)
    assert registers, log
    return CompiledKernel(
        launch=launch,
        arch=arch,
        kernel=kernel.metadata.name,
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        shared_bytes=kernel.metadata.shared,
        num_registers=int(registers[1]),
        spilled_bytes=sum(map(int, spills)),
        has_wgmma="wgmma.mma_async" in kernel.asm["ptx"],
    )


def _ptxas(ptx: str, arch: int) -> str:
    """What the assembler says of registers; Triton runs it in the same way and keeps its words to itself."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        target = f"--gpu-name={sm_arch_from_capability(arch)}"
        command = [get_ptxas(arch).path, "-v", "--regAllocOptLevel=2", target, source.name, "-o", os.devnull]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


if __name__ == "__main__":
    for each in _compile([int(arch) for arch in sys.argv[1].split(",")], sys.argv[2:]):
        print(json.dumps(asdict(each)), flush=True)
