"""The sampler of a GPU, which never makes the host wait: tokens stay on the device, where the next step reads them.

It does what `sampler.sample` does, in that order and with the same noise, over all rows at once. `follows_tokens` says
for which rows the host must know the last token: masks of grammars and the watermark are brought by the caller.
"""

import numpy as np
import torch

from funitel.model_server.device.upload import upload
from funitel.model_server.gpu_sampling.ops import Draws, ScoreMaths
from funitel.model_server.gpu_sampling.plan import SamplingPlan
from funitel.model_server.gpu_sampling.result_copy import SampledBatch
from funitel.model_server.gpu_sampling.row_state import RowStates
from funitel.model_server.sampling.grammar import TokenMasks
from funitel.model_server.sampling.gumbel_noise import noise_keys
from funitel.proto.step import SamplingParams

_BITS = 32  # of a word of a mask


def follows_tokens(params: SamplingParams) -> bool:
    """Whether what may be chosen next depends on the last token in a way that only the host computes."""
    return bool(params.grammar) or params.watermark


class DeviceSampler:
    """Chooses tokens on the device of `states` and keeps these up to date."""

    def __init__(self, states: RowStates, maths: ScoreMaths) -> None:
        self.maths = maths
        self._states = states

    def sample(
        self,
        logits: torch.Tensor,
        plan: SamplingPlan,
        positions: np.ndarray,
        masks: TokenMasks | None = None,
        marks: TokenMasks | None = None,
        delta: float = 0.0,
    ) -> SampledBatch:
        """Choose the next token of every row of `plan`.

        Args:
            logits: [rows, vocab_size] float32; changed in place.
            plan: of the rows.
            positions: [rows], index in its sequence of the token that each row is about to get.
            masks: tokens that grammars allow, of rows that have one.
            marks: tokens that the watermark favours, of rows that have it, and by how much it does.
        """
        is_broken = ~(logits.amax(dim=1) < torch.inf)
        raw = None if plan.raw is None else plan.raw.of_matrix(logits).clone()
        self._edit(logits, plan, positions, marks, delta)
        if masks is not None:
            allowed, rows = self._bits(masks, logits.shape[1]), self._rows(masks)
            logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill(~allowed, -torch.inf))
        keys = None if plan.draws is None else self._keys(plan.draws, positions)
        chosen = self.maths.choose(logits, plan.draws, keys)
        tokens, scores, normalisers = chosen.tokens, chosen.scores, chosen.normalisers
        if plan.raw is not None and raw is not None:
            raw.nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
            plan.raw.put(logits, raw)
            plan.raw.put(scores, raw.gather(1, plan.raw.of_matrix(tokens)[:, None])[:, 0])
            plan.raw.put(normalisers, raw.logsumexp(dim=-1))
        logprobs = (scores - normalisers).masked_fill_(is_broken, torch.nan)
        self._states.push(plan.slots, tokens)
        if plan.penalties is not None:
            self._states.count(plan.penalties.places, plan.penalties.some.of_matrix(tokens))
        if plan.tops is None:
            return SampledBatch(plan, tokens, logprobs)
        tops = plan.tops.of_matrix(logits).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        best = tops.topk(plan.num_tops, dim=-1)
        return SampledBatch(plan, tokens, logprobs, plan.tops.of_matrix(normalisers), best.indices, best.values, tops)

    def _edit(
        self, scores: torch.Tensor, plan: SamplingPlan, positions: np.ndarray, marks: TokenMasks | None, delta: float
    ) -> None:
        """Watermark, biases and penalties, in place."""
        if marks is not None:
            is_green, rows = self._bits(marks, scores.shape[1]), self._rows(marks)
            marked = scores.index_select(0, rows)
            scores.index_copy_(0, rows, torch.where(is_green, marked + delta, marked))
        if (biases := plan.biases) is not None:
            places = biases.rows, biases.ids
            scores.index_put_(places, scores[places] + biases.values)
        if (penalties := plan.penalties) is not None:
            counted = (positions - plan.source_lens)[penalties.some.rows]
            lengths = upload(counted.astype(np.float32)[:, None], scores.device)
            self.maths.penalise(scores, penalties, self._states.counts, lengths)

    def _keys(self, draws: Draws, positions: np.ndarray) -> torch.Tensor:
        """Which rows are drawn, and the upper and lower halves of the keys of their noise: [3, rows] int32."""
        rows = draws.some.rows
        keys = noise_keys(draws.seeds, positions[rows])
        lines = np.zeros((3, len(positions)), dtype=np.uint32)
        lines[:, rows] = np.ones_like(keys), keys >> np.uint64(32), keys & np.uint64(0xFFFFFFFF)
        return upload(lines.view(np.int32), self._states.device)

    def _rows(self, masks: TokenMasks) -> torch.Tensor:
        return upload(np.array(masks.rows, dtype=np.int64), self._states.device)

    def _bits(self, masks: TokenMasks, vocab_size: int) -> torch.Tensor:
        """Masks as [rows, vocab_size] bool."""
        words = upload(masks.bits, self._states.device)
        places = torch.arange(_BITS, dtype=torch.int32, device=words.device)
        return ((words[:, :, None] >> places) & 1).flatten(1)[:, :vocab_size].bool()
