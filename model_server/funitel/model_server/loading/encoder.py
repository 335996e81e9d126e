"""Checkpoint folder -> loaded encoder with its heads."""

import logging
from pathlib import Path

import torch

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.compiler import CannotBuild
from funitel.model_server.device.memory import log_idle_memory
from funitel.model_server.executor.encoder import EncoderExecutor
from funitel.model_server.files.integrity import read_json
from funitel.model_server.hub.resolve import cache_folder
from funitel.model_server.loading.common import choose_device, choose_dtype, refuse_stages, set_threads, warn_of_spin
from funitel.model_server.loading.flags import check_engine, check_honoured, decoder_flags
from funitel.model_server.models.encoder.amx import open_layers
from funitel.model_server.models.encoder.heads import ClassifierHead, FillHead, read_embedding_head, read_usual_tokens
from funitel.model_server.models.encoder.model import Encoder, Layers, TorchLayers
from funitel.model_server.models.weight_offload import refuse_host_memory
from funitel.model_server.registry.encoders import encoder_spec_of, is_encoder
from funitel.model_server.settings import ModelServerSettings
from funitel.model_server.spec.encoder import EncoderSpec
from funitel.proto.errors import SettingsError
from funitel.proto.step import Capability, EncoderFacts, ShardInfo

logger = logging.getLogger(__name__)

# Heads that are not used, and what old checkpoints keep that is no weight.
_IGNORED = (r"position_ids$", r"(^|\.)pooler\.", r"^cls\.", r"^lm_head\.", r"^vocab_", r"\.decoder\.bias$")


def holds_encoder(folder: Path) -> bool:
    """Whether the model of a folder is an encoder."""
    return is_encoder(read_json(folder / "config.json"))


def load_encoder(settings: ModelServerSettings, folder: Path) -> tuple[EncoderExecutor, ShardInfo]:
    """Load the encoder in `folder`.

    Raises:
        StartupError: the checkpoint and the settings do not fit together.
    """
    refuse_stages(settings, "encoders")
    _check(settings)
    device = choose_device(settings.device, settings.device_number)
    dtype = choose_dtype(settings.dtype, device)
    set_threads(settings.num_threads or settings.most_threads)
    spec = encoder_spec_of(read_json(folder / "config.json"))
    weights = Weights(folder, dtype, device, spec.names.prefix)
    layers = _choose_layers(settings, spec, weights)
    encoder = Encoder(spec, weights, layers)
    classifier = ClassifierHead(spec, weights) if spec.is_classifier else None
    filler = FillHead(spec, weights, encoder.tokens) if FillHead.is_in(spec, weights) else None
    embedding = read_embedding_head(folder, spec.hidden_size, device)
    weights.finish(_IGNORED)
    executor = EncoderExecutor(encoder, embedding, classifier, filler, device)
    logger.info(
        "loaded model=%s architecture=%s device=%s layers=%s precision=%s threads=%d tasks=%s pooling=%s",
        folder,
        spec.architecture,
        device,
        "torch" if isinstance(layers, TorchLayers) else "amx",
        dtype,
        torch.get_num_threads(),
        ",".join(sorted(task.name.lower() for task in executor.tasks)),
        ",".join(embedding.pools),
    )
    log_idle_memory()
    warn_of_spin(settings)
    facts = EncoderFacts(
        tasks=executor.tasks,
        width=embedding.width,
        max_tokens=spec.max_tokens,
        usual_tokens=min(read_usual_tokens(folder) or spec.max_tokens, spec.max_tokens),
        labels=spec.labels if classifier is not None else (),
        is_multi_label=spec.is_multi_label,
        pooling=",".join(embedding.pools),
        token_width=spec.hidden_size,
    )
    info = ShardInfo(
        dtype=str(dtype),
        device_type=device.type,
        encoder=facts,
        weight_bytes=weights.held_bytes,
        capabilities=frozenset({Capability.SLEEP}),
    )
    return executor, info


def _choose_layers(settings: ModelServerSettings, spec: EncoderSpec, weights: Weights) -> Layers:
    """Layers on this processor's tiles, where it has some and they are to be float32."""
    if weights.device.type == "cpu" and weights.dtype is torch.float32:
        try:
            return open_layers(cache_folder(settings.cache_dir), spec, torch.get_num_threads())
        except CannotBuild as reason:
            logger.info("the encoder's layers run in torch: %s", reason)
    return TorchLayers(spec)


def _check(settings: ModelServerSettings) -> None:
    """Raise SettingsError for what would change the answers and is for generating models only."""
    check_engine(settings, "encoders")
    if settings.world_size > 1:
        raise SettingsError(
            f"--num-shard {settings.world_size}: an encoder is not split over shards; --num-replicas "
            f"{settings.world_size} runs as many copies of it, which share the texts"
        )
    check_honoured(decoder_flags(settings), "encoders")
    refuse_host_memory(settings, "encoders")
