"""Admission of new sequences to a rank's table, and what must hold of a call before anything changes."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from funitel.model_server.adapters.registry import LoadedAdapters
from funitel.model_server.executor.interface import ExecutorOptions
from funitel.model_server.executor.row_rules import RowBeginning, RowRules
from funitel.model_server.sampling.grammar import FollowerState, GrammarCompiler, GrammarState
from funitel.model_server.sampling.sampler import SamplingState
from funitel.model_server.sampling.token_rules import TokenRules
from funitel.model_server.sequence.detokenizer import Detokenizer, StopMatcher, TextCodec
from funitel.model_server.sequence.table import SequenceState, SequenceTable
from funitel.proto.errors import InvalidRequest
from funitel.proto.step import RowUpdate, SamplingParams, SequenceStart
from funitel.proto.strategy import DecodingStrategy


@dataclass(frozen=True, slots=True)
class StepBounds:
    """What steps stay within: blocks of the pool and of a row, tokens of a block and of the model's context.

    `num_states` are the slots of the state pool, slot 0 among them; 0 where the model keeps no states.
    """

    num_blocks: int
    max_blocks: int
    block_size: int
    context: int
    num_states: int = 0


def check_supported(start: SequenceStart, vocab_size: int, *, takes_first_token: bool) -> None:
    """Raise InvalidRequest for what no step could give."""
    first_token = start.sampling.first_token
    if first_token is not None and not takes_first_token:
        raise InvalidRequest("first_token is not supported by this shard")
    if first_token is not None and first_token >= vocab_size:
        raise InvalidRequest(f"first_token must be within 0..{vocab_size - 1}, given {first_token}")
    temperature = start.sampling.temperature
    if not 0.0 < temperature < math.inf:
        raise InvalidRequest(f"temperature must be > 0 and finite, given {temperature}", "temperature")
    unknown = [token_id for token_id, _ in start.sampling.logit_bias if token_id >= vocab_size]
    if unknown:
        raise InvalidRequest(f"logit_bias needs token ids within 0..{vocab_size - 1}, given {unknown[0]}", "logit_bias")
    _check_token_rules(start.sampling, vocab_size)
    if start.stopping.max_new_tokens <= len(start.output_ids):
        raise InvalidRequest(
            f"max_new_tokens must be > the {len(start.output_ids)} tokens already produced, "
            f"given {start.stopping.max_new_tokens}"
        )


def _check_token_rules(params: SamplingParams, vocab_size: int) -> None:
    if params.strategy is not None:
        _check_strategy(params.strategy)
    if not all(params.banned_tokens):
        raise InvalidRequest("banned_tokens needs sequences of one token or more", "banned_tokens")
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        ("banned_tokens", [token_id for sequence in params.banned_tokens for token_id in sequence]),
    ):
        if max(ids, default=0) >= vocab_size:
            raise InvalidRequest(f"{name} needs token ids within 0..{vocab_size - 1}, given {max(ids)}", name)


def _check_strategy(strategy: DecodingStrategy) -> None:
    """What a router has checked in full: here, what would spoil a step."""
    numbers = (getattr(strategy, name) for name in DecodingStrategy.__slots__)
    if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
        raise InvalidRequest("strategy needs finite numbers", "strategy")
    if strategy.mirostat > 2:
        raise InvalidRequest(f"mirostat must be 0, 1 or 2, given {strategy.mirostat}", "mirostat")
    if strategy.dry_base < 0:
        raise InvalidRequest(f"dry_base must be >= 0, given {strategy.dry_base}", "dry_base")
    if strategy.fsd_alpha and not (strategy.fsd_k and strategy.fsd_n):
        raise InvalidRequest("fsd_k and fsd_n must be > 0", "fsd_k")


def check_addresses(start: SequenceStart, bounds: StepBounds) -> None:
    """Blocks must lie in the pool, and slots, which TGI routers send too, must say the same as blocks."""
    num_blocks, size = bounds.num_blocks, bounds.block_size
    if any(block >= num_blocks for block in start.blocks):
        raise InvalidRequest(f"block {max(start.blocks)} is outside the pool of {num_blocks} blocks")
    if len(set(start.blocks)) < len(start.blocks):
        raise InvalidRequest(f"request {start.request_id} has a block twice")
    for position, slot in enumerate(start.slots):
        index, offset = divmod(position, size)
        if index >= len(start.blocks) or slot != start.blocks[index] * size + offset:
            raise InvalidRequest(f"slot {slot} of token {position} does not lie in its block")
    if start.state_slot or start.state_saves:
        _check_states((start.state_slot, start.state_from, *(save.slot for save in start.state_saves)), bounds)


def _check_states(slots: Sequence[int], bounds: StepBounds) -> None:
    if max(slots) >= bounds.num_states:
        raise InvalidRequest(f"slot {max(slots)} is outside the state pool of {bounds.num_states} slots")


def check_step(
    running: Sequence[SequenceState],
    new: Sequence[SequenceState],
    counts: Sequence[int],
    updates: Sequence[RowUpdate],
    bounds: StepBounds,
) -> None:
    """Every update has its row, every granted block lies in the pool, every token of the step in a block."""
    by_id = {row.request_id: row for row in running}
    if updates and len(by_id) < len(running):
        raise InvalidRequest("row updates need distinct request ids")
    granted: Counter[int] = Counter()
    for update in updates:
        if update.request_id not in by_id:
            raise InvalidRequest(f"row update for request {update.request_id}, which is not in the step")
        if any(block >= bounds.num_blocks for block in update.blocks):
            raise InvalidRequest(f"block {max(update.blocks)} is outside the pool of {bounds.num_blocks} blocks")
        if update.state_saves:
            _check_states([save.slot for save in update.state_saves], bounds)
        granted[update.request_id] += len(update.blocks)
    _check_owners(new, updates, bounds.block_size)
    for row, count in zip([*running, *new], counts, strict=True):
        _check_blocks(row, count, granted[row.request_id], bounds)


def _check_blocks(row: SequenceState, count: int, num_granted: int, bounds: StepBounds) -> None:
    held = row.num_blocks + num_granted
    if held > bounds.max_blocks:
        raise InvalidRequest(f"request {row.request_id} has {held} blocks, at most {bounds.max_blocks} are allowed")
    num_tokens, context = row.num_cached + count, bounds.context
    if num_tokens > context:  # a table of learned positions has no more
        raise InvalidRequest(
            f"request {row.request_id} would have {num_tokens} tokens, the model's context is {context}"
        )
    needed = -(-num_tokens // bounds.block_size)
    if count and needed > held:
        raise InvalidRequest(f"request {row.request_id} needs {needed} blocks for this step, it has {held}")


def _check_owners(new: Sequence[SequenceState], updates: Sequence[RowUpdate], block_size: int) -> None:
    """Every block that a call grants to be written has one owner; those that are found computed may have several."""
    owners: dict[int, int] = {}
    granted = [(row.request_id, row.start.blocks[-(-row.start.cache_len // block_size) :]) for row in new]
    for request_id, blocks in (*granted, *((update.request_id, update.blocks) for update in updates)):
        for block in blocks:
            if owners.setdefault(block, request_id) != request_id:
                raise InvalidRequest(f"block {block} is granted to requests {owners[block]} and {request_id}")


class RowAdmission:
    """Makes the rows of new sequences, alike on every rank, so that all refuse a bad one."""

    def __init__(
        self,
        vocab_size: int,
        codec: TextCodec,
        options: ExecutorOptions,
        rules: RowRules,
        table: SequenceTable,
        adapters: LoadedAdapters,
        *,
        samples: bool,
    ) -> None:
        self.adapters = adapters
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
        if start.media and not self._rules.takes_media:
            raise InvalidRequest(f"request {start.request_id} has media, this model takes text alone", "media")
        adapter = None if start.adapter_id is None else self.adapters.get(start.adapter_id)
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
        row.adapter = adapter
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
        grammar: GrammarState | None = None
        if start.sampling.grammar:
            described = beginning.described
            num_left = start.stopping.max_new_tokens - len(start.output_ids) + len(described)
            grammar = self.grammars.start(
                start.sampling, described, num_left=num_left, ignores_eos=start.stopping.ignore_eos
            )
        follower: FollowerState | None = grammar
        if start.sampling.has_token_rules:
            follower = TokenRules(
                start.sampling, grammar, self._options.eos_token_ids, self._vocab_size, start.output_ids, opening
            )
        follower = self._rules.follower(start, follower)
        first_timestamp = self._rules.first_timestamp(start)
        detokenizer = Detokenizer(self._codec, opening)
        stops = StopMatcher(start.stopping.stop_sequences)
        for token_id in start.output_ids:
            detokenizer.push(token_id)
        stops.search(detokenizer.text)
        if len(start.output_ids) < start.sampling.min_new_tokens:
            stops.skip(len(detokenizer.text))
        sampling = SamplingState.over(
            start.sampling,
            start.top_n_tokens,
            opening,
            start.output_ids,
            self._options.watermark,
            mirostat_mu=start.mirostat_mu,
            has_text=self._has_text,
        )
        sampling.first_timestamp = first_timestamp
        sampling.wants_raw |= start.sampling.raw_logprobs and follower is not None
        return SequenceState(
            index=self._table.take(),  # last of all that can fail
            start=start,
            tokens=[*beginning.source, *opening, *start.output_ids],
            prompt_len=len(beginning.source) + len(opening),
            num_cached=start.cache_len,
            sampling=sampling,
            detokenizer=detokenizer,
            stops=stops,
            prompt_top=self._prompt_top(start),
            grammar=follower if self._samples else None,
            source_len=len(beginning.source),
            state_saves=start.state_saves,
            speculate=start.speculate,
            media=beginning.media,
        )

    def _has_text(self, token_id: int, text: str) -> bool:
        return text in self._codec.decode([token_id])

    def _prompt_top(self, start: SequenceStart) -> int | None:
        """How many likeliest tokens at each place of its prompt a sequence wants; None where it wants no scores."""
        if start.output_ids:  # it had them with its first token
            return None
        if start.prompt_logprobs is not None:
            return start.prompt_logprobs
        return 0 if start.prefill_logprobs and self._options.allow_prefill_logprobs else None
