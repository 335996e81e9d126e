"""Share out the GPUs of this machine among replicas: each gets those with the fewest others."""

from collections.abc import Sequence


class GpuShares:
    """Which replica has which GPUs; owners are any names."""

    def __init__(self, gpus: Sequence[str]) -> None:
        """Share out GPUs, as CUDA names them; there may be none."""
        self.gpus = tuple(gpus)
        self._owned: dict[str, tuple[str, ...]] = {}

    def take(self, owner: str, count: int) -> tuple[str, ...]:
        """Give an owner `count` GPUs; none where the machine has fewer."""
        self.give_back(owner)
        if len(self.gpus) < count:
            return ()
        used = [gpu for gpus in self._owned.values() for gpu in gpus]
        chosen = tuple(sorted(self.gpus, key=lambda gpu: (used.count(gpu), self.gpus.index(gpu)))[:count])
        self._owned[owner] = chosen
        return chosen

    def put(self, owner: str, gpus: Sequence[str]) -> None:
        """Note the GPUs that an owner has from before."""
        self._owned[owner] = tuple(gpus)

    def give_back(self, owner: str) -> None:
        """Take the GPUs of an owner back."""
        self._owned.pop(owner, None)
