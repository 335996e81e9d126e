"""Measure the accuracy of each precision tier of the fused CPU step against torch in float32 on one text.

Teacher-forced over windows of the text: perplexity, how often the likeliest token is the same, and the Kullback-Leibler
divergence of the tier's distribution from float32's. `same` is the relative error of the logits against torch holding
the very weights that the tier rounded to, so it shows what the implementation adds. Each promise of `LIMITS` gets a
line; the exit status is 1 where one is broken. The last line on stdout is one JSON object.

    python benchmarks/accuracy.py MODEL_FOLDER_OR_NAME --text LICENSE --num-tokens 1024
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.decoder import FusedDecoder
from funitel.model_server.cpu.native import load_library
from funitel.model_server.cpu.precision import ActivationDtype, Tier
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.gguf_pointer import POINTER
from funitel.model_server.files.integrity import read_json
from funitel.model_server.forward.batch import Forward, ForwardBatch, RowSpan
from funitel.model_server.hub.resolve import DEFAULT_CACHE_DIR, resolve
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.registry.lookup import spec_of

WINDOW, BLOCK_SIZE = 256, 16
CPU = torch.device("cpu")
LIMITS = {
    ("float16", "relative_error"): 1e-2,
    ("int8 int16", "same"): 5e-3,
    ("int8 int16", "perplexity_change"): 1e-2,
    ("int8 int8", "perplexity_change"): 2e-2,
    ("gguf int8", "perplexity_change"): 1e-2,
}
"""What a tier's figure is promised to be at most."""


class Rounded(Weights):
    """Weights rounded as a tier rounds them, in float32: int8 with one scale for each output, or float16."""

    tier = Tier.FLOAT32

    def read(self, name, shape, **parts):  # type: ignore[no-untyped-def]
        weight = super().read(name, shape, **parts)
        if weight.dim() < 2 or self.tier in (Tier.FLOAT32, Tier.GGUF):
            return weight
        if self.tier in (Tier.FLOAT16, Tier.BFLOAT16):
            return weight.to(getattr(torch, self.tier.label)).float()
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        return (weight / scale.clamp_min(1e-30)).round().clamp(-127, 127) * scale


def logits_of(decoder: Forward, folder: Path, windows: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    """Logits of every token of every window: [num_tokens, vocab_size]."""
    spec = spec_of(read_json(folder / "config.json"))
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
    cache = KVCache(spec, heads, 2 + WINDOW // BLOCK_SIZE, BLOCK_SIZE, dtype, CPU)
    table = np.arange(1, cache.num_blocks, dtype=np.int32)
    found = []
    with torch.inference_mode():
        for window in windows:
            logits = decoder(ForwardBatch.build([RowSpan(window, 0, table, "all")], BLOCK_SIZE, CPU), cache)
            assert logits is not None
            found.append(logits)
    return torch.cat(found)


def torch_logits(folder: Path, windows: list[list[int]], tier: Tier) -> torch.Tensor:
    spec = spec_of(read_json(folder / "config.json"))
    weights = Rounded(folder, torch.float32, CPU, spec.names.prefix)
    weights.tier = tier
    decoder = Decoder(spec, weights, TensorParallel(), TorchAttention(BLOCK_SIZE, CPU))
    return logits_of(decoder, folder, windows, torch.float32)


def compare(found: torch.Tensor, expected: torch.Tensor, windows: list[list[int]]) -> dict[str, float]:
    """Figures of a tier against float32."""
    ours, theirs = found.log_softmax(-1), expected.log_softmax(-1)
    losses = []
    for i, window in enumerate(windows):
        part = ours[i * WINDOW : (i + 1) * WINDOW - 1]
        losses.append(-part.gather(1, torch.tensor(window[1:])[:, None]))
    return {
        "perplexity": torch.cat(losses).mean().exp().item(),
        "top1": (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item(),
        "kl": (theirs.exp() * (theirs - ours)).sum(-1).mean().item(),
        "relative_error": ((found - expected).norm() / expected.norm()).item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, nargs="+", default=[Path("LICENSE"), Path("README.md")])
    parser.add_argument("--num-tokens", type=int, default=2048)
    options = parser.parse_args()
    folder = resolve(options.model).folder
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = []
    for path in options.text:
        ids += tokenizer.encode(path.read_text(), add_special_tokens=False).ids[
            : options.num_tokens // len(options.text)
        ]
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)]
    if not windows:
        parser.error(f"--num-tokens {options.num_tokens}: the texts must have at least {WINDOW} tokens together")
    spec = spec_of(read_json(folder / "config.json"))
    library = load_library(DEFAULT_CACHE_DIR.expanduser())
    exact = torch_logits(folder, windows, Tier.FLOAT32)
    table = {"torch float32": compare(exact, exact, windows)}
    for tier, activations in product(Tier, ActivationDtype):
        if not tier.kind.has_codes and activations is not ActivationDtype.INT8:
            continue
        if tier is Tier.GGUF and not (folder / POINTER).is_file():
            continue
        weights = Weights(folder, torch.float32, CPU, spec.names.prefix)
        decoder = FusedDecoder(
            spec,
            weights,
            TensorParallel(),
            library,
            tier=tier,
            block_size=BLOCK_SIZE,
            num_threads=2,
            activations=activations,
        )
        label = f"{tier.label} {activations.label}" if tier.kind.has_codes else tier.label
        found = logits_of(decoder, folder, windows, decoder.kv_dtype)
        table[label] = compare(found, exact, windows)
        same = torch_logits(folder, windows, tier)
        table[label]["same"] = ((found - same).norm() / same.norm()).item()
        table[label]["max_same"] = (found - same).abs().max().item()
        table[label]["megabytes"] = decoder.program.held_bytes / 1e6
    for figures in table.values():
        figures["perplexity_change"] = abs(figures["perplexity"] / table["torch float32"]["perplexity"] - 1)
    for name, figures in table.items():
        print(f"{name:14}", "  ".join(f"{key} {value:.5g}" for key, value in figures.items()))
    limits = {each: most for each, most in LIMITS.items() if each[0] in table}
    broken = [(tier, figure) for (tier, figure), most in limits.items() if table[tier][figure] > most]
    for (tier, figure), most in limits.items():
        verdict = "broken" if (tier, figure) in broken else "kept"
        print(f"{tier}: {figure} {table[tier][figure]:.2g}, at most {most:g}: {verdict}")
    print(json.dumps({"num_tokens": len(windows) * WINDOW, "tiers": table, "broken": broken}))
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
