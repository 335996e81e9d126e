"""The beams of one sequence while it runs: its search, their blocks and states, and its answer. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from funitel.proto.step import GeneratedText, Generation, Tokens
from funitel.router.core.beam_search import BeamParams, BeamSearch, Hypothesis


@dataclass(slots=True)
class BeamEnding(Generation):
    """The end of a beam search: the completions that are returned, best first; `tokens` are those of all, no texts."""

    hypotheses: tuple[Hypothesis, ...] = ()


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The beams of a sequence.

    Until the next step is planned, `tables` and `slots` are those of the beams that `search.beams` go on, by their
    `parent`; from then on those of `search.beams`.
    """

    params: BeamParams
    search: BeamSearch = field(init=False)
    tables: list[list[int]] = field(default_factory=list)  # blocks of each beam
    slots: list[int] = field(default_factory=list)  # slot of the state of each beam, of a model with recurrent layers
    spare_slots: list[int] = field(default_factory=list)
    rows: tuple[int, ...] = ()  # ids of the rows in flight, in the order of the beams
    opening: Generation | None = None  # the step's answer to the prompt

    def __post_init__(self) -> None:
        self.search = BeamSearch(self.params)

    @property
    def parents(self) -> frozenset[int]:
        """Beams that go on."""
        return frozenset(beam.parent for beam in self.search.beams)

    def restart(self) -> list[int]:
        """Begin again with the prompt; returns the slots it had."""
        slots = list({*self.slots, *self.spare_slots})  # those of beams that do not go on are in both
        self.search = BeamSearch(self.params)
        self.tables, self.slots, self.spare_slots, self.rows, self.opening = [], [], [], (), None
        return slots

    def ending(self, request_id: int) -> BeamEnding:
        """The answer, once the search is over."""
        found = self.search.hypotheses()
        opening = self.opening
        ids = tuple(token_id for each in found for token_id in each.ids)
        logprobs = tuple(logprob for each in found for logprob in each.logprobs)
        return BeamEnding(
            request_id=request_id,
            tokens=Tokens(ids, logprobs, ("",) * len(ids), (False,) * len(ids)),
            prefill_tokens=None if opening is None else opening.prefill_tokens,
            prompt_top=None if opening is None else opening.prompt_top,
            finished=GeneratedText("", len(ids), found[0].finish_reason),
            hypotheses=tuple(found),
        )


def distinct(tables: Iterable[Iterable[int]]) -> list[int]:
    """The blocks of some beams, each once, in their order."""
    return list(dict.fromkeys(block for table in tables for block in table))
