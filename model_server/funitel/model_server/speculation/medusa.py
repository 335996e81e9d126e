"""Medusa: heads behind the target's last layer, each of which predicts the token at a distance of its own.

Source: arXiv 2401.10774; checkpoints as TGI reads them: a head is some blocks x + silu(linear(x)), and a matrix of
logits, or the target's own head where it has none.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.layers.linear import ColumnLinear, Matmul
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.speculation.ends import UNKNOWN, End, RowEnds
from funitel.model_server.speculation.heads import behind_of
from funitel.model_server.speculation.interface import DraftRow
from funitel.model_server.speculation.tables import VocabTables, likeliest
from funitel.proto.errors import WeightsError

_MOST = 64  # heads, and blocks of one


def is_medusa(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is one of such heads."""
    return "medusa_num_heads" in config


class MedusaHeads:
    """The heads. Each rank has their blocks whole and its part of the logits.

    Args:
        folder: of the heads, for messages.
        config: their `config.json`.
        weights: their checkpoint, all of which is taken.
        target: the target's spec.
        tables: of the target.
        parallel: the ranks.

    Raises:
        WeightsError: the heads are for another model, or their checkpoint is not whole.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        weights: Weights,
        target: ModelSpec,
        tables: VocabTables,
        parallel: TensorParallel,
    ) -> None:
        size, vocab = target.hidden_size, target.vocab_size
        counts = config.get("medusa_num_heads"), config.get("medusa_num_layers", 1)
        for name, count in zip(("medusa_num_heads", "medusa_num_layers"), counts, strict=True):
            if not isinstance(count, int) or not 1 <= count <= _MOST:
                raise WeightsError(f"{folder / 'config.json'}: {name} must be within 1..{_MOST}, given {count!r}")
        num_heads, num_blocks = (int(count or 1) for count in counts)
        self._tables = tables
        self._parallel = parallel
        self._vocab_size = vocab
        self._dtype = weights.dtype
        self._blocks: list[list[Matmul]] = []
        self._outs: list[ColumnLinear | None] = []
        try:
            weights.check("0.0.linear.weight", [size, size])
        except WeightsError as error:
            raise WeightsError(
                f"{folder} holds no Medusa heads for {target.architecture} with a hidden size of {size}: "
                f"{error.message}"
            ) from None
        for head in range(num_heads):
            stems = [f"{head}.{block}.linear" for block in range(num_blocks)]
            self._blocks.append(
                [Matmul(weights.read_linear(stem, size, size), weights.read(f"{stem}.bias", [size])) for stem in stems]
            )
            out: ColumnLinear | None = None
            if weights.has_linear(f"{head}.{num_blocks}"):
                part = f"{head}.{num_blocks}", vocab, parallel.split(vocab)
                out = ColumnLinear(weights, [part], size, has_bias=False, is_transposed=False)
            self._outs.append(out)
        weights.finish(())

    def __len__(self) -> int:
        """How many heads there are."""
        return len(self._blocks)

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """States [num_tokens, hidden_size] that heads read, from outputs of the last layer."""
        return self._tables.normed(hidden[:, 0].to(self._dtype))

    def choose(self, states: torch.Tensor, count: int) -> list[list[int]]:
        """What the first `count` heads predict behind each state, by head and row; the same on every rank."""
        found = []
        for blocks, out in zip(self._blocks[:count], self._outs, strict=False):
            x = states
            for block in blocks:
                x = x + F.silu(block(x))
            logits = (
                self._tables.head(x) if out is None else self._parallel.gather_columns(out(x).float(), self._vocab_size)
            )
            found.append(likeliest(logits, len(x), self._parallel, x.device).tolist())
        return found


class MedusaDrafter:
    """See Drafter. It keeps no keys and values: a draft depends on the hidden states of one token."""

    name = "medusa"
    hidden_layers: tuple[int, ...] = (-1,)

    def __init__(self, heads: MedusaHeads, block_size: int) -> None:
        self._heads = heads
        self._ends = RowEnds(block_size)

    def take_pool(self, pool: KVCache | None) -> None:
        """There is another pool for the target: what was observed before is forgotten."""
        self._ends.clear()

    @torch.inference_mode()
    def observe(self, batch: ForwardBatch, next_ids: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """See Drafter."""
        if hidden is None:
            return
        ids, following = batch.input_ids.tolist(), next_ids.tolist()
        places, tokens = [], []
        begin = 0
        for row in batch.rows:
            end = begin + len(row.tokens)
            known = behind_of(ids[begin:end], following[begin:end])
            places.append(begin + len(known) - 1)
            tokens.append((row, row.start + len(known) - 1, known[-1]))
            begin = end
        for (row, position, token), state in zip(tokens, self._heads.enter(hidden[places]), strict=True):
            self._ends.put(row, position, End(token, state))

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """See Drafter."""
        drafts: list[list[int]] = [[] for _ in rows]
        ends = {index: end for index, row in enumerate(rows) if (end := self._ends.of(row)) is not None}
        ready = [index for index, end in ends.items() if end.token in (rows[index].tokens[-1], UNKNOWN)]
        if ready:
            states = torch.stack([ends[index].state for index in ready])
            chosen = self._heads.choose(states, max(rows[index].limit for index in ready))
            for place, index in enumerate(ready):
                drafts[index] = [each[place] for each in chosen[: rows[index].limit]]
        return drafts
