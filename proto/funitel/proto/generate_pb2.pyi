from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MediaKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEDIA_KIND_IMAGE: _ClassVar[MediaKind]
    MEDIA_KIND_AUDIO: _ClassVar[MediaKind]

class EncoderTask(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODER_TASK_EMBED: _ClassVar[EncoderTask]
    ENCODER_TASK_CLASSIFY: _ClassVar[EncoderTask]
    ENCODER_TASK_FILL: _ClassVar[EncoderTask]
    ENCODER_TASK_EMBED_ALL: _ClassVar[EncoderTask]

class GrammarType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_TYPE_NONE: _ClassVar[GrammarType]
    GRAMMAR_TYPE_JSON: _ClassVar[GrammarType]
    GRAMMAR_TYPE_REGEX: _ClassVar[GrammarType]
    GRAMMAR_TYPE_LARK: _ClassVar[GrammarType]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_EOS_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_SEQUENCE: _ClassVar[FinishReason]
MEDIA_KIND_IMAGE: MediaKind
MEDIA_KIND_AUDIO: MediaKind
ENCODER_TASK_EMBED: EncoderTask
ENCODER_TASK_CLASSIFY: EncoderTask
ENCODER_TASK_FILL: EncoderTask
ENCODER_TASK_EMBED_ALL: EncoderTask
GRAMMAR_TYPE_NONE: GrammarType
GRAMMAR_TYPE_JSON: GrammarType
GRAMMAR_TYPE_REGEX: GrammarType
GRAMMAR_TYPE_LARK: GrammarType
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_EOS_TOKEN: FinishReason
FINISH_REASON_STOP_SEQUENCE: FinishReason

class HealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthResponse(_message.Message):
    __slots__ = ("resident_bytes", "peak_bytes", "busy_ns")
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUSY_NS_FIELD_NUMBER: _ClassVar[int]
    resident_bytes: int
    peak_bytes: int
    busy_ns: int
    def __init__(self, resident_bytes: _Optional[int] = ..., peak_bytes: _Optional[int] = ..., busy_ns: _Optional[int] = ...) -> None: ...

class DismissRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class DismissResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OutputsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OutputsResponse(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceOutputs]
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceOutputs, _Mapping]]] = ...) -> None: ...

class SequenceOutputs(_message.Message):
    __slots__ = ("output_key", "num_before", "steps", "mirostat_mu")
    OUTPUT_KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_BEFORE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MIROSTAT_MU_FIELD_NUMBER: _ClassVar[int]
    output_key: str
    num_before: int
    steps: _containers.RepeatedCompositeFieldContainer[OutputStep]
    mirostat_mu: float
    def __init__(self, output_key: _Optional[str] = ..., num_before: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[OutputStep, _Mapping]]] = ..., mirostat_mu: _Optional[float] = ...) -> None: ...

class OutputStep(_message.Message):
    __slots__ = ("step", "generation")
    STEP_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    step: int
    generation: Generation
    def __init__(self, step: _Optional[int] = ..., generation: _Optional[_Union[Generation, _Mapping]] = ...) -> None: ...

class ReleaseOutputsRequest(_message.Message):
    __slots__ = ("output_keys",)
    OUTPUT_KEYS_FIELD_NUMBER: _ClassVar[int]
    output_keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, output_keys: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseOutputsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TakeOverRequest(_message.Message):
    __slots__ = ("warmup", "missing", "only_looks")
    WARMUP_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    ONLY_LOOKS_FIELD_NUMBER: _ClassVar[int]
    warmup: WarmupRequest
    missing: _containers.RepeatedCompositeFieldContainer[NumberedCall]
    only_looks: bool
    def __init__(self, warmup: _Optional[_Union[WarmupRequest, _Mapping]] = ..., missing: _Optional[_Iterable[_Union[NumberedCall, _Mapping]]] = ..., only_looks: bool = ...) -> None: ...

class TakeOverResponse(_message.Message):
    __slots__ = ("last_step_seq", "latest", "warmup", "batches")
    LAST_STEP_SEQ_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    WARMUP_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    last_step_seq: int
    latest: _containers.RepeatedCompositeFieldContainer[NumberedCall]
    warmup: WarmupResponse
    batches: _containers.RepeatedCompositeFieldContainer[HeldBatch]
    def __init__(self, last_step_seq: _Optional[int] = ..., latest: _Optional[_Iterable[_Union[NumberedCall, _Mapping]]] = ..., warmup: _Optional[_Union[WarmupResponse, _Mapping]] = ..., batches: _Optional[_Iterable[_Union[HeldBatch, _Mapping]]] = ...) -> None: ...

class NumberedCall(_message.Message):
    __slots__ = ("step_seq", "method", "payload")
    STEP_SEQ_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    step_seq: int
    method: str
    payload: bytes
    def __init__(self, step_seq: _Optional[int] = ..., method: _Optional[str] = ..., payload: _Optional[bytes] = ...) -> None: ...

class HeldBatch(_message.Message):
    __slots__ = ("id", "rows")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    id: int
    rows: _containers.RepeatedCompositeFieldContainer[HeldRow]
    def __init__(self, id: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[HeldRow, _Mapping]]] = ...) -> None: ...

class HeldRow(_message.Message):
    __slots__ = ("request_id", "output_key", "blocks", "num_computed", "num_known", "state_slot", "adapter_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_KEY_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_FIELD_NUMBER: _ClassVar[int]
    STATE_SLOT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    output_key: str
    blocks: _containers.RepeatedScalarFieldContainer[int]
    num_computed: int
    num_known: int
    state_slot: int
    adapter_id: str
    def __init__(self, request_id: _Optional[int] = ..., output_key: _Optional[str] = ..., blocks: _Optional[_Iterable[int]] = ..., num_computed: _Optional[int] = ..., num_known: _Optional[int] = ..., state_slot: _Optional[int] = ..., adapter_id: _Optional[str] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: int
    def __init__(self, level: _Optional[int] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ("freed_bytes",)
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    def __init__(self, freed_bytes: _Optional[int] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoResponse(_message.Message):
    __slots__ = ("requires_padding", "dtype", "device_type", "window_size", "speculate", "support_chunking", "use_prefix_caching", "attention_impl", "block_size", "capabilities", "rank", "world_size", "weight_bytes", "sharded_weight_bytes", "total_sharded_weight_bytes", "encoder", "step_socket", "num_opening_tokens", "vocab_size", "max_lora_rank", "drafter", "num_stages", "stage", "eos_token_ids", "media")
    REQUIRES_PADDING_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TYPE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_SIZE_FIELD_NUMBER: _ClassVar[int]
    SPECULATE_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_CHUNKING_FIELD_NUMBER: _ClassVar[int]
    USE_PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_IMPL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARDED_WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SHARDED_WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENCODER_FIELD_NUMBER: _ClassVar[int]
    STEP_SOCKET_FIELD_NUMBER: _ClassVar[int]
    NUM_OPENING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    requires_padding: bool
    dtype: str
    device_type: str
    window_size: int
    speculate: int
    support_chunking: bool
    use_prefix_caching: bool
    attention_impl: str
    block_size: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    rank: int
    world_size: int
    weight_bytes: int
    sharded_weight_bytes: int
    total_sharded_weight_bytes: int
    encoder: EncoderFacts
    step_socket: str
    num_opening_tokens: int
    vocab_size: int
    max_lora_rank: int
    drafter: str
    num_stages: int
    stage: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    media: MediaFacts
    def __init__(self, requires_padding: bool = ..., dtype: _Optional[str] = ..., device_type: _Optional[str] = ..., window_size: _Optional[int] = ..., speculate: _Optional[int] = ..., support_chunking: bool = ..., use_prefix_caching: bool = ..., attention_impl: _Optional[str] = ..., block_size: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., sharded_weight_bytes: _Optional[int] = ..., total_sharded_weight_bytes: _Optional[int] = ..., encoder: _Optional[_Union[EncoderFacts, _Mapping]] = ..., step_socket: _Optional[str] = ..., num_opening_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_lora_rank: _Optional[int] = ..., drafter: _Optional[str] = ..., num_stages: _Optional[int] = ..., stage: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., media: _Optional[_Union[MediaFacts, _Mapping]] = ...) -> None: ...

class MediaFacts(_message.Message):
    __slots__ = ("kinds", "has_whole_spans", "cache_bytes", "feature_bytes")
    KINDS_FIELD_NUMBER: _ClassVar[int]
    HAS_WHOLE_SPANS_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FEATURE_BYTES_FIELD_NUMBER: _ClassVar[int]
    kinds: _containers.RepeatedScalarFieldContainer[MediaKind]
    has_whole_spans: bool
    cache_bytes: int
    feature_bytes: int
    def __init__(self, kinds: _Optional[_Iterable[_Union[MediaKind, str]]] = ..., has_whole_spans: bool = ..., cache_bytes: _Optional[int] = ..., feature_bytes: _Optional[int] = ...) -> None: ...

class MediaSpan(_message.Message):
    __slots__ = ("key", "position", "length", "grid")
    KEY_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    position: int
    length: int
    grid: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[bytes] = ..., position: _Optional[int] = ..., length: _Optional[int] = ..., grid: _Optional[_Iterable[int]] = ...) -> None: ...

class EncodeMediaRequest(_message.Message):
    __slots__ = ("key", "kind", "shape", "values", "num_features", "grid", "size")
    KEY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    NUM_FEATURES_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    kind: MediaKind
    shape: _containers.RepeatedScalarFieldContainer[int]
    values: bytes
    num_features: int
    grid: _containers.RepeatedScalarFieldContainer[int]
    size: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[bytes] = ..., kind: _Optional[_Union[MediaKind, str]] = ..., shape: _Optional[_Iterable[int]] = ..., values: _Optional[bytes] = ..., num_features: _Optional[int] = ..., grid: _Optional[_Iterable[int]] = ..., size: _Optional[_Iterable[int]] = ...) -> None: ...

class EncodeMediaResponse(_message.Message):
    __slots__ = ("bytes", "total_ns")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    total_ns: int
    def __init__(self, bytes: _Optional[int] = ..., total_ns: _Optional[int] = ...) -> None: ...

class DropMediaRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DropMediaResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EncoderFacts(_message.Message):
    __slots__ = ("tasks", "width", "max_tokens", "labels", "is_multi_label", "pooling", "usual_tokens", "token_width")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    IS_MULTI_LABEL_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    USUAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_WIDTH_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedScalarFieldContainer[EncoderTask]
    width: int
    max_tokens: int
    labels: _containers.RepeatedScalarFieldContainer[str]
    is_multi_label: bool
    pooling: str
    usual_tokens: int
    token_width: int
    def __init__(self, tasks: _Optional[_Iterable[_Union[EncoderTask, str]]] = ..., width: _Optional[int] = ..., max_tokens: _Optional[int] = ..., labels: _Optional[_Iterable[str]] = ..., is_multi_label: bool = ..., pooling: _Optional[str] = ..., usual_tokens: _Optional[int] = ..., token_width: _Optional[int] = ...) -> None: ...

class EncoderInput(_message.Message):
    __slots__ = ("input_ids", "type_ids", "dimensions", "is_normalized", "mask_place", "top_n")
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    TYPE_IDS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    IS_NORMALIZED_FIELD_NUMBER: _ClassVar[int]
    MASK_PLACE_FIELD_NUMBER: _ClassVar[int]
    TOP_N_FIELD_NUMBER: _ClassVar[int]
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    type_ids: _containers.RepeatedScalarFieldContainer[int]
    dimensions: int
    is_normalized: bool
    mask_place: int
    top_n: int
    def __init__(self, input_ids: _Optional[_Iterable[int]] = ..., type_ids: _Optional[_Iterable[int]] = ..., dimensions: _Optional[int] = ..., is_normalized: bool = ..., mask_place: _Optional[int] = ..., top_n: _Optional[int] = ...) -> None: ...

class EncodeRequest(_message.Message):
    __slots__ = ("task", "inputs")
    TASK_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    task: EncoderTask
    inputs: _containers.RepeatedCompositeFieldContainer[EncoderInput]
    def __init__(self, task: _Optional[_Union[EncoderTask, str]] = ..., inputs: _Optional[_Iterable[_Union[EncoderInput, _Mapping]]] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("width", "values", "ids", "broken", "total_ns")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    width: int
    values: bytes
    ids: _containers.RepeatedScalarFieldContainer[int]
    broken: _containers.RepeatedScalarFieldContainer[int]
    total_ns: int
    def __init__(self, width: _Optional[int] = ..., values: _Optional[bytes] = ..., ids: _Optional[_Iterable[int]] = ..., broken: _Optional[_Iterable[int]] = ..., total_ns: _Optional[int] = ...) -> None: ...

class ServiceDiscoveryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServiceDiscoveryResponse(_message.Message):
    __slots__ = ("urls",)
    URLS_FIELD_NUMBER: _ClassVar[int]
    urls: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, urls: _Optional[_Iterable[str]] = ...) -> None: ...

class ClearCacheRequest(_message.Message):
    __slots__ = ("id", "step_seq")
    ID_FIELD_NUMBER: _ClassVar[int]
    STEP_SEQ_FIELD_NUMBER: _ClassVar[int]
    id: int
    step_seq: int
    def __init__(self, id: _Optional[int] = ..., step_seq: _Optional[int] = ...) -> None: ...

class ClearCacheResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Image(_message.Message):
    __slots__ = ("data", "mimetype")
    DATA_FIELD_NUMBER: _ClassVar[int]
    MIMETYPE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    mimetype: str
    def __init__(self, data: _Optional[bytes] = ..., mimetype: _Optional[str] = ...) -> None: ...

class InputChunk(_message.Message):
    __slots__ = ("text", "image")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    text: str
    image: Image
    def __init__(self, text: _Optional[str] = ..., image: _Optional[_Union[Image, _Mapping]] = ...) -> None: ...

class Input(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[InputChunk]
    def __init__(self, chunks: _Optional[_Iterable[_Union[InputChunk, _Mapping]]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class DecodingStrategy(_message.Message):
    __slots__ = ("top_n_sigma", "max_k", "tfs_z", "xtc_probability", "xtc_threshold", "mirostat", "mirostat_tau", "mirostat_eta", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "fsd_alpha", "fsd_k", "fsd_n", "fsd_beta", "fsd_random_tokens", "no_repeat_ngram_size")
    TOP_N_SIGMA_FIELD_NUMBER: _ClassVar[int]
    MAX_K_FIELD_NUMBER: _ClassVar[int]
    TFS_Z_FIELD_NUMBER: _ClassVar[int]
    XTC_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    XTC_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    MIROSTAT_FIELD_NUMBER: _ClassVar[int]
    MIROSTAT_TAU_FIELD_NUMBER: _ClassVar[int]
    MIROSTAT_ETA_FIELD_NUMBER: _ClassVar[int]
    DRY_MULTIPLIER_FIELD_NUMBER: _ClassVar[int]
    DRY_BASE_FIELD_NUMBER: _ClassVar[int]
    DRY_ALLOWED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRY_PENALTY_LAST_N_FIELD_NUMBER: _ClassVar[int]
    DRY_SEQUENCE_BREAKERS_FIELD_NUMBER: _ClassVar[int]
    FSD_ALPHA_FIELD_NUMBER: _ClassVar[int]
    FSD_K_FIELD_NUMBER: _ClassVar[int]
    FSD_N_FIELD_NUMBER: _ClassVar[int]
    FSD_BETA_FIELD_NUMBER: _ClassVar[int]
    FSD_RANDOM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NO_REPEAT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    top_n_sigma: float
    max_k: int
    tfs_z: float
    xtc_probability: float
    xtc_threshold: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: _containers.RepeatedScalarFieldContainer[str]
    fsd_alpha: float
    fsd_k: int
    fsd_n: int
    fsd_beta: float
    fsd_random_tokens: int
    no_repeat_ngram_size: int
    def __init__(self, top_n_sigma: _Optional[float] = ..., max_k: _Optional[int] = ..., tfs_z: _Optional[float] = ..., xtc_probability: _Optional[float] = ..., xtc_threshold: _Optional[float] = ..., mirostat: _Optional[int] = ..., mirostat_tau: _Optional[float] = ..., mirostat_eta: _Optional[float] = ..., dry_multiplier: _Optional[float] = ..., dry_base: _Optional[float] = ..., dry_allowed_length: _Optional[int] = ..., dry_penalty_last_n: _Optional[int] = ..., dry_sequence_breakers: _Optional[_Iterable[str]] = ..., fsd_alpha: _Optional[float] = ..., fsd_k: _Optional[int] = ..., fsd_n: _Optional[int] = ..., fsd_beta: _Optional[float] = ..., fsd_random_tokens: _Optional[int] = ..., no_repeat_ngram_size: _Optional[int] = ...) -> None: ...

class NextTokenChooserParameters(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "typical_p", "do_sample", "seed", "repetition_penalty", "watermark", "frequency_penalty", "grammar", "grammar_type", "presence_penalty", "count_penalty", "min_p", "logit_bias", "raw_logprobs", "min_new_tokens", "stop_token_ids", "allowed_token_ids", "banned_tokens", "strategy", "with_timestamps", "first_token")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    DO_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_TYPE_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    COUNT_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    RAW_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BANNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    WITH_TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    typical_p: float
    do_sample: bool
    seed: int
    repetition_penalty: float
    watermark: bool
    frequency_penalty: float
    grammar: str
    grammar_type: GrammarType
    presence_penalty: float
    count_penalty: float
    min_p: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    raw_logprobs: bool
    min_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    banned_tokens: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    strategy: DecodingStrategy
    with_timestamps: bool
    first_token: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., typical_p: _Optional[float] = ..., do_sample: bool = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., watermark: bool = ..., frequency_penalty: _Optional[float] = ..., grammar: _Optional[str] = ..., grammar_type: _Optional[_Union[GrammarType, str]] = ..., presence_penalty: _Optional[float] = ..., count_penalty: _Optional[float] = ..., min_p: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., raw_logprobs: bool = ..., min_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., banned_tokens: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., strategy: _Optional[_Union[DecodingStrategy, _Mapping]] = ..., with_timestamps: bool = ..., first_token: _Optional[int] = ...) -> None: ...

class CompileGrammarRequest(_message.Message):
    __slots__ = ("grammar", "grammar_type")
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_TYPE_FIELD_NUMBER: _ClassVar[int]
    grammar: str
    grammar_type: GrammarType
    def __init__(self, grammar: _Optional[str] = ..., grammar_type: _Optional[_Union[GrammarType, str]] = ...) -> None: ...

class CompileGrammarResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("id", "path")
    ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    id: str
    path: str
    def __init__(self, id: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("bytes", "max_rank")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    max_rank: int
    def __init__(self, bytes: _Optional[int] = ..., max_rank: _Optional[int] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoppingCriteriaParameters(_message.Message):
    __slots__ = ("max_new_tokens", "stop_sequences", "ignore_eos_token")
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    stop_sequences: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos_token: bool
    def __init__(self, max_new_tokens: _Optional[int] = ..., stop_sequences: _Optional[_Iterable[str]] = ..., ignore_eos_token: bool = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("id", "inputs", "truncate", "parameters", "stopping_parameters", "prefill_logprobs", "top_n_tokens", "input_chunks", "blocks", "slots", "adapter_id", "cache_len", "add_special_tokens", "chunk_len", "input_ids", "output_ids", "name", "mirostat_mu", "prompt_logprobs", "state_slot", "state_from", "state_saves", "media", "output_key", "speculate")
    ID_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STOPPING_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INPUT_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_LEN_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_LEN_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MIROSTAT_MU_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STATE_SLOT_FIELD_NUMBER: _ClassVar[int]
    STATE_FROM_FIELD_NUMBER: _ClassVar[int]
    STATE_SAVES_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_KEY_FIELD_NUMBER: _ClassVar[int]
    SPECULATE_FIELD_NUMBER: _ClassVar[int]
    id: int
    inputs: str
    truncate: int
    parameters: NextTokenChooserParameters
    stopping_parameters: StoppingCriteriaParameters
    prefill_logprobs: bool
    top_n_tokens: int
    input_chunks: Input
    blocks: _containers.RepeatedScalarFieldContainer[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    adapter_id: str
    cache_len: int
    add_special_tokens: bool
    chunk_len: int
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    name: str
    mirostat_mu: float
    prompt_logprobs: int
    state_slot: int
    state_from: int
    state_saves: _containers.RepeatedCompositeFieldContainer[StateSave]
    media: _containers.RepeatedCompositeFieldContainer[MediaSpan]
    output_key: str
    speculate: int
    def __init__(self, id: _Optional[int] = ..., inputs: _Optional[str] = ..., truncate: _Optional[int] = ..., parameters: _Optional[_Union[NextTokenChooserParameters, _Mapping]] = ..., stopping_parameters: _Optional[_Union[StoppingCriteriaParameters, _Mapping]] = ..., prefill_logprobs: bool = ..., top_n_tokens: _Optional[int] = ..., input_chunks: _Optional[_Union[Input, _Mapping]] = ..., blocks: _Optional[_Iterable[int]] = ..., slots: _Optional[_Iterable[int]] = ..., adapter_id: _Optional[str] = ..., cache_len: _Optional[int] = ..., add_special_tokens: bool = ..., chunk_len: _Optional[int] = ..., input_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ..., name: _Optional[str] = ..., mirostat_mu: _Optional[float] = ..., prompt_logprobs: _Optional[int] = ..., state_slot: _Optional[int] = ..., state_from: _Optional[int] = ..., state_saves: _Optional[_Iterable[_Union[StateSave, _Mapping]]] = ..., media: _Optional[_Iterable[_Union[MediaSpan, _Mapping]]] = ..., output_key: _Optional[str] = ..., speculate: _Optional[int] = ...) -> None: ...

class StateSave(_message.Message):
    __slots__ = ("position", "slot")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    position: int
    slot: int
    def __init__(self, position: _Optional[int] = ..., slot: _Optional[int] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("id", "requests", "size", "max_tokens", "max_blocks")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    id: int
    requests: _containers.RepeatedCompositeFieldContainer[Request]
    size: int
    max_tokens: int
    max_blocks: int
    def __init__(self, id: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[Request, _Mapping]]] = ..., size: _Optional[int] = ..., max_tokens: _Optional[int] = ..., max_blocks: _Optional[int] = ...) -> None: ...

class CachedBatch(_message.Message):
    __slots__ = ("id", "request_ids", "size", "max_tokens", "current_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CURRENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: int
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    size: int
    max_tokens: int
    current_tokens: int
    def __init__(self, id: _Optional[int] = ..., request_ids: _Optional[_Iterable[int]] = ..., size: _Optional[int] = ..., max_tokens: _Optional[int] = ..., current_tokens: _Optional[int] = ...) -> None: ...

class GeneratedText(_message.Message):
    __slots__ = ("text", "generated_tokens", "finish_reason", "seed", "stop_index", "stop_start")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_INDEX_FIELD_NUMBER: _ClassVar[int]
    STOP_START_FIELD_NUMBER: _ClassVar[int]
    text: str
    generated_tokens: int
    finish_reason: FinishReason
    seed: int
    stop_index: int
    stop_start: int
    def __init__(self, text: _Optional[str] = ..., generated_tokens: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., seed: _Optional[int] = ..., stop_index: _Optional[int] = ..., stop_start: _Optional[int] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("ids", "logprobs", "texts", "is_special")
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    IS_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    texts: _containers.RepeatedScalarFieldContainer[str]
    is_special: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., texts: _Optional[_Iterable[str]] = ..., is_special: _Optional[_Iterable[bool]] = ...) -> None: ...

class PromptTop(_message.Message):
    __slots__ = ("width", "ids", "logprobs", "ranks", "texts")
    class TextsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    width: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    texts: _containers.ScalarMap[int, str]
    def __init__(self, width: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., texts: _Optional[_Mapping[int, str]] = ...) -> None: ...

class Generation(_message.Message):
    __slots__ = ("request_id", "prefill_tokens", "tokens", "generated_text", "top_tokens", "num_accepted", "prompt_top")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TEXT_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOP_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    prefill_tokens: Tokens
    tokens: Tokens
    generated_text: GeneratedText
    top_tokens: _containers.RepeatedCompositeFieldContainer[Tokens]
    num_accepted: int
    prompt_top: PromptTop
    def __init__(self, request_id: _Optional[int] = ..., prefill_tokens: _Optional[_Union[Tokens, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., generated_text: _Optional[_Union[GeneratedText, _Mapping]] = ..., top_tokens: _Optional[_Iterable[_Union[Tokens, _Mapping]]] = ..., num_accepted: _Optional[int] = ..., prompt_top: _Optional[_Union[PromptTop, _Mapping]] = ...) -> None: ...

class FilterBatchRequest(_message.Message):
    __slots__ = ("batch_id", "request_ids", "step_seq")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    STEP_SEQ_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    step_seq: int
    def __init__(self, batch_id: _Optional[int] = ..., request_ids: _Optional[_Iterable[int]] = ..., step_seq: _Optional[int] = ...) -> None: ...

class FilterBatchResponse(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: CachedBatch
    def __init__(self, batch: _Optional[_Union[CachedBatch, _Mapping]] = ...) -> None: ...

class RowUpdate(_message.Message):
    __slots__ = ("request_id", "blocks", "chunk_len", "state_saves", "speculate")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_LEN_FIELD_NUMBER: _ClassVar[int]
    STATE_SAVES_FIELD_NUMBER: _ClassVar[int]
    SPECULATE_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    chunk_len: int
    state_saves: _containers.RepeatedCompositeFieldContainer[StateSave]
    speculate: int
    def __init__(self, request_id: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., chunk_len: _Optional[int] = ..., state_saves: _Optional[_Iterable[_Union[StateSave, _Mapping]]] = ..., speculate: _Optional[int] = ...) -> None: ...

class BlockCopy(_message.Message):
    __slots__ = ("block", "slot", "is_load", "to_block", "key", "age_seconds")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    IS_LOAD_FIELD_NUMBER: _ClassVar[int]
    TO_BLOCK_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    block: int
    slot: int
    is_load: bool
    to_block: int
    key: bytes
    age_seconds: float
    def __init__(self, block: _Optional[int] = ..., slot: _Optional[int] = ..., is_load: bool = ..., to_block: _Optional[int] = ..., key: _Optional[bytes] = ..., age_seconds: _Optional[float] = ...) -> None: ...

class Columns(_message.Message):
    __slots__ = ("request_ids", "ids", "logprobs", "texts", "is_special")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    IS_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    texts: _containers.RepeatedScalarFieldContainer[str]
    is_special: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, request_ids: _Optional[_Iterable[int]] = ..., ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., texts: _Optional[_Iterable[str]] = ..., is_special: _Optional[_Iterable[bool]] = ...) -> None: ...

class StrategyMemory(_message.Message):
    __slots__ = ("request_id", "mirostat_mu")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MIROSTAT_MU_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    mirostat_mu: float
    def __init__(self, request_id: _Optional[int] = ..., mirostat_mu: _Optional[float] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("batch", "cached_batch", "step_seq", "rows", "takes_columns", "copies")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CACHED_BATCH_FIELD_NUMBER: _ClassVar[int]
    STEP_SEQ_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TAKES_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    batch: Batch
    cached_batch: CachedBatch
    step_seq: int
    rows: _containers.RepeatedCompositeFieldContainer[RowUpdate]
    takes_columns: bool
    copies: _containers.RepeatedCompositeFieldContainer[BlockCopy]
    def __init__(self, batch: _Optional[_Union[Batch, _Mapping]] = ..., cached_batch: _Optional[_Union[CachedBatch, _Mapping]] = ..., step_seq: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[RowUpdate, _Mapping]]] = ..., takes_columns: bool = ..., copies: _Optional[_Iterable[_Union[BlockCopy, _Mapping]]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("generations", "batch", "forward_ns", "decode_ns", "total_ns", "concat_ns", "num_forwards", "num_forward_rows", "num_forward_tokens", "columns", "memories", "num_draft_tokens", "num_accepted_tokens", "lost_slots")
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    CONCAT_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORWARD_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORWARD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    MEMORIES_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOST_SLOTS_FIELD_NUMBER: _ClassVar[int]
    generations: _containers.RepeatedCompositeFieldContainer[Generation]
    batch: CachedBatch
    forward_ns: int
    decode_ns: int
    total_ns: int
    concat_ns: int
    num_forwards: int
    num_forward_rows: int
    num_forward_tokens: int
    columns: Columns
    memories: _containers.RepeatedCompositeFieldContainer[StrategyMemory]
    num_draft_tokens: int
    num_accepted_tokens: int
    lost_slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, generations: _Optional[_Iterable[_Union[Generation, _Mapping]]] = ..., batch: _Optional[_Union[CachedBatch, _Mapping]] = ..., forward_ns: _Optional[int] = ..., decode_ns: _Optional[int] = ..., total_ns: _Optional[int] = ..., concat_ns: _Optional[int] = ..., num_forwards: _Optional[int] = ..., num_forward_rows: _Optional[int] = ..., num_forward_tokens: _Optional[int] = ..., columns: _Optional[_Union[Columns, _Mapping]] = ..., memories: _Optional[_Iterable[_Union[StrategyMemory, _Mapping]]] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., lost_slots: _Optional[_Iterable[int]] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("batches", "step_seq", "rows", "takes_columns", "copies")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    STEP_SEQ_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TAKES_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[CachedBatch]
    step_seq: int
    rows: _containers.RepeatedCompositeFieldContainer[RowUpdate]
    takes_columns: bool
    copies: _containers.RepeatedCompositeFieldContainer[BlockCopy]
    def __init__(self, batches: _Optional[_Iterable[_Union[CachedBatch, _Mapping]]] = ..., step_seq: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[RowUpdate, _Mapping]]] = ..., takes_columns: bool = ..., copies: _Optional[_Iterable[_Union[BlockCopy, _Mapping]]] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("generations", "batch", "forward_ns", "decode_ns", "total_ns", "concat_ns", "num_forwards", "num_forward_rows", "num_forward_tokens", "columns", "memories", "num_draft_tokens", "num_accepted_tokens", "lost_slots")
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    CONCAT_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORWARD_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORWARD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    MEMORIES_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOST_SLOTS_FIELD_NUMBER: _ClassVar[int]
    generations: _containers.RepeatedCompositeFieldContainer[Generation]
    batch: CachedBatch
    forward_ns: int
    decode_ns: int
    total_ns: int
    concat_ns: int
    num_forwards: int
    num_forward_rows: int
    num_forward_tokens: int
    columns: Columns
    memories: _containers.RepeatedCompositeFieldContainer[StrategyMemory]
    num_draft_tokens: int
    num_accepted_tokens: int
    lost_slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, generations: _Optional[_Iterable[_Union[Generation, _Mapping]]] = ..., batch: _Optional[_Union[CachedBatch, _Mapping]] = ..., forward_ns: _Optional[int] = ..., decode_ns: _Optional[int] = ..., total_ns: _Optional[int] = ..., concat_ns: _Optional[int] = ..., num_forwards: _Optional[int] = ..., num_forward_rows: _Optional[int] = ..., num_forward_tokens: _Optional[int] = ..., columns: _Optional[_Union[Columns, _Mapping]] = ..., memories: _Optional[_Iterable[_Union[StrategyMemory, _Mapping]]] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., lost_slots: _Optional[_Iterable[int]] = ...) -> None: ...

class WarmupRequest(_message.Message):
    __slots__ = ("batch", "max_input_tokens", "max_prefill_tokens", "max_total_tokens", "max_batch_total_tokens", "max_batch_size")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    MAX_INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    batch: Batch
    max_input_tokens: int
    max_prefill_tokens: int
    max_total_tokens: int
    max_batch_total_tokens: int
    max_batch_size: int
    def __init__(self, batch: _Optional[_Union[Batch, _Mapping]] = ..., max_input_tokens: _Optional[int] = ..., max_prefill_tokens: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., max_batch_total_tokens: _Optional[int] = ..., max_batch_size: _Optional[int] = ...) -> None: ...

class WarmupResponse(_message.Message):
    __slots__ = ("max_supported_total_tokens", "max_input_tokens", "max_total_tokens", "kv_bytes", "total_kv_bytes", "host_blocks", "state_slots", "is_disk", "stored_blocks")
    MAX_SUPPORTED_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STATE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    IS_DISK_FIELD_NUMBER: _ClassVar[int]
    STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    max_supported_total_tokens: int
    max_input_tokens: int
    max_total_tokens: int
    kv_bytes: int
    total_kv_bytes: int
    host_blocks: int
    state_slots: int
    is_disk: bool
    stored_blocks: _containers.RepeatedCompositeFieldContainer[StoredBlock]
    def __init__(self, max_supported_total_tokens: _Optional[int] = ..., max_input_tokens: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., total_kv_bytes: _Optional[int] = ..., host_blocks: _Optional[int] = ..., state_slots: _Optional[int] = ..., is_disk: bool = ..., stored_blocks: _Optional[_Iterable[_Union[StoredBlock, _Mapping]]] = ...) -> None: ...

class StoredBlock(_message.Message):
    __slots__ = ("slot", "key", "age_seconds")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    key: bytes
    age_seconds: float
    def __init__(self, slot: _Optional[int] = ..., key: _Optional[bytes] = ..., age_seconds: _Optional[float] = ...) -> None: ...
