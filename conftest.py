"""Settings of every test, and of every process a test starts."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A busy machine makes single examples slow; what takes too long shows in the suite's time instead.
hypothesis.settings.register_profile("funitel", deadline=None)
hypothesis.settings.register_profile("short", deadline=None, max_examples=25)
hypothesis.settings.register_profile("long", deadline=None, max_examples=4000)
hypothesis.settings.load_profile("funitel")

# Processes of tests import the tests' own helpers, as pytest's `pythonpath` lets the tests.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent / "testing"), os.environ.get("PYTHONPATH")])
)
# Beside other tests the threads of a computation would wait for each other, spinning, on cores that others use.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without a GPU Triton's kernels run in its interpreter. It is asked for before anything can have imported triton.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# Run in the background by a shell, we and all we start would ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Files that take longest, in this order: begun last they would run while other processes have nothing left to do.
LONGEST = (
    # of the packages
    "supervisor/test_supervisor.py",
    "tests/test_main.py",
    "config/test_upgrade.py",
    "cpu/test_families.py",
    "tests/test_gpu_compiled.py",
    "tests/test_gpu_benchmark.py",
    "transformers_fallback/test_fallback.py",
    "executor/test_async_executor.py",
    # of the whole system
    "integration-tests/test_wheel.py",
    "integration-tests/test_equality.py",
    "integration-tests/test_lifecycle.py",
    "integration-tests/test_bad_input.py",
    "integration-tests/test_install.py",
    "integration-tests/test_schemathesis.py",
    "integration-tests/test_contract_shards.py",
    "integration-tests/test_logprobs.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that take longest first; the others as they come."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(f"{item.path.parent.name}/{item.path.name}", len(LONGEST)))


@pytest.fixture(autouse=True)
def keeps_signal_handlers() -> Iterator[None]:
    """Fail a test that leaves a signal handler behind: a later test of the same process would not get its signals."""
    handlers = _signal_handlers()
    yield
    left = {number.name: left for number, left in _signal_handlers().items() if left != handlers[number]}
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert not left


def _signal_handlers() -> dict[signal.Signals, Any]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    return {number: signal.getsignal(number) for number in numbers}
