"""Settings of every test, and of every process a test starts."""

import os
import signal
from pathlib import Path

import hypothesis

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
