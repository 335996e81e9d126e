"""`step` nouns <-> protobuf messages, both directions; with `encoder_wire` all that touches `_pb2` messages.

Knows no sockets: `router.shards` and `model_server.server` carry the messages.
"""

from collections.abc import Callable, Iterable, Sequence

from funitel.proto import encoder_wire
from funitel.proto import generate_pb2 as pb
from funitel.proto.same_names import from_message, to_message
from funitel.proto.step import (
    BlockCopy,
    CachedBatch,
    FinishReason,
    GeneratedText,
    Generation,
    GrammarType,
    PromptTop,
    RowUpdate,
    SamplingParams,
    SequenceStart,
    ShardInfo,
    ShardMemory,
    StateSave,
    StepResult,
    StoppingParams,
    StoredBlock,
    Tokens,
    WarmupLimits,
    WarmupResult,
)
from funitel.proto.strategy import DecodingStrategy

StepResponse = pb.PrefillResponse | pb.DecodeResponse


# Requests, router -> shard ------------------------------------------------------------------------------------------


def encode_sequence(sequence: SequenceStart) -> pb.Request:
    """Build the Request of one sequence that enters a shard."""
    sampling, stopping = sequence.sampling, sequence.stopping
    message = to_message(
        pb.Request,
        sequence,
        without=("request_id", "sampling", "stopping"),
        id=sequence.request_id,
        state_saves=map(_encode_save, sequence.state_saves),
        media=map(encoder_wire.encode_span, sequence.media),
        parameters=to_message(
            pb.NextTokenChooserParameters,
            sampling,
            grammar_type=f"GRAMMAR_TYPE_{sampling.grammar_type.name}",
            logit_bias=[pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias],
            banned_tokens=[pb.TokenSequence(ids=ids) for ids in sampling.banned_tokens],
            strategy=None if sampling.strategy is None else to_message(pb.DecodingStrategy, sampling.strategy),
        ),
        stopping_parameters=pb.StoppingCriteriaParameters(
            max_new_tokens=stopping.max_new_tokens,
            stop_sequences=stopping.stop_sequences,
            ignore_eos_token=stopping.ignore_eos,
        ),
    )
    if sequence.inputs:
        message.input_chunks.chunks.add(text=sequence.inputs)
    return message


def decode_sequence(message: pb.Request) -> SequenceStart:
    """Read one Request. Image chunks are kept out of `inputs`; callers that serve no images see text only."""
    sampling, stopping = message.parameters, message.stopping_parameters
    chunks = [chunk.text for chunk in message.input_chunks.chunks if chunk.WhichOneof("chunk") == "text"]
    return from_message(
        SequenceStart,
        message,
        request_id=message.id,
        inputs="".join(chunks) if message.HasField("input_chunks") else message.inputs,
        state_saves=_decode_saves(message.state_saves),
        media=tuple([encoder_wire.decode_span(span) for span in message.media]),
        sampling=from_message(
            SamplingParams,
            sampling,
            grammar_type=decode_grammar_type(sampling.grammar_type),
            logit_bias=tuple((entry.token_id, entry.bias) for entry in sampling.logit_bias),
            banned_tokens=tuple(tuple(entry.ids) for entry in sampling.banned_tokens),
            strategy=from_message(DecodingStrategy, sampling.strategy) if sampling.HasField("strategy") else None,
        ),
        stopping=StoppingParams(
            max_new_tokens=stopping.max_new_tokens,
            stop_sequences=tuple(stopping.stop_sequences),
            ignore_eos=stopping.ignore_eos_token,
        ),
    )


def encode_grammar(kind: GrammarType, text: str) -> pb.CompileGrammarRequest:
    """Build the CompileGrammar call."""
    return pb.CompileGrammarRequest(grammar=text, grammar_type=f"GRAMMAR_TYPE_{kind.name}")


def decode_grammar_type(number: int) -> GrammarType:
    """Read the type of a grammar; one that is not known reads as NONE, which no grammar has."""
    return GrammarType(number) if number in set(GrammarType) else GrammarType.NONE


def encode_batch(batch_id: int, sequences: Sequence[SequenceStart], block_size: int) -> pb.Batch:
    """Build the Batch of new sequences; `max_tokens` counts the KV tokens their blocks hold."""
    num_blocks = sum(len(sequence.blocks) for sequence in sequences)
    return pb.Batch(
        id=batch_id,
        requests=[encode_sequence(sequence) for sequence in sequences],
        size=len(sequences),
        max_tokens=num_blocks * block_size,
        max_blocks=num_blocks,
    )


def encode_prefill(
    batch: pb.Batch,
    cached: CachedBatch | None,
    rows: Iterable[RowUpdate],
    step_seq: int | None,
    copies: Iterable[BlockCopy] = (),
) -> pb.PrefillRequest:
    """Build a Prefill call; `cached` rows are stepped in the same forward."""
    return pb.PrefillRequest(
        batch=batch,
        cached_batch=None if cached is None else encode_cached(cached),
        rows=map(_encode_row, rows),
        copies=map(_encode_copy, copies),
        takes_columns=True,
        step_seq=step_seq,
    )


def encode_decode(
    batches: Iterable[CachedBatch], rows: Iterable[RowUpdate], step_seq: int | None, copies: Iterable[BlockCopy] = ()
) -> pb.DecodeRequest:
    """Build a Decode call of one or more cached batches, concatenated in this order."""
    return pb.DecodeRequest(
        batches=map(encode_cached, batches),
        rows=map(_encode_row, rows),
        copies=map(_encode_copy, copies),
        takes_columns=True,
        step_seq=step_seq,
    )


def _encode_copy(copy: BlockCopy) -> pb.BlockCopy:
    return pb.BlockCopy(
        block=copy.block,
        slot=copy.slot,
        is_load=copy.is_load,
        to_block=copy.to_block,
        key=copy.key,
        age_seconds=copy.age_seconds,
    )


def decode_copies(messages: Iterable[pb.BlockCopy]) -> tuple[BlockCopy, ...]:
    """Read the copies of a call, in order."""
    return tuple(
        BlockCopy(m.block, m.slot, m.is_load, m.to_block if m.HasField("to_block") else None, m.key, m.age_seconds)
        for m in messages
    )


def encode_cached(batch: CachedBatch) -> pb.CachedBatch:
    """Build the CachedBatch message."""
    return pb.CachedBatch(
        id=batch.id,
        request_ids=batch.request_ids,
        size=len(batch.request_ids),
        max_tokens=batch.max_tokens,
        current_tokens=batch.current_tokens,
    )


def decode_cached(message: pb.CachedBatch) -> CachedBatch:
    """Read a CachedBatch message."""
    return CachedBatch(message.id, tuple(message.request_ids), message.max_tokens, message.current_tokens)


def _encode_row(row: RowUpdate) -> pb.RowUpdate:
    return pb.RowUpdate(
        request_id=row.request_id,
        blocks=row.blocks,
        chunk_len=row.chunk_len,
        state_saves=map(_encode_save, row.state_saves),
        speculate=row.speculate,
    )


def decode_rows(messages: Iterable[pb.RowUpdate]) -> tuple[RowUpdate, ...]:
    """Read the row updates of a step call."""
    return tuple(
        RowUpdate(
            m.request_id,
            tuple(m.blocks),
            m.chunk_len if m.HasField("chunk_len") else None,
            _decode_saves(m.state_saves),
            m.speculate if m.HasField("speculate") else None,
        )
        for m in messages
    )


def _encode_save(save: StateSave) -> pb.StateSave:
    return pb.StateSave(position=save.position, slot=save.slot)


def _decode_saves(messages: Iterable[pb.StateSave]) -> tuple[StateSave, ...]:
    return tuple(StateSave(message.position, message.slot) for message in messages)


# Results, shard -> router -------------------------------------------------------------------------------------------


def encode_result(result: StepResult, response: StepResponse, *, in_columns: bool = False) -> None:
    """Fill a Prefill or Decode response; `in_columns` where the call takes generations of one token as columns.

    A step with memories has no columns, so that memories are looked for only beside other generations.
    """
    generations = result.generations
    if in_columns and not result.memories:
        _encode_columns([generation for generation in generations if generation.is_plain], response.columns)
        generations = tuple(generation for generation in generations if not generation.is_plain)
    response.generations.extend(map(encode_generation, generations))
    if result.batch is not None:
        response.batch.CopyFrom(encode_cached(result.batch))
    response.forward_ns = result.forward_ns
    response.decode_ns = result.decode_ns
    response.total_ns = result.total_ns
    if result.concat_ns is not None:
        response.concat_ns = result.concat_ns
    response.num_forwards = result.num_forwards
    response.num_forward_rows = result.num_forward_rows
    response.num_forward_tokens = result.num_forward_tokens
    if result.num_draft_tokens:
        response.num_draft_tokens = result.num_draft_tokens
        response.num_accepted_tokens = result.num_accepted_tokens
    if result.lost_slots:
        response.lost_slots.extend(result.lost_slots)
    if result.memories:
        response.memories.extend(pb.StrategyMemory(request_id=i, mirostat_mu=mu) for i, mu in result.memories)


def decode_result(response: StepResponse, vocab_size: int = 0) -> StepResult:
    """Read a Prefill or Decode response; of `vocab_size` 0 tokens are not held against it.

    Raises:
        ValueError: a token is not in the vocabulary, a generation has none, or what is said of tokens is more or less
            than they are.
    """
    plain = tuple(_decode_columns(response.columns, vocab_size))
    others = response.generations
    return StepResult(
        generations=(*(decode_generation(message, vocab_size) for message in others), *plain),
        batch=decode_cached(response.batch) if response.HasField("batch") else None,
        forward_ns=response.forward_ns,
        decode_ns=response.decode_ns,
        total_ns=response.total_ns,
        concat_ns=response.concat_ns if response.HasField("concat_ns") else None,
        num_forwards=response.num_forwards,
        num_forward_rows=response.num_forward_rows,
        num_forward_tokens=response.num_forward_tokens,
        memories=_decode_memories(response) if others else (),
        num_draft_tokens=response.num_draft_tokens,
        num_accepted_tokens=response.num_accepted_tokens,
        lost_slots=tuple(response.lost_slots) if response.lost_slots else (),
    )


def _decode_memories(response: StepResponse) -> tuple[tuple[int, float], ...]:
    return tuple((memory.request_id, memory.mirostat_mu) for memory in response.memories)


def decode_results(parse: Callable[[bytes], StepResponse], vocab_size: int, payload: bytes) -> tuple[StepResult, ...]:
    """Read the bytes of one rank's Prefill or Decode response; raises as `decode_result`."""
    return (decode_result(parse(payload), vocab_size),)


def _encode_columns(generations: Sequence[Generation], columns: pb.Columns) -> None:
    tokens = [generation.tokens for generation in generations]
    columns.request_ids.extend([generation.request_id for generation in generations])
    columns.ids.extend([one.ids[0] for one in tokens])
    columns.logprobs.extend([one.logprobs[0] for one in tokens])
    columns.texts.extend([one.texts[0] for one in tokens])
    columns.is_special.extend([one.is_special[0] for one in tokens])


def _decode_columns(columns: pb.Columns, vocab_size: int) -> Iterable[Generation]:
    request_ids, ids, logprobs = columns.request_ids[:], columns.ids[:], columns.logprobs[:]
    _check_ids(ids, vocab_size)
    for request_id, token_id, logprob, text, is_special in zip(
        request_ids, ids, logprobs, columns.texts[:], columns.is_special[:], strict=True
    ):
        yield Generation(request_id, Tokens((token_id,), (logprob,), (text,), (is_special,)))


def _encode_tokens(tokens: Tokens) -> pb.Tokens:
    return pb.Tokens(ids=tokens.ids, logprobs=tokens.logprobs, texts=tokens.texts, is_special=tokens.is_special)


def _decode_tokens(message: pb.Tokens) -> Tokens:
    # A slice is a list, made at once; to iterate over the field takes twice as long.
    ids, logprobs, texts, is_special = message.ids[:], message.logprobs[:], message.texts[:], message.is_special[:]
    if not len(ids) == len(logprobs) == len(texts) or (is_special and len(is_special) != len(ids)):
        raise ValueError(f"{len(ids)} tokens have {len(logprobs)} log-probabilities and {len(texts)} texts")
    return Tokens(tuple(ids), tuple(logprobs), tuple(texts), tuple(is_special))


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    if vocab_size and ids and max(ids) >= vocab_size:
        raise ValueError(f"token {max(ids)} is not in the vocabulary of {vocab_size}")


def encode_generation(generation: Generation) -> pb.Generation:
    """Build the Generation of one sequence in one step."""
    prefill_tokens, finished, top = generation.prefill_tokens, generation.finished, generation.prompt_top
    return pb.Generation(
        request_id=generation.request_id,
        prompt_top=None if top is None else to_message(pb.PromptTop, top, texts=dict(top.texts)),
        prefill_tokens=None if prefill_tokens is None else _encode_tokens(prefill_tokens),
        tokens=_encode_tokens(generation.tokens),
        generated_text=None if finished is None else _encode_finished(finished),
        top_tokens=map(_encode_tokens, generation.top_tokens),
        num_accepted=generation.num_accepted,
    )


def _encode_finished(finished: GeneratedText) -> pb.GeneratedText:
    return pb.GeneratedText(
        text=finished.text,
        generated_tokens=finished.num_tokens,
        finish_reason=f"FINISH_REASON_{finished.finish_reason.name}",
        seed=finished.seed,
        stop_index=finished.stop_index,
        stop_start=finished.stop_start,
    )


def decode_generation(message: pb.Generation, vocab_size: int) -> Generation:
    """Read one Generation; of `vocab_size` 0 tokens are not held against it.

    Raises:
        ValueError: see `decode_result`.
    """
    tokens = _decode_tokens(message.tokens)
    if not tokens.ids:
        raise ValueError(f"request {message.request_id} got no token")
    if message.num_accepted >= len(tokens.ids):
        raise ValueError(
            f"of {len(tokens.ids)} tokens of request {message.request_id}, {message.num_accepted} are drafts"
        )
    _check_ids(tokens.ids, vocab_size)
    finished = None
    if message.HasField("generated_text"):
        text = message.generated_text
        reason = FinishReason(text.finish_reason)
        finished = from_message(GeneratedText, text, num_tokens=text.generated_tokens, finish_reason=reason)
    return Generation(
        request_id=message.request_id,
        tokens=tokens,
        top_tokens=tuple(map(_decode_tokens, message.top_tokens[:])),
        prefill_tokens=_decode_tokens(message.prefill_tokens) if message.HasField("prefill_tokens") else None,
        prompt_top=_decode_top(message) if message.HasField("prompt_top") else None,
        finished=finished,
        num_accepted=message.num_accepted,
    )


def _decode_top(message: pb.Generation) -> PromptTop:
    found = message.prompt_top
    top = PromptTop(found.width, tuple(found.ids), tuple(found.logprobs), tuple(found.ranks), dict(found.texts))
    places, values = max(0, len(message.prefill_tokens.ids) - 1), len(top.ids)
    if not (len(top.ranks) == places and values == places * top.width == len(top.logprobs)):
        raise ValueError(f"{places} places of a prompt have {len(top.ranks)} ranks and {values} tokens of {top.width}")
    if not top.texts.keys() >= set(top.ids):
        raise ValueError("a likely token of a prompt has no text")
    return top


# Facts and warm-up --------------------------------------------------------------------------------------------------


def encode_info(info: ShardInfo) -> pb.InfoResponse:
    """Build the InfoResponse."""
    encoder = None if info.encoder is None else encoder_wire.encode_facts(info.encoder)
    media = None if info.media is None else encoder_wire.encode_media_facts(info.media)
    names, ends = sorted(info.capabilities), sorted(info.eos_token_ids)
    return to_message(pb.InfoResponse, info, capabilities=names, encoder=encoder, media=media, eos_token_ids=ends)


def decode_info(message: pb.InfoResponse) -> ShardInfo:
    """Read an InfoResponse."""
    encoder = encoder_wire.decode_facts(message.encoder) if message.HasField("encoder") else None
    media = encoder_wire.decode_media_facts(message.media) if message.HasField("media") else None
    names, ends = frozenset(message.capabilities), frozenset(message.eos_token_ids)
    return from_message(ShardInfo, message, capabilities=names, encoder=encoder, media=media, eos_token_ids=ends)


def encode_warmup(batch: pb.Batch, limits: WarmupLimits) -> pb.WarmupRequest:
    """Build the Warmup call."""
    return to_message(pb.WarmupRequest, limits, batch=batch)


def decode_warmup_limits(message: pb.WarmupRequest) -> WarmupLimits:
    """Read the limits of a Warmup call."""
    return from_message(WarmupLimits, message, max_batch_size=message.max_batch_size or None)


def encode_memory(memory: ShardMemory) -> pb.HealthResponse:
    """Build the HealthResponse."""
    return to_message(pb.HealthResponse, memory)


def decode_memory(message: pb.HealthResponse) -> ShardMemory:
    """Read a HealthResponse; a peer that speaks TGI's wire alone says nothing."""
    return ShardMemory(message.resident_bytes, message.peak_bytes)


def encode_warmup_result(result: WarmupResult) -> pb.WarmupResponse:
    """Build the WarmupResponse."""
    return to_message(
        pb.WarmupResponse,
        result,
        without=("pool_tokens",),
        max_supported_total_tokens=result.pool_tokens,
        stored_blocks=[to_message(pb.StoredBlock, each) for each in result.stored_blocks],
    )


def decode_warmup_result(message: pb.WarmupResponse) -> WarmupResult:
    """Read a WarmupResponse."""
    is_known = message.HasField("max_supported_total_tokens")
    pool_tokens = message.max_supported_total_tokens if is_known else None
    stored = tuple(StoredBlock(each.slot, each.key, each.age_seconds) for each in message.stored_blocks)
    return from_message(WarmupResult, message, pool_tokens=pool_tokens, stored_blocks=stored)
