"""After sampling: text, stops and finish of each sequence, and its description for the router.

Every rank settles alike, so that all agree on what has finished; each describes only the requests that are its own.
Touches no tensors.
"""

import math
from collections.abc import Sequence

from funitel.model_server.parallel import TensorParallel
from funitel.model_server.sampler import SampledToken
from funitel.model_server.sequences import Row
from funitel.model_server.text import StopMatch, TextCodec
from funitel.proto.step import FinishReason, GeneratedText, Generation, Tokens


class Settler:
    """Settles sampled tokens. A request is a rank's own if its id modulo the number of ranks is the rank."""

    def __init__(self, codec: TextCodec, parallel: TensorParallel, eos_token_ids: frozenset[int]) -> None:
        self.codec = codec
        self.parallel = parallel
        self.eos_token_ids = eos_token_ids

    def settle(self, row: Row, tokens: Sequence[SampledToken]) -> Generation | None:
        """Give a row its next tokens, up to the one that finishes it, as text; describe them if the row is ours.

        A rank that neither describes the row nor has stops to look for needs no text.
        """
        is_ours = row.request_id % self.parallel.size == self.parallel.rank
        needs_text = is_ours or bool(row.start.stopping.stop_sequences)
        is_first = row.num_generated == 0
        pieces: list[str] = []
        match: StopMatch | None = None
        for token in tokens:
            row.take(token.id)
            row.finish_reason = self._finish_reason(row, token)
            if needs_text:
                piece = row.detokenizer.push(token.id)
                match = row.stops.search(row.detokenizer.text, self.codec.special_text(token.id))
                if row.finish_reason is None and match is not None:
                    row.finish_reason = FinishReason.STOP_SEQUENCE
                if row.finish_reason is not None:
                    piece += row.detokenizer.flush()
                pieces.append(piece)
            if row.finish_reason is not None:
                break
        if not is_ours:
            return None
        taken = tokens[: len(pieces)]
        return Generation(
            request_id=row.request_id,
            tokens=Tokens(
                tuple(token.id for token in taken),
                tuple(token.logprob for token in taken),
                tuple(pieces),
                tuple(self.codec.special_text(token.id) is not None for token in taken),
            ),
            top_tokens=(
                tuple(self._describe(token.top_ids, token.top_logprobs) for token in taken)
                if row.sampling.top_n
                else ()
            ),
            prefill_tokens=self._prompt_tokens(row) if row.wants_prompt_logprobs and is_first else None,
            finished=_ending(row, match),
        )

    def _finish_reason(self, row: Row, token: SampledToken) -> FinishReason | None:
        """Length first, then end of sequence: TGI's order. The end of a grammar is one that cannot be ignored."""
        stopping = row.start.stopping
        if row.num_generated >= stopping.max_new_tokens or token.is_cut:
            return FinishReason.LENGTH
        ignores_eos = stopping.ignore_eos and not row.start.sampling.grammar
        if not ignores_eos and token.id in self.eos_token_ids:
            return FinishReason.EOS_TOKEN
        return None

    def _describe(self, ids: Sequence[int], logprobs: Sequence[float]) -> Tokens:
        texts = tuple(self.codec.decode([token_id]) for token_id in ids)
        specials = tuple(self.codec.special_text(token_id) is not None for token_id in ids)
        return Tokens(tuple(ids), tuple(logprobs), texts, specials)

    def _prompt_tokens(self, row: Row) -> Tokens:
        """Prompt tokens with log-probabilities; NaN for the first and for those whose KV came from the cache."""
        prompt = row.tokens[: row.prompt_len]
        unknown = [math.nan] * (row.prompt_len - len(row.prompt_logprobs))
        described = self._describe(prompt, unknown + row.prompt_logprobs)
        return Tokens(described.ids, described.logprobs, described.texts)


def _ending(row: Row, match: StopMatch | None) -> GeneratedText | None:
    """How a finished row ended. A stop that ended it ends its text; where length did, the text is whole."""
    if row.finish_reason is None:
        return None
    text, params = row.detokenizer.text, row.start.sampling
    if match is not None and row.finish_reason is FinishReason.STOP_SEQUENCE:
        text = text[: match.end]
    return GeneratedText(
        text=text,
        num_tokens=row.num_generated,
        finish_reason=row.finish_reason,
        seed=params.seed if params.is_sampled else None,
        stop_index=match.index if match else None,
        stop_start=match.start if match else None,
    )
