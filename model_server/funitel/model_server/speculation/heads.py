"""A drafter that is one layer behind the target's: it reads their outputs, and has keys and values of its own.

Position i of its sequence is the target's output for token i together with the embedding of token i + 1; what comes of
it predicts token i + 2. Which layer that is, and how the two are joined, a `DraftHead` says.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.speculation.ends import UNKNOWN, End, RowEnds
from funitel.model_server.speculation.interface import DraftRow


class DraftHead(Protocol):
    """The layer of a drafter, and what is around it. All ranks call it alike; states are the same on all of them."""

    hidden_layers: tuple[int, ...]

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """From outputs of the target [num_tokens, num_layers, hidden_size] to states [num_tokens, width]."""

    def step(self, states: torch.Tensor, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """States behind the tokens of `batch`, from those before them, both [num_tokens, width]."""

    def choose(self, states: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens behind states, [num_tokens] int64, the same on every rank."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What the head computes of a row: its span, and which of the states that enter are its own."""

    span: RowSpan
    places: list[int]


class HeadDrafter:
    """See Drafter. It is given a pool when the target's is made; before that nothing is observed."""

    def __init__(self, name: str, head: DraftHead, block_size: int, device: torch.device) -> None:
        self.name = name
        self.hidden_layers = head.hidden_layers
        self._head = head
        self._block_size = block_size
        self._device = device
        self._pool: KVCache | None = None
        self._ends = RowEnds(block_size)

    def take_pool(self, pool: KVCache | None) -> None:
        """Keep keys and values there from now on; what was observed before is forgotten."""
        self._pool = pool
        self._ends.clear()

    @torch.inference_mode()
    def observe(self, batch: ForwardBatch, next_ids: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """See Drafter."""
        if self._pool is None or hidden is None:
            return
        entering = self._head.enter(hidden)
        ids, following = batch.input_ids.tolist(), next_ids.tolist()
        parts: list[_Part] = []
        late: list[torch.Tensor] = []
        begin = 0
        for row in batch.rows:
            count = len(row.tokens)
            own, behind = ids[begin : begin + count], following[begin : begin + count]
            known = behind_of(own, behind)
            places, tokens, start = list(range(begin, begin + len(known))), known, row.start
            begin += count
            before = self._ends.at(row, start - 1)
            if before is not None and before.token == UNKNOWN:  # the first token of this step is behind it
                places, tokens, start = [len(ids) + len(late), *places], [own[0], *known], start - 1
                late.append(before.state)
            if tokens[-1] == UNKNOWN:
                self._ends.put(row, row.start + len(known) - 1, End(UNKNOWN, entering[places[-1]].clone()))
                places, tokens = places[:-1], tokens[:-1]
            if tokens:
                parts.append(_Part(RowSpan(tokens, start, row.block_table, "none"), places))
        if parts:
            self._compute(parts, torch.cat((entering, torch.stack(late))) if late else entering)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """See Drafter."""
        drafts: list[list[int]] = [[] for _ in rows]
        self._catch_up(rows)
        ready: list[int] = []
        states: list[torch.Tensor] = []
        for index, row in enumerate(rows):
            end = self._ends.of(row)
            if end is not None and end.token == row.tokens[-1]:
                ready.append(index)
                states.append(end.state)
        if not ready or self._pool is None:
            return drafts
        current = torch.stack(states)
        while True:
            chosen = self._head.choose(current).tolist()
            for index, token in zip(ready, chosen, strict=True):
                drafts[index].append(token)
            going = [place for place, index in enumerate(ready) if len(drafts[index]) < rows[index].limit]
            if not going:
                return drafts
            ready = [ready[place] for place in going]
            spans = [
                RowSpan([drafts[i][-1]], len(rows[i].tokens) + len(drafts[i]) - 2, rows[i].block_table, "none")
                for i in ready
            ]
            current = self._step(spans, [[place] for place in going], current)

    def _catch_up(self, rows: Sequence[DraftRow]) -> None:
        """Compute the last position of rows of which the token behind it was not known when it was observed."""
        parts: list[_Part] = []
        states: list[torch.Tensor] = []
        for row in rows:
            end = self._ends.of(row)
            if end is not None and end.token == UNKNOWN:
                span = RowSpan([row.tokens[-1]], len(row.tokens) - 2, row.block_table, "none")
                parts.append(_Part(span, [len(states)]))
                states.append(end.state)
        if parts:
            self._compute(parts, torch.stack(states))

    def _compute(self, parts: Sequence[_Part], entering: torch.Tensor) -> None:
        """Compute parts of rows, and remember where they end."""
        states = self._step([part.span for part in parts], [part.places for part in parts], entering)
        begin = 0
        lasts = []
        for part in parts:
            begin += len(part.places)
            lasts.append(begin - 1)
        for part, state in zip(parts, states[lasts], strict=True):
            self._ends.put(part.span, part.span.end - 1, End(part.span.tokens[-1], state))

    def _step(self, spans: Sequence[RowSpan], places: Sequence[Sequence[int]], entering: torch.Tensor) -> torch.Tensor:
        """The head's states for spans one after the other, of the entering states at `places`."""
        assert self._pool is not None
        batch = ForwardBatch.build(spans, self._block_size, self._device)
        numbers = {id(span): number for number, span in enumerate(spans)}
        order = [numbers[id(span)] for span in batch.rows]
        taken = [place for number in order for place in places[number]]
        states = self._head.step(entering[taken], batch, self._pool)
        firsts: dict[int, int] = {}
        begin = 0
        for number in order:
            firsts[number] = begin
            begin += len(places[number])
        back = [firsts[number] + i for number in range(len(spans)) for i in range(len(places[number]))]
        return states[back]


def behind_of(ids: Sequence[int], following: Sequence[int]) -> list[int]:
    """The token behind each of a row's tokens, as far as these are of the sequence: a rejected draft is not.

    The last may be UNKNOWN where it is behind the row's last token.
    """
    found: list[int] = []
    for place, token in enumerate(following):
        is_last = place + 1 == len(ids)
        if token == UNKNOWN and not is_last and place:
            break
        found.append(token)
        if not is_last and token != ids[place + 1]:
            break
    return found
