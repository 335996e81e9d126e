"""Does a transformers model compute the same by steps over our blocks as at once? Asked once, before it serves.

A model's code is not ours: it may look at other tokens in ways that nothing declares. A step that it gets wrong in a
few random tokens, it would get wrong in every answer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from funitel.model_server.forward.batch import Forward, ForwardBatch, RowSpan
from funitel.model_server.models.transformers_fallback.attention import Unsuited
from funitel.model_server.models.transformers_fallback.pool import FallbackPools

_LENGTHS = (9, 5)  # tokens of the sequences
_STEPS = ((6, 4), (1, 1), (2, 0))  # tokens that each computes: chunks beside each other, single ones, a chunk upon them
_TOLERANCE = 1e-3  # of the largest logit, in float32; rounding alone is far below
_HALF_TOLERANCE = 0.1


@torch.inference_mode()
def expected_logits(model: Any, vocab_size: int, device: torch.device) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Random prompts, and the logits of all their positions as the model alone computes them."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in _LENGTHS]
    return prompts, [model(input_ids=torch.tensor([ids], device=device)).logits[0].float() for ids in prompts]


@torch.inference_mode()
def check_steps(
    forward: Forward, pools: FallbackPools, prompts: Sequence[Sequence[int]], expected: Sequence[torch.Tensor]
) -> None:
    """Step through `prompts` beside each other and hold every logit against `expected`.

    Raises:
        Unsuited: they differ.
    """
    size = pools.block_size
    each = -(-max(_LENGTHS) // size)
    pool = pools.make(1 + each * len(prompts))
    tables = [np.arange(1 + i * each, 1 + (i + 1) * each, dtype=np.int32) for i in range(len(prompts))]
    done = [0] * len(prompts)
    for counts in _STEPS:
        active = [i for i, n in enumerate(counts) if n]
        spans = [
            RowSpan(prompts[i][done[i] : done[i] + counts[i]], done[i], tables[i], "all", len(prompts[i]))
            for i in active
        ]
        logits = forward(ForwardBatch.build(spans, size, pools.device), pool)
        for i, span in zip(active, spans, strict=True):
            done[i] = span.end
        if logits is not None:
            wanted = torch.cat([expected[i][s.start : s.end] for i, s in zip(active, spans, strict=True)])
            error = float((logits - wanted).abs().max())
            tolerance = _TOLERANCE if pools.dtype is torch.float32 else _HALF_TOLERANCE
            if not error <= tolerance * float(wanted.abs().max()):
                raise Unsuited(f"its logits by steps are off by {error:.2g}")
