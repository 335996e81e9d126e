"""The fused decoder: the same call and results as `models/decoder`, in one call into C++; and its logits processors."""

import ctypes
import hashlib
import math
from array import array
from collections.abc import Sequence

import numpy as np
import torch

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.footprint import has_partial
from funitel.model_server.cpu.low_rank import addresses
from funitel.model_server.cpu.native import DONE, Batch, Buffer, NativeEngine, Warp
from funitel.model_server.cpu.precision import ActivationDtype, KvKind, Tier
from funitel.model_server.cpu.program import Program
from funitel.model_server.cpu.shared_memory_ranks import SharedMemoryRanks
from funitel.model_server.device.stages import StageLink
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.key_frames import frames_of, num_sums
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.kv_cache.precision import KvCodes, KvDtype
from funitel.model_server.sampling.grammar import TokenMasks
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.proto.step import SamplingParams

KV_DTYPES: dict[KvKind, KvDtype] = {
    KvKind.FLOAT32: torch.float32,
    KvKind.FLOAT16: torch.float16,
    KvKind.BFLOAT16: torch.bfloat16,
    KvKind.FP8_E4M3FN: torch.float8_e4m3fn,
    KvKind.FP8_E5M2: torch.float8_e5m2,
    KvKind.INT8: KvCodes.INT8,
    KvKind.UINT4: KvCodes.UINT4,
}
"""Precision of a pool of each kind."""


class FusedDecoder:
    """This rank's share of the model in C++. `weights` must give float32; the tier says what becomes of it.

    `link` passes hidden states between pipeline stages, where there are several.

    A row's logits have the same bits alone, in company, and in chunks of any size, on any number of threads.
    """

    name = "fused"
    frames_digest = ""  # of what is done to keys before they become codes, where something is
    _sums: torch.Tensor | None = None  # of queries and keys, while they are observed

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        parallel: TensorParallel,
        library: ctypes.CDLL,
        *,
        tier: Tier,
        block_size: int,
        num_threads: int,
        activations: ActivationDtype = ActivationDtype.INT8,
        kv_kind: KvKind | None = None,
        link: StageLink | None = None,
    ) -> None:
        self.tier = tier
        self._link = link
        self._spec = spec
        self.block_size = block_size
        self.program = Program(
            spec,
            weights,
            parallel,
            library,
            tier=tier,
            block_size=block_size,
            num_threads=num_threads,
            activations=activations,
            kv_kind=kv_kind,
        )
        self._engine = self.program.engine
        self._parallel = parallel
        if isinstance(parallel, SharedMemoryRanks):
            self._engine.join(parallel)
        self._has_partial = has_partial(spec, parallel)
        self._vocab_size = spec.vocab_size
        start, end = parallel.split(spec.vocab_size)
        self._local_vocab = end - start
        self._hidden_size = spec.hidden_size
        self.num_layers = spec.num_layers
        self._keeps_last = False

    @property
    def num_threads(self) -> int:
        """Threads that compute, the calling one included."""
        return self._engine.num_threads

    @property
    def has_blocks(self) -> bool:
        """Whether some matrix is kept as a GGUF has it."""
        return self.tier is Tier.GGUF and any(kind is not self.tier.kind for kind in self.program.kinds.values())

    @property
    def kv_dtype(self) -> KvDtype:
        """Precision the pool must have."""
        return KV_DTYPES[self.program.kv_kind]

    @property
    def has_key_frames(self) -> bool:
        """Whether keys are to have frames: with codes of 8 bits, and without codes, errors are small without."""
        return self.program.kv_kind is KvKind.UINT4

    def observe_keys(self) -> None:
        """Add up the queries and keys of the forwards to come."""
        dim = self._spec.head_dim
        shape = self.program.num_kv_layers, self.program.num_kv_heads, num_sums(dim)
        self._sums = torch.zeros(shape, dtype=torch.float64)
        self._engine.observe(self._sums)

    def frame_keys(self, num_tokens: int, num_first: int) -> None:
        """Set the frames of keys by what was observed, of so many first tokens of sequences and so many others."""
        assert self._sums is not None
        self._engine.observe(None)
        frames = frames_of(self._sums, num_tokens, num_first, self._spec.head_dim)
        self._engine.set_key_frames(*frames)
        self.frames_digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in frames)).hexdigest()[:16]
        self._sums = None

    def keep_hidden(self, layers: Sequence[int]) -> None:
        """See KeepingForward; only the last layer's outputs are there."""
        if any(layer not in (-1, self.num_layers - 1) for layer in layers):
            raise ValueError(f"the fused step keeps the outputs of the last layer alone, asked for {list(layers)}")
        self._keeps_last = bool(layers)

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor | None:
        """Run one forward; logits [len(batch.logit_indices), vocab_size] float32 on rank 0, None elsewhere."""
        num_logits = batch.logit_indices.shape[0] if self._spec.is_last else 0
        x = torch.empty(batch.num_tokens, self._hidden_size)
        link = None if self.program.is_limited else self._link
        if not self._spec.is_first:
            self._enter(x, link)
        partial = torch.empty_like(x) if self._has_partial else x
        logits = torch.empty(num_logits, self._local_vocab)
        # Arrays of Python's own: for few rows these cost a fraction of what numpy's do.
        starts = array("i", [row.start for row in batch.rows])
        lengths = array("i", [len(row.tokens) for row in batch.rows])
        adapters = addresses(batch) if batch.adapters else None
        tables, table_starts = array("i"), array("i")
        has_media = False
        for row in batch.rows:
            table_starts.append(len(tables))
            tables.frombytes(row.block_table[: -(-row.end // self.block_size)].tobytes())
            if row.media or row.whole_spans or row.rotary is not None:
                has_media = True
        request = Batch(
            num_tokens=batch.num_tokens,
            num_rows=len(batch.rows),
            num_logits=num_logits,
            logits_stride=self._local_vocab,
            token_ids=batch.input_ids.data_ptr(),
            logit_indices=batch.logit_indices.data_ptr(),
            starts=_address(starts),
            lengths=_address(lengths),
            blocks=_address(tables),
            table_starts=_address(table_starts),
            pool=cache.pool.data_ptr(),
            x=x.data_ptr(),
            partial=partial.data_ptr(),
            logits=logits.data_ptr(),
            adapters=None if adapters is None else _address(adapters),
        )
        if has_media:
            media = _MediaArrays(batch)
            media.enter(request)
            if media.has_features:
                self.program.take_features()
        at = self._engine.run(request, 0)
        while at != DONE:
            buffer, width = self.program.reduced_at(at)
            whole = x if buffer is Buffer.X else partial
            self._parallel.all_reduce(whole.view(-1)[: batch.num_tokens * width])
            at = self._engine.run(request, at)
        if link is not None and not self._spec.is_last:
            link.send(x)
            return None
        if self._keeps_last:
            batch.kept.append(x)
        return self._parallel.gather_columns(logits, self._vocab_size) if num_logits else None

    def _enter(self, x: torch.Tensor, link: StageLink | None) -> None:
        """Take the hidden states that enter the first layer here; zeros where it is only timed."""
        if link is None:
            x.zero_()
        else:
            link.receive(x)


def _address(values: "array[int]") -> int:
    return values.buffer_info()[0]


class _MediaArrays:
    """Features, rotary positions and spans seen whole of a batch, as arrays that a request points to."""

    def __init__(self, batch: ForwardBatch) -> None:
        num_tokens = batch.num_tokens
        self._rotary = _int32(batch.rotary, (3, num_tokens))
        self._visible_ends = _int32(batch.host_visible_ends, (num_tokens,))
        self._kept: list[torch.Tensor] = []  # what `_features` point to
        items = [each for row in batch.rows for each in row.media]
        num_deep = max([len(each.deep) for each in items], default=0)
        self._features = np.zeros((1 + num_deep, num_tokens), dtype=np.uintp) if items else None
        first = 0
        for row in batch.rows:
            for each in row.media:
                self._place(first + each.places, (each.features, *each.deep))
            first += len(row.tokens)

    def _place(self, tokens: np.ndarray, features: Sequence[torch.Tensor]) -> None:
        """Note where the features of some tokens lie: those in place of embeddings, then those behind each layer."""
        assert self._features is not None
        for line, each in zip(self._features, features, strict=False):
            numbers = each.float().contiguous()
            assert len(numbers) == len(tokens), "each token has features"
            row_bytes = numbers.shape[1] * numbers.itemsize
            line[tokens] = numbers.data_ptr() + np.arange(len(numbers), dtype=np.uintp) * row_bytes
            self._kept.append(numbers)

    @property
    def has_features(self) -> bool:
        """Whether a token has features in place of its embedding."""
        return self._features is not None

    def enter(self, request: Batch) -> None:
        """Point a request to them; they are to outlive its step."""
        request.rotary = None if self._rotary is None else self._rotary.ctypes.data
        request.visible_ends = None if self._visible_ends is None else self._visible_ends.ctypes.data
        if self._features is not None:
            request.features, request.num_deep = self._features.ctypes.data, len(self._features) - 1


def _int32(values: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray | None:
    """Values of a shape that they are repeated to."""
    return None if values is None else np.ascontiguousarray(np.broadcast_to(values, shape), dtype=np.int32)


class FusedLogitsProcessors:
    """Rows of scores on the threads of an engine. Kept tokens are those of `TorchLogitsProcessors`, up to rounding."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine

    def allow(self, scores: torch.Tensor, masks: TokenMasks | None) -> None:
        """See `LogitsProcessors`."""
        bits: list[int | None] = [None] * len(scores)
        if masks is not None:
            for place, row in enumerate(masks.rows):
                bits[row] = masks.bits[place].ctypes.data
        self._engine.allow_scores(scores, bits)

    def warp(self, scores: torch.Tensor, rows: Sequence[int], params: Sequence[SamplingParams]) -> None:
        """See `LogitsProcessors`."""
        self._engine.warp_scores(scores, rows, [_record(p) for p in params])

    def best(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LogitsProcessors`."""
        return self._engine.best_scores(scores)

    def likeliest(self, scores: torch.Tensor) -> tuple[list[int], list[float]]:
        """See `LogitsProcessors`."""
        return self._engine.likeliest(scores)

    def draw(self, scores: torch.Tensor, rows: Sequence[int], keys: Sequence[int]) -> torch.Tensor:
        """See `LogitsProcessors`."""
        return self._engine.draw_scores(scores, rows, keys)


def _record(params: SamplingParams) -> Warp:
    return Warp(
        temperature=params.temperature,
        top_p=params.top_p,
        min_score=math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
        typical_p=params.typical_p,
        top_k=params.top_k,
    )
