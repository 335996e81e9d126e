"""Encoders in this process: the vectors, classes and scores of texts."""

import math
import struct
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import mul
from pathlib import Path

from funitel.llm.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from funitel.llm.workers.threads import CLOSED, ComputeThread
from funitel.model_server.loading.encoder import load_encoder
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import ContextTooLong, InvalidRequest, NotReady, StepFailed, WrongTask, translating
from funitel.proto.step import EncoderInput, EncoderTask
from funitel.router.text.encode import EncodeCalls
from funitel.router.text.model_files import ModelFiles

Text = str | tuple[str, str]
BYTES = 4  # of a float32


@dataclass(frozen=True, slots=True)
class _Encoded:
    ids: tuple[int, ...]
    type_ids: tuple[int, ...]


class LoadedEncoder:
    """An encoder on its own thread, until `close` or garbage collection. Thread-safe."""

    def __init__(self, folder: Path, settings: ModelServerSettings, max_batch_tokens: int) -> None:
        """Load the encoder in `folder`; a batch has at most `max_batch_tokens`, or one text.

        Raises:
            StartupError: model, settings and machine do not fit together.
        """
        compute = ComputeThread()
        self._finalizer = weakref.finalize(self, _end, compute)
        self._compute = compute
        self._max_batch_tokens = max_batch_tokens
        with ExitStack() as undo:
            undo.callback(compute.close)
            self._executor, info = compute.submit(lambda: load_encoder(settings, folder)).result()
            undo.pop_all()
        assert info.encoder is not None, "an encoder says what it does"
        self.facts = info.encoder
        self._texts = EncodeCalls(ModelFiles(folder).tokenizer())

    def close(self) -> None:
        """End the thread after the batch in flight."""
        self._finalizer()

    def embed(self, texts: Sequence[str], max_tokens: int | None) -> list[EmbeddingRequestOutput]:
        """The vector of each text, of length 1."""
        self._check_task(EncoderTask.EMBED)
        encoded = self._encode(texts, max_tokens)
        return [
            EmbeddingRequestOutput(EmbeddingOutput(vector), each.ids)
            for each, vector in zip(encoded, self._vectors(encoded), strict=True)
        ]

    def classify(self, texts: Sequence[Text], max_tokens: int | None) -> list[ClassificationRequestOutput]:
        """The probability of each class of each text."""
        self._check_task(EncoderTask.CLASSIFY)
        encoded, facts = self._encode(texts, max_tokens), self.facts
        is_each_alone = facts.is_multi_label or len(facts.labels) == 1
        normalize: Callable[[Sequence[float]], list[float]] = _sigmoids if is_each_alone else _softmax
        return [
            ClassificationRequestOutput(ClassificationOutput(tuple(normalize(row)), facts.labels), each.ids)
            for each, row in zip(encoded, self._logits(encoded), strict=True)
        ]

    def score(self, pairs: Sequence[tuple[str, str]], max_tokens: int | None) -> list[ScoringRequestOutput]:
        """How well the texts of each pair go together: a cross-encoder's score, or the cosine of two vectors.

        A pair's tokens, of an embedding model, are those of the first text and of the second.
        """
        if EncoderTask.CLASSIFY in self.facts.tasks:
            if len(self.facts.labels) != 1:
                raise WrongTask(f"scores need a model with one class; this one has {len(self.facts.labels)}")
            encoded = self._encode(pairs, max_tokens)
            scores = [_sigmoids(row)[0] for row in self._logits(encoded)]
            return [
                ScoringRequestOutput(ScoringOutput(score), each.ids)
                for each, score in zip(encoded, scores, strict=True)
            ]
        self._check_task(EncoderTask.EMBED)
        different = list(dict.fromkeys(text for pair in pairs for text in pair))
        encoded = self._encode(different, max_tokens)
        vectors = dict(zip(different, zip(encoded, self._vectors(encoded), strict=True), strict=True))
        outputs = []
        for first, second in pairs:
            (one, a), (other, b) = vectors[first], vectors[second]
            outputs.append(ScoringRequestOutput(ScoringOutput(math.fsum(map(mul, a, b))), one.ids + other.ids))
        return outputs

    def _check_task(self, task: EncoderTask) -> None:
        if task not in self.facts.tasks:
            does = ", ".join(sorted(each.name.lower() for each in self.facts.tasks))
            raise WrongTask(f"this model does not {task.name.lower()}: it is an encoder for {does}")

    def _encode(self, texts: Sequence[Text], max_tokens: int | None) -> list[_Encoded]:
        """Tokenize texts and pairs; those that are longer than `max_tokens` are truncated on the right."""
        longest = self.facts.max_tokens
        if max_tokens is not None and not 1 <= max_tokens <= longest:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be an integer within 1..{longest}, given {max_tokens!r}",
                "truncate_prompt_tokens",
            )
        truncate = None if max_tokens is None else "right"
        arguments = {"texts": list(texts), "max_tokens": max_tokens or longest, "truncate": truncate}
        with translating(lambda error: InvalidRequest(f"tokenizer error {error}", "prompts")):
            found = self._texts.run("batch", arguments)
        for place, (ids, _) in enumerate(found):
            if isinstance(ids, int):
                raise ContextTooLong(f"prompt {place} must have at most {longest} tokens, given {ids}", "prompts")
            if not ids:
                raise InvalidRequest(f"prompt {place} has no tokens", "prompts")
        return [_Encoded(tuple(ids), tuple(type_ids)) for ids, type_ids in found]

    def _vectors(self, encoded: Sequence[_Encoded]) -> list[tuple[float, ...]]:
        width = self.facts.width
        inputs = [EncoderInput(input_ids=each.ids, dimensions=width, is_normalized=True) for each in encoded]
        return self._rows(EncoderTask.EMBED, inputs)

    def _logits(self, encoded: Sequence[_Encoded]) -> list[tuple[float, ...]]:
        inputs = [EncoderInput(input_ids=each.ids, type_ids=each.type_ids) for each in encoded]
        return self._rows(EncoderTask.CLASSIFY, inputs)

    def _rows(self, task: EncoderTask, inputs: Sequence[EncoderInput]) -> list[tuple[float, ...]]:
        """Compute batches of texts of like length; rows are in the order of `inputs`."""
        rows: list[tuple[float, ...]] = [()] * len(inputs)
        for places in self._batches(inputs):
            batch = [inputs[place] for place in places]
            if not self._finalizer.alive:
                raise NotReady(CLOSED)
            result = self._compute.submit(partial(self._executor.encode, task, batch)).result()
            if result.broken:
                broken = places[result.broken[0]]
                raise StepFailed(f"the model's numbers for prompt {broken} are not finite")
            size = result.width * BYTES
            for number, place in enumerate(places):
                row = result.values[number * size : (number + 1) * size]
                rows[place] = struct.unpack(f"<{result.width}f", row)
        return rows

    def _batches(self, inputs: Sequence[EncoderInput]) -> list[list[int]]:
        batches: list[list[int]] = []
        num_tokens = 0
        for place in sorted(range(len(inputs)), key=lambda place: len(inputs[place].input_ids)):
            count = len(inputs[place].input_ids)
            if not batches or num_tokens + count > self._max_batch_tokens:
                batches.append([])
                num_tokens = 0
            batches[-1].append(place)
            num_tokens += count
        return batches


def _end(compute: ComputeThread) -> None:
    compute.close()
    compute.join()


def _sigmoids(scores: Sequence[float]) -> list[float]:
    powers = [math.exp(-abs(score)) for score in scores]
    return [(1 if score >= 0 else power) / (1 + power) for score, power in zip(scores, powers, strict=True)]


def _softmax(scores: Sequence[float]) -> list[float]:
    largest = max(scores)
    powers = [math.exp(score - largest) for score in scores]
    total = sum(powers)
    return [power / total for power in powers]
