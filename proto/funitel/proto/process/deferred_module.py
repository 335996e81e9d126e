"""Modules that are executed at the first attribute asked of them: a start does not take the time of what it never uses.

What `importlib.util.LazyLoader` does, for several threads: the others wait until the module is executed.
"""

import sys
import threading
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

_EXECUTING = threading.RLock()


class DeferredModule(ModuleType):
    """A module that is executed at the first attribute it does not have yet."""

    def __getattr__(self, name: str) -> Any:
        execute(self)
        if isinstance(self, DeferredModule):  # it is being executed, by this thread
            raise AttributeError(f"partially initialized module {self.__name__!r} has no attribute {name!r}")
        return getattr(self, name)


class DeferringLoader:
    """Makes a module and leaves its execution to `loader`, its own."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Make the module as its own loader does."""
        made: ModuleType | None = self.loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Leave it as it is."""
        module.__class__ = DeferredModule


def defer(spec: ModuleSpec) -> None:
    """Let the module that a spec describes be executed at its first use."""
    loader: Any = DeferringLoader(spec.loader)
    spec.loader = loader


def deferred(name: str) -> Any:
    """A module by its name, executed at its first use; its package is executed now.

    Raises:
        ModuleNotFoundError: there is none.
    """
    if name in sys.modules:
        return sys.modules[name]
    spec = find_spec(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    defer(spec)
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    package, _, last = name.rpartition(".")
    if package:
        setattr(sys.modules[package], last, module)  # as an import does
    return module


def execute(module: ModuleType) -> None:
    """Execute a module that was deferred; another thread waits until it is executed."""
    with _EXECUTING:
        spec = module.__spec__
        if spec is None or not isinstance(spec.loader, DeferringLoader):
            return  # another thread has executed it, or this one does
        deferring = spec.loader
        with ExitStack() as undo:  # what fails is deferred again
            undo.callback(_use_loader, module, spec, deferring)
            _use_loader(module, spec, deferring.loader)
            deferring.loader.exec_module(module)
            undo.pop_all()
        module.__class__ = ModuleType


def _use_loader(module: ModuleType, spec: ModuleSpec, loader: Any) -> None:
    module.__loader__ = spec.loader = loader
