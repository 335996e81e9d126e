"""Fixtures of the whole-system tests: real processes, the demo model or a tiny random one, figures at the end."""

import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from funitel_testing.cache import demo_folder
from funitel_testing.servers import Server, serving
from funitel_testing.tiny import save_tiny

_FIGURES: dict[str, object] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    """--full runs every prompt, seed and repetition; without it a short form of each."""
    parser.addoption("--full", action="store_true", help="run the long form of the whole-system tests")
    parser.addoption("--figures", help="write the measured figures to this JSON file")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases of `sampled` tests, except with --full and where single tests were asked for by their names."""
    if config.getoption("--full") or any("::" in argument for argument in config.args):
        return
    num_seen: Counter[str] = Counter()
    left_out: set[pytest.Item] = set()
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None:
            name = item.nodeid.partition("[")[0]
            if num_seen[name] % marker.args[0]:
                left_out.add(item)
            num_seen[name] += 1
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def is_full(request: pytest.FixtureRequest) -> bool:
    """Whether the long form was asked for."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def figures() -> dict[str, object]:
    """Measured figures by name, printed when the tests end."""
    return _FIGURES


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the figures of one of several processes to the one that prints them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["figures"] = json.dumps(_FIGURES)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the figures of a process that has ended; one that died has none."""
    _FIGURES.update(json.loads(getattr(node, "workeroutput", {}).get("figures", "{}")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the figures, one a line."""
    if not _FIGURES:
        return
    terminalreporter.section("figures")
    for name, value in _FIGURES.items():
        terminalreporter.write_line(f"{name}: {value}")
    target = config.getoption("--figures")
    if target:
        Path(target).write_text(json.dumps(_FIGURES, indent=2) + "\n")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the demo model, in the cache that FUNITEL_CACHE names or the default one."""
    return demo_folder()


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    """`benchmarks/oracle.py`: what transformers makes of prompts, on one thread, beside servers that compute too."""
    torch.set_num_threads(1)
    path = Path(__file__).parent.parent / "benchmarks" / "oracle.py"
    spec = importlib.util.spec_from_file_location("oracle", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama with a context of 512 tokens."""
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


ServerFactory = Callable[..., Server]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerFactory]:
    """`launch(*flags)` starts a server, or returns the one this module runs with the same flags."""
    running: dict[tuple[str, ...], tuple[Server, object]] = {}

    def start(*flags: str) -> Server:
        if flags not in running:
            for _, context in running.values():
                context.__exit__(None, None, None)  # type: ignore[attr-defined]
            running.clear()
            context = serving(tmp_path_factory.mktemp("server"), *flags)
            running[flags] = (context.__enter__(), context)
        return running[flags][0]

    yield start
    for _, context in running.values():
        context.__exit__(None, None, None)  # type: ignore[attr-defined]
