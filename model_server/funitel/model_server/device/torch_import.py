"""Import torch without the modules that only tracing and training use: they are executed where they are first used.

A third of the time of `import torch` goes into such modules, for example the rules by which a traced operation finds
the shape of its result. `import_torch` puts them into `sys.modules` without executing them; the first attribute that is
asked of one executes it.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING

from funitel.proto.process.deferred_module import DeferredModule, defer, execute

if TYPE_CHECKING:
    import torch

DEFERRED = frozenset(
    f"torch.{name}"
    for name in (
        "_meta_registrations",
        "ao",
        "compiler",
        "distributed._meta_registrations",
        "distributions",
        "export",
        "fx.passes",
        "masked",
        "multiprocessing",
        "nn.attention",
        "nn.intrinsic",
        "nn.qat",
        "nn.quantizable",
        "nn.quantized",
        "nn.utils",
        "optim",
        "profiler",
        "quantization",
        "testing",
        "utils.data",
    )
)
_WITH_EFFECTS = ("torch._meta_registrations", "torch.distributed._meta_registrations")
"""Those that nothing names where it needs them: they register the shapes of results with torch's dispatcher."""


class _DeferringFinder:
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in DEFERRED else None
        if spec is not None and spec.loader is not None:
            defer(spec)
        return spec


def import_torch() -> None:
    """Import torch, the modules of `DEFERRED` unexecuted; nothing where torch is imported already."""
    if "torch" in sys.modules:
        return
    finder = _DeferringFinder()
    sys.meta_path.insert(0, finder)
    try:
        import_module("torch")
    finally:
        sys.meta_path.remove(finder)


def register_shapes() -> None:
    """Execute what registers the shapes of results: for models that torch traces, or makes on the meta device."""
    for name in _WITH_EFFECTS:
        if isinstance(module := sys.modules.get(name), DeferredModule):
            execute(module)


def seeded_generator(seed: int, device: "torch.device | str" = "cpu") -> "torch.Generator":
    """A random generator of torch; `torch.Generator` itself fails where `import_torch` left its type unregistered."""
    import_module("torch._prims.rng_prims")  # registers it
    generator: torch.Generator = import_module("torch").Generator(device)
    return generator.manual_seed(seed)


@contextmanager
def imports_kept() -> Iterator[None]:
    """Look for no garbage cycles during imports, nor later in what they made: it stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
