"""A pinned process: every thread on its cores, new memory from its node; read back from the system."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from funitel.model_server.device.cpu_affinity import pin
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import SettingsError
from funitel.proto.process.cores import Cores

CORE = max(os.sched_getaffinity(0))
SCRIPT = f"""
import logging, sys, threading
from pathlib import Path
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from funitel.model_server.device.cpu_affinity import pin
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.process.cores import Cores
pin(ModelServerSettings(model_id="m", cores=Cores([{CORE}]), memory_node=0))
assert "torch" not in sys.modules
wait = threading.Event()
threads = [threading.Thread(target=wait.wait) for _ in range(3)]
for thread in threads: thread.start()
for task in Path("/proc/self/task").iterdir():
    status = (task / "status").read_text().splitlines()
    print(next(line.split()[1] for line in status if line.startswith("Cpus_allowed_list")))
print(Path("/proc/self/numa_maps").read_text().count("prefer:0") > 3)
wait.set()
"""


def test_threads_and_memory_are_where_they_were_told_to_be() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    first, *cores, is_preferred = done.stdout.splitlines()
    assert cores == [str(CORE)] * 4
    if first.endswith("is left to the system: Operation not permitted"):
        pytest.skip("this system lets nobody choose a node")
    assert first == f"pinned cores={CORE} memory_node=0"
    if Path("/proc/self/numa_maps").exists():
        assert is_preferred == "True"


def test_cores_that_are_not_there_are_refused() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(SettingsError, match=rf"--cores 4000-4001 must be among the cores .* may use, {Cores(before)}"):
        pin(ModelServerSettings(model_id="m", cores=Cores("4000-4001")))
    assert os.sched_getaffinity(0) == before


def test_a_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(SettingsError, match="--memory-node must be a node with memory .* given 1000"):
        pin(ModelServerSettings(model_id="m", memory_node=1000))
    with pytest.raises(SettingsError, match=r"--memory-node must be within 0\.\.1023, given 1024"):
        ModelServerSettings(model_id="m", memory_node=1024)


def test_nothing_is_pinned_where_nothing_is_asked() -> None:
    before = os.sched_getaffinity(0)
    pin(ModelServerSettings(model_id="m"))
    assert os.sched_getaffinity(0) == before
