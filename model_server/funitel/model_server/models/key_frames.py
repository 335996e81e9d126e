"""Give pools of uint4 the frames of their keys: compute a short text, and see what the keys of the model are like."""

import logging
import time

import numpy as np
import torch

from funitel.model_server.cpu.decoder import FusedDecoder
from funitel.model_server.files.texts import BUILT_IN
from funitel.model_server.forward.batch import Forward, ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import Pools
from funitel.model_server.models.joined import JoinedForward
from funitel.model_server.sequence.detokenizer import TextCodec

logger = logging.getLogger(__name__)

WINDOW, NUM_WINDOWS = 256, 4  # tokens that are computed together
NUM_FIRST = 32  # tokens that are computed as the first ones of a sequence, besides those of the windows


@torch.inference_mode()
def frame_keys(forward: Forward, pools: Pools, codec: TextCodec, context: int) -> str:
    """Compute a short text, and set the frames of keys of the fused decoders that need some; the digests of these.

    All ranks and stages of a model call it at the same time.

    Args:
        forward: the model, or this stage of it.
        pools: make its pool.
        codec: makes tokens of the text.
        context: tokens of the longest sequence.
    """
    parts = [part.decoder for part in forward.parts] if isinstance(forward, JoinedForward) else [forward]
    decoders = [each for each in parts if isinstance(each, FusedDecoder) and each.has_key_frames]
    if not decoders:
        return ""
    begin = time.perf_counter()
    window = min(WINDOW, context)
    text = BUILT_IN.read_text(encoding="utf-8")
    tokens = codec.encode(text, add_special_tokens=True)[: window * NUM_WINDOWS]
    lines = [line for line in text.splitlines() if line.strip()]
    encoded = (codec.encode(line, add_special_tokens=True) for line in lines[:: -(-len(lines) // NUM_FIRST)])
    first = [ids[:1] for ids in encoded if ids]
    size = pools.block_size
    table = np.arange(1, 1 + max(len(first), -(-window // size)), dtype=np.int32)
    cache = pools.make(len(table) + 1)
    windows = [tokens[start : start + window] for start in range(0, len(tokens), window)]
    steps = [[RowSpan(each, 0, table)] for each in windows]
    steps.append([RowSpan(each, 0, table[i : i + 1]) for i, each in enumerate(first)])
    for each in decoders:
        each.observe_keys()
    for rows in steps:
        forward(ForwardBatch.build(rows, size, torch.device("cpu")), cache)
    num_first = len(windows) + len(first)
    for each in decoders:
        each.frame_keys(len(tokens) - len(windows), num_first)
    seconds = time.perf_counter() - begin
    digests = " ".join(each.frames_digest for each in decoders)
    message = "keys are framed for uint4: tokens=%d seconds=%.1f digest=%s"
    logger.info(message, len(tokens) + len(first), seconds, digests)
    return digests
