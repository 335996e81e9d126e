"""Log-probabilities of prompt tokens: the forward of a step that scores prompts, in pieces of bounded memory.

A prompt's scores need logits of every token, [tokens, vocab_size] float32, which for a long prompt is more memory than
all else of its step. So such a step computes in several forwards, none of which has logits of more than
`max_scored_tokens` prompt tokens, and of each only what was asked for is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from funitel.model_server.device.pinned_memory import upload
from funitel.model_server.executor.interface import ActiveRow
from funitel.model_server.executor.model_runner import ModelRunner
from funitel.model_server.forward.batch import RowMedia, RowSpan
from funitel.model_server.sequence.table import SequenceState

MAX_LOGITS_BYTES = 128 << 20  # of the prompt tokens in one forward; to score them takes about as much again


def max_scored_tokens(vocab_size: int) -> int:
    """The most prompt tokens that one forward has logits of."""
    return max(1, MAX_LOGITS_BYTES // (4 * vocab_size))


class PromptScores(NamedTuple):
    """Scores of consecutive prompt tokens of a row, on the device: [tokens, 2 + 2 * top] float64, as `score` has it."""

    row: SequenceState
    numbers: torch.Tensor


@dataclass(frozen=True, slots=True)
class Scored:
    """What the forwards of a step gave: logits of the rows that computed all their known tokens, and scores of prompts.

    `logits` [rows that have them, vocab_size] is None on ranks that have none, and where no row has any.
    """

    logits: torch.Tensor | None
    has_logits: list[bool]  # of each active row
    prompts: list[PromptScores]
    num_forwards: int


def score(logits: torch.Tensor, ids: torch.Tensor, num_top: int) -> torch.Tensor:
    """Score `ids` [rows] under raw `logits` [rows, vocab_size]: [rows, 2 + 2 * num_top] float64.

    Of each row its log-probability, its rank from 1 on, the ids of the likeliest tokens and their log-probabilities.

    The sum over the vocabulary is that of `log_softmax`, as in transformers. On a CPU it errs by about 6e-6 in one
    direction: with a more exact sum, loglikelihoods of texts would differ from those of transformers by 1e-4 and more.
    """
    logprobs = logits.log_softmax(dim=1)
    own = ids[:, None]
    parts = [logprobs.gather(1, own), (logits > logits.gather(1, own)).sum(dim=1, keepdim=True) + 1]
    if num_top := min(num_top, logits.shape[1]):
        likeliest = logits.topk(num_top, dim=1).indices
        parts += [likeliest, logprobs.gather(1, likeliest)]
    return torch.cat([part.double() for part in parts], dim=1)


def forward_scored(
    runner: ModelRunner, active: Sequence[ActiveRow], device_tokens: torch.Tensor | None = None
) -> Scored:
    """Run the forward of a step, in as many pieces as the scores of prompts need.

    Args:
        runner: of this rank; all ranks compute the same pieces.
        active: the rows of the step.
        device_tokens: see `ForwardBatch.build`.
    """
    spans = runner.spans(active)
    has_logits = [row.num_pending == count for row, count in active]
    if all(span.logits != "all" for span in spans):
        return Scored(runner.forward(spans, device_tokens), has_logits, [], 1)
    pieces = _pieces(spans, max_scored_tokens(runner.spec.vocab_size))
    due: dict[int, torch.Tensor] = {}  # logits by row
    prompts: list[PromptScores] = []
    for piece in pieces:
        logits = runner.forward([span for _, span in piece], device_tokens)
        if logits is None:
            continue
        at = 0
        for place, span in piece:
            size = {"none": 0, "last": 1, "all": len(span.tokens)}[span.logits]
            own, at = logits[at : at + size], at + size
            if span.logits == "all":
                prompts.append(_scored(active[place][0], span, own))
            if has_logits[place] and span.end == spans[place].end:
                due[place] = own[-1:].clone()  # a view would keep the logits of the whole piece
        del logits
    kept = [due[place] for place in sorted(due)]
    return Scored(torch.cat(kept) if kept else None, has_logits, prompts, len(pieces))


def _scored(row: SequenceState, span: RowSpan, logits: torch.Tensor) -> PromptScores:
    following = row.tokens[span.start + 1 : span.end + 1]  # the token after each computed one, if known
    ids = upload(np.array(following, dtype=np.int64), logits.device)
    return PromptScores(row, score(logits[: len(following)], ids, row.prompt_top or 0))


def _pieces(spans: Sequence[RowSpan], most: int) -> list[list[tuple[int, RowSpan]]]:
    """The forwards of a step: spans with their places; the first forward has all that score no prompt."""
    pieces = [[(place, span) for place, span in enumerate(spans) if span.logits != "all"]]
    room = most
    for place, span in enumerate(spans):
        begin = 0
        while span.logits == "all" and begin < len(span.tokens):
            end = _end_of_piece(span, begin, room)
            if end == begin:
                pieces.append([])
                room = most
                end = max(_end_of_piece(span, begin, room), _first_end(span, begin))
            pieces[-1].append((place, _part(span, begin, end)))
            room = max(0, room - (end - begin))
            begin = end
    return pieces


def _end_of_piece(span: RowSpan, begin: int, room: int) -> int:
    """Where a piece of a span ends, of the tokens from `begin` on: not within tokens that see each other."""
    end = min(begin + room, len(span.tokens))
    cut = next((first for first, last in span.whole_spans if first < span.start + end < last), span.start + end)
    return max(begin, cut - span.start)


def _first_end(span: RowSpan, begin: int) -> int:
    """The first place behind `begin` where a piece may end."""
    at = span.start + begin
    return next((last for first, last in span.whole_spans if first <= at < last), at + 1) - span.start


def _part(span: RowSpan, begin: int, end: int) -> RowSpan:
    """The tokens [begin, end) of a span."""
    media = []
    for item in span.media:
        first, last = np.searchsorted(item.places, (begin, end))
        if first < last:
            deep = tuple([each[first:last] for each in item.deep])
            media.append(RowMedia(item.places[first:last] - begin, item.features[first:last], deep))
    at = span.start
    return replace(
        span,
        tokens=span.tokens[begin:end],
        start=at + begin,
        media=tuple(media),
        rotary=None if span.rotary is None else span.rotary[:, begin:end],
        whole_spans=tuple([each for each in span.whole_spans if each[0] < at + end and at + begin < each[1]]),
    )
