"""Admission of new sequences to a rank's table: what a request asks for is checked, encoded and made a row."""

from funitel.model_server.executor.interface import ExecutorOptions
from funitel.model_server.executor.row_rules import RowBeginning, RowRules
from funitel.model_server.executor.step_checks import StepBounds, check_addresses, check_supported
from funitel.model_server.sampling.grammar import GrammarCompiler, GrammarState
from funitel.model_server.sampling.sampler import SamplingState
from funitel.model_server.sequence.detokenizer import Detokenizer, StopMatcher, TextCodec
from funitel.model_server.sequence.table import SequenceState, SequenceTable
from funitel.proto.errors import InvalidRequest
from funitel.proto.step import SequenceStart


class RowAdmission:
    """Makes the rows of new sequences, alike on every rank, so that all refuse a bad one."""

    def __init__(
        self,
        vocab_size: int,
        codec: TextCodec,
        options: ExecutorOptions,
        rules: RowRules,
        table: SequenceTable,
        *,
        samples: bool,
    ) -> None:
        self.grammars = GrammarCompiler(codec.path, vocab_size, options.eos_token_ids)
        self._vocab_size = vocab_size
        self._codec = codec
        self._options = options
        self._rules = rules
        self._table = table
        self._samples = samples  # this rank does

    def admit(self, start: SequenceStart, bounds: StepBounds) -> SequenceState:
        """Make the row of a new sequence.

        Raises:
            InvalidRequest: it contradicts itself, or asks for what this shard cannot do; nothing has changed.
        """
        check_supported(start, self._vocab_size, takes_first_token=self._rules.takes_first_token)
        prompt = self.prompt_of(start)
        tokens = [*prompt, *start.output_ids]
        if not prompt or max(tokens) >= self._vocab_size:
            raise InvalidRequest(
                f"request {start.request_id} needs token ids within 0..{self._vocab_size - 1}, "
                f"given {max(tokens) if prompt else 'none'}"
            )
        if start.cache_len >= len(tokens):
            raise InvalidRequest(f"cache_len {start.cache_len} must be < the {len(tokens)} tokens known")
        check_addresses(start, bounds)
        row = self._row(self._rules.begin(start, prompt))
        try:
            self._table.grant(row, start.blocks)
        except InvalidRequest:
            self._table.release([row])
            raise
        return row

    def prompt_of(self, start: SequenceStart) -> list[int]:
        """The tokens of a prompt: as they are given, or of its text."""
        if start.input_ids:
            return list(start.input_ids)
        ids = self._codec.encode(start.inputs, add_special_tokens=start.add_special_tokens)
        return ids[-start.truncate :] if start.truncate else ids

    def _row(self, beginning: RowBeginning) -> SequenceState:
        start, opening = beginning.start, beginning.opening
        grammar = self._grammar(beginning)
        detokenizer = Detokenizer(self._codec, opening)
        stops = StopMatcher(start.stopping.stop_sequences)
        for token_id in start.output_ids:
            detokenizer.push(token_id)
        stops.search(detokenizer.text)
        sampling = SamplingState.over(
            start.sampling, start.top_n_tokens, opening, start.output_ids, self._options.watermark
        )
        return SequenceState(
            index=self._table.take(),  # last of all that can fail
            start=start,
            tokens=[*beginning.source, *opening, *start.output_ids],
            prompt_len=len(beginning.source) + len(opening),
            num_cached=start.cache_len,
            sampling=sampling,
            detokenizer=detokenizer,
            stops=stops,
            wants_prompt_logprobs=(
                start.prefill_logprobs and self._options.allow_prefill_logprobs and not start.output_ids
            ),
            grammar=grammar if self._samples else None,
            source_len=len(beginning.source),
        )

    def _grammar(self, beginning: RowBeginning) -> GrammarState | None:
        """The state of its grammar, if it has one."""
        start = beginning.start
        if not start.sampling.grammar:
            return None
        return self.grammars.start(start.sampling, beginning.described, ignores_eos=start.stopping.ignore_eos)
