"""Imports beyond `.importlinter` and `scripts/house.py`: purity, gRPC, the environment, start-up without torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PORTIONS = ("proto", "router", "model_server", "launcher", "llm")

# What decides a step knows numbers and nouns: no event loop, no clock, no socket, no gRPC.
PURE_PACKAGES = ("funitel.router.scheduler", "funitel.router.kv_cache")
PURE_MODULES = (
    "funitel.proto.step",
    "funitel.proto.strategy",
    "funitel.router.auth.rate_limit",
    "funitel.router.core.beam_group",
    "funitel.router.core.beam_search",
    "funitel.router.core.request",
    "funitel.router.encoder.queue",
)
PURE_STDLIB = {
    "array",
    "bisect",
    "collections",
    "collections.abc",
    "dataclasses",
    "enum",
    "hashlib",
    "heapq",
    "itertools",
    "math",
    "typing",
}

GRPC_RIMS = {
    "funitel.proto.generate_pb2_grpc",
    "funitel.proto.security.tls",
    "funitel.router.shard_client.rank",
    "funitel.model_server.rpc.servicer",
    "funitel.model_server.rpc.tracing",
    "funitel.launcher.processes.health",
    "funitel.launcher.executors.shard_calls",
    "funitel.launcher.executors.shard_health",
}
# The launcher copies its environment once and hands it down; typer reads the variables of settings.
# A library has no main module: what its callers do not say it reads where they call it.
ENVIRONMENT_READERS = {f"funitel.{portion}.__main__" for portion in ("router", "model_server", "launcher")}
ENVIRONMENT_READERS |= {"funitel.llm.llm"}
ENVIRONMENT_READERS |= {"funitel.router.sandbox.process"}  # hands a few variables to its processes
ENVIRONMENT_READERS |= {"funitel.proto"}  # it reads nothing: it sets a variable for gRPC before that is imported
ENVIRONMENT_READERS |= {f"funitel.proto.settings.{module}" for module in ("command", "fields", "options")}
ENVIRONMENT_READERS |= {"funitel.launcher.terminal_ui.credentials"}  # which server a client's key is for
ENVIRONMENT_READERS |= {"funitel.launcher.up.program"}  # copies it once, as `__main__` does for `serve`
ENVIRONMENT_READERS |= {f"funitel.launcher.machine.{module}" for module in ("facts", "ranks")}  # of another machine
ENVIRONMENT_READERS |= {"funitel.launcher.executors.ray_actor"}  # what Ray gives to an actor
ENVIRONMENT_READERS |= {"funitel.model_server.tools.cache.listing"}  # where the hub's library keeps its cache
ENVIRONMENT_READERS |= {"funitel.launcher.cli.server"}  # hands it to the server that a client starts


def module_name(path: Path, portion: str) -> str:
    return ".".join(path.relative_to(ROOT / portion).with_suffix("").parts).removesuffix(".__init__")


def portion_of(module: str) -> str:
    """The portion that holds a module of ours; `funitel.__main__` is the launcher."""
    return "launcher" if module == "funitel.__main__" else module.split(".")[1]


TREES = {
    module_name(path, portion): ast.parse(path.read_bytes())
    for portion in PORTIONS
    for path in sorted((ROOT / portion / "funitel").rglob("*.py"))
}


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module a file imports, at its top or inside a function, under type checking or not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if name in TREES)
            if module not in TREES or any(name not in TREES for name in names):
                yield module


IMPORTS = {module: set(imported(tree)) for module, tree in TREES.items()}
OURS = {module: {name for name in names if name.split(".")[0] == "funitel"} for module, names in IMPORTS.items()}


def test_every_portion_was_read() -> None:
    assert {portion_of(module) for module in TREES} == set(PORTIONS)
    assert all(targets <= {*TREES, "funitel"} for targets in OURS.values())


def test_no_module_imports_itself_in_a_circle() -> None:
    TopologicalSorter(OURS).prepare()  # raises CycleError, which names the circle


def test_nothing_hides_the_other_portions() -> None:
    assert [str(path) for path in ROOT.glob("*/funitel/__init__.py")] == []


PURE = sorted({*PURE_MODULES, *(m for m in TREES if m.startswith(tuple(f"{package}." for package in PURE_PACKAGES)))})


@pytest.mark.parametrize("module", PURE)
def test_what_plans_a_step_is_pure(module: str) -> None:
    assert IMPORTS[module] <= PURE_STDLIB | set(PURE) | {"funitel.proto.errors"}


def test_grpc_is_known_at_the_rims_only() -> None:
    assert {module for module, names in IMPORTS.items() if "grpc" in names} == GRPC_RIMS


def reads_environment(tree: ast.AST) -> bool:
    """Whether a file uses os.environ or os.getenv under any of their names."""
    names = ("environ", "environb", "getenv", "getenvb")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "os" and node.attr in names:
                return True
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            if any(alias.name in names for alias in node.names):
                return True
    return False


def test_the_environment_is_read_in_main_modules_only() -> None:
    readers = {module for module, tree in TREES.items() if reads_environment(tree)}
    assert readers <= ENVIRONMENT_READERS


def loaded_by(module: str, *suspects: str) -> list[str]:
    """Which of `suspects` a fresh interpreter holds after importing `module`."""
    code = f"import sys, {module}; print(*(name for name in {suspects!r} if name in sys.modules))"
    path = ":".join(entry for entry in sys.path if entry)
    answer = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    return answer.stdout.split()


@pytest.mark.parametrize("module", ["funitel.router.__main__", "funitel.launcher.__main__"])
def test_router_and_launcher_start_without_torch(module: str) -> None:
    assert loaded_by(module, "torch", "transformers", "numpy") == []


def test_help_of_a_shard_needs_no_torch() -> None:
    assert loaded_by("funitel.model_server.__main__", "torch", "transformers") == []


def test_the_scheduler_comes_alone() -> None:
    assert (
        loaded_by("funitel.router.scheduler.scheduler", "asyncio", "grpc", "socket", "google.protobuf", "starlette")
        == []
    )
