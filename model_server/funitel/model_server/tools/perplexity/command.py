"""The command `funitel-server perplexity`: its settings -> a measurement, and the table, JSON and picture of it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from funitel.model_server.device.memory import within_memory
from funitel.model_server.files.integrity import read_json
from funitel.model_server.files.texts import read_texts
from funitel.model_server.hub.resolve import resolve
from funitel.model_server.loading.encoder import holds_encoder
from funitel.model_server.registry.encoder_decoders import is_seq2seq
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.settings import DTYPES, ModelServerSettings, PerplexitySettings
from funitel.model_server.tools.perplexity.measurement import Measurement, Source
from funitel.model_server.tools.perplexity.picture import picture_of
from funitel.model_server.tools.perplexity.report import json_of, table_of
from funitel.model_server.tools.perplexity.windows import TokenizedText
from funitel.proto.errors import SettingsError, StartupError, UnsupportedModel
from funitel.proto.settings.fields import project


def print_perplexity(settings: PerplexitySettings) -> None:
    """Measure and print. Raises: see `run`."""
    print(run(settings))


def run(settings: PerplexitySettings) -> str:
    """Measure, draw the picture if it is asked for, and return what is to be printed.

    Raises:
        StartupError: the text, the models and the settings do not fit together.
        BrokenScores: a model gives no probabilities.
    """
    report = within_memory(measurement_of(settings).run)()
    if settings.picture is not None:
        try:
            Path(settings.picture).expanduser().write_text(picture_of(report), encoding="utf-8")
        except OSError as error:
            raise StartupError(f"--picture {settings.picture} cannot be written: {error.strerror}") from error
    return json_of(report) if settings.json else table_of(report)


def measurement_of(settings: PerplexitySettings) -> Measurement:
    """Read the text and find the models; none is loaded yet.

    Raises:
        StartupError: the text cannot be read, a model is not there, is none that predicts text, or has another
            tokenizer than the reference.
    """
    texts = read_texts(settings.text, "--text")
    folder = _folder_of(settings.model_id, settings.revision, settings.cache_dir)
    tokenized = tokenize(folder, texts, settings.max_text_tokens)
    subjects = _subjects(settings, folder)
    reference = _reference(settings, folder)
    if reference is not None and reference.folder != folder:
        theirs = tokenize(reference.folder, texts, settings.max_text_tokens)
        if [text.ids for text in theirs] != [text.ids for text in tokenized]:
            raise SettingsError(
                f"--against {settings.against}: its tokenizer makes other tokens of the text than that of "
                f"{settings.model_id}: only models with the same tokenizer can be compared"
            )
    if reference is None and len(subjects) > 1:
        reference, *subjects = subjects
    return Measurement(settings.text, tokenized, settings.window, settings.stride, reference, subjects)


def tokenize(folder: Path, texts: Sequence[str], most: int | None) -> list[TokenizedText]:
    """Texts as tokens of the model in `folder`, up to `most` tokens together."""
    codec = TextCodec(folder)
    return list(_within((TokenizedText.of(codec, text) for text in texts), most))


def _within(texts: Iterable[TokenizedText], most: int | None) -> Iterator[TokenizedText]:
    for text in texts:
        if most is None:
            yield text
            continue
        yield text.cut(most)
        most -= len(text.ids)
        if most <= 0:
            return


def _subjects(settings: PerplexitySettings, folder: Path) -> list[Source]:
    """MODEL in the one precision that is asked for, or in each of the tiers."""
    given = project(settings, ModelServerSettings)
    if settings.tiers is None:
        return [Source(settings.model_id, given, folder)]
    return [
        Source(tier, replace(given, dtype=tier) if tier in DTYPES else replace(given, quantize=tier), folder)
        for tier in settings.tiers
    ]


def _reference(settings: PerplexitySettings, folder: Path) -> Source | None:
    """The model of --against, with the pool and the activations of its own precision."""
    if settings.against is None:
        return None
    changes: dict[str, Any] = {
        "model_id": settings.against,
        "dtype": settings.against_dtype or (None if settings.against_quantize else "float32"),
        "quantize": settings.against_quantize,
        "kv_cache_dtype": None,
        "activation_dtype": ModelServerSettings.activation_dtype,
    }
    if settings.against != settings.model_id:
        changes |= {"revision": None, "model_spec": None}  # which say of MODEL what it is
        folder = _folder_of(settings.against, None, settings.cache_dir)
    name = f"{settings.against} {settings.against_quantize or changes['dtype']}"
    return Source(name, project(settings, ModelServerSettings, **changes), folder)


def _folder_of(model_id: str, revision: str | None, cache_dir: str | None) -> Path:
    folder = resolve(model_id, revision=revision, cache_dir=cache_dir).folder
    if holds_encoder(folder) or is_seq2seq(read_json(folder / "config.json")):
        raise UnsupportedModel(f"{model_id} does not predict the next token of a text: only decoders have a perplexity")
    return folder
