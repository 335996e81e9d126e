"""The command `funitel-server quantize`: the settings, the texts and the folder of one quantisation."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.convert.hf_folder import write_json
from funitel.model_server.files.gguf_pointer import POINTER
from funitel.model_server.files.integrity import read_json
from funitel.model_server.files.manifest import MANIFEST, VERIFIED, write_manifest
from funitel.model_server.hub import resolve
from funitel.model_server.hub.huggingface import first_line
from funitel.model_server.loading.common import choose_device, set_threads
from funitel.model_server.registry.encoder_decoders import is_seq2seq
from funitel.model_server.registry.lookup import holds_more_than_text, spec_of
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.settings import QuantizeSettings
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.tools.quantize.blocks import make_job
from funitel.model_server.tools.quantize.calibration import calibration_texts, tokenize
from funitel.model_server.tools.quantize.folder import SafetensorsWriter, check_space, check_target, finished_folder
from funitel.model_server.tools.quantize.job import CheckpointSource, Report, without_sparsity
from funitel.proto.errors import SettingsError, StartupError, UnsupportedModel, WeightsError

logger = logging.getLogger(__name__)

# Among its bases is the error of whichever HTTP library this version of huggingface_hub uses.
_HTTP_ERRORS = tuple(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))
_FAILURES: tuple[type[Exception], ...] = (HfHubHTTPError, OfflineModeIsEnabled, OSError, *_HTTP_ERRORS)


def check_upload(repository: str) -> None:
    """Find out, before hours of work, whether the hub knows us. Raises: `StartupError`."""
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise SettingsError(f"--upload-to-model-id must be OWNER/NAME, given {repository!r}")
    try:
        HfApi().whoami()
    except LocalTokenNotFoundError as error:
        raise StartupError(f"--upload-to-model-id {repository}: no token for the hub, set HF_TOKEN") from error
    except _FAILURES as error:
        raise StartupError(f"--upload-to-model-id {repository}: the hub refused: {first_line(error)}") from error


def upload(folder: Path, repository: str) -> None:
    """Create the repository if need be and put all files of `folder` there. Raises: `StartupError`."""
    try:
        api = HfApi()
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=[VERIFIED])
    except HFValidationError as error:
        raise SettingsError(f"--upload-to-model-id {repository}: {first_line(error)}") from error
    except _FAILURES as error:
        raise StartupError(f"{folder} is complete but could not be uploaded: {first_line(error)}") from error


DEFAULT_SEQUENCE_LENGTH = 2048
_WEIGHTS = "*.safetensors"  # has checksums; other files may be edited
_COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*")
_NOT_COPIED = frozenset(
    {"config.json", "quantize_config.json", "quant_config.json", "source.json", POINTER, MANIFEST, VERIFIED}
)


def run(settings: QuantizeSettings) -> Path:
    """Fetch a model, quantise it, upload it where that is asked, and return its folder.

    Raises: `StartupError`.
    """
    check_target(_target(settings))
    if settings.upload_to_model_id is not None:
        check_upload(settings.upload_to_model_id)
    model = resolve.resolve(settings.model_id, revision=settings.revision, cache_dir=settings.cache_dir)
    report = quantize(settings, model.folder)
    target = _target(settings)
    num_bytes = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    logger.info("quantised layers=%d kept=%d bytes=%d", report.num_quantised, len(report.kept), num_bytes)
    if report.qualities:
        logger.info(
            "calibrated tokens=%d mean_output_error=%.4f if_only_rounded=%.4f",
            report.num_tokens,
            mean(quality.error for quality in report.qualities.values()),
            mean(quality.rounded for quality in report.qualities.values()),
        )
    if settings.upload_to_model_id is not None:
        upload(target, settings.upload_to_model_id)
    return target


def _target(settings: QuantizeSettings) -> Path:
    return Path(settings.output_dir).expanduser().resolve()


def quantize(settings: QuantizeSettings, folder: Path) -> Report:
    """Write the model of `folder`, quantised, to `settings.output_dir`.

    Raises:
        StartupError: the model, the settings, the texts or the disk do not allow it; nothing is left behind.
    """
    target = _target(settings)
    check_target(target)
    device = choose_device(settings.device, 0)
    set_threads(settings.num_threads)
    config = read_json(folder / "config.json")
    if is_seq2seq(config):
        raise UnsupportedModel(f"{config['architectures'][0]} is an encoder-decoder: only decoders are quantised")
    spec = spec_of(config)
    weights = Weights(folder, torch.float32, device, spec.names.prefix, is_shown=False)
    if weights.quantization is not None:
        raise UnsupportedModel(f"{folder} is quantised already, as {weights.quantization.flags[0]}")
    config = without_sparsity(config)
    if settings.rounding == "none":
        return _copy(folder, config, target)
    if holds_more_than_text(spec):
        raise UnsupportedModel(
            f"{spec.architecture} is a model for images too: only models of text alone are quantised"
        )
    samples = _samples(settings, folder, spec) if settings.rounding == "gptq" and settings.to is None else []
    try:
        with finished_folder(target) as result, torch.inference_mode():
            job = make_job(settings, folder, spec, weights)
            check_space(result, job.plan)
            for path in _side_files(folder):
                shutil.copyfile(path, result / path.name)
            write_json(result / "config.json", config | {"quantization_config": job.quantization_config})
            for name, value in job.side_files.items():
                write_json(result / name, value)
            with SafetensorsWriter(result, job.plan) as writer:
                job.run(writer, samples)
            write_manifest(result, _WEIGHTS)
    except OSError as error:
        raise StartupError(f"cannot write OUTPUT_DIR {target}: {error.strerror or error}") from error
    return job.report


def _copy(folder: Path, config: dict[str, Any], target: Path) -> Report:
    """Write the model as it is, in safetensors: that of a GGUF in the values that its blocks stand for."""
    source = CheckpointSource(folder)
    plan = {name: source.shape(name) for name in source.names}
    try:
        with finished_folder(target) as result:
            check_space(result, plan)
            for path in _side_files(folder):
                shutil.copyfile(path, result / path.name)
            write_json(result / "config.json", config)
            with SafetensorsWriter(result, plan) as writer:
                for name in plan:
                    writer.write(name, source.read(name))
            write_manifest(result, _WEIGHTS)
    except OSError as error:
        raise StartupError(f"cannot write OUTPUT_DIR {target}: {error.strerror or error}") from error
    return Report(0, source.names)


def _samples(settings: QuantizeSettings, folder: Path, spec: ModelSpec) -> list[list[int]]:
    context = spec.max_position_embeddings
    length = settings.sequence_length or min(DEFAULT_SEQUENCE_LENGTH, context)
    if length > context:
        raise SettingsError(f"--sequence-length {length} is longer than the model's context of {context} tokens")
    samples = tokenize(TextCodec(folder), calibration_texts(settings.calibration_file), settings.num_samples, length)
    largest, num_tokens = max(max(sample) for sample in samples), sum(map(len, samples))
    if largest >= spec.vocab_size:
        raise WeightsError(f"the tokenizer gives token {largest}, the model has {spec.vocab_size}")
    num_inputs = max(spec.intermediate_size, spec.hidden_size, spec.num_heads * spec.head_dim)
    if num_tokens < num_inputs:
        logger.warning(
            "calibration has %d tokens for layers of %d inputs: longer texts give a better model",
            num_tokens,
            num_inputs,
        )
    return samples


def _side_files(folder: Path) -> Iterator[Path]:
    """Tokenizer, templates, generation settings and licence: all that is neither weights nor about them."""
    found = {path for pattern in _COPIED for path in folder.glob(pattern) if path.is_file()}
    return (p for p in sorted(found) if p.name not in _NOT_COPIED and not p.name.endswith(".index.json"))
