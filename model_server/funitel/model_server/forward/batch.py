"""The forward batch, one step's rows as tensors, without global context; and the interface of a forward over it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from funitel.model_server.adapters.registry import PlacedAdapter
from funitel.model_server.device.pinned_memory import upload
from funitel.model_server.kv_cache.pool import KVCache, Slots
from funitel.proto.step import StateSave


@dataclass(frozen=True, slots=True, eq=False)
class RowMedia:
    """Features that take the place of the embeddings of some tokens of a row, after these are scaled.

    `deep` are added to the residual of the same tokens behind layer 0, layer 1 and so on.
    """

    places: np.ndarray  # [n] int64, among the row's tokens of the step
    features: torch.Tensor  # [n, hidden_size]
    deep: tuple[torch.Tensor, ...] = ()  # each [n, hidden_size]


@dataclass(frozen=True, slots=True)
class RowSpan:
    """What one row computes in a step.

    `tokens` are those to compute, the first at position `start`, or where a device holds them (`ForwardBatch.build`);
    `block_table` covers at least start + len(tokens) tokens. `logits` says which of them need logits: "none", "last" or
    "all". `prompt_len` is that of the sequence, 0 where it does not matter. The first `source_len` tokens of a sequence
    are what an encoder reads; it does so in the step that has them as `source`. `state_slot` is where the sequence's
    state lies, for models that keep one; a row that starts at 0 finds it cleared. Of `state_saves` those at positions
    that no token of the step reaches change nothing. `adapter` is added to the weights; None: the base's alone.
    `rotary` are the positions of the tokens for rotary embeddings, by axis, where these are not those in the sequence.
    `whole_spans` are [begin, end) of tokens of the sequence that see each other, besides what is before them; a step
    has all tokens of such a span, or its last ones.
    """

    tokens: Sequence[int]
    start: int
    block_table: np.ndarray  # [num_blocks] int32
    logits: str = "last"
    prompt_len: int = 0
    source_len: int = 0
    source: Sequence[int] = ()
    state_slot: int = 0  # that of no sequence
    state_saves: tuple[StateSave, ...] = ()
    adapter: PlacedAdapter | None = None
    row_index: int = 0  # place of the sequence in the table
    media: tuple[RowMedia, ...] = ()
    rotary: np.ndarray | None = None  # [3, num_tokens] int64
    whole_spans: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        """Context after the step, in tokens."""
        return self.start + len(self.tokens)

    def part(self, begin: int, end: int) -> "RowSpan":
        """The same row with the tokens [begin, end) of these alone."""
        rotary = None if self.rotary is None else self.rotary[:, begin:end]
        media = tuple([each for each in (_media_within(item, begin, end) for item in self.media) if len(each.places)])
        return replace(self, tokens=self.tokens[begin:end], start=self.start + begin, rotary=rotary, media=media)


def _media_within(media: RowMedia, begin: int, end: int) -> RowMedia:
    """What of media falls on the tokens [begin, end) of a row, counted from there."""
    is_within = (media.places >= begin) & (media.places < end)
    if is_within.all():
        return replace(media, places=media.places - begin)
    chosen = torch.from_numpy(np.flatnonzero(is_within)).to(media.features.device)
    deep = tuple([each[chosen] for each in media.deep])
    return RowMedia(media.places[is_within] - begin, media.features[chosen], deep)


@dataclass(frozen=True, slots=True, eq=False)
class BatchMedia:
    """The same of all rows of a batch. On the device of the batch."""

    places: torch.Tensor  # [n] int64, among the tokens of the batch
    features: torch.Tensor  # [n, hidden_size]
    deep: tuple[torch.Tensor, ...]  # each [n, hidden_size]

    def hide(self, input_ids: torch.Tensor, token: int) -> torch.Tensor:
        """The tokens [num_tokens] with `token` in the places of features, where ids may be beyond the vocabulary."""
        return input_ids.index_fill(0, self.places, token)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Embeddings [num_tokens, hidden_size], with the features in place of some."""
        return x.index_copy(0, self.places, self.features.to(x.dtype))

    def deepen(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """The residual [num_tokens, hidden_size] behind a layer, with what is added there, if anything."""
        return x.index_add(0, self.places, self.deep[layer].to(x.dtype)) if layer < len(self.deep) else x


@dataclass(frozen=True, slots=True)
class StateSegment:
    """Some tokens [begin, end) of the batch, of one row, and where its state goes behind them, besides `slot`."""

    begin: int
    end: int
    slot: int
    saves: tuple[int, ...]


@dataclass(frozen=True)
class AdapterGroup:
    """The rows of a step that have the same adapter; their tensors are uploaded when they are first read.

    `token_places` are places among the tokens of the batch, `logit_places` among its logits.
    """

    adapter: PlacedAdapter
    token_places: Sequence[int]
    logit_places: Sequence[int]
    device: torch.device

    @cached_property
    def tokens(self) -> torch.Tensor:
        """`token_places` on the device, [n] int64."""
        return _tensor(self.token_places, self.device)

    @cached_property
    def logits(self) -> torch.Tensor:
        """`logit_places` on the device, [m] int64."""
        return _tensor(self.logit_places, self.device)


@dataclass(frozen=True)
class ForwardBatch:
    """The sequences of one forward, tokens of all rows back to back, single-token rows first.

    `rows` are the spans in that order. `logit_indices` are the tokens that need logits, caller's row by row.
    """

    rows: tuple[RowSpan, ...]
    num_decode: int  # leading rows that compute one token
    block_size: int
    input_ids: torch.Tensor  # [num_tokens] int64
    logit_indices: torch.Tensor  # [num_logits] int64
    adapters: tuple[AdapterGroup, ...] = field(default=(), kw_only=True)

    @classmethod
    def build(
        cls, spans: Sequence[RowSpan], block_size: int, device: torch.device, device_tokens: torch.Tensor | None = None
    ) -> "ForwardBatch":
        """Lay rows out; decode rows are sorted by context so that attention can group like with like.

        `device_tokens` are tokens that only the device knows: of them -1 - i is the i-th wherever a span says so.
        """
        order = sorted(range(len(spans)), key=lambda i: (len(spans[i].tokens) > 1, spans[i].end))
        input_ids: list[int] = []
        first = [0] * len(spans)  # caller's row -> its first token in the flat order
        for i in order:
            first[i] = len(input_ids)
            input_ids += spans[i].tokens
        wanted: list[int] = []
        num_decode, has_adapters = 0, False
        for begin, span in zip(first, spans, strict=True):
            count = len(span.tokens)
            num_decode += count == 1
            has_adapters |= span.adapter is not None
            end = begin + count
            wanted += range(end - {"none": 0, "last": 1, "all": count}[span.logits], end)
        return cls(
            rows=tuple([spans[i] for i in order]),
            num_decode=num_decode,
            block_size=block_size,
            input_ids=_filled_in(_tensor(input_ids, device), device_tokens),
            logit_indices=_tensor(wanted, device),
            adapters=_groups(spans, first, wanted, device) if has_adapters else (),
        )

    def of_rows(self, first: int, last: int) -> "ForwardBatch":
        """The rows [first, last) in this order, without logits."""
        counts = [len(row.tokens) for row in self.rows]
        begin = sum(counts[:first])
        return ForwardBatch(
            rows=self.rows[first:last],
            num_decode=max(0, min(self.num_decode, last) - first),
            block_size=self.block_size,
            input_ids=self.input_ids[begin : begin + sum(counts[first:last])],
            logit_indices=self.logit_indices[:0],
        )

    def on(
        self, device: torch.device, adapter_of: Callable[[PlacedAdapter], PlacedAdapter] | None = None
    ) -> "ForwardBatch":
        """The same rows with tensors on a device; `adapter_of` gives what takes the place of their adapters."""
        if self.input_ids.device == device and (adapter_of is None or not self.adapters):
            return self
        rows, groups = self.rows, self.adapters
        if adapter_of is not None and groups:
            rows = tuple(
                [row if row.adapter is None else replace(row, adapter=adapter_of(row.adapter)) for row in rows]
            )
            groups = tuple([replace(group, adapter=adapter_of(group.adapter)) for group in groups])
        groups = tuple([replace(each, device=device) for each in groups])
        ids, wanted = self.input_ids.to(device), self.logit_indices.to(device)
        return ForwardBatch(rows, self.num_decode, self.block_size, ids, wanted, adapters=groups)

    @property
    def num_tokens(self) -> int:
        """Tokens in this forward."""
        return self.input_ids.shape[0]

    @cached_property
    def positions(self) -> torch.Tensor:
        """Where in its sequence each token stands: [num_tokens] int64."""
        return _tensor(self._positions, self.input_ids.device)

    @cached_property
    def media(self) -> BatchMedia | None:
        """Features that take the place of embeddings; None where all tokens are text."""
        rows = self.rows
        if not any([row.media for row in rows]):
            return None
        first = np.cumsum([0, *[len(row.tokens) for row in rows]])
        found = [(begin, each) for begin, row in zip(first, rows, strict=False) for each in row.media]
        device, deep = self.input_ids.device, [each.deep for _, each in found]
        return BatchMedia(
            _tensor(np.concatenate([begin + each.places for begin, each in found]), device),
            torch.cat([each.features.to(device) for _, each in found]),
            tuple([torch.cat([part.to(device) for part in parts]) for parts in zip(*deep, strict=True)]),
        )

    @cached_property
    def rotary_positions(self) -> torch.Tensor:
        """Positions for rotary embeddings: [num_tokens] int64, or [3, num_tokens] by axis where axes differ."""
        rotary = self.rotary
        return self.positions if rotary is None else _tensor(rotary, self.input_ids.device)

    @cached_property
    def rotary(self) -> np.ndarray | None:
        """The same on the host; None where they are `positions`."""
        rows = self.rows
        if all([row.rotary is None for row in rows]):
            return None
        by_row = [np.tile(np.arange(row.start, row.end), (3, 1)) if row.rotary is None else row.rotary for row in rows]
        axes = np.concatenate(by_row, axis=1)
        return axes[0] if (axes == axes[0]).all() else axes

    @cached_property
    def visible_ends(self) -> torch.Tensor | None:
        """How many tokens of its sequence each token sees in layers that see spans whole: [num_tokens] int64.

        None where each sees those before it and itself.
        """
        ends = self.host_visible_ends
        return None if ends is None else _tensor(ends, self.input_ids.device)

    @cached_property
    def host_visible_ends(self) -> np.ndarray | None:
        """The same on the host."""
        if not any([_spans_within(row) for row in self.rows if row.whole_spans]):
            return None
        ends = self._positions + 1
        begin = 0
        for row in self.rows:
            for first, end in _spans_within(row):
                ends[begin + max(first - row.start, 0) : begin + end - row.start] = end
            begin += len(row.tokens)
        return ends

    @cached_property
    def slots(self) -> Slots:
        """Where the keys and values of each token go."""
        blocks = [row.block_table[np.arange(row.start, row.end) // self.block_size] for row in self.rows]
        device = self.input_ids.device
        return _tensor(np.concatenate(blocks), device), _tensor(self._positions % self.block_size, device)

    @cached_property
    def choices(self) -> dict[int, Any]:
        """What the indexers of layers chose in this step, for layers that have no own."""
        return {}

    @cached_property
    def kept(self) -> list[torch.Tensor]:
        """Outputs of the layers that the forward keeps, each [num_tokens, hidden_size]; see `KeepingForward`."""
        return []

    @property
    def hidden(self) -> torch.Tensor | None:
        """The same as one tensor [num_tokens, num_layers, hidden_size] float32; None where it keeps none."""
        return torch.stack([each.float() for each in self.kept], dim=1) if self.kept else None

    @cached_property
    def _positions(self) -> np.ndarray:
        return np.concatenate([np.arange(row.start, row.end) for row in self.rows])

    @cached_property
    def decode_slots(self) -> torch.Tensor:
        """Slots of the states of the rows that compute one token: [num_decode] int64."""
        return _tensor([row.state_slot for row in self.rows[: self.num_decode]], self.input_ids.device)

    @cached_property
    def decode_saves(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Which of these rows' states go elsewhere too, and to which slots, each [num_saves] int64; None: none."""
        rows = enumerate(self.rows[: self.num_decode])
        found = [(place, save.slot) for place, row in rows for save in row.state_saves if save.position == row.end]
        places, slots = zip(*found, strict=True) if found else ((), ())
        return (_tensor(places, self.input_ids.device), _tensor(slots, self.input_ids.device)) if found else None

    @cached_property
    def state_segments(self) -> tuple[StateSegment, ...]:
        """The other rows, cut where states are saved."""
        segments, begin = [], self.num_decode
        for row in self.rows[self.num_decode :]:
            saves = [save for save in row.state_saves if row.start < save.position <= row.end]
            first = begin - row.start  # of the row's tokens position 0 would lie there
            for end in sorted({save.position for save in saves} | {row.end}):
                slots = tuple(save.slot for save in saves if save.position == end)
                segments.append(StateSegment(begin, first + end, row.state_slot, slots))
                begin = first + end
        return tuple(segments)

    def reaches(self) -> torch.Tensor:
        """How many tokens each token's sequence is known to have: those of its prompt, and those up to itself."""
        prompts = [np.full(len(row.tokens), row.prompt_len) for row in self.rows]
        return torch.maximum(_tensor(np.concatenate(prompts), self.positions.device), self.positions + 1)


def _spans_within(row: RowSpan) -> list[tuple[int, int]]:
    """The spans seen whole of which the row has tokens in the step, cut where the step ends."""
    return [(begin, min(end, row.end)) for begin, end in row.whole_spans if end > row.start and begin < row.end]


def block_tables(rows: Sequence[RowSpan], block_size: int) -> np.ndarray:
    """Blocks [num_rows, width] int32 that rows have after the step, each row's padded with block 0 to the longest."""
    used = [-(-row.end // block_size) for row in rows]
    tables = np.zeros((len(rows), max(used)), dtype=np.int32)
    for line, row, num_blocks in zip(tables, rows, used, strict=True):
        line[:num_blocks] = row.block_table[:num_blocks]
    return tables


def _groups(
    spans: Sequence[RowSpan], first: Sequence[int], wanted: Sequence[int], device: torch.device
) -> tuple[AdapterGroup, ...]:
    """Tokens and logits by adapter, of rows that begin at `first`; `wanted` are the tokens with logits."""
    tokens: dict[PlacedAdapter, list[int]] = {}
    for begin, span in zip(first, spans, strict=True):
        if span.adapter is not None:
            tokens.setdefault(span.adapter, []).extend(range(begin, begin + len(span.tokens)))
    owners = {token: adapter for adapter, own in tokens.items() for token in own}
    logits: dict[PlacedAdapter, list[int]] = {adapter: [] for adapter in tokens}
    for place, token in enumerate(wanted):
        if token in owners:
            logits[owners[token]].append(place)
    return tuple([AdapterGroup(adapter, own, logits[adapter], device) for adapter, own in tokens.items()])


def _filled_in(ids: torch.Tensor, device_tokens: torch.Tensor | None) -> torch.Tensor:
    return ids if device_tokens is None else torch.where(ids < 0, device_tokens[(-1 - ids).clamp_(min=0)], ids)


def _tensor(values: Sequence[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    return upload(np.asarray(values, dtype=np.int64), device)


class Forward(Protocol):
    """One forward of this rank's share of a model; all ranks call it with the same batch."""

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor | None:
        """Run one forward; logits [len(batch.logit_indices), vocab_size] float32 on rank 0, None elsewhere."""


@runtime_checkable
class KeepingForward(Forward, Protocol):
    """A forward that can keep outputs of its layers."""

    num_layers: int

    def keep_hidden(self, layers: Sequence[int]) -> None:
        """Keep the outputs of these layers in `ForwardBatch.kept`, from the next forward on; -1 is the last.

        Outputs are those before the final norm. Nothing is kept before this is called, or for no layers.
        """


@runtime_checkable
class RecordingForward(Forward, Protocol):
    """A forward that keeps a recording of its decoding steps, one for each of some numbers of rows."""

    @property
    def num_recordings(self) -> int:
        """How many there will be at most."""

    def record_largest(self, cache: KVCache) -> None:
        """Record the step of most rows over this cache; recordings over another are dropped."""

    def forget_recordings(self) -> None:
        """Let go of all recordings, and of the memory they use."""
