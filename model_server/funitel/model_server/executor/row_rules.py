"""What a model does with a sequence: how its tokens begin, what a row computes in a step, and which tokens are forced.

An encoder-decoder's sequence is a prompt that the encoder reads, then the decoder's tokens. The prompt's tokens count
as tokens of the sequence like any others, with a place in the pool each; they cost nothing until the step that has the
decoder's first token, in which the encoder reads all of them at once. However a prompt is cut into chunks, and however
often its sequence is resumed, the encoder reads it whole; of several in one step, as many at once as fill the longest
it can read.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from funitel.model_server.forward.batch import RowMedia, RowSpan
from funitel.model_server.media.service import FeatureService
from funitel.model_server.models.encoder_decoder.forced_tokens import DecodingRules, read_rules
from funitel.model_server.sampling.grammar import FollowerState
from funitel.model_server.sampling.transcript_rules import TranscriptRules
from funitel.model_server.sequence.media_plan import MediaPlan, PlannedMedia
from funitel.model_server.sequence.table import SequenceState
from funitel.model_server.spec.encoder_decoder import Seq2SeqSpec
from funitel.proto.errors import InvalidRequest
from funitel.proto.step import SequenceStart

logger = logging.getLogger(__name__)

NUM_OPENING_TOKENS = 1
"""Tokens behind a prompt that the decoder of an encoder-decoder begins with."""


@dataclass(frozen=True, slots=True)
class RowBeginning:
    """How the row of a sequence begins: with what an encoder reads of it, and what its completion comes behind.

    Penalties, the text and the grammar know the opening and the completion; of a resumed sequence `described` is the
    part of the completion that its grammar describes. `media` are those of the prompt.
    """

    start: SequenceStart
    source: Sequence[int]
    opening: list[int]
    described: Sequence[int]
    media: MediaPlan | None = None


class RowRules:
    """A decoder's rules: its sequences are the prompt and what follows, and no token is forced."""

    takes_first_token = False
    """Of a request; see `Capability.FIRST_TOKEN`."""
    forces_tokens = False
    takes_media = False
    max_prompt: int | None = None
    """Tokens of a prompt, where that is less than the model's context."""

    def begin(self, start: SequenceStart, prompt: list[int]) -> RowBeginning:
        """How a sequence begins.

        Raises:
            InvalidRequest: the model cannot take it.
        """
        return RowBeginning(start, (), prompt, start.output_ids)

    def check_chunk(self, row: SequenceState, count: int) -> None:
        """Check that a row may compute `count` tokens in a step. Raises: InvalidRequest: it may not."""

    def span(self, row: SequenceState, count: int, block_table: np.ndarray) -> RowSpan:
        """What a row computes in a step of `count` of its tokens."""
        wanted = "last" if count == row.num_pending else "none"
        if row.owes_prompt_scores:
            wanted = "all"
        tokens = row.next_tokens(count)
        return RowSpan(
            tokens, row.num_cached, block_table, wanted, row.prompt_len, adapter=row.adapter, row_index=row.index
        )

    def follower(self, start: SequenceStart, inner: FollowerState | None) -> FollowerState | None:
        """What may follow in a sequence, where that is more than its grammar and its token rules, `inner`, say."""
        return inner

    def first_timestamp(self, start: SequenceStart) -> int | None:
        """The smallest token that is a timestamp, where a sequence is to have such.

        Raises:
            InvalidRequest: the model knows none.
        """
        if start.sampling.with_timestamps:
            raise InvalidRequest("with_timestamps is not supported by this shard", "with_timestamps")
        return None

    def state_slot(self, row: SequenceState) -> int:
        """Where the state of a row is, for models that keep one; 0 is no sequence's."""
        return 0

    def forced(self, row: SequenceState) -> int | None:
        """The token that must follow in a row, whatever is sampled; it is known before the tokens that come first."""
        return None

    def profile_prompt(
        self, tokens: Sequence[int], block_table: np.ndarray, block_size: int, wanted: str, *, is_measured: bool
    ) -> RowSpan:
        """What a prompt of the profile run computes; `wanted` logits are a `RowSpan`'s.

        `is_measured`: the peak of its memory counts.
        """
        return RowSpan(tokens, 0, block_table, wanted)

    def profile_decode(self) -> RowSpan:
        """What a sequence of the profile run that decodes computes, in the block that is no sequence's."""
        return RowSpan([0], 0, np.zeros(1, np.int32))


class StateRules(RowRules):
    """A decoder's rules, of which some layers keep a state, in the slot that the router gives a sequence.

    A router that knows of no states gives none: then each place of the sequence table has a slot.
    """

    def begin(self, start: SequenceStart, prompt: list[int]) -> RowBeginning:
        """See RowRules; behind tokens that are found in the cache a sequence begins with the state after them."""
        if (start.cache_len > 0) != (start.state_from > 0):
            raise InvalidRequest(
                f"cache_len {start.cache_len} needs state_from, the slot of the state after so many tokens, "
                f"given {start.state_from}"
            )
        if start.state_from and not start.state_slot:
            raise InvalidRequest(f"state_from {start.state_from} needs a state_slot, given 0")
        return super().begin(start, prompt)

    def state_slot(self, row: SequenceState) -> int:
        """See RowRules."""
        return row.start.state_slot or row.index + 1

    def span(self, row: SequenceState, count: int, block_table: np.ndarray) -> RowSpan:
        """See RowRules."""
        saves = row.state_saves
        if saves:  # with drafts, a later step may be the one that gets so far
            end = row.num_cached + count
            row.state_saves = tuple([save for save in saves if save.position > end])
        return replace(super().span(row, count, block_table), state_slot=self.state_slot(row), state_saves=saves)


class Seq2SeqRules(RowRules):
    """An encoder-decoder's rules: what the decoder begins with, and what is forced, is the checkpoint's."""

    forces_tokens = True

    def __init__(self, spec: Seq2SeqSpec, decoding: DecodingRules) -> None:
        self.takes_first_token = spec.is_multilingual
        self.max_prompt: int = spec.encoder.max_position_embeddings
        self._max_completion = spec.decoder.max_position_embeddings
        self._decoding = decoding

    @classmethod
    def read(cls, folder: Path, spec: Seq2SeqSpec) -> "Seq2SeqRules":
        """Those of the checkpoint in `folder`. Raises: as `read_rules`."""
        decoding = read_rules(folder, spec.decoder.vocab_size)
        if spec.is_multilingual and decoding.forced_first is None:
            logger.warning(
                "the checkpoint does not say which language completions are in (forced_bos_token_id of "
                "generation_config.json): that is up to the model, behind the token %d",
                decoding.start,
            )
        return cls(spec, decoding)

    def begin(self, start: SequenceStart, prompt: list[int]) -> RowBeginning:
        """See RowRules; a grammar begins behind the token that is forced to come first."""
        if len(prompt) > self.max_prompt:
            raise InvalidRequest(
                f"request {start.request_id} has a prompt of {len(prompt)} tokens, "
                f"the model's encoder reads {self.max_prompt}"
            )
        if start.cache_len:
            raise InvalidRequest(f"cache_len must be 0 for an encoder-decoder, given {start.cache_len}")
        if len(start.output_ids) >= self._max_completion:
            raise InvalidRequest(
                f"request {start.request_id} has {len(start.output_ids)} completion tokens, "
                f"the model's decoder writes {self._max_completion}"
            )
        max_new_tokens = min(start.stopping.max_new_tokens, self._max_completion)
        start = replace(start, stopping=replace(start.stopping, max_new_tokens=max_new_tokens))
        is_forced = (self._decoding.forced_first, start.sampling.first_token) != (None, None)
        described = start.output_ids[1:] if is_forced else start.output_ids
        return RowBeginning(start, prompt, [self._decoding.start], described)

    def span(self, row: SequenceState, count: int, block_table: np.ndarray) -> RowSpan:
        """See RowRules."""
        begin = row.num_cached
        is_read = begin <= row.source_len < begin + count
        return RowSpan(
            row.next_tokens(count),
            begin,
            block_table,
            "last" if count == row.num_pending else "none",  # nothing predicts what the encoder reads
            row.prompt_len,
            row.source_len,
            row.tokens[: row.source_len] if is_read else (),
        )

    def forced(self, row: SequenceState) -> int | None:
        """See RowRules; the end of what a grammar describes never is."""
        stopping = row.start.stopping
        return self._decoding.forced(
            row.num_generated + row.num_placeholders,
            stopping.max_new_tokens,
            ignores_eos=stopping.ignore_eos or bool(row.start.sampling.grammar),
            first=row.start.sampling.first_token,
        )

    def profile_prompt(
        self, tokens: Sequence[int], block_table: np.ndarray, block_size: int, wanted: str, *, is_measured: bool
    ) -> RowSpan:
        """A prompt as long as the encoder reads, the last of the tokens standing in for the decoder's first.

        Where the peak of memory counts the encoder reads all that it ever does at once, whatever the budget of a step.
        """
        length = max(1, min(len(tokens) - NUM_OPENING_TOKENS, self.max_prompt))
        tokens = tokens[: length + NUM_OPENING_TOKENS]
        num_read = self.max_prompt if is_measured else length
        source = np.resize(tokens[:length], num_read).tolist()
        # Of the pool made for the tokens alone; what is written does not matter.
        table = np.resize(block_table, max(len(block_table), -(-num_read // block_size)))
        return RowSpan(tokens, 0, table, source_len=length, source=source)

    def profile_decode(self) -> RowSpan:
        """The decoder's first token, behind one that the encoder has read."""
        return RowSpan([self._decoding.start], 1, np.zeros(2, np.int32), source_len=1)


class TranscriptionRules(RowRules):
    """The rules of an encoder-decoder that hears.

    A prompt is the places of the features of one sound, then the tokens that the decoder begins with. The places count
    as tokens of the sequence like those that an encoder reads. A prompt without a sound has the decoder's tokens alone.
    """

    takes_media = True

    def __init__(self, spec: Seq2SeqSpec, decoding: DecodingRules, media: FeatureService) -> None:
        """`media` has the features of sounds."""
        self._num_features = spec.encoder.max_position_embeddings
        self._most = spec.decoder.max_position_embeddings
        self.max_prompt: int = self._num_features + self._most - 1
        self._width = spec.decoder.hidden_size
        self._vocab_size = spec.decoder.vocab_size
        self._decoding = decoding
        self._media = media

    @classmethod
    def read(cls, folder: Path, spec: Seq2SeqSpec, media: FeatureService) -> "TranscriptionRules":
        """Those of the checkpoint in `folder`. Raises: as `read_rules`."""
        return cls(spec, read_rules(folder, spec.decoder.vocab_size, hears=True), media)

    def begin(self, start: SequenceStart, prompt: list[int]) -> RowBeginning:
        """See RowRules; the decoder's opening and completion together are as long as it can write."""
        places = [(span.position, span.length) for span in start.media]
        if places not in ([], [(0, self._num_features)]):
            raise InvalidRequest(f"a prompt needs one sound, {self._num_features} tokens from 0 on, given {places}")
        heard = self._num_features if places else 0
        source, opening = prompt[:heard], prompt[heard:]
        if start.cache_len:
            raise InvalidRequest(f"cache_len must be 0 for an encoder-decoder, given {start.cache_len}")
        known = len(opening) + len(start.output_ids)
        if not opening or known >= self._most:
            raise InvalidRequest(
                f"request {start.request_id} has {known} tokens of the decoder, which has room for 1 to {self._most}"
            )
        max_new_tokens = min(start.stopping.max_new_tokens, self._most - len(opening))
        start = replace(start, stopping=replace(start.stopping, max_new_tokens=max_new_tokens))
        items = [PlannedMedia(np.arange(heard), self._media.features(span.key).features) for span in start.media]
        return RowBeginning(start, source, opening, start.output_ids, MediaPlan(items))

    def span(self, row: SequenceState, count: int, block_table: np.ndarray) -> RowSpan:
        """See RowRules; the decoder looks at the features in the step that has its first token."""
        begin, heard = row.num_cached, row.source_len
        media: list[RowMedia] = []
        for item in () if row.media is None else row.media.items:
            if begin > heard:
                item.features = None
            elif item.features is not None and heard < begin + count:
                # All of them, whatever part of them the plan counts in this step.
                media.append(RowMedia(item.places - begin, item.features))
        wanted = "last" if count == row.num_pending else "none"
        return RowSpan(row.next_tokens(count), begin, block_table, wanted, row.prompt_len, heard, media=tuple(media))

    def follower(self, start: SequenceStart, inner: FollowerState | None) -> FollowerState | None:
        """See RowRules."""
        tokens, with_timestamps = self._decoding.transcript, start.sampling.with_timestamps
        assert tokens is not None, "of a model that hears they are read"
        return TranscriptRules(tokens, self._vocab_size, start.output_ids, inner, with_timestamps=with_timestamps)

    def first_timestamp(self, start: SequenceStart) -> int | None:
        """See RowRules."""
        if not start.sampling.with_timestamps:
            return None
        first = None if self._decoding.transcript is None else self._decoding.transcript.first_timestamp
        if first is None:
            raise InvalidRequest("with_timestamps: the model knows no timestamps", "with_timestamps")
        return first

    def profile_prompt(
        self, tokens: Sequence[int], block_table: np.ndarray, block_size: int, wanted: str, *, is_measured: bool
    ) -> RowSpan:
        """A sound of as many features as there are tokens but one; where the peak of memory counts, a whole one."""
        length = max(1, min(len(tokens) - 1, self._num_features))
        num_read = self._num_features if is_measured else length
        table = np.resize(block_table, max(len(block_table), -(-num_read // block_size)))
        media = RowMedia(np.arange(num_read), torch.zeros(num_read, self._width))
        return RowSpan(tokens[: length + 1], 0, table, source_len=length, media=(media,))

    def profile_decode(self) -> RowSpan:
        """The decoder's first token, behind one feature."""
        return RowSpan([self._decoding.start], 1, np.zeros(2, np.int32), source_len=1)
