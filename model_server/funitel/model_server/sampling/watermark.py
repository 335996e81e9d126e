"""Watermark generated text: at each step a part of the vocabulary, picked by the last token, is favoured.

Source: Kirchenbauer et al., "A Watermark for Large Language Models" (arXiv 2301.10226), with TGI's seeding, so that
detectors written for it go on working. The permutation is drawn on the CPU whatever the model runs on.
"""

from dataclasses import dataclass

import torch

HASH_KEY = 15485863


@dataclass(frozen=True, slots=True)
class Watermark:
    """`gamma` is the favoured share of the vocabulary, `delta` what its scores gain."""

    gamma: float = 0.5
    delta: float = 2.0

    def apply(self, scores: torch.Tensor, last_token: int) -> None:
        """Favour the tokens that `last_token` picks in one row of scores [vocab_size], in place."""
        green = self.green_ids(last_token, scores.shape[0]).to(scores.device)
        scores[green] += self.delta

    def green_ids(self, last_token: int, vocab_size: int) -> torch.Tensor:
        """The favoured tokens: [gamma * vocab_size] int64."""
        generator = torch.Generator().manual_seed(HASH_KEY * last_token)
        return torch.randperm(vocab_size, generator=generator)[: int(vocab_size * self.gamma)]
