"""Verify drafts: a draft is accepted where it is what the target itself samples, at its position and by its own noise.

So a text has the same tokens with drafts and without. A row's positions are sampled one after the other, each with the
state that penalties, grammar and token rules have behind the tokens before it; the rows of a batch together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from funitel.model_server.sampling.grammar import TokenMasks
from funitel.model_server.sampling.logits_processors import LogitsProcessors
from funitel.model_server.sampling.sampler import SampledToken, sample
from funitel.model_server.sequence.table import SequenceState

Extend = Callable[[SequenceState, SampledToken, int], list[SampledToken]]
"""A row, the token sampled in it, and how many came before it in this step; the token and those forced behind it."""


@dataclass(slots=True)
class Verified:
    """A row with drafts to verify: `first` is the place of its first logits, `tokens` are what follows so far."""

    row: SequenceState
    drafts: Sequence[int]
    first: int
    tokens: list[SampledToken]


def num_accepted(drafts: Sequence[int], token_ids: Sequence[int]) -> int:
    """How many leading tokens of a step's output are drafts with KV; the last token never has any."""
    count = 0
    for draft, token_id in zip(drafts, token_ids[:-1], strict=False):
        if draft != token_id:
            break
        count += 1
    return count


def verify(
    rows: Sequence[Verified],
    logits: torch.Tensor,
    scores: LogitsProcessors,
    extend: Extend,
    ends: Callable[[SequenceState, int], bool],
) -> list[list[SampledToken]]:
    """What follows in each row: accepted drafts, then one token more, with what grammars force between and behind.

    Args:
        rows: with no `tokens` yet.
        logits: [tokens, vocab_size] float32; of each row those behind its pending token, then those behind its drafts.
        scores: what does the heavy part of sampling.
        extend: takes a sampled token into a row's grammar.
        ends: whether a row ends with a token, so that nothing behind it counts.
    """
    going = list(rows)
    while going:
        places = [each.first + len(each.tokens) for each in going]
        masks = TokenMasks.of([each.row.grammar for each in going], logits.shape[1])
        positions = [len(each.row.tokens) + len(each.tokens) for each in going]
        sampled = sample(logits[places], [each.row.sampling for each in going], positions, masks, scores)
        going = [each for each, token in zip(going, sampled, strict=True) if _goes_on(each, token, extend, ends)]
    for each in rows:
        if each.drafts:
            each.row.sampling.take_back([token.id for token in each.tokens], each.row.tokens[-1])
    return [each.tokens for each in rows]


def _goes_on(each: Verified, token: SampledToken, extend: Extend, ends: Callable[[SequenceState, int], bool]) -> bool:
    """Take a sampled token; whether the logits behind it are those of the row's own text."""
    for following in extend(each.row, token, len(each.tokens)):
        each.tokens.append(following)
        if each.drafts:
            each.row.sampling.push(following.id)
    ids = [following.id for following in each.tokens]
    if not each.tokens[-1].logprob > -torch.inf or each.tokens[-1].is_cut:  # or not a number
        return False
    is_drafted = len(ids) <= len(each.drafts) and list(each.drafts[: len(ids)]) == ids
    return is_drafted and not any(ends(each.row, token_id) for token_id in ids)
