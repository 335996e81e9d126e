"""Every noun survives the wire, as bytes; what TGI's peers leave out reads as they mean it."""

import dataclasses
import math
import struct
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funitel.proto import encoder_wire, wire
from funitel.proto import generate_pb2 as pb
from funitel.proto.step import (
    BlockCopy,
    CachedBatch,
    Capability,
    EncoderFacts,
    EncoderInput,
    EncoderResult,
    EncoderTask,
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

T = TypeVar("T")

# No deadline: what is slow here is the machine, making examples.
quickly = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
# Any float of Python's that float32 can hold, rounded: what does not fit is refused by the API, before the wire.
FLOAT = st.floats(-3.4e38, 3.4e38)
TEXT = st.text(max_size=12)


def some(values: st.SearchStrategy[T]) -> st.SearchStrategy[tuple[T, ...]]:
    """A short tuple of values."""
    return st.lists(values, max_size=2).map(tuple)


SHORT = st.floats(width=32, allow_nan=False, allow_infinity=False)  # of the fields in double precision
STRATEGIES = st.builds(
    DecodingStrategy,
    top_n_sigma=SHORT,
    max_k=U32,
    tfs_z=SHORT,
    xtc_probability=SHORT,
    mirostat=U32,
    mirostat_tau=SHORT,
    dry_multiplier=SHORT,
    dry_penalty_last_n=st.integers(-1, 2**31 - 1),
    dry_sequence_breakers=some(TEXT),
    fsd_alpha=SHORT,
    fsd_random_tokens=U32,
    no_repeat_ngram_size=U32,
)
SAMPLING = st.builds(
    SamplingParams,
    temperature=FLOAT,
    top_k=U32,
    top_p=FLOAT,
    typical_p=FLOAT,
    do_sample=st.booleans(),
    seed=U64,
    repetition_penalty=FLOAT,
    frequency_penalty=FLOAT,
    presence_penalty=FLOAT,
    count_penalty=FLOAT,
    watermark=st.booleans(),
    grammar=TEXT,
    grammar_type=st.sampled_from(GrammarType),
    min_p=FLOAT,
    logit_bias=some(st.tuples(U32, FLOAT)),
    raw_logprobs=st.booleans(),
    first_token=st.none() | U32,
    strategy=st.none() | STRATEGIES,
)
STOPPING = st.builds(StoppingParams, max_new_tokens=U32, stop_sequences=some(TEXT), ignore_eos=st.booleans())
STARTS = st.builds(
    SequenceStart,
    request_id=U64,
    sampling=SAMPLING,
    stopping=STOPPING,
    input_ids=some(U32),
    output_ids=some(U32),
    blocks=some(U32),
    slots=some(U32),
    cache_len=U32,
    chunk_len=st.none() | U32,
    prefill_logprobs=st.booleans(),
    prompt_logprobs=st.none() | U32,
    top_n_tokens=U32,
    inputs=TEXT,
    truncate=U32,
    add_special_tokens=st.booleans(),
    adapter_id=st.none() | TEXT,
    name=TEXT,
    state_slot=U32,
    state_from=U32,
    state_saves=some(st.builds(StateSave, U32, U32)),
    mirostat_mu=st.none() | SHORT,
    speculate=U32,
)
ROWS = some(
    st.builds(
        RowUpdate,
        request_id=U64,
        blocks=some(U32),
        chunk_len=st.none() | U32,
        state_saves=some(st.builds(StateSave, U32, U32)),
        speculate=st.none() | U32,
    )
)
CACHED = st.builds(CachedBatch, id=U64, request_ids=some(U64), max_tokens=U32, current_tokens=U32)
ONE = st.builds(Tokens, st.tuples(U32), st.tuples(FLOAT), st.tuples(TEXT), st.tuples(st.booleans()) | st.just(()))
TWO = st.builds(Tokens, *(st.tuples(each, each) for each in (U32, FLOAT, TEXT, st.booleans())))
TOKENS = ONE | TWO
REASONS = st.sampled_from([reason for reason in FinishReason if reason is not FinishReason.ABORT])  # no shard says it
FINISHED = st.builds(GeneratedText, TEXT, U32, REASONS, seed=st.none() | U64) | st.builds(
    GeneratedText, TEXT, U32, REASONS, st.none() | U64, stop_index=U32, stop_start=U32
)
TOP_OF_TWO = st.builds(PromptTop, st.just(0), st.just(()), st.just(()), st.tuples(U32), st.just({})) | st.builds(
    PromptTop,
    st.just(2),
    st.just((5, 3)),
    st.tuples(FLOAT, FLOAT),
    st.tuples(U32),
    st.builds(lambda a, b: {5: a, 3: b}, TEXT, TEXT),
)
PLAIN_PARTS = {"request_id": U64, "tokens": TOKENS, "top_tokens": some(TOKENS), "finished": st.none() | FINISHED}
GENERATIONS = st.builds(Generation, prefill_tokens=st.none() | TOKENS, **PLAIN_PARTS) | st.builds(
    Generation, prefill_tokens=TWO, prompt_top=TOP_OF_TWO, **PLAIN_PARTS
)
RESULTS = st.builds(
    StepResult,
    generations=some(GENERATIONS),
    batch=st.none() | CACHED,
    forward_ns=U64,
    decode_ns=U64,
    total_ns=U64,
    concat_ns=st.none() | U64,
    num_forwards=U32,
    num_forward_rows=U32,
    num_forward_tokens=U32,
    memories=some(st.tuples(U64, SHORT)),
    lost_slots=some(U32),
).map(lambda result: result if result.generations else dataclasses.replace(result, memories=()))
FACTS = st.builds(
    EncoderFacts,
    tasks=st.frozensets(st.sampled_from(EncoderTask)),
    width=U32,
    max_tokens=U32,
    usual_tokens=U32,
    labels=some(TEXT),
    is_multi_label=st.booleans(),
    pooling=TEXT,
    token_width=U32,
)
ENCODER_INPUTS = st.builds(
    EncoderInput,
    input_ids=some(U32),
    type_ids=some(U32),
    dimensions=U32,
    is_normalized=st.booleans(),
    mask_place=U32,
    top_n=U32,
)
INFOS = st.builds(
    ShardInfo,
    encoder=st.none() | FACTS,
    requires_padding=st.booleans(),
    dtype=TEXT,
    device_type=TEXT,
    window_size=st.none() | U32,
    speculate=U32,
    support_chunking=st.booleans(),
    use_prefix_caching=st.booleans(),
    attention_impl=TEXT,
    block_size=U32,
    capabilities=st.frozensets(st.sampled_from(Capability) | TEXT, max_size=4),
    rank=U32,
    world_size=U32,
    weight_bytes=U64,
    sharded_weight_bytes=U64,
    total_sharded_weight_bytes=U64,
    num_opening_tokens=U32,
    eos_token_ids=st.frozensets(U32, max_size=3),
)
COPIES = st.builds(BlockCopy, U32, U32, st.booleans(), st.none() | U32, st.binary(max_size=32), SHORT)
LIMITS = st.builds(
    WarmupLimits,
    max_input_tokens=st.none() | U32,
    max_prefill_tokens=U32,
    max_total_tokens=st.none() | U32,
    max_batch_total_tokens=st.none() | U32,
    max_batch_size=st.none() | st.integers(1, 2**32 - 1),
)
WARMUPS = st.builds(
    WarmupResult,
    pool_tokens=st.none() | U32,
    max_input_tokens=U32,
    max_total_tokens=U32,
    kv_bytes=U64,
    total_kv_bytes=U64,
    host_blocks=U32,
    state_slots=U32,
    is_disk=st.booleans(),
    stored_blocks=some(st.builds(StoredBlock, U32, st.binary(max_size=32), SHORT)),
)


def as_float32(value: Any) -> Any:
    """The same noun with every float as the wire can carry it."""
    if isinstance(value, DecodingStrategy):  # in double precision
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {field.name: as_float32(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changes)
    if isinstance(value, tuple):
        return tuple(map(as_float32, value))
    return struct.unpack("f", struct.pack("f", value))[0] if isinstance(value, float) else value


def over_the_wire(message: Any) -> Any:
    """The message as the other side reads it."""
    return type(message).FromString(message.SerializeToString())


# Round trips


@quickly
@given(STARTS)
def test_sequence_start(start: SequenceStart) -> None:
    assert wire.decode_sequence(over_the_wire(wire.encode_sequence(start))) == as_float32(start)


@quickly
@given(U64, st.lists(STARTS, max_size=2), st.integers(1, 1000))
def test_batch(batch_id: int, starts: list[SequenceStart], block_size: int) -> None:
    batch = over_the_wire(wire.encode_batch(batch_id, starts, block_size))
    assert [wire.decode_sequence(message) for message in batch.requests] == [as_float32(start) for start in starts]
    assert (batch.id, batch.size) == (batch_id, len(starts))
    assert batch.max_blocks == sum(len(start.blocks) for start in starts)
    assert batch.max_tokens == batch.max_blocks * block_size


@quickly
@given(CACHED)
def test_cached_batch(cached: CachedBatch) -> None:
    message = over_the_wire(wire.encode_cached(cached))
    assert wire.decode_cached(message) == cached
    assert message.size == len(cached.request_ids)


@quickly
@given(st.lists(STARTS, max_size=1), st.none() | CACHED, ROWS, st.none() | U64, some(COPIES))
def test_prefill_call(
    starts: list[SequenceStart],
    cached: CachedBatch | None,
    rows: tuple[RowUpdate, ...],
    step_seq: int | None,
    copies: tuple[BlockCopy, ...],
) -> None:
    batch = wire.encode_batch(7, starts, 16)
    call = over_the_wire(wire.encode_prefill(batch, cached, rows, step_seq, copies))
    assert wire.decode_copies(call.copies) == copies
    assert call.batch == batch
    assert (wire.decode_cached(call.cached_batch) if call.HasField("cached_batch") else None) == cached
    assert wire.decode_rows(call.rows) == rows
    assert (call.step_seq if call.HasField("step_seq") else None) == step_seq


@quickly
@given(some(CACHED), ROWS, st.none() | U64, some(COPIES))
def test_decode_call(
    batches: tuple[CachedBatch, ...],
    rows: tuple[RowUpdate, ...],
    step_seq: int | None,
    copies: tuple[BlockCopy, ...],
) -> None:
    call = over_the_wire(wire.encode_decode(batches, rows, step_seq, copies))
    assert wire.decode_copies(call.copies) == copies
    assert tuple(map(wire.decode_cached, call.batches)) == batches
    assert wire.decode_rows(call.rows) == rows
    assert (call.step_seq if call.HasField("step_seq") else None) == step_seq


@pytest.mark.parametrize("response", [pb.PrefillResponse, pb.DecodeResponse])
@quickly
@given(result=RESULTS)
def test_step_result(response: type[wire.StepResponse], result: StepResult) -> None:
    message = response()
    wire.encode_result(result, message)
    assert wire.decode_result(over_the_wire(message)) == as_float32(result)


@pytest.mark.parametrize("response", [pb.PrefillResponse, pb.DecodeResponse])
@quickly
@given(result=RESULTS)
def test_step_result_in_columns(response: type[wire.StepResponse], result: StepResult) -> None:
    """Generations of one token come last, unless there are memories."""
    message = response()
    wire.encode_result(result, message, in_columns=True)
    if result.memories:
        assert wire.decode_result(over_the_wire(message)) == as_float32(result)
        return
    ordered = tuple(sorted(result.generations, key=lambda generation: generation.is_plain))
    assert wire.decode_result(over_the_wire(message)) == as_float32(dataclasses.replace(result, generations=ordered))
    assert len(message.columns.ids) == sum(generation.is_plain for generation in result.generations)


def test_only_generations_of_one_token_are_plain() -> None:
    token, two = Tokens((1,), (-0.5,), ("a",), (False,)), Tokens((1, 2), (-0.5, 0.0), ("a", "b"), (False, False))
    ending = GeneratedText("a", 1, FinishReason.LENGTH)
    assert Generation(7, token).is_plain
    others = (
        Generation(7, two),
        Generation(7, token, top_tokens=(two,)),
        Generation(7, token, prefill_tokens=two),
        Generation(7, token, finished=ending),
        Generation(7, Tokens((1,), (-0.5,), ("a",))),
    )
    assert not any(generation.is_plain for generation in others)


@quickly
@given(INFOS)
def test_shard_info(info: ShardInfo) -> None:
    assert wire.decode_info(over_the_wire(wire.encode_info(info))) == info


@quickly
@given(st.sampled_from(EncoderTask), st.lists(ENCODER_INPUTS, max_size=3))
def test_encoder_call(task: EncoderTask, inputs: list[EncoderInput]) -> None:
    assert encoder_wire.decode_inputs(over_the_wire(encoder_wire.encode_inputs(task, inputs))) == (task, inputs)


@quickly
@given(st.builds(EncoderResult, U32, st.binary(max_size=12), some(U32), some(U32), U64))
def test_encoder_result(result: EncoderResult) -> None:
    assert encoder_wire.decode_rows(over_the_wire(encoder_wire.encode_rows(result))) == result


def test_a_task_of_a_later_wire_is_left_out() -> None:
    assert encoder_wire.decode_facts(pb.EncoderFacts(tasks=[0, 77])).tasks == {EncoderTask.EMBED}  # type: ignore[list-item]


@quickly
@given(LIMITS)
def test_warmup_limits(limits: WarmupLimits) -> None:
    message = over_the_wire(wire.encode_warmup(pb.Batch(id=3), limits))
    assert wire.decode_warmup_limits(message) == limits
    assert message.batch.id == 3


@quickly
@given(WARMUPS)
def test_warmup_result(result: WarmupResult) -> None:
    assert wire.decode_warmup_result(over_the_wire(wire.encode_warmup_result(result))) == result


@quickly
@given(st.builds(ShardMemory, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)))
def test_memory(memory: ShardMemory) -> None:
    assert wire.decode_memory(over_the_wire(wire.encode_memory(memory))) == memory


# What equality cannot say


def test_sleep_says_its_level_and_how_much_is_free() -> None:
    assert over_the_wire(pb.SleepRequest(level=1)).level == 1
    assert pb.SleepRequest().level == 0  # which no shard takes
    assert over_the_wire(pb.SleepResponse(freed_bytes=1 << 40)).freed_bytes == 1 << 40
    assert over_the_wire(pb.WakeRequest()) == pb.WakeRequest()


def test_floats_arrive_as_float32() -> None:
    start = SequenceStart(
        request_id=1, sampling=SamplingParams(temperature=0.1), stopping=StoppingParams(max_new_tokens=1)
    )
    arrived = wire.decode_sequence(over_the_wire(wire.encode_sequence(start))).sampling.temperature
    assert arrived != 0.1
    assert arrived == pytest.approx(0.1, rel=1e-7)


def test_the_first_prompt_token_has_no_logprob() -> None:
    prompt = Tokens((1, 2), (math.nan, -1.0), ("a", "b"))
    message = pb.PrefillResponse()
    wire.encode_result(
        StepResult((Generation(1, Tokens((3,), (-1.0,), ("c",)), prefill_tokens=prompt),), None), message
    )
    (generation,) = wire.decode_result(over_the_wire(message)).generations
    assert generation.prefill_tokens is not None
    first, second = generation.prefill_tokens.logprobs
    assert math.isnan(first)
    assert second == -1.0


def test_defaults_are_neutral_and_written_out() -> None:
    """Protobuf's own default of a float is 0: a peer that reads the fields must not see a temperature of 0."""
    parameters = wire.encode_sequence(
        SequenceStart(request_id=0, sampling=SamplingParams(), stopping=StoppingParams(max_new_tokens=1))
    ).parameters
    assert (parameters.temperature, parameters.top_k, parameters.top_p, parameters.typical_p) == (1, 0, 1, 1)
    assert (parameters.repetition_penalty, parameters.frequency_penalty) == (1, 0)
    assert (parameters.presence_penalty, parameters.count_penalty) == (0, 0)
    assert not parameters.do_sample
    assert not parameters.watermark
    assert (parameters.grammar, parameters.grammar_type) == ("", pb.GRAMMAR_TYPE_NONE)
    assert not SamplingParams().is_sampled
    assert not SamplingParams().has_penalties


@pytest.mark.parametrize(
    "change",
    [{"do_sample": True}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.9}, {"typical_p": 0.9}],
)
def test_what_makes_a_request_sampled(change: dict[str, Any]) -> None:
    assert SamplingParams(**change).is_sampled


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty", "count_penalty"])
def test_what_makes_a_request_penalised(name: str) -> None:
    change: dict[str, Any] = {name: 1.5}
    assert SamplingParams(**change).has_penalties


def test_strategies_travel_in_double_precision() -> None:
    """Mirostat's state is exact on another shard, and a strategy is the one that the client named."""
    strategy = DecodingStrategy(mirostat=2, mirostat_tau=0.1, dry_base=1.1)
    start = SequenceStart(
        request_id=0,
        sampling=SamplingParams(strategy=strategy),
        stopping=StoppingParams(max_new_tokens=1),
        mirostat_mu=0.3,
    )
    found = wire.decode_sequence(over_the_wire(wire.encode_sequence(start)))
    assert (found.sampling.strategy, found.mirostat_mu) == (strategy, 0.3)
    message = pb.DecodeResponse()
    plain = Generation(7, Tokens((5,), (-1.0,), ("a",), (False,)))
    wire.encode_result(StepResult((plain,), None, memories=((7, 0.1),)), message, in_columns=True)
    assert wire.decode_result(over_the_wire(message)).memories == ((7, 0.1),)


@pytest.mark.parametrize(
    ("strategy", "is_sampled"),
    [
        ({"tfs_z": 0.9}, True),
        ({"xtc_probability": 0.5}, True),
        ({"top_n_sigma": 1.0}, True),
        ({"max_k": 3}, True),
        ({"mirostat": 1}, True),
        ({"dry_multiplier": 1.0}, False),
        ({"no_repeat_ngram_size": 3}, False),
        ({"fsd_alpha": 0.5}, False),
        ({"fsd_alpha": 0.5, "fsd_random_tokens": 3}, True),
    ],
)
def test_which_strategies_sample(strategy: dict[str, Any], is_sampled: bool) -> None:
    given = DecodingStrategy(**strategy)
    assert SamplingParams(strategy=given).is_sampled is is_sampled
    assert SamplingParams(do_sample=True, strategy=given).is_sampled is not given.is_deterministic
    assert not SamplingParams(strategy=given.greedy).is_sampled
    assert next(iter(strategy)) in given.used


# Plain TGI peers


def test_a_request_of_tgis_router() -> None:
    """Text in chunks and in one string, slots beside blocks, none of our fields."""
    message = pb.Request(
        id=5,
        inputs="Hello ![](data:image/png;base64,AAAA) world",
        truncate=1023,
        parameters=pb.NextTokenChooserParameters(
            temperature=1, top_p=1, typical_p=1, repetition_penalty=1, seed=42, do_sample=True
        ),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=20, stop_sequences=["###"]),
        top_n_tokens=0,
        blocks=[4, 2],
        slots=[64, 65, 66],
        add_special_tokens=True,
    )
    message.input_chunks.chunks.add(text="Hello ")
    message.input_chunks.chunks.add(image=pb.Image(data=b"x", mimetype="image/png"))
    message.input_chunks.chunks.add(text=" world")
    assert wire.decode_sequence(over_the_wire(message)) == SequenceStart(
        request_id=5,
        sampling=SamplingParams(seed=42, do_sample=True),
        stopping=StoppingParams(max_new_tokens=20, stop_sequences=("###",)),
        blocks=(4, 2),
        slots=(64, 65, 66),
        inputs="Hello  world",
        truncate=1023,
    )


def test_a_request_without_chunks_is_its_inputs() -> None:
    assert wire.decode_sequence(pb.Request(inputs="Hello")).inputs == "Hello"


def test_a_step_of_tgis_router_is_not_numbered_and_updates_no_row() -> None:
    call = over_the_wire(pb.DecodeRequest(batches=[pb.CachedBatch(id=1, request_ids=[5], size=1)]))
    assert not call.HasField("step_seq")
    assert wire.decode_rows(call.rows) == ()


def test_a_shard_of_tgis_lists_no_capabilities() -> None:
    message = pb.InfoResponse(dtype="torch.float16", device_type="cuda", block_size=1, attention_impl="flashinfer")
    info = wire.decode_info(over_the_wire(message))
    assert info.capabilities == frozenset()
    assert (info.dtype, info.block_size, info.window_size) == ("torch.float16", 1, None)


def test_an_answer_of_tgis_shard() -> None:
    message = pb.PrefillResponse(
        generations=[
            pb.Generation(
                request_id=5,
                tokens=pb.Tokens(ids=[9], logprobs=[-0.5], texts=["a"], is_special=[False]),
                generated_text=pb.GeneratedText(
                    text="a", generated_tokens=1, finish_reason=pb.FINISH_REASON_STOP_SEQUENCE
                ),
            )
        ],
        forward_ns=3,
        decode_ns=2,
        total_ns=6,
    )
    assert wire.decode_result(over_the_wire(message)) == StepResult(
        generations=(
            Generation(5, Tokens((9,), (-0.5,), ("a",), (False,)), finished=GeneratedText("a", 1, FinishReason(2))),
        ),
        batch=None,
        forward_ns=3,
        decode_ns=2,
        total_ns=6,
    )


def test_a_padded_model_has_no_pool() -> None:
    assert wire.decode_warmup_result(pb.WarmupResponse(max_input_tokens=9)).pool_tokens is None


def test_finish_reasons_in_both_vocabularies() -> None:
    assert [reason.native for reason in FinishReason] == ["abort", "length", "eos_token", "stop_sequence"]
    assert [reason.openai for reason in FinishReason] == ["abort", "length", "stop", "stop"]
    assert {f"FINISH_REASON_{reason.name}" for reason in FinishReason} - {*pb.FinishReason.keys()} == {
        "FINISH_REASON_ABORT"
    }


def test_a_grammar_type_of_a_later_wire_reads_as_none() -> None:
    message = pb.Request(parameters=pb.NextTokenChooserParameters.FromString(b"\x58\x63"))  # field 11, varint 99
    assert message.parameters.grammar_type == 99
    assert wire.decode_sequence(message).sampling.grammar_type is GrammarType.NONE


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        (pb.Tokens(ids=[1, 2], logprobs=[-1.0], texts=["a", "b"]), "2 tokens have 1 log-probabilities and 2 texts"),
        (pb.Tokens(ids=[1], logprobs=[-1.0], texts=[]), "1 tokens have 1 log-probabilities and 0 texts"),
        (pb.Tokens(ids=[1], logprobs=[-1.0], texts=["a"], is_special=[True, True]), "1 tokens have"),
        (pb.Tokens(), "request 4 got no token"),
        (pb.Tokens(ids=[50], logprobs=[-1.0], texts=["a"]), "token 50 is not in the vocabulary of 50"),
    ],
)
def test_what_is_said_of_tokens_that_cannot_be_is_refused(tokens: pb.Tokens, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        wire.decode_result(pb.DecodeResponse(generations=[pb.Generation(request_id=4, tokens=tokens)]), 50)


@pytest.mark.parametrize("count", [0, 2])
def test_columns_of_tokens_that_cannot_be_are_refused(count: int) -> None:
    columns = pb.Columns(request_ids=[1], ids=[50], logprobs=[-1.0], texts=["a"], is_special=[False])
    with pytest.raises(ValueError, match="token 50 is not in the vocabulary of 50"):
        wire.decode_result(pb.DecodeResponse(columns=columns), 50)
    columns.ids[:] = [5] * count
    with pytest.raises(ValueError, match="zip"):
        wire.decode_result(pb.DecodeResponse(columns=columns), 50)
