"""Bindings of the C interface of `engine.cpp` by ctypes, which releases the interpreter lock for the time of a call."""

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from funitel.model_server.cpu.build import Functions, open_library
from funitel.model_server.cpu.precision import MatrixKind
from funitel.model_server.cpu.shared_memory_ranks import SharedMemoryRanks
from funitel.model_server.quantized.outliers import Outliers
from funitel.proto.errors import NotEnoughMemory

DONE, NO_MEMORY, LOST_RANK = -1, -2, -3


class Code(IntEnum):
    """Operations of a program."""

    EMBED = 0
    POSITIONS = 1
    NORM = 2
    PREPARE = 3
    LINEAR = 4
    ROTATE = 5
    ATTEND = 6
    ADD = 7
    REDUCE = 8
    SELECT = 9
    NORMALISE = 10
    CLIP = 11
    SQUARES = 12
    CAP = 13
    HOLD = 14
    EXPERTS = 15
    ADD_EXPERTS = 16
    TURN_LATENTS = 17
    ATTEND_LATENTS = 18
    ENTER = 19
    DEEPEN = 20


class Buffer(IntEnum):
    """What operations read and write, a row for each token."""

    X = 0
    QKV = 1
    ATTENDED = 2
    HIDDEN = 3
    PARTIAL = 4
    LOGITS = 5
    HELD = 6
    QUERY_LATENTS = 7
    LATENTS = 8


class Mode(IntEnum):
    """What a linear operation does with its result."""

    STORE = 0
    ACCUMULATE = 1
    ACTIVATE = 2
    GATE = 3
    MULTIPLY = 4


class NativeOperation(ctypes.Structure):
    """One operation; what its operands mean depends on the code, see `program.h`."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("code", "a", "b", "c", "d", "e")),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
    ]


class Shape(ctypes.Structure):
    """Sizes of this rank's share of a model."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            "hidden_size",
            "head_dim",
            "num_heads",
            "num_kv_heads",
            "intermediate_size",
            "num_layers",
            "block_size",
            "kv_kind",
            "num_threads",
            "level_bits",
            "latent_rank",
            "latent_turned",
            "value_dim",
            "query_rank",
        )
    ]


class NormRecord(ctypes.Structure):
    """One norm; see `norms.h`."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("weight", "bias", "is_layer", "head_stride", "whole_size")),
        ("eps", ctypes.c_float),
    ]


class MixtureRecord(ctypes.Structure):
    """One layer's experts; see `experts.h`."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("router", "correction", "first")),
        *((name, ctypes.c_int32) for name in ("num_experts", "num_chosen", "num_groups", "num_chosen_groups")),
        *((name, ctypes.c_int32) for name in ("group_depth", "is_sigmoid", "is_normalized", "has_shared", "has_share")),
        *((name, ctypes.c_int32) for name in ("is_gated", "activation", "first_held", "num_held")),
        ("scale", ctypes.c_float),
    ]


class PieceRecord(ctypes.Structure):
    """Outputs of a matrix that grow by an adapter; see `low_rank.h`."""

    _fields_ = [
        ("b", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("first_rank", "rank", "part", "first_panel", "num_panels")),
    ]


class SiteRecord(ctypes.Structure):
    """What an adapter has of a matrix."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "scales", "pieces", "whole")),
        *((name, ctypes.c_int32) for name in ("num_ranks", "num_pieces")),
    ]


class TableRecord(ctypes.Structure):
    """What an adapter has of the embedding."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "whole")),
        ("scale", ctypes.c_float),
        ("num_ranks", ctypes.c_int32),
    ]


class AdapterRecord(ctypes.Structure):
    """An adapter: its sites by the index of the matrix, and the embedding."""

    _fields_ = [("sites", ctypes.c_void_p), ("table", TableRecord), ("kind", ctypes.c_int32)]


class Batch(ctypes.Structure):
    """One step's rows and where its results go; the caller keeps the memory alive."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_rows", "num_logits", "logits_stride")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "token_ids",
                "logit_indices",
                "starts",
                "lengths",
                "blocks",
                "table_starts",
                "pool",
                "x",
                "partial",
                "logits",
                "adapters",
                "rotary",
                "visible_ends",
                "features",
            )
        ),
        ("num_deep", ctypes.c_int32),
    ]


def load_library(cache_dir: Path, instruction_set: str | None = None) -> ctypes.CDLL:
    """Load the fused step for this CPU; see `open_library`."""
    number, size, address = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    functions: Functions = {
        "funitel_engine": (address, [address]),
        "funitel_release": (None, [address]),
        "funitel_num_threads": (number, [address]),
        "funitel_set_threads": (number, [address, number, number]),
        "funitel_reserve": (number, [address, size]),
        "funitel_matrix": (number, [address, *[number] * 4]),
        "funitel_rows": (None, [address, *[number] * 4, address, size, size, address]),
        "funitel_blocks": (None, [address, *[number] * 4, address, size, address]),
        "funitel_outliers": (number, [address, *[number] * 4, *[address] * 3]),
        "funitel_outliers_done": (size, [address, number]),
        "funitel_matrix_done": (size, [address, number]),
        "funitel_vector": (number, [address, address, size]),
        "funitel_norm": (number, [address, address]),
        "funitel_turn": (number, [address, address, number, ctypes.c_float, number, address]),
        "funitel_mixture": (number, [address, address]),
        "funitel_observe": (None, [address, address]),
        "funitel_key_frames": (number, [address, address, address, address, address, size, size]),
        "funitel_layer_bytes": (size, [address]),
        "funitel_bytes_read": (size, [address]),
        "funitel_program": (None, [address, address, number]),
        "funitel_join": (None, [address, address]),
        "funitel_run": (number, [address, address, number]),
        "funitel_allow_scores": (None, [address, address, number, number, address]),
        "funitel_warp_scores": (number, [address, address, address, number, number, address]),
        "funitel_best_scores": (None, [address, address, number, number, address, address]),
        "funitel_likeliest": (None, [address, address, number, number, address, address]),
        "funitel_draw_scores": (None, [address, address, address, number, number, address, address]),
        "funitel_ranks_bytes": (size, [number]),
        "funitel_ranks": (address, [number, number, number, size]),
        "funitel_ranks_release": (None, [address]),
        "funitel_ranks_lost_rank": (number, [address]),
        "funitel_ranks_sum": (number, [address, address, size]),
        "funitel_ranks_broadcast": (number, [address, address, size, number]),
        "funitel_ranks_gather": (number, [address, address, number, address, address]),
    }
    return open_library(cache_dir, functions, instruction_set)


class Warp(ctypes.Structure):
    """How one row of scores is warped before a draw; see `scores.h`."""

    _fields_ = [
        *((name, ctypes.c_float) for name in ("temperature", "top_p", "min_score", "typical_p")),
        ("top_k", ctypes.c_int32),
    ]


class NativeEngine:
    """One engine with its threads and weights; released with the object."""

    def __init__(self, library: ctypes.CDLL, shape: Shape) -> None:
        self._library = library
        self._ranks: SharedMemoryRanks | None = None
        self._handle = library.funitel_engine(ctypes.byref(shape))
        if not self._handle:
            raise NotEnoughMemory("there is no memory for the threads of the CPU engine")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.funitel_release(self._handle)
            self._handle = None

    @property
    def num_threads(self) -> int:
        """Threads that compute, the calling one included."""
        return int(self._library.funitel_num_threads(self._handle))

    def set_threads(self, num_threads: int, spin_us: int) -> None:
        """Compute on so many threads from the next step on, which spin for so many microseconds before they sleep."""
        _checked(self._library.funitel_set_threads(self._handle, num_threads, spin_us), "threads")

    def reserve(self, num_bytes: int) -> None:
        """Make room for the weights of all matrices, before the first; what does not fit gets memory of its own."""
        _checked(self._library.funitel_reserve(self._handle, num_bytes), "weights")

    def add_matrix(
        self, kind: MatrixKind, num_outputs: int, num_inputs: int, parts: Sequence[Sequence[tuple[torch.Tensor, Any]]]
    ) -> tuple[int, int]:
        """Pack a matrix and return its index and its bytes.

        Args:
            parts: one, or gate and up; each a list of (weight, bias or None), which together have `num_outputs`
                outputs: float32 [outputs, num_inputs], or of kinds that are as in a GGUF uint8 [outputs, bytes].
        """
        index = _checked(
            self._library.funitel_matrix(self._handle, kind, num_outputs, num_inputs, len(parts)), "weights"
        )
        for number, part in enumerate(parts):
            first = 0
            for weight, bias in part:
                place = self._handle, index, number, first, weight.shape[0], weight.data_ptr()
                biases = None if bias is None else bias.data_ptr()
                if kind.has_blocks:
                    self._library.funitel_blocks(*place, weight.stride(0), biases)
                else:
                    self._library.funitel_rows(*place, *weight.stride(), biases)
                first += weight.shape[0]
        return index, int(self._library.funitel_matrix_done(self._handle, index))

    def add_outliers(self, index: int, parts: Sequence[Sequence[tuple[int, Outliers | None]]]) -> int:
        """Give a matrix of blocks its outliers and return their bytes.

        Args:
            index: of the matrix, before the program is set.
            parts: as those of `add_matrix`, each a list of (outputs, their outliers or None).
        """
        for number, part in enumerate(parts):
            first = 0
            for num_outputs, found in part:
                if found is not None:
                    place = self._handle, index, number, first, num_outputs
                    pointers = found.starts.data_ptr(), found.columns.data_ptr(), found.deltas.data_ptr()
                    _checked(self._library.funitel_outliers(*place, *pointers), "weights")
                first += num_outputs
        return _checked(int(self._library.funitel_outliers_done(self._handle, index)), "weights")

    def add_vector(self, values: torch.Tensor) -> int:
        """Copy a float32 tensor and return its index."""
        values = values.contiguous()
        return _checked(self._library.funitel_vector(self._handle, values.data_ptr(), values.numel()), "weights")

    def add_norm(self, norm: NormRecord) -> int:
        """Add a norm and return its index."""
        return _checked(self._library.funitel_norm(self._handle, ctypes.byref(norm)), "weights")

    def add_turn(
        self, frequencies: torch.Tensor, amplitude: float, *, is_interleaved: bool, axes: Sequence[int] = ()
    ) -> int:
        """Add rotary positions with a frequency for each pair, [pairs] float32, and return their index.

        `axes` say by which of its token's positions each pair turns; empty where tokens have one position.
        """
        values = frequencies.contiguous()
        place = values.data_ptr(), values.numel()
        by_axis = (ctypes.c_int32 * len(axes))(*axes) if axes else None
        return _checked(self._library.funitel_turn(self._handle, *place, amplitude, is_interleaved, by_axis), "weights")

    def add_mixture(self, mixture: MixtureRecord) -> int:
        """Add a mixture of experts, its matrices being there, and return its index."""
        return _checked(self._library.funitel_mixture(self._handle, ctypes.byref(mixture)), "weights")

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer's keys and values in a block of the pool, where it keeps heads."""
        return int(self._library.funitel_layer_bytes(self._handle))

    def observe(self, sums: torch.Tensor | None) -> None:
        """Add up queries and keys of the steps to come in float64 `sums`, see `key_frames`; None to stop."""
        self._library.funitel_observe(self._handle, None if sums is None else sums.data_ptr())

    def set_key_frames(
        self, shifts: torch.Tensor, first_shifts: torch.Tensor, key_maps: torch.Tensor, query_maps: torch.Tensor
    ) -> None:
        """Change keys before they become codes, and queries so that their products stay; contiguous float32.

        Args:
            shifts, first_shifts: [layers, heads, dim], what is taken away from keys, and from that of the first token.
            key_maps, query_maps: [layers, heads, dim, dim], by which keys and queries are multiplied from the left.
        """
        maps = [each.transpose(-1, -2).contiguous() for each in (key_maps, query_maps)]  # input by input
        pointers = [each.data_ptr() for each in (shifts, first_shifts, *maps)]
        _checked(self._library.funitel_key_frames(self._handle, *pointers, shifts.numel(), key_maps.numel()), "weights")

    @property
    def bytes_read(self) -> int:
        """Bytes of the weights that the products of the last step have read: of experts those that some row passed."""
        return int(self._library.funitel_bytes_read(self._handle))

    def set_program(self, operations: Sequence[NativeOperation]) -> None:
        """Say what a step does."""
        program = (NativeOperation * len(operations))(*operations)
        self._library.funitel_program(self._handle, program, len(operations))

    def join(self, ranks: SharedMemoryRanks) -> None:
        """Sum over ranks in shared memory, so that `run` does not return for it."""
        self._ranks = ranks
        self._library.funitel_join(self._handle, ranks.handle)

    def run(self, batch: Batch, at: int) -> int:
        """Run the program from operation `at`; returns where to go on after a reduction, or DONE."""
        result = _checked(self._library.funitel_run(self._handle, ctypes.byref(batch), at), "this step")
        if result == LOST_RANK and self._ranks is not None:
            raise self._ranks.lost()
        return result

    # Scores: [rows, vocab_size] float32, contiguous. See `scores.h`.

    def allow_scores(self, scores: torch.Tensor, bits: Sequence[int | None]) -> None:
        """Make -inf of what is not a number, and in rows that have `bits` (an address) of tokens without theirs."""
        pointers = (ctypes.c_void_p * len(bits))(*bits)
        self._library.funitel_allow_scores(self._handle, scores.data_ptr(), *scores.shape, pointers)

    def warp_scores(self, scores: torch.Tensor, rows: Sequence[int], warps: Sequence[Warp]) -> None:
        """Warp some rows in place."""
        numbers, records = (ctypes.c_int64 * len(rows))(*rows), (Warp * len(rows))(*warps)
        result = self._library.funitel_warp_scores(
            self._handle, scores.data_ptr(), numbers, len(rows), scores.shape[1], records
        )
        _checked(result, "sampling")

    def best_scores(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The best token of every row, [rows] int64, and the log of the sum of exponentials, [rows] float32."""
        tokens, normalisers = torch.empty(len(scores), dtype=torch.int64), torch.empty(len(scores))
        self._library.funitel_best_scores(
            self._handle, scores.data_ptr(), *scores.shape, tokens.data_ptr(), normalisers.data_ptr()
        )
        return tokens, normalisers

    def likeliest(self, scores: torch.Tensor) -> tuple[list[int], list[float]]:
        """The best token of every row, and its log-probability: NaN of a broken row. Allows as `allow_scores`."""
        tokens, logprobs = (ctypes.c_int32 * len(scores))(), (ctypes.c_float * len(scores))()
        self._library.funitel_likeliest(self._handle, scores.data_ptr(), *scores.shape, tokens, logprobs)
        return tokens[:], logprobs[:]

    def draw_scores(self, scores: torch.Tensor, rows: Sequence[int], keys: Sequence[int]) -> torch.Tensor:
        """A token for some rows, [len(rows)] int64, by noise from 64-bit keys."""
        numbers, seeds = (ctypes.c_int64 * len(rows))(*rows), (ctypes.c_uint64 * len(rows))(*keys)
        tokens = torch.empty(len(rows), dtype=torch.int64)
        self._library.funitel_draw_scores(
            self._handle, scores.data_ptr(), numbers, len(rows), scores.shape[1], seeds, tokens.data_ptr()
        )
        return tokens


def _checked(result: int, what: str) -> int:
    if result == NO_MEMORY:
        raise NotEnoughMemory(f"there is no memory left for {what}")
    return result
