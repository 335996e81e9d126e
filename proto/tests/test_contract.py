"""The generated descriptor against TGI's v3 wire, written down once more from the contract's own tables.

Source: contract reference 1.1 to 1.3. Whatever is not in the table is an addition of funitel's: a field from number
100 up, or a message of its own.
"""

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

from funitel.proto import generate_pb2 as pb

FIRST_ADDITION = 100

# A message, then its fields as NUMBER NAME TYPE; `in NAME` at the end is a oneof.
TGI_MESSAGES = """
HealthRequest
HealthResponse
InfoRequest
InfoResponse
    1 requires_padding bool
    2 dtype string
    3 device_type string
    4 window_size optional uint32
    5 speculate uint32
    6 support_chunking bool
    7 use_prefix_caching bool
    8 attention_impl string
    9 block_size uint32
ServiceDiscoveryRequest
ServiceDiscoveryResponse
    1 urls repeated string
ClearCacheRequest
    1 id optional uint64
ClearCacheResponse
Image
    1 data bytes
    2 mimetype string
InputChunk
    1 text string in chunk
    2 image Image in chunk
Input
    1 chunks repeated InputChunk
NextTokenChooserParameters
    1 temperature float
    2 top_k uint32
    3 top_p float
    4 typical_p float
    5 do_sample bool
    6 seed uint64
    7 repetition_penalty float
    8 watermark bool
    9 frequency_penalty float
    10 grammar string
    11 grammar_type GrammarType
StoppingCriteriaParameters
    1 max_new_tokens uint32
    2 stop_sequences repeated string
    3 ignore_eos_token bool
Request
    1 id uint64
    2 inputs string
    3 truncate uint32
    4 parameters NextTokenChooserParameters
    5 stopping_parameters StoppingCriteriaParameters
    6 prefill_logprobs bool
    7 top_n_tokens uint32
    8 input_chunks Input
    9 blocks repeated uint32
    10 slots repeated uint32
    11 adapter_id optional string
    12 cache_len uint32
    13 add_special_tokens bool
    14 chunk_len optional uint32
Batch
    1 id uint64
    2 requests repeated Request
    3 size uint32
    4 max_tokens uint32
    5 max_blocks uint32
CachedBatch
    1 id uint64
    2 request_ids repeated uint64
    3 size uint32
    4 max_tokens uint32
    5 current_tokens uint32
GeneratedText
    1 text string
    2 generated_tokens uint32
    3 finish_reason FinishReason
    4 seed optional uint64
Tokens
    1 ids repeated uint32
    2 logprobs repeated float
    3 texts repeated string
    4 is_special repeated bool
Generation
    1 request_id uint64
    2 prefill_tokens Tokens
    3 tokens Tokens
    4 generated_text optional GeneratedText
    5 top_tokens repeated Tokens
FilterBatchRequest
    1 batch_id uint64
    2 request_ids repeated uint64
FilterBatchResponse
    1 batch CachedBatch
PrefillRequest
    1 batch Batch
    2 cached_batch CachedBatch
PrefillResponse
    1 generations repeated Generation
    2 batch optional CachedBatch
    3 forward_ns uint64
    4 decode_ns uint64
    5 total_ns uint64
    6 concat_ns optional uint64
DecodeRequest
    1 batches repeated CachedBatch
DecodeResponse
    1 generations repeated Generation
    2 batch optional CachedBatch
    3 forward_ns uint64
    4 decode_ns uint64
    5 total_ns uint64
    6 concat_ns optional uint64
WarmupRequest
    1 batch Batch
    2 max_input_tokens optional uint32
    3 max_prefill_tokens uint32
    4 max_total_tokens optional uint32
WarmupResponse
    1 max_supported_total_tokens optional uint32
    2 max_input_tokens uint32
    3 max_total_tokens uint32
"""

TGI_ENUMS = {
    "GrammarType": {"GRAMMAR_TYPE_NONE": 0, "GRAMMAR_TYPE_JSON": 1, "GRAMMAR_TYPE_REGEX": 2},
    "FinishReason": {
        "FINISH_REASON_LENGTH": 0,
        "FINISH_REASON_EOS_TOKEN": 1,
        "FINISH_REASON_STOP_SEQUENCE": 2,
    },
}

TGI_METHODS = ("Info", "ServiceDiscovery", "ClearCache", "FilterBatch", "Warmup", "Prefill", "Decode", "Health")

OUR_MESSAGES = {"CompileGrammarRequest", "CompileGrammarResponse", "LogitBias", "RowUpdate", "Columns", "BlockCopy"}
OUR_MESSAGES |= {"DismissRequest", "DismissResponse", "PromptTop", "TokenSequence"}
OUR_MESSAGES |= {"DecodingStrategy", "StrategyMemory", "StateSave", "StoredBlock"}
OUR_MESSAGES |= {f"{call}Adapter{kind}" for call in ("Load", "Unload") for kind in ("Request", "Response")}
OUR_MESSAGES |= {"EncoderFacts", "EncoderInput", "EncodeRequest", "EncodeResponse"}
OUR_MESSAGES |= {f"{call}{kind}" for call in ("Sleep", "Wake") for kind in ("Request", "Response")}
OUR_MESSAGES |= {f"{call}Media{kind}" for call in ("Encode", "Drop") for kind in ("Request", "Response")}
OUR_MESSAGES |= {"MediaFacts", "MediaSpan"}
OUR_MESSAGES |= {
    f"{call}{kind}" for call in ("Outputs", "ReleaseOutputs", "TakeOver") for kind in ("Request", "Response")
}
OUR_MESSAGES |= {"SequenceOutputs", "OutputStep", "NumberedCall", "HeldBatch", "HeldRow"}
OUR_ENUMS = {
    "EncoderTask": {
        "ENCODER_TASK_EMBED": 0,
        "ENCODER_TASK_CLASSIFY": 1,
        "ENCODER_TASK_FILL": 2,
        "ENCODER_TASK_EMBED_ALL": 3,
    },
    "MediaKind": {"MEDIA_KIND_IMAGE": 0, "MEDIA_KIND_AUDIO": 1},
}

Fields = dict[int, str]


def tgi_messages() -> dict[str, Fields]:
    """The table, read: message -> number -> "NAME TYPE"."""
    messages: dict[str, Fields] = {}
    fields: Fields = {}
    for line in TGI_MESSAGES.strip().splitlines():
        if line.startswith(" "):
            number, _, rest = line.strip().partition(" ")
            fields[int(number)] = rest
        else:
            fields = messages[line] = {}
    return messages


def definition() -> FileDescriptorProto:
    """What the generated code declares."""
    proto = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(proto)
    return proto


def declared(message: DescriptorProto) -> Fields:
    """The fields of a generated message in the table's words."""
    return {field.number: f"{field.name} {kind_of(message, field)}" for field in message.field}


def kind_of(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    kind = field.type_name.rpartition(".")[2] or FieldDescriptorProto.Type.Name(field.type)[len("TYPE_") :].lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {kind}"
    if field.proto3_optional:
        return f"optional {kind}"
    return f"{kind} in {message.oneof_decl[field.oneof_index].name}" if field.HasField("oneof_index") else kind


GENERATED: dict[str, DescriptorProto] = {message.name: message for message in definition().message_type}


@pytest.mark.parametrize("name", tgi_messages())
def test_fields_below_100_are_tgis(name: str) -> None:
    fields = declared(GENERATED[name])
    assert {number: field for number, field in fields.items() if number < FIRST_ADDITION} == tgi_messages()[name]


def test_the_other_messages_are_ours() -> None:
    assert GENERATED.keys() - tgi_messages().keys() == OUR_MESSAGES


def test_tgis_fields_never_refer_to_our_messages() -> None:
    """A peer that knows TGI's wire alone can read every field it knows."""
    for name, fields in tgi_messages().items():
        for number in fields:
            (field,) = [field for field in GENERATED[name].field if field.number == number]
            assert field.type_name.rpartition(".")[2] not in OUR_MESSAGES


def test_nothing_is_packed_in_another_way_than_proto3s() -> None:
    assert definition().syntax == "proto3"
    assert not [field for message in GENERATED.values() for field in message.field if field.HasField("options")]


def test_enums() -> None:
    found: dict[str, dict[str, int]] = {enum.name: values(enum) for enum in definition().enum_type}
    assert found["GrammarType"].pop("GRAMMAR_TYPE_LARK") >= FIRST_ADDITION
    assert found == TGI_ENUMS | OUR_ENUMS


def values(enum: EnumDescriptorProto) -> dict[str, int]:
    return {value.name: value.number for value in enum.value}


def test_service() -> None:
    assert definition().package == "generate.v3"
    (service,) = definition().service
    assert service.name == "TextGenerationService"
    methods = {method.name: method for method in service.method}
    assert methods.keys() >= set(TGI_METHODS)
    for name in TGI_METHODS:
        method = methods[name]
        assert method.input_type == f".generate.v3.{name}Request"
        assert method.output_type == f".generate.v3.{name}Response"
        assert not method.client_streaming
        assert not method.server_streaming
