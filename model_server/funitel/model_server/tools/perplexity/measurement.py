"""The measurement: models are loaded one after the other, beside the reference, and predict the windows of texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from funitel.model_server.files.progress import Progress
from funitel.model_server.settings import DEFAULT_WINDOW, ModelServerSettings
from funitel.model_server.tools.perplexity.report import QualityReport, Row
from funitel.model_server.tools.perplexity.scores import Distance, Scores
from funitel.model_server.tools.perplexity.subject import Subject, pieces_of
from funitel.model_server.tools.perplexity.windows import TokenizedText, Window, windows_of
from funitel.proto.errors import SettingsError, WeightsError


@dataclass(frozen=True)
class Source:
    """A model to load: the name of its row, the shard's settings and its folder."""

    name: str
    settings: ModelServerSettings
    folder: Path

    def load(self) -> Subject:
        """Load it. Raises: StartupError."""
        return Subject.load(self.name, self.settings, self.folder)


@dataclass(frozen=True)
class Measurement:
    """What is measured on which texts.

    Attributes:
        text: name of the text.
        texts: as tokens.
        window, stride: in tokens, see `windows_of`; None for the defaults.
        reference: what the others are compared with; it stays loaded, and predicts the text beside each of them.
        subjects: at least one.
    """

    text: str
    texts: Sequence[TokenizedText]
    window: int | None
    stride: int | None
    reference: Source | None
    subjects: Sequence[Source]

    def run(self) -> QualityReport:
        """Load, predict and compare.

        Raises:
            StartupError: a model cannot be loaded, or does not fit the windows, the text or the reference.
            BrokenScores: a model gives no probabilities.
        """
        reference = None if self.reference is None else self.reference.load()
        rows: list[Row] = []
        for source in self.subjects:
            subject = source.load()
            models = [subject] if reference is None else [reference, subject]
            window, stride = self._sizes(models)
            windows = [each for text in self.texts for each in windows_of(text, window, stride)]
            self._check(windows, models)
            for model in models:
                model.reserve(window)
            scores = _predict(windows, models)
            num_bytes = sum(each.num_bytes for each in windows)
            if reference is not None and self.reference is not None and not rows:
                rows.append(_row(reference, self.reference, scores[0], num_bytes, None))
            distance = None if reference is None else scores[-1].distance(scores[0])
            rows.append(_row(subject, source, scores[-1], num_bytes, distance))
            subject.close()
        return QualityReport(
            text=self.text,
            num_tokens=scores[-1].num_tokens,
            num_bytes=num_bytes,
            window=window,
            stride=stride,
            reference=None if self.reference is None else self.reference.name,
            rows=rows,
        )

    def _sizes(self, models: Sequence[Subject]) -> tuple[int, int]:
        """The tokens of a window, and those from its begin to that of the next."""
        context = min(model.context for model in models)
        window = min(DEFAULT_WINDOW, context) if self.window is None else self.window
        stride = window if self.stride is None else self.stride
        if window > context:
            raise SettingsError(f"--window {window} is longer than the model's context of {context} tokens")
        if stride > window:
            raise SettingsError(f"--stride {stride} is longer than a window of {window} tokens, the model's context")
        return window, stride

    def _check(self, windows: Sequence[Window], models: Sequence[Subject]) -> None:
        if not windows:
            raise SettingsError(f"--text {self.text} holds less than two tokens of text: there is nothing to predict")
        largest, size = max(max(each.ids) for each in windows), models[-1].vocab_size
        if largest >= size:
            raise WeightsError(f"{models[-1].name}: the tokenizer gives token {largest}, the model has {size}")
        if models[0].vocab_size != size:
            raise SettingsError(
                f"{models[0].name} has a vocabulary of {models[0].vocab_size} tokens and {models[-1].name} of {size}: "
                "only models with the same vocabulary can be compared"
            )


def _predict(windows: Sequence[Window], models: Sequence[Subject]) -> list[Scores]:
    """Scores of the models, the reference first if there are two.

    Both compute a piece before the next, so that no more logits than those of a piece are kept.
    """
    scores = [Scores(model.name) for model in models]
    progress = Progress(f"predicting with {models[-1].name}", sum(len(each.ids) for each in windows), unit="tokens")
    for window in windows:
        for begin, end, wanted in pieces_of(len(window.ids), window.num_context, models[0].vocab_size):
            against: torch.Tensor | None = None
            for model, found in zip(models, scores, strict=True):
                logits = model.forward(window.ids, begin, end, wanted)
                if wanted == "none" or logits is None:
                    continue
                found.add(logits, torch.tensor(window.ids[begin + 1 : end + 1], device=logits.device), against)
                against = logits
        progress.advance(len(window.ids))
    progress.finish()
    return scores


def _row(subject: Subject, source: Source, scores: Scores, num_bytes: int, distance: Distance | None) -> Row:
    return Row(
        name=source.name,
        model=source.settings.model_id,
        precision=subject.info.dtype.removeprefix("torch."),
        kv_precision=subject.kv_precision,
        weight_bytes=subject.info.weight_bytes,
        tokens_per_second=subject.num_tokens / subject.seconds,
        likelihood=scores.likelihood(num_bytes),
        distance=distance,
    )
