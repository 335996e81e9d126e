"""Attention through two backends: one for rows that decode, one for prompts."""

from dataclasses import dataclass
from typing import Any

import torch

from funitel.model_server.attention.backend import AttentionBackend, AttentionRule, RecordableAttention
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.pool import KVCache


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The first `num_decode` tokens of a step are rows that decode; a part without tokens has no plan."""

    num_decode: int
    decode: Any
    prompts: Any


class SplitAttention:
    """Rows that decode, which come first, through `decode`; those with more tokens through `prompts`.

    Where `is_for_fresh` the latter is for prompts from their beginning: a step with any other takes `decode` alone.
    """

    def __init__(self, decode: RecordableAttention, prompts: AttentionBackend, *, is_for_fresh: bool) -> None:
        self.name = f"{decode.name} and {prompts.name}"
        self.block_size, self.device = decode.block_size, decode.device
        self._decode = decode
        self._prompts = prompts
        self._is_for_fresh = is_for_fresh

    def plan(self, batch: ForwardBatch) -> SplitPlan:
        """See AttentionBackend."""
        num_decode, chunks = batch.num_decode, batch.rows[batch.num_decode :]
        if not chunks or (self._is_for_fresh and any(row.start for row in chunks)):
            return SplitPlan(batch.num_tokens, self._decode.plan(batch), None)
        return SplitPlan(
            num_decode,
            self._decode.plan(batch.of_rows(0, num_decode)) if num_decode else None,
            self._prompts.plan(batch.of_rows(num_decode, len(batch.rows))),
        )

    def plan_rows(self, contexts: torch.Tensor, tables: torch.Tensor) -> SplitPlan:
        """See RecordableAttention."""
        return SplitPlan(len(contexts), self._decode.plan_rows(contexts, tables), None)

    def attend(
        self, query: torch.Tensor, cache: KVCache, layer: int, plan: SplitPlan, rule: AttentionRule
    ) -> torch.Tensor:
        """See AttentionBackend."""
        if plan.prompts is None:
            return self._decode.attend(query, cache, layer, plan.decode, rule)
        prompts = self._prompts.attend(query[plan.num_decode :], cache, layer, plan.prompts, rule)
        if plan.decode is None:
            return prompts
        return torch.cat((self._decode.attend(query[: plan.num_decode], cache, layer, plan.decode, rule), prompts))
