"""Sampling that never makes the host wait: the tokens of a step stay on the device, where the next step reads them.

It does what `sampler.sample` does, in that order and with the same noise, over all rows at once. `follows_tokens` says
for which rows the host must know the last token: masks of grammars and the watermark are brought by who calls.
"""

import numpy as np
import torch

from funitel.model_server.gpu.packets import Choice
from funitel.model_server.gpu.row_states import RowStates
from funitel.model_server.gpu.sampling_plan import Draws, Penalties, SamplingPlan
from funitel.model_server.grammar import TokenMasks
from funitel.model_server.noise import gumbel_of, noise_keys
from funitel.model_server.scores import heated
from funitel.model_server.uploads import upload
from funitel.proto.step import SamplingParams

_BITS = 32  # of a word of a mask


def follows_tokens(params: SamplingParams) -> bool:
    """Whether what may be chosen next depends on the last token in a way that only the host computes."""
    return bool(params.grammar) or params.watermark


class DeviceSampler:
    """Chooses tokens on the device of `states` and keeps these up to date."""

    def __init__(self, states: RowStates) -> None:
        self._states = states

    def sample(
        self,
        logits: torch.Tensor,
        plan: SamplingPlan,
        positions: np.ndarray,
        masks: TokenMasks | None = None,
        marks: TokenMasks | None = None,
        delta: float = 0.0,
    ) -> Choice:
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
        logits.nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
        if masks is not None:
            allowed, rows = self._bits(masks, logits.shape[1]), self._rows(masks)
            logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill(~allowed, -torch.inf))
        tokens = self._choose(logits, plan, positions)
        if plan.raw is not None and raw is not None:
            plan.raw.put(logits, raw.nan_to_num_(nan=-torch.inf, neginf=-torch.inf))
        normalisers = logits.logsumexp(dim=-1)
        logprobs = logits.gather(1, tokens[:, None])[:, 0] - normalisers
        logprobs.masked_fill_(is_broken, torch.nan)
        self._states.push(plan.slots, tokens)
        if plan.penalties is not None:
            self._states.count(plan.penalties.places, plan.penalties.some.of_matrix(tokens))
        if plan.tops is None:
            return Choice(plan, tokens, logprobs)
        scores = plan.tops.of_matrix(logits)
        best = scores.topk(plan.num_tops, dim=-1)
        return Choice(plan, tokens, logprobs, plan.tops.of_matrix(normalisers), best.indices, best.values, scores)

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
            lengths = upload(positions[penalties.some.rows].astype(np.float32)[:, None], scores.device)
            values = penalties.some.of_matrix(scores)
            penalties.some.put(scores, self._penalised(values, penalties, lengths))

    def _penalised(self, scores: torch.Tensor, penalties: Penalties, lengths: torch.Tensor) -> torch.Tensor:
        seen, produced = self._states.counts.index_select(0, penalties.places).float().unbind(1)
        repeated = torch.where(scores < 0, scores * penalties.repetition, scores / penalties.repetition)
        repeated = repeated - penalties.frequency * seen / lengths
        scores = torch.where(seen > 0, repeated, scores)
        return torch.where(produced > 0, scores - (penalties.presence + penalties.count * produced), scores)

    def _choose(self, scores: torch.Tensor, plan: SamplingPlan, positions: np.ndarray) -> torch.Tensor:
        """Warp the rows that are drawn, in place; the token of every row [rows] int64."""
        draws = plan.draws
        if draws is None:
            return scores.argmax(dim=-1)
        warped = _warped(draws.some.of_matrix(scores), draws)
        draws.some.put(scores, warped)
        first, second = self._keys(draws, positions)
        drawn = (warped + gumbel_of(first, second, scores.shape[1])).argmax(dim=-1)
        if draws.some.index is None:
            return drawn
        tokens = scores.argmax(dim=-1)
        draws.some.put(tokens, drawn)
        return tokens

    def _keys(self, draws: Draws, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """The upper and lower halves of the keys of the noise, each [rows, 1] int32."""
        keys = noise_keys(draws.seeds, positions[draws.some.rows])
        halves = np.stack([keys >> np.uint64(32), keys & np.uint64(0xFFFFFFFF)]).astype(np.uint32).view(np.int32)
        first, second = upload(halves[:, :, None], self._states.device)
        return first, second

    def _rows(self, masks: TokenMasks) -> torch.Tensor:
        return upload(np.array(masks.rows, dtype=np.int64), self._states.device)

    def _bits(self, masks: TokenMasks, vocab_size: int) -> torch.Tensor:
        """Masks as [rows, vocab_size] bool."""
        words = upload(masks.bits, self._states.device)
        places = torch.arange(_BITS, dtype=torch.int32, device=words.device)
        return ((words[:, :, None] >> places) & 1).flatten(1)[:, :vocab_size].bool()


def _warped(scores: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Temperature, top-k, top-p, min-p, typical-p of rows that are drawn, in that order."""
    scores = heated(scores, draws.temperatures)
    for kept in draws.kept:
        kept.some.put(scores, kept.keep(kept.some.of_matrix(scores), kept.values, kept.most))
    return scores
