"""Types of a step that router and shards share: its sequences, its results, facts about shards.

Standard library only, with `strategy`, without protobuf and torch. `wire` converts these to messages.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from funitel.proto.strategy import DecodingStrategy


class Capability(StrEnum):
    """Extensions of a shard beyond TGI's v3 wire format (`InfoResponse.capabilities`)."""

    # Numbered calls, executed strictly in order on every rank. They may be planned before the previous step is
    # answered: rows and batches that ended in it compute nothing, rows without an update compute one token.
    STEP_SEQ = "step_seq"
    ROW_UPDATES = "row_updates"  # block grants and chunk lengths per step
    TOKEN_IDS = "token_ids"  # prompts as input_ids, resumption through output_ids
    COUNT_PENALTIES = "count_penalties"  # presence_penalty and count_penalty
    GRAMMARS = "grammars"  # JSON schemas beside regular expressions, and CompileGrammar
    FORCED_SPANS = "forced_spans"  # generations of several tokens; a later step computes their KV as a chunk
    MORE_SAMPLERS = "more_samplers"  # min_p, logit_bias and raw_logprobs
    TOKEN_RULES = "token_rules"  # min_new_tokens, stop_token_ids, allowed_token_ids, banned_tokens; Lark grammars
    STRATEGIES = "strategies"  # strategy, and memories of steps
    # Prefixes of a model with recurrent layers, with their states in slots that the router allocates. A TGI router has
    # none, so `use_prefix_caching` is false for such a model.
    STATE_SLOTS = "state_slots"
    ADAPTERS = "adapters"  # adapter_id, LoadAdapter and UnloadAdapter
    # Drafts that the shard makes and verifies: `speculate` of sequences and rows, `num_accepted` of generations.
    SPECULATION = "speculation"
    BLOCK_FORKS = "block_forks"  # copies from block to block
    SLEEP = "sleep"  # Sleep and Wake
    STAGES = "stages"  # pipeline stages: steps of several batches are computed at once, num_stages of them
    MEDIA = "media"  # media of sequences, EncodeMedia and DropMedia
    OUTPUTS = "outputs"  # output_key of sequences, Outputs and ReleaseOutputs
    TAKE_OVER = "take_over"  # TakeOver
    FIRST_TOKEN = "first_token"  # first_token: the language of a translation; translation models only


class EncoderTask(IntEnum):
    """Task of an encoder call; values are those of the wire."""

    EMBED = 0  # a vector for each text
    CLASSIFY = 1  # scores of every class
    FILL = 2  # the likeliest tokens in place of one
    EMBED_ALL = 3  # a vector for each token of each text


class MediaKind(IntEnum):
    """Kind of a media item; values are those of the wire."""

    IMAGE = 0
    AUDIO = 1


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """The place of a media item in a prompt.

    `key` identifies its content and its processing. It has `length` tokens from `position` on. Those with the id of the
    model's placeholder take its features, in order. `grid` is (frames, rows, columns) of features, for models with
    rotary positions of three axes; else empty.
    """

    key: bytes
    position: int
    length: int
    grid: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.position + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaInput:
    """A processed media item, as a shard encodes it.

    `values` are uint8 [tiles, height, width, 3] of an image, before its pixels are scaled and normalised, or float32
    [mel bins, frames] of a sound, little-endian, in the shape `shape`. `num_features` come of it. `size` is, where the
    model's features depend on it, the height and width of an image before it was cut into tiles, or the number of
    frames of a sound that are no padding; else empty.
    """

    key: bytes
    kind: MediaKind
    shape: tuple[int, ...]
    values: bytes = field(repr=False)
    num_features: int
    grid: tuple[int, ...] = ()
    size: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaFacts:
    """What a shard knows of media. With `has_whole_spans` a step computes all tokens of an item, or none.

    A rank keeps features of `cache_bytes` at most; one feature takes `feature_bytes`.
    """

    kinds: frozenset[MediaKind]
    has_whole_spans: bool = False
    cache_bytes: int = 0
    feature_bytes: int = 0


class GrammarType(IntEnum):
    """Kind of a grammar's text; values are those of the wire."""

    NONE = 0
    JSON = 1  # a JSON schema
    REGEX = 2
    LARK = 100  # a context-free grammar, in the form of Lark or of GBNF


class FinishReason(IntEnum):
    """Why a sequence ended; values are those of the wire, which has no ABORT: the router decides that."""

    ABORT = -1
    LENGTH = 0
    EOS_TOKEN = 1
    STOP_SEQUENCE = 2

    @property
    def native(self) -> str:
        """The word of TGI's native routes."""
        return self.name.lower()

    @property
    def openai(self) -> str:
        """The word of OpenAI's routes."""
        return _OPENAI_REASONS.get(self, "stop")


_OPENAI_REASONS = {FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Defaults are neutral; the order of application is TGI's."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    do_sample: bool = False
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0  # times the token's share of the sequence, prompt included (TGI)
    presence_penalty: float = 0.0  # once for each token the completion holds (OpenAI)
    count_penalty: float = 0.0  # per occurrence in the completion (OpenAI's frequency_penalty)
    min_p: float = 0.0  # minimum probability of a token, as a fraction of the likeliest one's
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its score), each id once
    watermark: bool = False
    grammar: str = ""
    grammar_type: GrammarType = GrammarType.NONE
    raw_logprobs: bool = False  # log-probabilities of the model's own scores, before any processing
    first_token: int | None = None  # first token of the completion, for models that let a request choose it
    min_new_tokens: int = 0  # before which nothing ends the completion
    stop_token_ids: tuple[int, ...] = ()  # tokens that end the completion as an end token does
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    banned_tokens: tuple[tuple[int, ...], ...] = ()  # the last token of each never follows the others
    strategy: DecodingStrategy | None = None
    with_timestamps: bool = False  # of a transcript: its tokens say when texts begin and end

    @property
    def is_masked(self) -> bool:
        """Whether some tokens may not follow, depending on those before."""
        return bool(self.grammar) or self.has_token_rules

    @property
    def has_token_rules(self) -> bool:
        """Whether rules beside a grammar say which tokens may follow."""
        return bool(
            self.min_new_tokens
            or self.allowed_token_ids
            or self.banned_tokens
            or (self.strategy is not None and self.strategy.no_repeat_ngram_size)
        )

    @property
    def is_sampled(self) -> bool:
        """Whether the token is sampled rather than greedy (TGI's rule)."""
        if self.strategy is not None and self.strategy.is_deterministic:
            return False
        return (
            self.do_sample
            or self.temperature != 1.0
            or self.top_k != 0
            or self.top_p < 1.0
            or self.min_p > 0.0
            or self.typical_p < 1.0
            or (self.strategy is not None and self.strategy.is_sampled)
        )

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the tokens seen so far."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.count_penalty != 0.0
        )

    @property
    def edits_scores(self) -> bool:
        """Whether individual logits are changed before a token is chosen."""
        return self.has_penalties or self.watermark or bool(self.logit_bias)

    @property
    def changes_scores(self) -> bool:
        """Whether the logits used for choosing can differ from the model's."""
        rules = self.is_masked or self.with_timestamps
        return self.is_sampled or self.edits_scores or rules or self.strategy is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingParams:
    """When a sequence ends."""

    max_new_tokens: int
    stop_sequences: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class StateSave:
    """The recurrent state of a sequence after its first `position` tokens is written to a slot of the state pool."""

    position: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStart:
    """A new sequence for a shard.

    Empty `input_ids` mean that the shard tokenizes `inputs` itself (a TGI router). `output_ids` are completion tokens
    that were generated before: the shard recomputes its state over them without output, and goes on.
    """

    request_id: int
    sampling: SamplingParams
    stopping: StoppingParams
    input_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    cache_len: int = 0
    chunk_len: int | None = None
    prefill_logprobs: bool = False
    prompt_logprobs: int | None = None  # so many likeliest tokens at each place of the prompt; beats prefill_logprobs
    top_n_tokens: int = 0
    inputs: str = ""
    truncate: int = 0
    add_special_tokens: bool = True
    adapter_id: str | None = None
    name: str = ""  # id of its request in log lines
    state_slot: int = 0  # of its recurrent state; 0: the shard chooses, or the model has none
    state_from: int = 0  # slot that is copied there before the step computes; 0: the state begins with zeros
    state_saves: tuple[StateSave, ...] = ()  # in the first step
    mirostat_mu: float | None = None  # what mirostat had come to with `output_ids`
    speculate: int = 0  # maximum of draft tokens that a decode step verifies
    media: tuple[MediaSpan, ...] = ()  # in the order of their positions
    output_key: str = ""  # its outputs are kept under this key until they are released; empty: they are not


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """The router's decisions for one running row: granted blocks, and how many known tokens to compute."""

    request_id: int
    blocks: tuple[int, ...] = ()
    chunk_len: int | None = None  # None: one token if decoding; 0: no token in this step
    state_saves: tuple[StateSave, ...] = ()
    speculate: int | None = None  # maximum of draft tokens of a decode step, from this one on; None: as before


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy between a block of the KV pool and a slot of host memory, or another block, before the step computes."""

    block: int
    slot: int
    is_load: bool  # from the slot into the block
    to_block: int | None = None  # given: `block` is copied there, and slot and is_load are 0 and False
    key: bytes = b""  # of the content; a save without one wipes a slot of a file
    age_seconds: float = 0.0  # of a save: since the content was used last


@dataclass(frozen=True, slots=True)
class CachedBatch:
    """A batch the shard keeps between steps."""

    id: int
    request_ids: tuple[int, ...]
    max_tokens: int = 0
    current_tokens: int = 0


@dataclass(slots=True)  # not frozen, which would triple the cost of construction per token
class Tokens:
    """Parallel lists about some tokens; `logprobs` of the very first prompt token is NaN."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    texts: tuple[str, ...]
    is_special: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptTop:
    """The likeliest tokens at each place of a prompt from its second on, by the model's own scores."""

    width: int  # tokens at each place
    ids: tuple[int, ...]  # [places * width], of each place the likeliest first
    logprobs: tuple[float, ...]  # [places * width]
    ranks: tuple[int, ...]  # [places] of the prompt's own tokens, 1 for the likeliest
    texts: Mapping[int, str]  # of every id

    def at(self, place: int) -> list[tuple[int, str, float]]:
        """The likeliest tokens at one place, from 0 for the prompt's second token: ids, texts, log-probabilities."""
        begin, end = place * self.width, (place + 1) * self.width
        ids = self.ids[begin:end]
        return list(zip(ids, [self.texts[each] for each in ids], self.logprobs[begin:end], strict=True))


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """How a sequence ended. `stop_start` is where the matched stop begins in `text`, in characters."""

    text: str
    num_tokens: int
    finish_reason: FinishReason
    seed: int | None = None
    stop_index: int | None = None
    stop_start: int | None = None

    @property
    def openai_reason(self) -> str:
        """The word of OpenAI's routes; a stop sequence that ends with the last allowed token counts as a stop."""
        return "stop" if self.stop_start is not None else self.finish_reason.openai


@dataclass(slots=True)  # not frozen, which would triple the cost of construction per token
class Generation:
    """Output of one step for one sequence."""

    request_id: int
    tokens: Tokens
    top_tokens: tuple[Tokens, ...] = ()
    prefill_tokens: Tokens | None = None
    prompt_top: PromptTop | None = None  # beside prefill_tokens, where it was asked for
    finished: GeneratedText | None = None
    num_accepted: int = 0  # leading tokens that are accepted drafts, with computed KV

    @property
    def is_plain(self) -> bool:
        """Whether the output is a single token and nothing else."""
        tokens = self.tokens
        return (
            self.finished is None
            and not self.top_tokens
            and self.prefill_tokens is None
            and len(tokens.ids) == len(tokens.logprobs) == len(tokens.texts) == len(tokens.is_special) == 1
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a Prefill or Decode call; times in nanoseconds."""

    generations: tuple[Generation, ...]
    batch: CachedBatch | None
    forward_ns: int = 0
    decode_ns: int = 0
    total_ns: int = 0
    concat_ns: int | None = None
    num_forwards: int = 0
    num_forward_rows: int = 0
    num_forward_tokens: int = 0
    # Request id and `mirostat_mu` behind the tokens of this step; lost on the wire where it brings no tokens.
    memories: tuple[tuple[int, float], ...] = ()
    num_draft_tokens: int = 0  # verified in this step
    num_accepted_tokens: int = 0  # of these, the ones that became tokens of a sequence
    lost_slots: tuple[int, ...] = ()  # copies from or to them failed: the step was not computed


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFacts:
    """Tasks, limits and output format of an encoder model."""

    tasks: frozenset[EncoderTask]
    width: int  # of an output vector
    max_tokens: int  # of a text, special ones included
    usual_tokens: int  # maximum of tokens in a text, by the model's authors
    labels: tuple[str, ...] = ()  # of the classes, in the order of their scores
    is_multi_label: bool = False  # a text may belong to several classes
    pooling: str = ""
    token_width: int = 0  # EMBED_ALL: of the vector of a token


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInput:
    """One text, or a pair, as tokens; `type_ids` empty means all 0."""

    input_ids: tuple[int, ...]
    type_ids: tuple[int, ...] = ()
    dimensions: int = 0  # EMBED: how many to keep, 0 for all
    is_normalized: bool = False  # EMBED: normalize the vector to length 1
    mask_place: int = 0  # FILL: which token
    top_n: int = 0  # FILL: number of tokens to return


@dataclass(frozen=True, slots=True)
class EncoderResult:
    """A row of `width` numbers for each input, float32 and little-endian; for FILL the tokens they belong to.

    For EMBED_ALL a row for each token of each input. `broken` are inputs with numbers that are not finite.
    """

    width: int
    values: bytes
    ids: tuple[int, ...] = ()
    broken: tuple[int, ...] = ()
    total_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """Static facts about a shard. A peer that lists no capabilities speaks plain TGI v3."""

    requires_padding: bool = False
    dtype: str = ""
    device_type: str = ""
    window_size: int | None = None
    speculate: int = 0
    support_chunking: bool = True
    use_prefix_caching: bool = False
    attention_impl: str = ""
    block_size: int = 16
    capabilities: frozenset[str] = field(default_factory=frozenset)
    rank: int = 0
    world_size: int = 1
    weight_bytes: int = 0
    sharded_weight_bytes: int = 0
    total_sharded_weight_bytes: int = 0
    encoder: EncoderFacts | None = None  # None: the model generates
    step_socket: str = ""  # path of a Unix socket that also takes numbered calls, see `step_socket`
    vocab_size: int = 0  # 0 if unknown
    num_opening_tokens: int = 0  # tokens that the shard appends to every prompt for a decoder, each in a KV slot
    max_lora_rank: int = 0  # of adapters that can be loaded; 0: the model takes none
    drafter: str = ""  # what makes draft tokens, for example ngram; empty: nothing does
    eos_token_ids: frozenset[int] = frozenset()  # end a completion, unless it ignores them
    num_stages: int = 0  # pipeline stages of the replica; 0 is one
    stage: int = 0  # the one that this rank belongs to
    media: MediaFacts | None = None  # None: prompts are text

    @property
    def layer_parts(self) -> str | None:
        """Ranges of layers with device and precision, which `dtype` says of a model in parts; None for any other."""
        return self.dtype if "=" in self.dtype else None


@dataclass(frozen=True, slots=True)
class ShardMemory:
    """Resident and peak host memory of a shard; 0 if not reported."""

    resident_bytes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupLimits:
    """Limits of a Warmup call, in tokens; None means the shard decides. `max_batch_size` is in sequences."""

    max_input_tokens: int | None = None
    max_prefill_tokens: int = 4096
    max_total_tokens: int | None = None
    max_batch_total_tokens: int | None = None
    max_batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A slot of a file that holds the content of an earlier run; `age_seconds` since that was used last."""

    slot: int
    key: bytes
    age_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupResult:
    """Result of Warmup: pool and limits in tokens, KV bytes of this rank and of all ranks.

    `host_blocks` is the number of KV block slots in host memory, or in a file if `is_disk`; `state_slots` that of slots
    for recurrent states.
    """

    pool_tokens: int | None
    max_input_tokens: int
    max_total_tokens: int
    kv_bytes: int = 0
    total_kv_bytes: int = 0
    host_blocks: int = 0
    state_slots: int = 0
    is_disk: bool = False
    stored_blocks: tuple[StoredBlock, ...] = ()  # those of the file
