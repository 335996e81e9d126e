"""Every Triton kernel compiles for the cards we serve on, within their shared memory and registers.

The interpreter, which tests what kernels compute, accepts what the compiler refuses. Needs no GPU.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")

from funitel import model_server
from funitel_testing.compiled_kernels import SHARED_BYTES, compile_launches
from funitel_testing.kernel_launches import LAUNCHES

QUICK = [name for name, launch in LAUNCHES.items() if launch.is_quick]


def test_a_few_compile_within_the_cards_limits() -> None:
    check(QUICK, archs=(90,))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHES)
def test_all_compile_within_the_cards_limits(name: str) -> None:
    check([name], archs=LAUNCHES[name].archs)


def check(names: list[str], archs: tuple[int, ...]) -> None:
    found = compile_launches(names, archs)
    for kernel in found:
        assert not kernel.error, kernel
        assert kernel.shared_bytes <= SHARED_BYTES[kernel.arch], kernel
        assert kernel.spilled_bytes <= LAUNCHES[kernel.launch].spilled_bytes, kernel
        assert kernel.num_registers * 32 * kernel.num_warps <= 65_536, kernel  # of a multiprocessor
    for name in names:
        for arch in archs:
            made = [kernel.kernel for kernel in found if (kernel.launch, kernel.arch) == (name, arch)]
            assert made == list(LAUNCHES[name].kernels)


def test_every_kernel_is_launched_by_a_test() -> None:
    launched = {kernel for launch in LAUNCHES.values() for kernel in launch.kernels}
    assert launched == set(kernels_in(Path(model_server.__file__).parent))


def kernels_in(folder: Path) -> Iterator[str]:
    """Names of the functions that Triton compiles, less those that other such functions call."""
    compiled = [node for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())) if is_jit(node)]
    called = {
        call.func.id
        for function in compiled
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    return (function.name for function in compiled if function.name not in called)


def is_jit(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
