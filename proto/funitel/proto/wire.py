"""`step` nouns <-> protobuf messages, both directions; with `encoder_wire` all that touches `_pb2` messages.

Knows no sockets: `router.shards` and `model_server.server` carry the messages.
"""

from collections.abc import Callable, Iterable, Sequence

from funitel.proto import encoder_wire
from funitel.proto import generate_pb2 as pb
from funitel.proto.step import (
    BlockCopy,
    CachedBatch,
    FinishReason,
    GeneratedText,
    Generation,
    GrammarType,
    RowUpdate,
    SamplingParams,
    SequenceStart,
    ShardInfo,
    ShardMemory,
    StepResult,
    StoppingParams,
    Tokens,
    WarmupLimits,
    WarmupResult,
)

StepResponse = pb.PrefillResponse | pb.DecodeResponse


# Requests, router -> shard ------------------------------------------------------------------------------------------


def encode_sequence(sequence: SequenceStart) -> pb.Request:
    """Build the Request of one sequence that enters a shard."""
    sampling, stopping = sequence.sampling, sequence.stopping
    message = pb.Request(
        id=sequence.request_id,
        inputs=sequence.inputs,
        truncate=sequence.truncate,
        parameters=pb.NextTokenChooserParameters(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            typical_p=sampling.typical_p,
            do_sample=sampling.do_sample,
            seed=sampling.seed,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            watermark=sampling.watermark,
            grammar=sampling.grammar,
            grammar_type=f"GRAMMAR_TYPE_{sampling.grammar_type.name}",
            presence_penalty=sampling.presence_penalty,
            count_penalty=sampling.count_penalty,
            min_p=sampling.min_p,
            logit_bias=[pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias],
            raw_logprobs=sampling.raw_logprobs,
            first_token=sampling.first_token,
        ),
        stopping_parameters=pb.StoppingCriteriaParameters(
            max_new_tokens=stopping.max_new_tokens,
            stop_sequences=stopping.stop_sequences,
            ignore_eos_token=stopping.ignore_eos,
        ),
        prefill_logprobs=sequence.prefill_logprobs,
        top_n_tokens=sequence.top_n_tokens,
        blocks=sequence.blocks,
        slots=sequence.slots,
        cache_len=sequence.cache_len,
        add_special_tokens=sequence.add_special_tokens,
        input_ids=sequence.input_ids,
        output_ids=sequence.output_ids,
        name=sequence.name,
    )
    if sequence.adapter_id is not None:
        message.adapter_id = sequence.adapter_id
    if sequence.chunk_len is not None:
        message.chunk_len = sequence.chunk_len
    if sequence.inputs:
        message.input_chunks.chunks.add(text=sequence.inputs)
    return message


def decode_sequence(message: pb.Request) -> SequenceStart:
    """Read one Request. Image chunks are kept out of `inputs`; callers that serve no images see text only."""
    sampling, stopping = message.parameters, message.stopping_parameters
    chunks = [chunk.text for chunk in message.input_chunks.chunks if chunk.WhichOneof("chunk") == "text"]
    return SequenceStart(
        request_id=message.id,
        inputs="".join(chunks) if message.HasField("input_chunks") else message.inputs,
        truncate=message.truncate,
        sampling=SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            typical_p=sampling.typical_p,
            do_sample=sampling.do_sample,
            seed=sampling.seed,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            watermark=sampling.watermark,
            grammar=sampling.grammar,
            grammar_type=decode_grammar_type(sampling.grammar_type),
            presence_penalty=sampling.presence_penalty,
            count_penalty=sampling.count_penalty,
            min_p=sampling.min_p,
            logit_bias=tuple((entry.token_id, entry.bias) for entry in sampling.logit_bias),
            raw_logprobs=sampling.raw_logprobs,
            first_token=sampling.first_token if sampling.HasField("first_token") else None,
        ),
        stopping=StoppingParams(
            max_new_tokens=stopping.max_new_tokens,
            stop_sequences=tuple(stopping.stop_sequences),
            ignore_eos=stopping.ignore_eos_token,
        ),
        prefill_logprobs=message.prefill_logprobs,
        top_n_tokens=message.top_n_tokens,
        blocks=tuple(message.blocks),
        slots=tuple(message.slots),
        cache_len=message.cache_len,
        add_special_tokens=message.add_special_tokens,
        input_ids=tuple(message.input_ids),
        output_ids=tuple(message.output_ids),
        adapter_id=message.adapter_id if message.HasField("adapter_id") else None,
        chunk_len=message.chunk_len if message.HasField("chunk_len") else None,
        name=message.name,
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
    request = pb.PrefillRequest(
        batch=batch, rows=map(_encode_row, rows), copies=map(_encode_copy, copies), takes_columns=True
    )
    if cached is not None:
        request.cached_batch.CopyFrom(encode_cached(cached))
    if step_seq is not None:
        request.step_seq = step_seq
    return request


def encode_decode(
    batches: Iterable[CachedBatch], rows: Iterable[RowUpdate], step_seq: int | None, copies: Iterable[BlockCopy] = ()
) -> pb.DecodeRequest:
    """Build a Decode call of one or more cached batches, concatenated in this order."""
    request = pb.DecodeRequest(
        batches=map(encode_cached, batches),
        rows=map(_encode_row, rows),
        copies=map(_encode_copy, copies),
        takes_columns=True,
    )
    if step_seq is not None:
        request.step_seq = step_seq
    return request


def _encode_copy(copy: BlockCopy) -> pb.BlockCopy:
    return pb.BlockCopy(block=copy.block, slot=copy.slot, is_load=copy.is_load)


def decode_copies(messages: Iterable[pb.BlockCopy]) -> tuple[BlockCopy, ...]:
    """Read the copies of a call, in order."""
    return tuple(BlockCopy(message.block, message.slot, message.is_load) for message in messages)


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
    message = pb.RowUpdate(request_id=row.request_id, blocks=row.blocks)
    if row.chunk_len is not None:
        message.chunk_len = row.chunk_len
    return message


def decode_rows(messages: Iterable[pb.RowUpdate]) -> tuple[RowUpdate, ...]:
    """Read the row updates of a step call."""
    return tuple(
        RowUpdate(m.request_id, tuple(m.blocks), m.chunk_len if m.HasField("chunk_len") else None) for m in messages
    )


# Results, shard -> router -------------------------------------------------------------------------------------------


def encode_result(result: StepResult, response: StepResponse, *, in_columns: bool = False) -> None:
    """Fill a Prefill or Decode response; `in_columns` where the call takes generations of one token as columns."""
    generations = result.generations
    if in_columns:
        _encode_columns([generation for generation in generations if generation.is_plain], response.columns)
        generations = tuple(generation for generation in generations if not generation.is_plain)
    response.generations.extend(map(_encode_generation, generations))
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


def decode_result(response: StepResponse, vocab_size: int = 0) -> StepResult:
    """Read a Prefill or Decode response; of `vocab_size` 0 tokens are not held against it.

    Raises:
        ValueError: a token is not in the vocabulary, a generation has none, or what is said of tokens is more or less
            than they are.
    """
    plain = tuple(_decode_columns(response.columns, vocab_size))
    return StepResult(
        generations=(*(_decode_generation(message, vocab_size) for message in response.generations), *plain),
        batch=decode_cached(response.batch) if response.HasField("batch") else None,
        forward_ns=response.forward_ns,
        decode_ns=response.decode_ns,
        total_ns=response.total_ns,
        concat_ns=response.concat_ns if response.HasField("concat_ns") else None,
        num_forwards=response.num_forwards,
        num_forward_rows=response.num_forward_rows,
        num_forward_tokens=response.num_forward_tokens,
    )


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


def _encode_generation(generation: Generation) -> pb.Generation:
    message = pb.Generation(
        request_id=generation.request_id,
        tokens=_encode_tokens(generation.tokens),
        top_tokens=map(_encode_tokens, generation.top_tokens),
    )
    if generation.prefill_tokens is not None:
        message.prefill_tokens.CopyFrom(_encode_tokens(generation.prefill_tokens))
    if generation.finished is not None:
        finished = generation.finished
        ended = pb.GeneratedText(
            text=finished.text,
            generated_tokens=finished.num_tokens,
            finish_reason=f"FINISH_REASON_{finished.finish_reason.name}",
        )
        message.generated_text.CopyFrom(ended)
        if finished.seed is not None:
            message.generated_text.seed = finished.seed
        if finished.stop_index is not None and finished.stop_start is not None:
            message.generated_text.stop_index = finished.stop_index
            message.generated_text.stop_start = finished.stop_start
    return message


def _decode_generation(message: pb.Generation, vocab_size: int) -> Generation:
    tokens = _decode_tokens(message.tokens)
    if not tokens.ids:
        raise ValueError(f"request {message.request_id} got no token")
    _check_ids(tokens.ids, vocab_size)
    finished = None
    if message.HasField("generated_text"):
        text = message.generated_text
        finished = GeneratedText(
            text=text.text,
            num_tokens=text.generated_tokens,
            finish_reason=FinishReason(text.finish_reason),
            seed=text.seed if text.HasField("seed") else None,
            stop_index=text.stop_index if text.HasField("stop_index") else None,
            stop_start=text.stop_start if text.HasField("stop_start") else None,
        )
    return Generation(
        request_id=message.request_id,
        tokens=tokens,
        top_tokens=tuple(map(_decode_tokens, message.top_tokens[:])),
        prefill_tokens=_decode_tokens(message.prefill_tokens) if message.HasField("prefill_tokens") else None,
        finished=finished,
    )


# Facts and warm-up --------------------------------------------------------------------------------------------------


def encode_info(info: ShardInfo) -> pb.InfoResponse:
    """Build the InfoResponse."""
    message = pb.InfoResponse(
        requires_padding=info.requires_padding,
        dtype=info.dtype,
        device_type=info.device_type,
        speculate=info.speculate,
        support_chunking=info.support_chunking,
        use_prefix_caching=info.use_prefix_caching,
        attention_impl=info.attention_impl,
        block_size=info.block_size,
        capabilities=sorted(info.capabilities),
        rank=info.rank,
        world_size=info.world_size,
        weight_bytes=info.weight_bytes,
        sharded_weight_bytes=info.sharded_weight_bytes,
        total_sharded_weight_bytes=info.total_sharded_weight_bytes,
        step_socket=info.step_socket,
        num_opening_tokens=info.num_opening_tokens,
        vocab_size=info.vocab_size,
    )
    if info.window_size is not None:
        message.window_size = info.window_size
    if info.encoder is not None:
        message.encoder.CopyFrom(encoder_wire.encode_facts(info.encoder))
    return message


def decode_info(message: pb.InfoResponse) -> ShardInfo:
    """Read an InfoResponse."""
    return ShardInfo(
        requires_padding=message.requires_padding,
        dtype=message.dtype,
        device_type=message.device_type,
        window_size=message.window_size if message.HasField("window_size") else None,
        speculate=message.speculate,
        support_chunking=message.support_chunking,
        use_prefix_caching=message.use_prefix_caching,
        attention_impl=message.attention_impl,
        block_size=message.block_size,
        capabilities=frozenset(message.capabilities),
        rank=message.rank,
        world_size=message.world_size,
        weight_bytes=message.weight_bytes,
        sharded_weight_bytes=message.sharded_weight_bytes,
        total_sharded_weight_bytes=message.total_sharded_weight_bytes,
        encoder=encoder_wire.decode_facts(message.encoder) if message.HasField("encoder") else None,
        step_socket=message.step_socket,
        num_opening_tokens=message.num_opening_tokens,
        vocab_size=message.vocab_size,
    )


def encode_warmup(batch: pb.Batch, limits: WarmupLimits) -> pb.WarmupRequest:
    """Build the Warmup call."""
    message = pb.WarmupRequest(
        batch=batch, max_prefill_tokens=limits.max_prefill_tokens, max_batch_size=limits.max_batch_size or 0
    )
    if limits.max_input_tokens is not None:
        message.max_input_tokens = limits.max_input_tokens
    if limits.max_total_tokens is not None:
        message.max_total_tokens = limits.max_total_tokens
    if limits.max_batch_total_tokens is not None:
        message.max_batch_total_tokens = limits.max_batch_total_tokens
    return message


def decode_warmup_limits(message: pb.WarmupRequest) -> WarmupLimits:
    """Read the limits of a Warmup call."""
    return WarmupLimits(
        max_input_tokens=message.max_input_tokens if message.HasField("max_input_tokens") else None,
        max_prefill_tokens=message.max_prefill_tokens,
        max_total_tokens=message.max_total_tokens if message.HasField("max_total_tokens") else None,
        max_batch_total_tokens=(message.max_batch_total_tokens if message.HasField("max_batch_total_tokens") else None),
        max_batch_size=message.max_batch_size or None,
    )


def encode_memory(memory: ShardMemory) -> pb.HealthResponse:
    """Build the HealthResponse."""
    return pb.HealthResponse(resident_bytes=memory.resident_bytes, peak_bytes=memory.peak_bytes)


def decode_memory(message: pb.HealthResponse) -> ShardMemory:
    """Read a HealthResponse; a peer that speaks TGI's wire alone says nothing."""
    return ShardMemory(message.resident_bytes, message.peak_bytes)


def encode_warmup_result(result: WarmupResult) -> pb.WarmupResponse:
    """Build the WarmupResponse."""
    message = pb.WarmupResponse(
        max_input_tokens=result.max_input_tokens,
        max_total_tokens=result.max_total_tokens,
        kv_bytes=result.kv_bytes,
        total_kv_bytes=result.total_kv_bytes,
        host_blocks=result.host_blocks,
    )
    if result.pool_tokens is not None:
        message.max_supported_total_tokens = result.pool_tokens
    return message


def decode_warmup_result(message: pb.WarmupResponse) -> WarmupResult:
    """Read a WarmupResponse."""
    return WarmupResult(
        pool_tokens=(message.max_supported_total_tokens if message.HasField("max_supported_total_tokens") else None),
        max_input_tokens=message.max_input_tokens,
        max_total_tokens=message.max_total_tokens,
        kv_bytes=message.kv_bytes,
        total_kv_bytes=message.total_kv_bytes,
        host_blocks=message.host_blocks,
    )
