"""Sampling on the host: each step is forward, sampling and output processing, and is known when the next one begins."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.executor.drafts import (
    forward_drafted,
    observe,
    of_due,
    propose,
    settle_drafts,
    with_drafts,
)
from funitel.model_server.executor.interface import ActiveRow, BegunStep, ComputedStep, PendingStep
from funitel.model_server.executor.model_runner import ModelRunner
from funitel.model_server.executor.output import OutputProcessor
from funitel.model_server.executor.prompt_scores import forward_scored
from funitel.model_server.sampling.grammar import TokenMasks
from funitel.model_server.sampling.logits_processors import LogitsProcessors, TorchLogitsProcessors
from funitel.model_server.sampling.sampler import SampledToken, sample
from funitel.model_server.sequence.table import CachedBatches, SequenceState
from funitel.model_server.speculation.speculator import Speculator
from funitel.model_server.speculation.verify import Verified, verify
from funitel.proto.step import CachedBatch

T = TypeVar("T")


class Computed(NamedTuple):
    """The rows of a step that get tokens, what follows in each, and when the forward began."""

    due: list[SequenceState]
    following: list[list[SampledToken]]
    begin: int
    num_forwards: int
    drafts: Mapping[int, Sequence[int]]  # verified, by the place of their row among those due


class SyncSampling:
    """`StepSampling` by which a step is known before the next one begins."""

    describing_waits = False

    def __init__(
        self,
        runner: ModelRunner,
        batches: CachedBatches,
        output: OutputProcessor,
        speculator: Speculator | None = None,
        *,
        scores: LogitsProcessors | None = None,
    ) -> None:
        self.lock: AbstractContextManager[object] = nullcontext()
        self._runner = runner
        self._batches = batches
        self._output = output
        self._scores = scores or TorchLogitsProcessors()
        self._speculator = speculator
        self._agreeing_on = runner.options.device  # of tensors by which ranks tell each other tokens

    def call(self, is_ahead: bool, call: Callable[[], T]) -> T:
        """See StepSampling."""
        return call()

    def filter(self, batch_id: int, is_ahead: bool, call: Callable[[], CachedBatch]) -> Callable[[], CachedBatch]:
        """See StepSampling."""
        kept = call()
        return lambda: kept

    @torch.inference_mode()
    def compute(self, active: Sequence[ActiveRow]) -> Computed:
        """See StepSampling; what follows in a row are the token sampled, and those its grammar forces after it."""
        begin = time.perf_counter_ns()
        if not active:
            return Computed([], [], begin, 0, {})
        self._runner.take_forwarded()  # of a step that failed
        drafts = {} if self._speculator is None else propose(self._speculator, self._runner, active)
        scored = forward_drafted(self._runner, active, drafts) if drafts else forward_scored(self._runner, active)
        for prompt in scored.prompts:
            prompt.row.prompt_scores.append(prompt.numbers.cpu().numpy())
        due = [row for row, count in active if row.num_pending == count]
        drafts = of_due(active, drafts) if drafts else drafts
        following: list[list[SampledToken]] = []
        if scored.logits is not None and due:
            following = self._sample(due, scored.logits, drafts)
        computed = self.agreed(Computed(due, following, begin, scored.num_forwards, drafts))
        following = computed.following
        for row, count in active:
            row.num_cached += count
        if self._speculator is not None and self._speculator.observes:
            observe(self._speculator, self._runner, active, due, following, drafts)
        return computed

    def agreed(self, computed: Computed) -> Computed:
        """What was computed, with what the rank that samples says follows in each row."""
        runner = self._runner
        following = agree(runner.parallel, self._agreeing_on, computed.due, computed.following, computed.drafts)
        return computed._replace(following=following)

    def finish(self, step: BegunStep, computed: Computed) -> PendingStep:
        """See StepSampling; keeps the batch unless every row has finished."""
        output_begin = time.perf_counter_ns()
        due, following, forward_begin, num_forwards, drafts = computed
        accepted = 0
        if drafts:
            assert self._speculator is not None
            settle_drafts(self._speculator, self._runner, due, following, drafts)
            accepted = -sum([due[place].num_cached for place in drafts])
            processed = [
                self._output.process(row, tokens, drafts.get(place, ()))
                for place, (row, tokens) in enumerate(zip(due, following, strict=True))
            ]
            accepted += sum([due[place].num_cached for place in drafts])
        else:
            processed = [self._output.process(row, tokens) for row, tokens in zip(due, following, strict=True)]
        for row in due:
            row.is_over = row.finish_reason is not None
        batch: CachedBatch | None = None
        if all(row.is_over for row in step.rows):
            self._batches.clear(step.batch_id)
            self._batches.mark_ended(step.batch_id, step.rows, step.number)
        else:
            batch = self._batches.describe(step.batch_id)
        end = time.perf_counter_ns()
        spent = output_begin - forward_begin, end - output_begin, end - step.begin
        result = step.result(
            batch, step.active, num_forwards, forward_ns=spent[0], decode_ns=spent[1], total_ns=spent[2]
        )
        if drafts:
            result = with_drafts(result, drafts, accepted)
        return ComputedStep(self._output, [one for one in processed if one is not None], result, step.number)

    def profile(self, rows: Sequence[SequenceState], logits: torch.Tensor) -> None:
        """See StepSampling."""
        self._sample(rows, logits, {})

    def _sample(
        self, due: Sequence[SequenceState], logits: torch.Tensor, drafts: Mapping[int, Sequence[int]]
    ) -> list[list[SampledToken]]:
        """Sample where nothing is forced."""
        if drafts:
            return self._verify(due, logits, drafts)
        rules = self._runner.rules
        if not rules.forces_tokens:
            return self._sample_free(due, logits)
        forced = {i: token_id for i, row in enumerate(due) if (token_id := rules.forced(row)) is not None}
        free = [i for i in range(len(due)) if i not in forced]
        if len(free) == len(due):
            return self._sample_free(due, logits)
        sampled = iter(self._sample_free([due[i] for i in free], logits[free]) if free else ())
        return [
            [SampledToken.forced(forced[i], with_top=row.sampling.top_n > 0)] if i in forced else next(sampled)
            for i, row in enumerate(due)
        ]

    def _verify(
        self, due: Sequence[SequenceState], logits: torch.Tensor, drafts: Mapping[int, Sequence[int]]
    ) -> list[list[SampledToken]]:
        """Sample what follows in each row, and behind each draft of it that is accepted."""
        rows, at = [], 0
        for place, row in enumerate(due):
            own = drafts.get(place, ())
            rows.append(Verified(row, own, at, []))
            at += 1 + len(own)
        return verify(rows, logits, self._scores, self._output.with_forced, self._output.ends_with)

    def _sample_free(self, due: Sequence[SequenceState], logits: torch.Tensor) -> list[list[SampledToken]]:
        masks = TokenMasks.of([row.grammar for row in due], logits.shape[1])
        sampled = sample(logits, [row.sampling for row in due], [len(row.tokens) for row in due], masks, self._scores)
        return [self._output.with_forced(row, token) for row, token in zip(due, sampled, strict=True)]


def wants_words(due: Sequence[SequenceState]) -> bool:
    """Whether a step says more of some row due than one token and its log-probability."""
    return any(row.owes_prompt_scores or row.sampling.is_told_in_words for row in due)


def agree(
    parallel: TensorParallel,
    device: torch.device,
    due: Sequence[SequenceState],
    following: list[list[SampledToken]],
    drafts: Mapping[int, Sequence[int]],
) -> list[list[SampledToken]]:
    """Give every rank what the root sampled, and the scores of prompts that are complete."""
    if parallel.size == 1 or not due:
        return following
    if wants_words(due):
        return agree_in_words(parallel, due, following)
    if drafts:
        return _agree_on_drafts(parallel, device, due, following, 1 + max(map(len, drafts.values())))
    pairs = torch.zeros(len(due), 2, dtype=torch.float64)
    if following:
        pairs = torch.tensor([(token.id, token.logprob) for (token,) in following], dtype=torch.float64)
    pairs = parallel.broadcast(pairs.to(device))
    return [[SampledToken(int(token_id), logprob)] for token_id, logprob in pairs.tolist()]


def _agree_on_drafts(
    parallel: TensorParallel,
    device: torch.device,
    due: Sequence[SequenceState],
    following: list[list[SampledToken]],
    most: int,
) -> list[list[SampledToken]]:
    """The same where a row gets up to `most` tokens."""
    pairs = torch.full((len(due), most, 2), -1.0, dtype=torch.float64)
    for line, tokens in zip(pairs, following, strict=False):
        line[: len(tokens)] = torch.tensor([(token.id, token.logprob) for token in tokens], dtype=torch.float64)
    pairs = parallel.broadcast(pairs.to(device))
    return [[SampledToken(int(i), logprob) for i, logprob in line if i >= 0] for line in pairs.tolist()]


def agree_in_words(
    parallel: TensorParallel, due: Sequence[SequenceState], following: list[list[SampledToken]]
) -> list[list[SampledToken]]:
    """The same for any rows: the root tells all of it as text."""
    notes = [
        (
            list(map(astuple, tokens)),
            [part.tolist() for part in row.prompt_scores] if row.is_scored_first else [],
            None if row.sampling.strategy is None else row.sampling.strategy.surprise,
        )
        for row, tokens in zip(due, following, strict=False)
    ]
    shared = json.loads(parallel.share(json.dumps(notes)))
    if not parallel.is_root:
        for row, (_, scores, surprise) in zip(due, shared, strict=True):
            if scores:
                row.prompt_scores = list(map(np.array, scores))
            if row.sampling.strategy is not None:
                row.sampling.strategy.surprise = surprise
    return [[SampledToken(*fields) for fields in tokens] for tokens, _, _ in shared]
