"""The executor of an encoder-decoder: its sequences are a prompt that the encoder reads, then the decoder's tokens.

The prompt's tokens count as tokens of the sequence like any others, with a place in the pool each; they cost nothing
until the step that has the decoder's first token, in which the encoder reads all of them at once. However a prompt is
cut into chunks, and however often its sequence is resumed, the encoder reads it whole; of several in one step, as many
at once as fill the longest it can read.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.executor.executor import Executor, ExecutorOptions
from funitel.model_server.forward.batch import RowSpan
from funitel.model_server.forward.interface import Forward
from funitel.model_server.kv_cache.pool import Pools
from funitel.model_server.models.encoder_decoder.forced_tokens import DecodingRules
from funitel.model_server.sampling.grammar import GrammarState
from funitel.model_server.sampling.sampler import SampledToken
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.sequence.table import SequenceState
from funitel.model_server.spec.encoder_decoder import Seq2SeqSpec
from funitel.proto.errors import InvalidRequest, SettingsError
from funitel.proto.step import SequenceStart, WarmupLimits, WarmupResult

NUM_OPENING_TOKENS = 1
"""Tokens behind a prompt that the decoder begins with."""


class Seq2SeqExecutor(Executor):
    """Runs steps as its base does; what the decoder begins with, and what is forced, is the checkpoint's."""

    def __init__(
        self,
        spec: Seq2SeqSpec,
        rules: DecodingRules,
        model: Forward,
        pools: Pools,
        codec: TextCodec,
        parallel: TensorParallel,
        options: ExecutorOptions,
    ) -> None:
        super().__init__(spec.whole, model, pools, codec, parallel, options)
        self.rules = rules
        self.takes_first_token = spec.is_multilingual
        self.source_context = spec.encoder.max_position_embeddings
        self.decoder_context = spec.decoder.max_position_embeddings

    def warmup(self, starts: Sequence[SequenceStart], limits: WarmupLimits) -> WarmupResult:
        """See the base; a prompt may be no longer than what the encoder can read."""
        asked, most = limits.max_input_tokens, self.source_context
        if asked is not None and asked > most:
            raise SettingsError(f"--max-input-tokens {asked} exceeds the {most} tokens that the model's encoder reads")
        result = super().warmup(starts, limits)
        return replace(result, max_input_tokens=min(result.max_input_tokens, most))

    def _row(self, start: SequenceStart, prompt: list[int], tokens: list[int]) -> SequenceState:
        """The row of a sequence; penalties, text and grammars know the decoder's tokens only."""
        if len(prompt) > self.source_context:
            raise InvalidRequest(
                f"request {start.request_id} has a prompt of {len(prompt)} tokens, "
                f"the model's encoder reads {self.source_context}"
            )
        if start.cache_len:
            raise InvalidRequest(f"cache_len must be 0 for an encoder-decoder, given {start.cache_len}")
        if len(start.output_ids) >= self.decoder_context:
            raise InvalidRequest(
                f"request {start.request_id} has {len(start.output_ids)} completion tokens, "
                f"the model's decoder writes {self.decoder_context}"
            )
        most = min(start.stopping.max_new_tokens, self.decoder_context)
        start = replace(start, stopping=replace(start.stopping, max_new_tokens=most))
        opening = [self.rules.start]
        row = super()._row(start, opening, [*opening, *start.output_ids])
        row.tokens[:0] = prompt
        row.prompt_len += len(prompt)
        row.source_len = len(prompt)
        return row

    def _span(self, row: SequenceState, count: int) -> RowSpan:
        span = super()._span(row, count)
        is_read = span.start <= row.source_len < span.end
        return replace(
            span,
            logits="last" if count == row.num_pending else "none",  # nothing predicts what the encoder reads
            source_len=row.source_len,
            source=row.tokens[: row.source_len] if is_read else (),
        )

    def _rehearsal(self, tokens: Sequence[int], block_table: np.ndarray) -> RowSpan:
        """A prompt as long as the encoder reads, the last of the tokens standing in for the decoder's first.

        Where the peak of memory counts the encoder reads all that it ever does at once, whatever the budget of a step.
        """
        length = max(1, min(len(tokens) - NUM_OPENING_TOKENS, self.source_context))
        tokens = tokens[: length + NUM_OPENING_TOKENS]
        most = self.source_context if self.memory.is_measured else length
        source = np.resize(tokens[:length], most).tolist()
        # Of the pool made for the tokens alone; what is written does not matter.
        table = np.resize(block_table, max(len(block_table), -(-most // self.options.block_size)))
        return RowSpan(tokens, 0, table, source_len=length, source=source)

    def _rehearsed_decode(self) -> RowSpan:
        """The decoder's first token, behind one that the encoder has read."""
        return RowSpan([self.rules.start], 1, np.zeros(2, np.int32), source_len=1)

    def _sample(self, due: Sequence[SequenceState], logits: torch.Tensor) -> list[list[SampledToken]]:
        """Sample where nothing is forced; the end of what a grammar describes never is."""
        forced = {i: token_id for i, row in enumerate(due) if (token_id := self._forced(row)) is not None}
        if not forced:
            return super()._sample(due, logits)
        free = [i for i in range(len(due)) if i not in forced]
        sampled = iter(super()._sample([due[i] for i in free], logits[free]) if free else ())
        return [
            [SampledToken.forced(forced[i], with_top=row.sampling.top_n > 0)] if i in forced else next(sampled)
            for i, row in enumerate(due)
        ]

    def _grammar(self, start: SequenceStart) -> GrammarState | None:
        """A grammar begins behind the token that is forced to come first."""
        if (self.rules.forced_first, start.sampling.first_token) != (None, None):
            start = replace(start, output_ids=start.output_ids[1:])
        return super()._grammar(start)

    def _forced(self, row: SequenceState) -> int | None:
        stopping = row.start.stopping
        ignores_eos = stopping.ignore_eos or bool(row.start.sampling.grammar)
        return self.rules.forced(
            row.num_generated,
            stopping.max_new_tokens,
            ignores_eos=ignores_eos,
            first=row.start.sampling.first_token,
        )
