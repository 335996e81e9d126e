"""Request and Sequence: a validated request of a client, and the growing list of tokens that answers it. Pure."""

import hashlib
from array import array
from bisect import bisect_right
from dataclasses import dataclass, field, replace

from funitel.proto.step import MediaFacts, MediaInput, MediaKind, MediaSpan, SamplingParams, StateSave, StoppingParams
from funitel.router.core.beam_group import BeamGroup
from funitel.router.core.beam_search import BeamParams

DEFAULT_MODEL = "tgi"  # what TGI's clients send when they name no model
MAX_PRIORITY = 100  # and -100 is the least

MediaKinds = frozenset[MediaKind]


_BACKGROUND = b"background:"  # no hash of a key begins so


def background_key(key: bytes) -> bytes:
    """The key under which the requests of a batch are scheduled: they have what those of all other keys leave free."""
    return _BACKGROUND + key


def is_background(key: bytes) -> bool:
    """Whether a key is one under which the requests of a batch are scheduled."""
    return key.startswith(_BACKGROUND)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Maximum of prompt tokens, and of prompt and completion tokens, of one request; the size of the pool in tokens.

    `max_speculate` is the maximum of draft tokens in a step of a request; 0: nothing makes drafts.
    `max_beams` of a beam search; 0 where there is none. `eos_token_ids` end a completion. `media` says which images and
    sounds a prompt may have; a replica keeps features of its `cache_bytes`, and one item has at most `max_span_tokens`
    tokens of the prompt.
    """

    max_input_tokens: int
    max_total_tokens: int
    pool_tokens: int
    max_speculate: int = 0
    block_size: int = 1  # tokens that the pool is shared out by
    max_beams: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    media: MediaFacts | None = None  # None: prompts are text
    max_span_tokens: int = 0  # 0: no bound of its own


@dataclass(frozen=True, slots=True)
class Adapter:
    """One version of an adapter's weights: its name, the folder that shards read, and its id there.

    An id is never given to other weights: it is part of the keys of cached prefixes.
    """

    name: str
    path: str
    id: str


@dataclass(frozen=True, slots=True, eq=False)
class RequestMedia:
    """A media item of a prompt: its place there, and what a shard encodes."""

    span: MediaSpan
    input: MediaInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One validated request: a prompt as tokens, how to sample and when to stop."""

    input_ids: tuple[int, ...]
    sampling: SamplingParams
    stopping: StoppingParams
    prefill_logprobs: bool = False
    output_ids: tuple[int, ...] = ()  # of the completion, known already; `stopping` counts them
    prompt_logprobs: int | None = None  # so many likeliest tokens at each place of the prompt
    top_n_tokens: int = 0
    beams: BeamParams | None = None  # it is searched, not sampled
    inputs: str = ""
    add_special_tokens: bool = True
    shows_special: bool = False  # special tokens are part of the text
    shows_stop: bool = False  # the stop that ended it is part of the text
    cache_salt: str = ""  # only requests of the same salt share computed prefixes,
    cache_owner: bytes = field(default=b"", repr=False)  # and of the same owner; a hash, empty for none
    key: bytes = field(default=b"", repr=False)  # of the API key or token it is charged to; a hash, empty for none
    priority: int = 0  # lower is sooner
    deadline: float | None = None  # instant of the monotonic clock after which the answer is of no use
    adapter: Adapter | None = None  # computes beside the model
    request_id: str = ""  # of its HTTP request, for logs
    key_name: str | None = None  # of its API key
    speculate: int = 0  # maximum of draft tokens that a step verifies
    media: tuple[RequestMedia, ...] = ()  # of the prompt, in the order of their positions
    output_key: str = ""  # shards keep its outputs under this key; empty: they do not
    is_replayed: bool = False  # an earlier router has admitted it,
    was_begun: bool = False  # and has delivered tokens of it


@dataclass(slots=True, eq=False)
class StateRow:
    """Slots that a running sequence of a model with recurrent layers has in the state pool."""

    slot: int  # of its working state
    source: int = 0  # slot that was copied there when it entered; 0: it began with zeros
    num_known: int = 0  # tokens that were known when it entered
    borders: tuple[int, ...] = ()  # numbers of these tokens after which its state is saved, in order
    saves: list[StateSave] = field(default_factory=list)  # of steps that are not committed, in order
    latest: bytes | None = None  # key of the last checkpoint of its completion


@dataclass(slots=True, eq=False)
class Sequence:
    """One growing list of tokens: waiting, running or finished. KV is computed for its first `num_computed` tokens.

    Its fields hold what answered steps have computed; `ahead` includes the steps in flight.
    """

    id: int
    request: Request
    output_ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0  # tokens of the cached prefix when it last entered a step, or arrived
    num_loaded: int = 0  # of these, the ones that were loaded from the lower tier
    swapped: tuple[bytes, ...] = ()  # keys that the lower tier keeps for it since it was preempted
    in_flight: list[int] = field(default_factory=list)  # tokens it computes in each step sent and not yet answered
    arrived: float = 0.0  # in seconds, on a clock that all sequences share
    estimated_seconds: float = 0.0  # until its first token, by the estimate; 0 once it is there
    mirostat_mu: float | None = None  # what mirostat has come to with `output_ids`
    was_started: bool = False  # it has entered a step; if it waits, it was preempted
    num_repeated: int = 0  # computed tokens that were lost, recomputed at no charge
    num_losses: int = 0  # replicas that were lost, in a row, while it ran there and before it got a token
    num_known_at_loss: int = 0  # when the last of them was
    is_broken: bool = False  # its scores were not finite: it has ended
    num_plain_steps: int = 0  # in which it certainly computes a token, needs no block and does not end
    num_opening: int = 0  # tokens that the shards add after the prompt
    state: StateRow | None = None  # while it runs, of a model with recurrent layers
    beams: BeamGroup | None = field(init=False, default=None)  # while it searches they have its tokens
    micro_batch: int = 0  # that it is in while it runs, where several take turns
    has_drafts: bool = True  # the shard was last told so, of a request that may
    num_prompt: int = field(init=False)  # tokens before the completion
    max_known: int = field(init=False)  # tokens that it ends with; of a search those that it has a row of its own for
    _block_keys: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.input_ids) + self.num_opening
        self.max_known = self.num_prompt + self.request.stopping.max_new_tokens
        if self.request.beams is not None:
            self.beams = BeamGroup(self.request.beams)
            self.max_known = self.num_prompt + 1

    @property
    def num_known(self) -> int:
        """Prompt and completion tokens so far."""
        return self.num_prompt + len(self.output_ids)

    @property
    def num_pending(self) -> int:
        """Known tokens without computed KV; one while decoding, more after a forced span."""
        return self.num_prompt + len(self.output_ids) - self.num_computed

    @property
    def is_searching(self) -> bool:
        """Whether beams are rows in its place, and its own has ended with its prompt."""
        return self.beams is not None and bool(self.beams.tables)

    @property
    def num_rows(self) -> int:
        """Rows of the next step that it takes part in: of a search one for each beam."""
        return len(self.beams.search.beams) if self.beams is not None and self.beams.tables else 1

    def ahead(self) -> tuple[int, int]:
        """Return the tokens computed after all steps in flight, and those that the next step may compute.

        A step that computes all known tokens brings one more. It may bring several when tokens are forced, or end the
        sequence early; only its result shows either. Nothing is left to compute when the steps in flight bring the
        last token.
        """
        computed, known = self.num_computed, self.num_known
        for count in self.in_flight:
            computed += count
            known += computed == known
        return computed, 0 if known >= self.max_known else known - computed

    def most_ahead(self, computed: int, num_steps: int = 0) -> int:
        """Return the tokens computed after all steps in flight and `num_steps` more, if all drafts are accepted.

        `computed` are those after these steps if none is. The last token of a sequence is never computed.
        """
        last = self.max_known - 1
        most = computed + self.request.speculate * (len(self.in_flight) + num_steps)
        return max(computed, min(most, last))

    def brings_token(self, computed: int, pending: int) -> bool:
        """Whether the next step brings a token, so that the sequence decodes; takes the values of `ahead`."""
        return pending == 1 or (pending > 0 and computed >= self.num_prompt)

    def note_loss(self) -> None:
        """Count the loss of the replica that it runs on."""
        if self.num_known > self.num_known_at_loss:
            self.num_losses = 0
        self.num_losses += 1
        self.num_known_at_loss = self.num_known

    def afresh(self) -> "Sequence":
        """Copy the sequence with nothing computed, for another replica."""
        repeated = self.num_repeated + self.num_computed
        return replace(
            self,
            output_ids=[] if self.beams is not None else self.output_ids,
            blocks=[],
            in_flight=[],
            num_computed=0,
            num_cached=0,
            num_loaded=0,
            swapped=(),
            num_repeated=repeated,
            num_plain_steps=0,
            state=None,
            has_drafts=True,
        )

    def block_key(self, index: int, block_size: int) -> bytes:
        """Key of the content of block `index`, all of known tokens: SHA-256 over the block before it and its tokens.

        The key before the first is the hash of owner, salt and adapter: those with different ones share nothing. A
        block with tokens of a media item is that of its content, too, and of its place within the item.
        """
        while len(self._block_keys) <= index:
            count = len(self._block_keys)
            parent = self._block_keys[-1] if count else self._root_key()
            first, end = count * block_size, (count + 1) * block_size
            tokens = array("I", self.request.input_ids[first:end])
            num_given = len(self.request.input_ids)
            if end > num_given:  # a block of the completion
                tokens.extend(self.output_ids[max(0, first - num_given) : end - num_given])
            content = parent + tokens.tobytes()
            if self.request.media:
                content += self._media_between(first, end)
            self._block_keys.append(hashlib.sha256(content).digest())
        return self._block_keys[index]

    def _media_between(self, first: int, end: int) -> bytes:
        """The keys of the media items that have tokens in [first, end), each with its place before `first`."""
        media = self.request.media
        pieces = []
        for place in range(bisect_right(media, first, key=lambda each: each.span.end), len(media)):
            span = media[place].span
            if span.position >= end:
                break
            pieces.append(span.key + (first - span.position).to_bytes(8, "little", signed=True))
        return b"".join(pieces)

    def _root_key(self) -> bytes:
        request = self.request
        root = hashlib.sha256(request.cache_owner + request.cache_salt.encode()).digest()
        if request.adapter is None:
            return root
        return hashlib.sha256(root + request.adapter.id.encode()).digest()
