"""The executor of a loaded model, and the facts that its rank tells the router."""

from functools import partial
from pathlib import Path

import torch

from funitel.model_server.executor.async_sampling import AsyncSampling
from funitel.model_server.executor.executor import Executor, MakeSampling
from funitel.model_server.executor.row_rules import RowRules
from funitel.model_server.executor.sync_sampling import SyncSampling
from funitel.model_server.gpu_sampling.ops import choose_maths
from funitel.model_server.kv_cache.pool import Pools
from funitel.model_server.loading.common import Loaded, info_of, log_loaded, options_of
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.settings import ModelServerSettings
from funitel.model_server.spec.model_spec import ModelFacts
from funitel.proto.step import ShardInfo

LoadedShard = tuple[Executor, ShardInfo]


def make_executor(
    settings: ModelServerSettings,
    folder: Path,
    spec: ModelFacts,
    loaded: Loaded,
    pools: Pools,
    codec: TextCodec,
    device: torch.device,
    eos_token_ids: frozenset[int],
    rules: RowRules | None = None,
) -> LoadedShard:
    """The executor of a loaded model, by default with the rules of a decoder; on a GPU it samples on the device."""
    log_loaded(settings, folder, spec, device, loaded)
    options = options_of(settings, device, loaded, eos_token_ids)
    sampling: MakeSampling = partial(SyncSampling, scores=loaded.scores)
    if device.type == "cuda" and loaded.takes_device_tokens:
        sampling = partial(AsyncSampling, maths=choose_maths(device))
    executor = Executor(spec, loaded.decoder, pools, codec, loaded.parallel, options, sampling, rules)
    info = info_of(
        settings,
        options,
        loaded,
        spec.vocab_size,
        keeps_states=pools.state_layout is not None,
        has_parted_blocks=pools.has_parted_blocks and rules is None,
    )
    return executor, info
