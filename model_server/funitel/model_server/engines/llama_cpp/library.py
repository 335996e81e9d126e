"""llama.cpp's C API as two objects: a model, and a context of sequences that are decoded together.

The package llama-cpp-python, which holds the library, is imported when a model is opened. Nothing here knows the wire.
"""

import ctypes
import logging
import weakref
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from funitel.proto.errors import NotEnoughMemory, StepFailed, UnsupportedModel, WeightsError
from funitel.proto.extras import check_extra

logger = logging.getLogger(__name__)

EXTRA = "llama-cpp"
MAX_BATCH_TOKENS = 512  # of one decode call; longer steps are several calls
_NO_SLOT, _ABORTED = 1, 2  # results of llama_decode
_ERROR = 4  # ggml's log level
_MAX_SAID = 300  # characters of a line of the library in an error

Ints = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]


class _Log:
    """The library's log: its lines go to ours, for debugging, and the errors of a call are kept for a message."""

    def __init__(self, api: Any) -> None:
        self.errors: list[str] = []
        self._part = ""
        self._callback = api.llama_log_callback(self._take)  # kept, or it would be freed
        api.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _take(self, level: int, text: bytes, _data: object) -> None:
        self._part += text.decode(errors="replace")
        *lines, self._part = self._part.split("\n")
        for line in filter(None, map(str.strip, lines)):
            if level == _ERROR:
                self.errors.append(line[:_MAX_SAID])
            logger.debug("llama.cpp: %s", line)

    def reason(self) -> str:
        """Why the latest call failed: the first error that it logged."""
        return self.errors[0] if self.errors else "it does not say why"


_loaded: list[tuple[Any, _Log]] = []


def _library() -> tuple[Any, _Log]:
    """The C API and its log.

    Raises:
        MissingPackage: the extra is not installed.
    """
    if not _loaded:
        check_extra(EXTRA, "--engine llama_cpp")
        api = import_module("llama_cpp.llama_cpp")
        log = _Log(api)
        api.llama_backend_init()
        _loaded.append((api, log))
    return _loaded[0]


def library_version() -> str:
    """The release of the package."""
    return str(import_module("llama_cpp").__version__)


class LlamaModel:
    """The weights of a GGUF, mapped into memory, and what is to be known of them.

    Raises:
        MissingPackage: the extra is not installed.
        UnsupportedModel: the model generates no text, or not from its own tokens alone.
        WeightsError: llama.cpp cannot load the file.
    """

    def __init__(self, path: Path) -> None:
        self._api, log = _library()
        params = self._api.llama_model_default_params()
        params.n_gpu_layers = 0
        log.errors.clear()
        self.handle = self._api.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise WeightsError(f"llama.cpp cannot load {path}: {log.reason()}")
        weakref.finalize(self, self._api.llama_model_free, self.handle)
        self.vocab_size = int(self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self.handle)))
        self.context = int(self._api.llama_model_n_ctx_train(self.handle))  # tokens
        self.num_bytes = int(self._api.llama_model_size(self.handle))
        self.architecture = self._text("general.architecture")
        if self._api.llama_model_has_encoder(self.handle):
            raise UnsupportedModel(f"{path}: {self.architecture} has an encoder; --engine llama_cpp is for decoders")
        if self._text(f"{self.architecture}.attention.causal") == "false":
            raise UnsupportedModel(f"{path}: {self.architecture} generates no text; --engine llama_cpp is for decoders")

    def is_end(self, token_id: int) -> bool:
        """Whether a token ends a completion, by the file's vocabulary."""
        vocab = self._api.llama_model_get_vocab(self.handle)
        return bool(self._api.llama_vocab_is_eog(vocab, token_id))

    def _text(self, key: str) -> str:
        buffer = ctypes.create_string_buffer(256)
        found = self._api.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return buffer.value.decode(errors="replace") if found >= 0 else ""

    def measure(self) -> "KeptBytes":
        """What the context keeps of sequences, measured by what it says of one of two lengths.

        Raises:
            StepFailed: the model does not decode.
        """
        context = LlamaContext(self, num_tokens=2 * _PROBED, num_sequences=1, num_threads=1)
        sizes, tokens = [], np.zeros(_PROBED, dtype=np.int32)
        for begin, end in ((0, 1), (1, 1 + _PROBED)):
            positions = np.arange(begin, end, dtype=np.int32)
            context.decode(tokens[: end - begin], positions, np.zeros_like(positions), np.zeros(end - begin, np.bool_))
            sizes.append(context.state_bytes(0))
        a_token = (sizes[1] - sizes[0]) // _PROBED
        return KeptBytes(a_token=max(1, a_token), a_sequence=max(0, sizes[0] - a_token))


_PROBED = 64  # tokens


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """What a context keeps: of each token of a sequence, and of a sequence however long it is."""

    a_token: int
    a_sequence: int


class LlamaContext:
    """Sequences of one model in one memory of `num_tokens`, which they share as they need.

    Args:
        num_sequences: those that can be in it at once; their numbers are below it.
        num_threads: that compute.

    Raises:
        NotEnoughMemory: there is none for it.
    """

    def __init__(self, model: LlamaModel, *, num_tokens: int, num_sequences: int, num_threads: int) -> None:
        self._api, log = _library()
        self._model = model  # outlives the context
        self.num_sequences = num_sequences
        params = self._api.llama_context_default_params()
        params.n_ctx = num_tokens
        params.n_batch = params.n_ubatch = MAX_BATCH_TOKENS
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = num_threads
        params.kv_unified = True
        params.no_perf = True
        log.errors.clear()
        self._handle = self._api.llama_init_from_model(model.handle, params)
        if not self._handle:
            raise NotEnoughMemory(f"llama.cpp makes no context of {num_tokens} tokens: {log.reason()}")
        weakref.finalize(self, self._api.llama_free, self._handle)
        self._memory = self._api.llama_get_memory(self._handle)
        self._batch = _Batch(self._api)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence that are computed."""
        return int(self._api.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def forget(self, sequence: int, begin: int = 0) -> None:
        """Let go of a sequence, or of its tokens from `begin` on.

        Raises:
            StepFailed: the model keeps a state, which cannot be wound back.
        """
        if not self._api.llama_memory_seq_rm(self._memory, sequence, begin or -1, -1):
            raise StepFailed(f"llama.cpp cannot take a sequence of {self.length(sequence)} tokens back to {begin}")

    def state_bytes(self, sequence: int) -> int:
        """What is kept of a sequence."""
        return int(self._api.llama_state_seq_get_size(self._handle, sequence))

    def decode(self, tokens: Ints, positions: Ints, sequences: Ints, wanted: npt.NDArray[np.bool_]) -> Logits:
        """Compute tokens of several sequences; logits [wanted tokens, vocab_size] in the order of the tokens.

        Raises:
            StepFailed: it fails; what is kept of the sequences is then not defined.
        """
        parts = []
        for begin in range(0, len(tokens), MAX_BATCH_TOKENS):
            part = slice(begin, begin + MAX_BATCH_TOKENS)
            batch = self._batch.fill(tokens[part], positions[part], sequences[part], wanted[part])
            result = self._api.llama_decode(self._handle, batch)
            if result:
                raise StepFailed(f"llama.cpp: {_FAILURES.get(result, f'decoding failed ({result})')}")
            if count := int(wanted[part].sum()):
                found = self._api.llama_get_logits(self._handle)
                parts.append(np.ctypeslib.as_array(found, shape=(count, self._model.vocab_size)).copy())
        if not parts:
            return np.empty((0, self._model.vocab_size), dtype=np.float32)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


_FAILURES = {_NO_SLOT: "there is no room for the tokens of the step", _ABORTED: "the step was aborted"}


class _Batch:
    """The arrays of a `llama_batch`, filled anew for each call."""

    def __init__(self, api: Any) -> None:
        size = MAX_BATCH_TOKENS
        self._tokens, self._positions, self._sequences = (np.zeros(size, dtype=np.int32) for _ in range(3))
        self._num_sequences = np.ones(size, dtype=np.int32)  # that a token belongs to
        self._wanted = np.zeros(size, dtype=np.int8)
        first = self._sequences.ctypes.data
        self._pointers = np.arange(first, first + 4 * size, 4, dtype=np.uintp)
        self._batch = batch = api.llama_batch()
        given: dict[str, npt.NDArray[Any]] = {
            "token": self._tokens,
            "pos": self._positions,
            "n_seq_id": self._num_sequences,
            "seq_id": self._pointers,
            "logits": self._wanted,
        }
        for name, kind in batch._fields_:
            if name in given:
                setattr(batch, name, ctypes.cast(given[name].ctypes.data, kind))

    def fill(self, tokens: Ints, positions: Ints, sequences: Ints, wanted: npt.NDArray[np.bool_]) -> Any:
        """The batch with these tokens."""
        count = len(tokens)
        self._tokens[:count], self._positions[:count], self._sequences[:count] = tokens, positions, sequences
        self._wanted[:count] = wanted
        self._batch.n_tokens = count
        return self._batch
