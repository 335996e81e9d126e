"""Measure perplexity and distance to float32 of quantised models on a held-out text.

For every folder: perplexity of the held-out text, how often its most likely token is that of float32, mean KL
divergence from float32 in nats, size of the weights, and the mean relative error of the outputs of each kind of linear
layer when fed what float32 feeds it. Computes in torch in float32; `funitel perplexity` measures a model as it is
served. The last line on stdout is one JSON object.

    funitel-server quantize smollm2-135m-instruct /models/gptq
    python benchmarks/quantization.py smollm2-135m-instruct /models/gptq [FOLDER ...] [--text FILE]
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean

import numpy as np
import torch

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.files.progress import Progress
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.hub import resolve
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.tools.perplexity.scores import Scores
from funitel.model_server.tools.quantize.gptq import output_error
from funitel.model_server.tools.quantize.layer_walk import Inputs, Walk, inputs_of

TEXT = Path(__file__).with_name("heldout.txt")
CPU = torch.device("cpu")
BLOCK_SIZE = 16


@torch.inference_mode()
def logits_of(folder: Path, ids: list[int]) -> torch.Tensor:
    """[num_tokens, vocab_size] of the model in `folder`, in float32."""
    spec = spec_of(read_json(folder / "config.json"))
    weights = Weights(folder, torch.float32, CPU, spec.names.prefix, is_shown=False)
    decoder = Decoder(spec, weights, TensorParallel(), TorchAttention(BLOCK_SIZE, CPU))
    table = np.arange(1, 2 + len(ids) // BLOCK_SIZE, dtype=np.int32)
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
    cache = KVCache(spec, heads, len(table) + 1, BLOCK_SIZE, torch.float32, CPU)
    logits = decoder(ForwardBatch.build([RowSpan(ids, 0, table, "all")], BLOCK_SIZE, CPU), cache)
    assert logits is not None
    return logits


def quality_of(name: str, logits: torch.Tensor, oracle: torch.Tensor, ids: list[int]) -> dict[str, float]:
    """How well a model predicts the text, and how far it is from the oracle."""
    found, reference, following = Scores(name), Scores("float32"), torch.tensor(ids[1:])
    reference.add(oracle[:-1], following)
    found.add(logits[:-1], following, oracle[:-1])
    distance = found.distance(reference)
    perplexity = found.likelihood(num_bytes=0).perplexity
    return {"perplexity": perplexity, "same_top_token": distance.same_top_token, "kl": distance.kl_mean}


@torch.inference_mode()
def layer_errors(source: Path, folders: list[Path], ids: list[int]) -> dict[Path, dict[str, float]]:
    """Mean relative output error of each kind of linear layer, fed with what the source's own layers give."""
    spec = spec_of(read_json(source / "config.json"))
    source_weights, *others = (
        Weights(folder, torch.float32, CPU, spec.names.prefix, is_shown=False) for folder in [source, *folders]
    )
    walk = Walk(spec, source_weights, [ids])
    found: dict[Path, dict[str, list[float]]] = {folder: defaultdict(list) for folder in folders}
    progress = Progress("comparing layers", spec.num_layers, unit="layers")
    for index in range(spec.num_layers):
        layer = walk.load(index)
        for inputs in inputs_of(spec, source_weights.prefix, index):
            hessian = walk.hessian(layer, inputs)
            expected = read(source_weights, inputs, is_transposed=spec.names.is_transposed)
            for folder, weights in zip(folders, others, strict=True):
                weight = read(weights, inputs, is_transposed=spec.names.is_transposed)
                kind = inputs.parts[0][0].rsplit(".", 1)[1]
                found[folder][kind].append(output_error(expected, weight, hessian))
        walk.advance(layer)
        progress.advance(1)
    progress.finish()
    return {folder: {kind: mean(errors) for kind, errors in kinds.items()} for folder, kinds in found.items()}


def read(weights: Weights, inputs: Inputs, *, is_transposed: bool) -> torch.Tensor:
    """Weights of the layers that share an input."""
    parts = [weights.read_linear(s, n, inputs.num_inputs, is_transposed=is_transposed) for s, n in inputs.parts]
    return torch.cat(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the model in floating point, as for funitel --model-id")
    parser.add_argument("folders", nargs="+", type=Path, help="folders that funitel-server quantize wrote from it")
    parser.add_argument("--text", type=Path, default=TEXT, help="a text that calibrated nothing")
    arguments = parser.parse_args()
    source = resolve.resolve(arguments.model).folder
    ids = TextCodec(source).encode(arguments.text.read_text(encoding="utf-8"), add_special_tokens=True)
    oracle = logits_of(source, ids)
    errors = layer_errors(source, arguments.folders, ids)
    results = {"float32": quality_of("float32", oracle, oracle, ids)}
    for folder in arguments.folders:
        print(f"predicting with {folder.name}", file=sys.stderr)
        num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        quality = quality_of(folder.name, logits_of(folder, ids), oracle, ids)
        results[folder.name] = quality | {"weight_bytes": num_bytes, "layer_errors": errors[folder]}
    kinds = sorted({kind for of_folder in errors.values() for kind in of_folder})
    print(f"{'':24} perplexity  same top     KL  " + "  ".join(f"{kind:>9}" for kind in kinds))
    for name, result in results.items():
        of_folder = result.get("layer_errors", dict.fromkeys(kinds, 0.0))
        row = f"{name:24} {result['perplexity']:10.3f} {result['same_top_token']:9.3f} {result['kl']:6.4f}  "
        print(row + "  ".join(f"{of_folder[kind]:9.4f}" for kind in kinds))
    print(json.dumps({"tokens": len(ids), "text": arguments.text.name} | results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
