"""Measure the roofline of this processor, what it reads and multiplies at best, by the C interface of `roofs.cpp`."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

from funitel.model_server.cpu.build import Functions, open_library
from funitel.model_server.cpu.precision import MatrixKind
from funitel.proto.errors import NotEnoughMemory

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_FUNCTIONS: Functions = {
    "funitel_roofs": (ctypes.c_void_p, [ctypes.c_int32, ctypes.c_int64]),
    "funitel_roofs_release": (None, [ctypes.c_void_p]),
    "funitel_roofs_num_reads": (ctypes.c_int32, []),
    "funitel_roofs_read": (ctypes.c_double, [ctypes.c_void_p, ctypes.c_int32]),
    "funitel_roofs_multiply": (ctypes.c_double, [ctypes.c_void_p, ctypes.c_int32]),
}


@dataclass(frozen=True, slots=True)
class RoofRow:
    """One shape with one number of rows; times in microseconds, rates in thousand millions a second."""

    shape: str
    rows: int
    microseconds: float
    gb_s: float
    gmac_s: float
    roof: str
    share: float


def held_against(
    shape: str, rows: int, seconds: float, num_bytes: int, num_weights: int, *, read_bytes_s: float, multiply_s: float
) -> RoofRow:
    """One product's time as rates, and as a share of the roof that is nearer."""
    reading, multiplying = num_bytes / read_bytes_s, rows * num_weights / multiply_s
    roof, best = ("reads", reading) if reading >= multiplying else ("multiplies", multiplying)
    return RoofRow(
        shape, rows, seconds * 1e6, num_bytes / seconds / 1e9, rows * num_weights / seconds / 1e9, roof, best / seconds
    )


class Roofs:
    """Some threads and memory that they read. What is measured is the best so far: others only take time away."""

    def __init__(self, cache_dir: Path, *, num_threads: int, num_bytes: int) -> None:
        """Raise CannotBuild without a compiler, NotEnoughMemory without so much memory."""
        self._library = open_library(cache_dir, _FUNCTIONS, source="roofs.cpp")
        self._handle = self._library.funitel_roofs(num_threads, num_bytes)
        if not self._handle:
            raise NotEnoughMemory(f"there are no {num_bytes >> 20} MiB of memory to read")
        self.read_bytes_s = 0.0
        self.multiply_s = 0.0

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.funitel_roofs_release(self._handle)
            self._handle = None

    def measure(self, kind: MatrixKind, passes: int = 3) -> None:
        """Measure both again: `read_bytes_s`, bytes a second, and `multiply_s`, multiply-adds a second."""
        for _ in range(passes):
            for way in range(self._library.funitel_roofs_num_reads()):
                self.read_bytes_s = max(self.read_bytes_s, self._library.funitel_roofs_read(self._handle, way))
            self.multiply_s = max(self.multiply_s, self._library.funitel_roofs_multiply(self._handle, kind))


def largest_cache_bytes() -> int:
    """Bytes of the largest cache of the first core, 0 where the system does not say."""
    sizes = [path.read_text().strip() for path in CACHES.glob("index*/size")]
    return max((int(size.rstrip("KMG")) * UNITS.get(size[-1:], 1) for size in sizes), default=0)
