"""A model loaded as for serving, over a KV pool for one sequence: the logits of a window's tokens."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from funitel.model_server.device.memory import release_memory
from funitel.model_server.executor.executor import Executor
from funitel.model_server.executor.prompt_scores import max_scored_tokens
from funitel.model_server.forward.batch import RowSpan
from funitel.model_server.kv_cache.precision import kv_label
from funitel.model_server.kv_cache.state_pool import StatePool
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.step import ShardInfo

STATE_SLOT = 1  # 0 is no sequence's


class Subject:
    """A model that is measured, or the reference.

    It runs the forward of serving over a pool in the precision of serving: attention reads keys and values from the
    blocks, as it does for a prompt that comes in chunks.

    Attributes:
        name: of its row in the results.
        info: what a shard of this model tells the router.
        num_tokens: tokens computed so far.
        seconds: time that this took.
    """

    def __init__(self, name: str, executor: Executor, info: ShardInfo) -> None:
        self.name = name
        self.info = info
        self.num_tokens = 0
        self.seconds = 0.0
        self._executor = executor
        self._table = np.zeros(0, dtype=np.int32)

    @classmethod
    def load(cls, name: str, settings: ModelServerSettings, folder: Path) -> "Subject":
        """Load the model of a folder. Raises: StartupError, see `load_generator`."""
        return cls(name, *load_generator(settings, folder))

    @property
    def context(self) -> int:
        """The most tokens of a window."""
        return self._executor.spec.max_position_embeddings

    @property
    def vocab_size(self) -> int:
        """Columns of its logits."""
        return self._executor.spec.vocab_size

    @property
    def kv_precision(self) -> str:
        """Precision of the pool."""
        return kv_label(self._executor.options.dtype)

    def reserve(self, window: int) -> None:
        """Make the pool, for a window of so many tokens."""
        runner = self._executor.runner
        num_blocks = -(-window // runner.options.block_size)
        self._table = np.arange(1, 1 + num_blocks, dtype=np.int32)  # block 0 is no sequence's
        runner.cache = runner.pools.make(1 + num_blocks)
        if runner.pools.state_layout is not None:
            runner.cache.state_pool = StatePool(runner.pools.state_layout, 1 + STATE_SLOT, runner.options.device)

    @torch.inference_mode()
    def forward(self, ids: Sequence[int], begin: int, end: int, wanted: str) -> torch.Tensor | None:
        """Compute the tokens [begin, end) of a window, behind those before it, which are in the pool.

        Args:
            ids: the whole window.
            begin, end: what to compute.
            wanted: "all" or "none".

        Returns: logits [end - begin, vocab_size] float32; where none are wanted, None or no rows.
        """
        span = RowSpan(ids[begin:end], begin, self._table, wanted, prompt_len=len(ids), state_slot=STATE_SLOT)
        started = time.perf_counter()
        logits = self._executor.runner.forward([span])
        if self._executor.options.device.type == "cuda":
            torch.cuda.synchronize(self._executor.options.device)
        self.seconds += time.perf_counter() - started
        self.num_tokens += end - begin
        return logits

    def close(self) -> None:
        """Let go of the pool and the weights."""
        device = self._executor.options.device
        self._executor.profiler.free()
        del self._executor
        release_memory(device)


def pieces_of(length: int, num_context: int, vocab_size: int) -> Iterator[tuple[int, int, str]]:
    """The forwards of a window of `length` tokens, as `begin`, `end` and `wanted` of `Subject.forward`.

    Logits are of bounded memory, as in a step that scores a prompt. The last token predicts nothing that is known, and
    is not computed; logits of token t score token t + 1, so the last token of the context has logits.
    """
    if num_context > 1:
        yield 0, num_context - 1, "none"
    most = max_scored_tokens(vocab_size)
    for begin in range(num_context - 1, length - 1, most):
        yield begin, min(begin + most, length - 1), "all"
