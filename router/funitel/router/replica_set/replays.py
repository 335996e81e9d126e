"""Requests that an earlier router has admitted go on: in their rows, behind their outputs, or from their beginning.

Event loop only.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq

from funitel.proto.errors import ShardFailed
from funitel.proto.takeover.state import SequenceOutputs
from funitel.router.core.request import Request, Sequence
from funitel.router.core.stream import TokenStream
from funitel.router.replica_set.kept_sequences import KeptSequences, TakenUp
from funitel.router.replica_set.membership import Membership
from funitel.router.replica_set.output_releases import OutputReleases
from funitel.router.replica_set.slot import ServingReplica
from funitel.router.settings import RouterSettings
from funitel.router.shard_client.capabilities import is_repeatable
from funitel.router.telemetry.metrics import Metrics

KeptOutputs = Mapping[str, SequenceOutputs]  # by output key


class Replays(Membership[ServingReplica]):
    """The replicas of a model, and what an earlier router has left there."""

    def __init__(
        self,
        members: Seq[ServingReplica],
        settings: RouterSettings,
        metrics: Metrics,
        outputs: KeptOutputs | None,
    ) -> None:
        """Begin with no replica that serves; those of `members` may hold rows."""
        super().__init__(settings, metrics)
        self._info = members[0].shards.infos[-1]  # facts that all replicas share
        self._newest: tuple[Request, ServingReplica] | None = None
        self._releases = OutputReleases(lambda: (*self._serving, *self._leaving), self._slots.values)
        self._kept = KeptSequences(outputs, [member.engine for member in members], self.release_outputs)

    @abstractmethod
    def _adopt_replayed(self, sequence: Sequence, stream: TokenStream) -> None:
        """Queue a sequence without asking admission, or let it wait for a replica."""

    def _submit_replayed(self, request: Request, sequence: Sequence) -> TokenStream:
        """Go on with a request that an earlier router has admitted, behind the outputs that shards have kept of it.

        Raises:
            ShardFailed: its outputs are lost, and others may be computed in their place.
        """
        stream = TokenStream(request, cancel=lambda: None)
        outputs = self._kept.claim(request.output_key)
        if outputs is None or outputs.num_before != len(request.output_ids) or request.beams is not None:
            if request.was_begun and request.beams is None and not is_repeatable(self._info):
                raise ShardFailed("the shards that have begun the answer are lost, and others may go on differently")
            for member in self._serving:
                member.engine.held.drop(request.output_key)
            self._adopt_replayed(sequence, stream)
            self._kept.count(TakenUp.RECOMPUTED)
            return stream
        stream.record(outputs.steps)
        if outputs.is_finished:
            for member in self._serving:  # a row that has ended, and was not dropped yet
                member.engine.held.drop(request.output_key)
            self._kept.count(TakenUp.ENDED)
            return stream
        sequence.output_ids += [token_id for each in outputs.steps for token_id in each.generation.tokens.ids]
        sequence.mirostat_mu = outputs.mirostat_mu
        self._kept.count(self._go_on(sequence, stream))
        return stream

    def _go_on(self, sequence: Sequence, stream: TokenStream) -> TakenUp:
        """Let a sequence go on in its row, or else compute its tokens again."""
        for member in self._serving:
            row = member.engine.claim(sequence)
            if row is not None:
                self._newest = sequence.request, member
                member.engine.go_on(sequence, stream, row)
                return TakenUp.HELD
        sequence.num_repeated = sequence.num_known - 1 if sequence.output_ids else 0
        self._adopt_replayed(sequence, stream)
        return TakenUp.RESUMED

    def replays_begun(self, journals: Collection[str]) -> None:
        """See Inference."""
        self._kept.begin(journals)

    def replay_ended(self, journal: str) -> None:
        """See Inference."""
        self._kept.end(journal)

    def release_outputs(self, keys: Iterable[str]) -> None:
        """See Inference."""
        self._releases.add(keys)
