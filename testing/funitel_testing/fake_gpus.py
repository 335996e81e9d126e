"""A GPU's memory as tests want it: counted, and nowhere."""

from funitel.model_server.device.memory import Gpu, GpuState


class FakeGpu(Gpu):
    """A card of `total` bytes, of which others have taken some.

    `take` is what this process's allocator holds from then on, `drive` what its driver keeps beside that.
    """

    def __init__(self, total: int, others: int = 0) -> None:
        self._total = total
        self.others = others
        self._used = self._cached = self._driver = self._peak = 0

    def take(self, num_bytes: int, *, is_brief: bool = False) -> None:
        """Hold more; what is brief is free again at once, but the allocator keeps it."""
        new = max(0, num_bytes - self._cached)
        self._cached += new - (0 if is_brief else num_bytes)
        self._used += 0 if is_brief else num_bytes
        self._peak = max(self._peak, self._used + self._cached)

    def drive(self, num_bytes: int) -> None:
        """What the driver takes beside the allocator."""
        self._driver += num_bytes

    def let_go(self, num_bytes: int) -> None:
        """Use less; the allocator keeps it."""
        self._used -= num_bytes
        self._cached += num_bytes

    def state(self) -> GpuState:
        """See Gpu."""
        held = self._used + self._cached
        return GpuState(total=self._total, free=self._total - self.others - self._driver - held, held=held)

    def release_cached(self) -> None:
        """See Gpu."""
        self._cached = 0

    def reset_peak(self) -> None:
        """See Gpu."""
        self._peak = self._used + self._cached

    def peak(self) -> int:
        """See Gpu."""
        return self._peak
