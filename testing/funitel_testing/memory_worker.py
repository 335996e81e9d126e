"""What a process says it will take of memory, and what the system then says that it has taken.

Each function runs in a process of its own, which it grows, and finds its model in `model` of a folder.
"""

import gc
import json
import logging
from pathlib import Path
from typing import Any

import torch

from funitel.model_server.cpu.decoder import FusedDecoder
from funitel.model_server.cpu.footprint import step_bytes
from funitel.model_server.cpu.precision import Tier
from funitel.model_server.device.memory import resident_bytes
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.loading.decoder import load
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.step import WarmupLimits
from funitel_testing.executors import start
from funitel_testing.forward_worker import BLOCK_SIZE, CPU, fused_decoder

PRECISIONS: tuple[dict[str, Any], ...] = (
    {"quantize": "gguf"},
    {"quantize": "int8"},
    {"dtype": "float16"},
    {"dtype": "float32"},
)
NUM_TOKENS, NUM_ROWS = 3072, 32


class _Listener(logging.Handler):
    """Keeps what the log says of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("memory "):
            self.said.append(record.args)


def load_and_fill_pools(work: Path, rank: int) -> None:
    """Write loads.json: what the log says of the weights of each precision, and what a pool takes once it is used."""
    listener = _Listener()
    logging.getLogger("funitel").addHandler(listener)
    logging.getLogger("funitel").setLevel(logging.INFO)
    folder, results = work / "model", {}
    for given in PRECISIONS:
        executor, info = load(ModelServerSettings(model_id=str(folder), device="cpu", num_threads=1, **given), folder)
        predicted, measured, kv_bytes_per_token = listener.said.pop()
        limits = WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=3200)
        executor.warmup([start(0, list(range(20)))], limits)
        before = resident_bytes()
        executor.runner.pool.pool.fill_(1.0)  # type: ignore[attr-defined]
        pool = resident_bytes() - before
        results[info.dtype] = [predicted, measured, 3216 * kv_bytes_per_token, pool]
        del executor
        gc.collect()
    (work / "loads.json").write_text(json.dumps(results))


def take_steps(work: Path, rank: int) -> None:
    """Write steps.json: what a step of each precision says it will take, and by how much the process grew at most."""
    alone, folder, results = TensorParallel(), work / "model", {}
    spec = spec_of(read_json(folder / "config.json"))
    num_blocks = NUM_TOKENS // BLOCK_SIZE
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
    for tier in (Tier.GGUF, Tier.INT8, Tier.FLOAT32):
        decoder = fused_decoder(folder, tier, alone)
        pool = KVCache(spec, heads, num_blocks, BLOCK_SIZE, decoder.kv_dtype, CPU)
        pool.pool.fill_(0.0)
        _step(decoder, pool, 1)
        resident_bytes()  # gives back what was freed
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        _step(decoder, pool, NUM_TOKENS // NUM_ROWS)
        predicted = step_bytes(spec, alone, tier, num_tokens=NUM_TOKENS, num_logits=NUM_TOKENS)
        results[tier.label] = [predicted, _status("VmHWM") - before]
        del decoder, pool
    (work / "steps.json").write_text(json.dumps(results))


@torch.inference_mode()
def _step(decoder: FusedDecoder, pool: KVCache, num_tokens: int) -> None:
    tables = torch.arange(NUM_TOKENS // BLOCK_SIZE, dtype=torch.int32).view(NUM_ROWS, -1).numpy()
    rows = [RowSpan([1] * num_tokens, 0, table, "all") for table in tables]
    decoder(ForwardBatch.build(rows, BLOCK_SIZE, CPU), pool)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
