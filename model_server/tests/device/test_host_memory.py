"""What memory a process may still get, read from files of /proc and /sys as kernels write them."""

from pathlib import Path

import pytest

from funitel.model_server.device.host_memory import AvailableMemory, available_memory

GB = 10**9
NO_LIMIT_V1 = 9223372036854771712


class Machine:
    """A folder with the files of /proc and /sys: 16 GB of memory are available and nothing has a limit."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {20 * GB // 1024} kB\nMemAvailable: {16 * GB // 1024} kB\n")
        self.write("proc/self/status", f"Name:\tpython\nVmSize:\t{GB // 1024} kB\nVmData:\t{GB // 2048} kB\n")
        self.limits()

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def limits(self, address_space: str = "unlimited", data: str = "unlimited") -> None:
        self.write(
            "proc/self/limits",
            "Limit                     Soft Limit           Hard Limit           Units     \n"
            f"Max data size             {data:20} unlimited            bytes     \n"
            f"Max address space         {address_space:20} unlimited            bytes     \n",
        )

    def v2(self, path: str, *, mounted: str = "/", place: str = "/sys/fs/cgroup") -> None:
        self.write("proc/self/cgroup", f"0::{path}\n")
        self.write("proc/self/mountinfo", f"30 23 0:26 {mounted} {place} rw,nosuid shared:4 - cgroup2 cgroup2 rw\n")

    def v1(self, path: str, *, mounted: str = "/") -> None:
        self.write("proc/self/cgroup", f"5:devices:/other\n4:cpu,memory:{path}\n0::/\n")
        self.write(
            "proc/self/mountinfo",
            "22 1 0:21 / /proc rw - proc proc rw\n"
            f"34 31 0:31 {mounted} /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices\n"
            f"35 31 0:32 {mounted} /sys/fs/cgroup/memory rw master:9 - cgroup cgroup rw,cpu,memory\n",
        )

    def group_v2(self, name: str, **limits: int | str) -> None:
        folder = f"sys/fs/cgroup/{name}"
        for file, limit in limits.items():
            self.write(f"{folder}/memory.{file}", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{3 * GB}\n")
        self.write(f"{folder}/memory.stat", f"anon 5\ninactive_file {GB}\n")

    def group_v1(self, name: str, limit: int) -> None:
        folder = f"sys/fs/cgroup/memory/{name}"
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{3 * GB}\n")
        self.write(f"{folder}/memory.stat", f"cache 7\ninactive_file 1\ntotal_inactive_file {GB}\n")

    @property
    def available(self) -> AvailableMemory:
        return available_memory(self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def of_machine(found: AvailableMemory) -> bool:
    return found == AvailableMemory(16 * GB // 1024 * 1024, "MemAvailable of /proc/meminfo")


def test_a8_without_limits_all_that_the_machine_has_is_available(machine: Machine) -> None:
    assert of_machine(machine.available)
    machine.v2("/")
    assert of_machine(machine.available)


@pytest.mark.parametrize(
    ("limits", "name", "left"),
    [
        ({"address_space": str(2 * GB)}, "RLIMIT_AS (ulimit -v)", 2 * GB - GB // 1024 * 1024),
        ({"data": str(2 * GB)}, "RLIMIT_DATA (ulimit -d)", 2 * GB - GB // 2048 * 1024),
        ({"address_space": str(GB // 2)}, "RLIMIT_AS (ulimit -v)", 0),
    ],
)
def test_a8_resource_limits_hold(machine: Machine, limits: dict[str, str], name: str, left: int) -> None:
    machine.limits(**limits)
    assert machine.available == AvailableMemory(left, name)


def test_a8_the_own_group_of_version_2_is_found_where_it_is_nested(machine: Machine) -> None:
    machine.v2("/kubepods.slice/pod1/box")
    machine.group_v2("", max="max")
    machine.group_v2("kubepods.slice/pod1/box", max=6 * GB)
    assert machine.available == AvailableMemory(4 * GB, "/sys/fs/cgroup/kubepods.slice/pod1/box/memory.max")


def test_a8_a_group_above_the_own_one_may_have_the_lower_limit(machine: Machine) -> None:
    machine.v2("/kubepods.slice/pod1/box")
    machine.group_v2("kubepods.slice/pod1/box", max="max")
    machine.group_v2("kubepods.slice/pod1", max=5 * GB)
    machine.group_v2("kubepods.slice", max=12 * GB)
    assert machine.available == AvailableMemory(3 * GB, "/sys/fs/cgroup/kubepods.slice/pod1/memory.max")


def test_a8_beyond_memory_high_processes_are_slowed_down_so_it_is_a_limit(machine: Machine) -> None:
    machine.v2("/box")
    machine.group_v2("box", max=9 * GB, high=4 * GB)
    assert machine.available == AvailableMemory(2 * GB, "/sys/fs/cgroup/box/memory.high")


def test_a8_in_a_container_its_own_group_is_mounted(machine: Machine) -> None:
    machine.v2("/", mounted="/")
    machine.group_v2("", max=5 * GB)
    assert machine.available.num_bytes == 3 * GB
    machine.v2("/docker/abc", mounted="/docker/abc")  # of a host's namespace, its own group mounted
    assert machine.available.num_bytes == 3 * GB
    machine.v2("/../elsewhere")  # moved out of what its namespace shows
    assert machine.available.num_bytes == 3 * GB


def test_a8_groups_of_version_1_count_as_well(machine: Machine) -> None:
    machine.v1("/docker/abc")
    machine.group_v1("", NO_LIMIT_V1)
    machine.group_v1("docker", NO_LIMIT_V1)
    machine.group_v1("docker/abc", NO_LIMIT_V1)
    assert of_machine(machine.available)
    machine.group_v1("docker", 5 * GB)
    assert machine.available == AvailableMemory(3 * GB, "/sys/fs/cgroup/memory/docker/memory.limit_in_bytes")
    machine.v1("/docker/abc", mounted="/docker")
    machine.group_v1("abc", 4 * GB)
    assert machine.available == AvailableMemory(2 * GB, "/sys/fs/cgroup/memory/abc/memory.limit_in_bytes")


def test_a8_a_full_group_leaves_nothing(machine: Machine) -> None:
    machine.v2("/box")
    machine.group_v2("box", max=GB)
    assert machine.available.num_bytes == 0


def test_a8_this_machine_can_be_read() -> None:
    assert available_memory().num_bytes > 0
