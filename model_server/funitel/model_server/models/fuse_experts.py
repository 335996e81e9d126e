"""Whether a decoder on a GPU computes mixtures of experts in our kernels: if a probe finds them right."""

import logging
from functools import partial
from importlib import import_module

import torch

from funitel.model_server.device.probe_or_fall_back import probe_or_fall_back, reason_of
from funitel.model_server.layers.expert_ops import ExpertOps
from funitel.model_server.layers.experts.stack import refusal, stack_experts
from funitel.model_server.layers.mlp import Experts
from funitel.model_server.models.decoder import Decoder

logger = logging.getLogger(__name__)


def fuse_experts(decoder: Decoder, device: torch.device) -> None:
    """Have a decoder's mixtures compute with our kernels, or say why not.

    Weights are stacked layer by layer, so that one layer's are there twice at most.
    """
    mixtures = decoder.mixtures()
    if device.type != "cuda" or not mixtures:
        return
    if decoder.offload is not None:
        logger.info("experts are computed one by one: weights come from the host in every step")
        return
    for mixture in mixtures:
        if (reason := refusal(mixture.experts)) is not None:
            logger.info("experts are computed one by one: %s", reason)
            return

    def fall_back(error: Exception) -> None:
        logger.warning("experts are computed one by one, without the Triton kernels: %s", reason_of(error))

    probe_or_fall_back(partial(_fuse, mixtures, decoder.spec.hidden_size, device), fall_back)


def _fuse(mixtures: list[Experts], hidden_size: int, device: torch.device) -> None:
    # Triton: seconds to import, and there with torch's builds for GPUs only
    kernels = import_module("funitel.model_server.layers.experts.kernels")
    choice = import_module("funitel.model_server.layers.experts.choice_kernels")
    ops: ExpertOps = kernels.TritonExpertOps()
    for i, mixture in enumerate(mixtures):
        stack_experts(mixture)
        torch.cuda.empty_cache()  # the next stack needs in one piece what the weights one by one leave
        if i == 0:
            with torch.inference_mode():
                choice.check_choice(mixture.router, device)
                kernels.check_experts(mixture.held_experts, mixture.router.spec.num_chosen, hidden_size, device)
    for mixture in mixtures:
        mixture.ops, mixture.router.choice = ops, choice.choice_of(mixture.router)
    logger.info("mixtures of experts are computed in Triton kernels")
