"""Rules of rows with images or sounds in their prompts, upon the rules that the model has otherwise."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from funitel.model_server.executor.row_rules import RowBeginning, RowRules, StateRules
from funitel.model_server.forward.batch import RowMedia, RowSpan
from funitel.model_server.kv_cache.pool import Pools
from funitel.model_server.media.positions import axis_positions
from funitel.model_server.media.service import FeatureService
from funitel.model_server.sequence.media_plan import MediaPlan, PlannedMedia
from funitel.model_server.sequence.table import SequenceState
from funitel.proto.errors import InvalidRequest
from funitel.proto.step import MediaKind, MediaSpan, SequenceStart


def choose_rules(given: RowRules | None, pools: Pools, media: FeatureService | None) -> RowRules:
    """The rules that are given, or a decoder's; with those of media where features take the place of embeddings."""
    rules = given or (RowRules() if pools.state_layout is None else StateRules())
    return rules if media is None or not media.encoder.placeholder_ids else MediaRules(rules, media)


class MediaRules(RowRules):
    """The rules `inner`, with features in the place of embeddings, and the positions that media set.

    A row keeps the features of its items until their tokens are computed.
    """

    takes_media = True

    def __init__(self, inner: RowRules, media: FeatureService) -> None:
        self.takes_first_token = inner.takes_first_token
        self.forces_tokens = inner.forces_tokens
        self.max_prompt = inner.max_prompt
        self._inner = inner
        self._media = media
        self._encoder = media.encoder

    def begin(self, start: SequenceStart, prompt: list[int]) -> RowBeginning:
        """See RowRules; also raised for media that do not fit the prompt or are not encoded."""
        beginning = self._inner.begin(start, prompt)
        if not start.media:
            return beginning
        ids = np.array(prompt, dtype=np.int64)
        is_placeholder = np.isin(ids, list(self._encoder.placeholder_ids.values()))
        _check_spans(start.media, len(prompt))
        is_inside = np.zeros_like(is_placeholder)
        for span in start.media:
            is_inside[span.position : span.end] = True
        is_placeholder &= is_inside
        plan = MediaPlan([self._planned(span, is_placeholder, start.cache_len) for span in start.media])
        if self._encoder.has_axes:
            for span in start.media:
                _check_grid(span)
            plan.rotary, plan.rotary_delta = axis_positions(len(prompt), start.media)
        if self._encoder.has_whole_spans:
            plan.whole_spans = _runs(is_placeholder & (ids == self._encoder.placeholder_ids.get(MediaKind.IMAGE, -1)))
        return replace(beginning, media=plan)

    def _planned(self, span: MediaSpan, is_placeholder: np.ndarray, cache_len: int) -> PlannedMedia:
        """An item, with its features if some of its tokens are still to be computed."""
        places = span.position + np.flatnonzero(is_placeholder[span.position : span.end])
        if not len(places):
            raise InvalidRequest(f"media at position {span.position} has no placeholder token", "media")
        planned = PlannedMedia(places, None)
        if planned.end <= cache_len:
            return planned
        found = self._media.features(span.key)
        if len(found.features) != len(places):
            raise InvalidRequest(
                f"media at position {span.position} has {len(places)} placeholder tokens, "
                f"and {len(found.features)} features",
                "media",
            )
        planned.features, planned.deep = found.features, found.deep
        return planned

    def check_chunk(self, row: SequenceState, count: int) -> None:
        """See RowRules."""
        self._inner.check_chunk(row, count)
        if row.media is None or not count:
            return
        end = row.num_cached + count
        for first, last in row.media.whole_spans:
            if first < end < last:
                raise InvalidRequest(
                    f"request {row.request_id} has a step that ends at token {end}, within the media tokens "
                    f"{first}..{last - 1}, which are computed together",
                    "media",
                )

    def span(self, row: SequenceState, count: int, block_table: np.ndarray) -> RowSpan:
        """See RowRules."""
        span, plan = self._inner.span(row, count, block_table), row.media
        if plan is None:
            return span
        found = []
        for item in plan.items:
            if item.end <= span.start:  # what is computed is not computed again
                item.features, item.deep = None, ()
            elif item.features is not None and item.places[0] < span.end:
                first, last = np.searchsorted(item.places, (span.start, span.end))
                if first < last:
                    deep = tuple([each[first:last] for each in item.deep])
                    found.append(RowMedia(item.places[first:last] - span.start, item.features[first:last], deep))
        whole = [each for each in plan.whole_spans if each[0] < span.end and span.start < each[1]]
        rotary = plan.rotary_between(span.start, span.end)
        return replace(span, media=tuple(found), rotary=rotary, whole_spans=tuple(whole))

    def state_slot(self, row: SequenceState) -> int:
        """See RowRules."""
        return self._inner.state_slot(row)

    def forced(self, row: SequenceState) -> int | None:
        """See RowRules."""
        return self._inner.forced(row)

    def profile_prompt(
        self, tokens: Sequence[int], block_table: np.ndarray, block_size: int, wanted: str, *, is_measured: bool
    ) -> RowSpan:
        """See RowRules."""
        return self._inner.profile_prompt(tokens, block_table, block_size, wanted, is_measured=is_measured)

    def profile_decode(self) -> RowSpan:
        """See RowRules."""
        return self._inner.profile_decode()


def _check_spans(spans: Sequence[MediaSpan], prompt_len: int) -> None:
    end = 0
    for span in spans:
        if span.position < end:
            raise InvalidRequest(
                f"media at position {span.position} begins before the end {end} of the one before it", "media"
            )
        if not span.length or span.end > prompt_len:
            raise InvalidRequest(
                f"media at position {span.position} has {span.length} tokens, the prompt has {prompt_len}", "media"
            )
        end = span.end


def _check_grid(span: MediaSpan) -> None:
    if len(span.grid) != 3 or span.grid[0] * span.grid[1] * span.grid[2] != span.length:
        raise InvalidRequest(
            f"media at position {span.position} has the grid {list(span.grid)}, and {span.length} tokens", "media"
        )


def _runs(is_placeholder: np.ndarray) -> tuple[tuple[int, int], ...]:
    """The runs [begin, end) of tokens that are set."""
    edges = np.flatnonzero(np.diff(is_placeholder.astype(np.int8), prepend=0, append=0))
    return tuple([(int(first), int(last)) for first, last in edges.reshape(-1, 2)])
