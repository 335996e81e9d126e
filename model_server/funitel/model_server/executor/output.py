"""The output processor: text, stops and finish of each sequence after sampling, and its description for the router.

Every rank processes alike, so that all agree on what has finished; each describes only the requests that are its own.
Processing is part of the step; describing may be done beside the next one. Touches no tensors.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.sampling.sampler import SampledToken
from funitel.model_server.sequence.detokenizer import Detokenizer, StopMatch, TextCodec
from funitel.model_server.sequence.output_records import OutputRecords, SequenceRecord
from funitel.model_server.sequence.table import SequenceState
from funitel.model_server.speculation.verify import num_accepted
from funitel.proto.process import logs
from funitel.proto.step import FinishReason, GeneratedText, Generation, PromptTop, Tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gave a row, before it is described: the tokens taken, their text where it is known, how it ended."""

    row: SequenceState
    tokens: tuple[SampledToken, ...]
    pieces: list[str] | None
    is_first: bool
    num_generated: int
    finish_reason: FinishReason | None
    match: StopMatch | None
    num_accepted: int = 0


class OutputProcessor:
    """Processes sampled tokens. A request is a rank's own if its id modulo the number of ranks is the rank.

    `forces_spans`: tokens that alone can follow in a grammar are taken without a forward each.
    """

    def __init__(
        self, codec: TextCodec, parallel: TensorParallel, eos_token_ids: frozenset[int], *, forces_spans: bool
    ) -> None:
        self.codec = codec
        self.parallel = parallel
        self.eos_token_ids = eos_token_ids
        self.records = OutputRecords()
        self.described: list[tuple[SequenceRecord, Generation]] = []  # of this step, to be recorded
        self._forces_spans = forces_spans

    def with_forced(self, row: SequenceState, token: SampledToken, num_before: int = 0) -> list[SampledToken]:
        """A token and those that alone can follow it in the row's grammar, which need no forward to be chosen.

        In this step it comes behind `num_before` others. Rows that want the model's own log-probabilities get none:
        those do need the forward.
        """
        grammar, params = row.grammar, row.start.sampling
        if grammar is None or math.isnan(token.logprob):  # a broken row gets no further
            return [token]
        if grammar.is_stuck:
            facts = {"request_id": row.start.name or str(row.request_id)}
            logs.log_fields(logger, "a request ends early: its grammar allows nothing more", logging.WARNING, **facts)
            return [replace(token, is_cut=True)]
        grammar.push(token.id)
        if not self._forces_spans or params.raw_logprobs or token.id in self.eos_token_ids:
            return [token]
        max_forced = row.start.stopping.max_new_tokens - row.num_generated - num_before - 1
        with_top = row.sampling.top_n > 0
        return [token, *(SampledToken.forced(token_id, with_top=with_top) for token_id in grammar.forced(max_forced))]

    def ends_with(self, row: SequenceState, token_id: int) -> bool:
        """Whether a row ends with a token, whatever its length and its text."""
        ignores_eos = row.start.stopping.ignore_eos and not row.start.sampling.grammar
        return (not ignores_eos and token_id in self.eos_token_ids) or token_id in row.start.sampling.stop_token_ids

    def process(
        self, row: SequenceState, tokens: Sequence[SampledToken], drafts: Sequence[int] = ()
    ) -> StepOutput | None:
        """Give a row its next tokens, up to the one that finishes it; None if another rank describes it.

        Those that are its `drafts` have keys and values already.

        What the next step depends on is done here. Text is needed for that only where stop strings are looked for;
        otherwise `describe` makes it, on whatever thread, while the next step is computed.
        """
        is_first = row.num_generated == 0
        pieces: list[str] | None = [] if row.start.stopping.stop_sequences else None
        match: StopMatch | None = None
        count = 0
        for token in tokens:
            row.take(token.id)
            count += 1
            row.finish_reason = self._finish_reason(row, token)
            if pieces is not None:
                piece = row.detokenizer.push(token.id)
                match = row.stops.search(row.detokenizer.text, self.codec.special_text(token.id))
                if match is not None and row.num_generated < row.start.sampling.min_new_tokens:
                    row.stops.skip(match.end)
                    match = None
                if row.finish_reason is None and match is not None:
                    row.finish_reason = FinishReason.STOP_SEQUENCE
                if row.finish_reason is not None:
                    piece += row.detokenizer.flush()
                pieces.append(piece)
            if row.finish_reason is not None:
                break
        accepted = num_accepted(drafts, [token.id for token in tokens[:count]]) if drafts else 0
        row.num_cached += accepted
        if row.request_id % self.parallel.size != self.parallel.rank:
            row.prompt_scores.clear()
            return None
        taken = tuple(tokens[:count])
        return StepOutput(row, taken, pieces, is_first, row.num_generated, row.finish_reason, match, accepted)

    def describe(self, output: StepOutput) -> Generation:
        """What is sent of a row's tokens. Each row's in the order they were processed, and never two at once."""
        row, tokens = output.row, output.tokens
        pieces = output.pieces
        if pieces is None:
            pieces = [row.detokenizer.push(token.id) for token in tokens]
            if output.finish_reason is not None:
                pieces[-1] += row.detokenizer.flush()
        prompt, prompt_top = None, None
        if row.prompt_top is not None and output.is_first:
            prompt, prompt_top = self._prompt(row)
        generation = Generation(
            request_id=row.request_id,
            tokens=Tokens(
                tuple(token.id for token in tokens),
                tuple(token.logprob for token in tokens),
                tuple(pieces),
                tuple(self.codec.special_text(token.id) is not None for token in tokens),
            ),
            top_tokens=(
                tuple(self._describe(token.top_ids, token.top_logprobs) for token in tokens)
                if row.sampling.top_n
                else ()
            ),
            prefill_tokens=prompt,
            prompt_top=prompt_top,
            finished=_ending(output, pieces[-1]),
            num_accepted=output.num_accepted,
        )
        if row.record is not None:
            self.described.append((row.record, generation))
        return generation

    def begin_records(self, new: Sequence[SequenceState]) -> None:
        """Begin the records of new rows, where they have output keys."""
        for row in new:
            if row.start.output_key:
                is_own = row.request_id % self.parallel.size == self.parallel.rank
                row.record = self.records.begin(row.start, is_own=is_own)

    def record(self, step: int, memories: Sequence[tuple[int, float]]) -> None:
        """Record the generations that were described since the last step; `memories` as in `StepResult`."""
        described, self.described = self.described, []
        self.records.add(step, described, memories)

    def _finish_reason(self, row: SequenceState, token: SampledToken) -> FinishReason | None:
        """Length first, then end of sequence: TGI's order. The end of a grammar is one that cannot be ignored."""
        stopping = row.start.stopping
        if row.num_generated >= stopping.max_new_tokens or token.is_cut:
            return FinishReason.LENGTH
        return FinishReason.EOS_TOKEN if self.ends_with(row, token.id) else None

    def _describe(self, ids: Sequence[int], logprobs: Sequence[float]) -> Tokens:
        texts = tuple(self.codec.decode([token_id]) for token_id in ids)
        specials = tuple(self.codec.special_text(token_id) is not None for token_id in ids)
        return Tokens(tuple(ids), tuple(logprobs), texts, specials)

    def _prompt(self, row: SequenceState) -> tuple[Tokens, PromptTop | None]:
        """Prompt tokens with log-probabilities, and where it is asked for the likeliest at each place.

        NaN, and rank 0, for the first, for those with KV from the cache, and for those that an encoder reads.
        """
        ids = tuple(row.tokens[: row.source_len or row.prompt_len])
        known = np.concatenate(row.prompt_scores or [np.zeros((0, 2))])
        row.prompt_scores = []
        unknown = np.zeros((len(ids) - 1 - len(known), known.shape[1]))
        unknown[:, 0] = np.nan
        scores = np.concatenate([unknown, known])
        logprobs = (math.nan, *scores[:, 0].tolist())
        if row.start.prompt_logprobs is None:
            return Tokens(ids, logprobs, tuple(self.codec.decode([each]) for each in ids)), None
        is_special = tuple(self.codec.special_text(token_id) is not None for token_id in ids)
        return Tokens(ids, logprobs, self._pieces(ids), is_special), self._prompt_top(scores)

    def _pieces(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Texts of tokens that together are the text of all, special ones included."""
        detokenizer = Detokenizer(self.codec, ())
        pieces = [detokenizer.push(token_id) for token_id in ids]
        pieces[-1] += detokenizer.flush()
        return tuple(pieces)

    def _prompt_top(self, scores: np.ndarray) -> PromptTop:
        """The likeliest tokens of `scores` [places, 2 + 2 * width], see `prompt_scores.score`."""
        width = scores.shape[1] // 2 - 1
        ids = scores[:, 2 : 2 + width].astype(np.int64)
        return PromptTop(
            width=width,
            ids=tuple(ids.flatten().tolist()),
            logprobs=tuple(scores[:, 2 + width :].flatten().tolist()),
            ranks=tuple(scores[:, 1].astype(np.int64).tolist()),
            texts={token_id: self.codec.decode([token_id]) for token_id in np.unique(ids).tolist()},
        )


def _ending(output: StepOutput, last_piece: str) -> GeneratedText | None:
    """How a finished row ended. A stop that ended it ends its text; where length did, the text is whole.

    `last_piece` is the text of the last token: a stop token's is a stop, too.
    """
    if output.finish_reason is None:
        return None
    row, match = output.row, output.match
    text, params = row.detokenizer.text, row.start.sampling
    if match is not None and output.finish_reason is FinishReason.STOP_SEQUENCE:
        text = text[: match.end]
    stop_start = match.start if match else None
    if output.finish_reason is FinishReason.EOS_TOKEN and output.tokens[-1].id in params.stop_token_ids:
        stop_start = len(text.removesuffix(last_piece))  # a special token has no text here
    return GeneratedText(
        text=text,
        num_tokens=output.num_generated,
        finish_reason=output.finish_reason,
        seed=params.seed if params.is_sampled else None,
        stop_index=match.index if match else None,
        stop_start=stop_start,
    )
