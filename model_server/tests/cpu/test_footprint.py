"""Memory is known before it is taken: weights by the spec alone, and what the system then says the process has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.footprint import weight_bytes
from funitel.model_server.cpu.precision import Tier
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.loading.torch_footprint import torch_weight_bytes
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.registry.lookup import spec_of
from funitel_testing.forward_worker import fused_decoder
from funitel_testing.tiny import FAMILIES, save_tiny
from funitel_testing.tiny_blocks import add_blocks
from funitel_testing.zoo import ZOO

CPU = torch.device("cpu")

# One process, precision after precision: what the log says of the weights, and what a pool takes once it is used.
SCRIPT = """
import gc, json, logging, sys
from pathlib import Path
from funitel.model_server.loading.decoder import load
from funitel.model_server.device.memory import resident_bytes
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.step import WarmupLimits
from funitel_testing.executors import start

class Listener(logging.Handler):
    def emit(self, record):
        if record.msg.startswith("memory "):
            said.append(record.args)

said, results = [], {}
logging.getLogger("funitel").addHandler(Listener())
logging.getLogger("funitel").setLevel(logging.INFO)
folder = Path(sys.argv[1])
for given in ({"quantize": "gguf"}, {"quantize": "int8"}, {"dtype": "float16"}, {"dtype": "float32"}):
    executor, info = load(ModelServerSettings(model_id=str(folder), device="cpu", num_threads=1, **given), folder)
    predicted, measured, kv_bytes_per_token = said.pop()
    limits = WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=3200)
    executor.warmup([start(0, list(range(20)))], limits)
    before = resident_bytes()
    executor.runner.pool.pool.fill_(1.0)
    pool = resident_bytes() - before
    results[info.dtype] = [predicted, measured, 3216 * kv_bytes_per_token, pool]
    del executor
    gc.collect()
print(json.dumps(results))
"""

# One process, precision after precision: what a step says it will take, and by how much the process then grew at most.
STEP_SCRIPT = """
import json, sys
from pathlib import Path
import torch
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.files.integrity import read_json
from funitel.model_server.cpu.footprint import step_bytes
from funitel.model_server.cpu.precision import Tier
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.device.memory import resident_bytes
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel_testing.forward_worker import BLOCK_SIZE, CPU, fused_decoder

NUM_TOKENS, alone, folder, results = 3072, TensorParallel(), Path(sys.argv[1]), {}
spec = spec_of(read_json(folder / "config.json"))
tables = torch.arange(NUM_TOKENS // BLOCK_SIZE, dtype=torch.int32).view(32, -1).numpy()

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

@torch.inference_mode()
def step(decoder, pool, num_tokens):
    rows = [RowSpan([1] * num_tokens, 0, table, "all") for table in tables]
    decoder(ForwardBatch.build(rows, BLOCK_SIZE, CPU), pool)

for tier in (Tier.GGUF, Tier.INT8, Tier.FLOAT32):
    decoder = fused_decoder(folder, tier, alone)
    pool = KVCache(spec, HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0), len(tables) * tables.shape[1],
                   BLOCK_SIZE, decoder.kv_dtype, CPU)
    pool.pool.fill_(0.0)
    step(decoder, pool, 1)
    resident_bytes()  # gives back what was freed
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    step(decoder, pool, NUM_TOKENS // 32)
    predicted = step_bytes(spec, alone, tier, num_tokens=NUM_TOKENS, num_logits=NUM_TOKENS)
    results[tier.label] = [predicted, status("VmHWM") - before]
    del decoder, pool
print(json.dumps(results))
"""


@pytest.mark.parametrize("tier", [Tier.INT8, Tier.FLOAT16, Tier.FLOAT32], ids=lambda tier: tier.label)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_take_what_was_predicted_on_every_rank(family: str, tier: Tier, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path)
    spec = spec_of(read_json(folder / "config.json"))
    for rank, size in ((0, 1), (0, 3), (2, 3), (3, 4)):
        parallel = TensorParallel(rank, size)
        assert (
            weight_bytes(spec, parallel, tier, lambda layer, columns: None)
            == fused_decoder(folder, tier, parallel).program.held_bytes
        )


@pytest.mark.parametrize("name", ["gemma2", "opt_350m", "qwen2_moe", "deepseek_v2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_takes_what_was_predicted_on_every_rank(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    ZOO[name].save(tmp_path)
    spec = spec_of(read_json(tmp_path / "config.json"))
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        weights = Weights(tmp_path, dtype, CPU, spec.names.prefix, is_shown=False)
        Decoder(spec, weights, TensorParallel(rank, size), TorchAttention(4, CPU))
        assert torch_weight_bytes(spec, rank, size, dtype, CPU) == weights.held_bytes


def test_the_process_has_as_much_memory_as_was_predicted(demo_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(demo_model)], capture_output=True, text=True, check=True, timeout=300
    )
    results = json.loads(done.stdout)
    assert results.keys() == {"gguf", "int8", "torch.float16", "torch.float32"}
    for tier, (weights, measured, pool, used) in results.items():
        assert measured == pytest.approx(weights, rel=0.1), tier
        assert used == pytest.approx(pool, rel=0.1), tier


def test_a_step_takes_what_was_predicted_at_its_peak(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4}
    folder = save_tiny("llama", tmp_path, **sizes, head_dim=64, num_hidden_layers=1)
    add_blocks(folder, lambda name: "Q4_0")
    done = subprocess.run(
        [sys.executable, "-c", STEP_SCRIPT, str(folder)], capture_output=True, text=True, check=True, timeout=300
    )
    results = json.loads(done.stdout)
    assert results.keys() == {"gguf", "int8", "float32"}
    for tier, (predicted, measured) in results.items():
        assert measured == pytest.approx(predicted, rel=0.1), tier
