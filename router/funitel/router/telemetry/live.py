"""The numbers of one model that the console shows and keeps for an hour."""

from dataclasses import dataclass

from funitel.router.telemetry.replica_metrics import ReplicaNumbers, kv_utilisation


@dataclass(frozen=True, slots=True)
class LiveNumbers:
    """Counts since the router began, and the replicas as they are.

    Attributes:
        requests: for a generation.
        queried_tokens: of the prompts of new sequences.
        cached_tokens: of those, found in the prefix cache.
        step_seconds: that the calls of all steps took.
    """

    requests: int
    queried_tokens: int
    cached_tokens: int
    steps: int
    step_seconds: float
    replicas: tuple[ReplicaNumbers, ...]

    @property
    def running(self) -> int:
        """Sequences that run."""
        return sum(each.num_running for each in self.replicas)

    @property
    def waiting(self) -> int:
        """Sequences that wait."""
        return sum(each.num_waiting for each in self.replicas)

    @property
    def generated_tokens(self) -> int:
        """Tokens that the replicas there are have generated."""
        return sum(each.generated_tokens for each in self.replicas)

    @property
    def kv_utilisation(self) -> float:
        """Share of the KV blocks that sequences hold, 0 to 1."""
        return kv_utilisation(self.replicas)
