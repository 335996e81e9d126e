"""Logits processors in C++, a thread for each row; the reference is `sampling/logits_processors`."""

import math
from collections.abc import Sequence

import torch

from funitel.model_server.cpu.native import NativeEngine, Warp
from funitel.model_server.sampling.grammar import TokenMasks
from funitel.proto.step import SamplingParams


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
