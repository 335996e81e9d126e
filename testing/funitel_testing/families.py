"""Every architecture of the family table against transformers: a table with the worst error of each.

Usage: python -m funitel_testing.families [--full] [NAME ...]. A random tiny checkpoint; three prompts of uneven length
in random chunks beside each other and then decode steps, which join late and are preempted once each, to be computed
again; on one rank and on two; logits in float32. `--full` takes 32 decode steps and computes the oracle step by step
too. The last line is one JSON object.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel_testing import forward_worker
from funitel_testing.threads import on_ranks
from funitel_testing.zoo import VOCAB_SIZE, ZOO, at_once, by_steps

PROMPTS = (37, 5, 70)  # tokens: uneven, and longer than the zoo's windows and some trained contexts
TOLERANCE = 1e-4
SEED = 5  # of the chunks


def worst_error(
    name: str,
    folder: Path,
    *,
    num_decode: int,
    sizes: Sequence[int],
    is_full: bool = False,
    model_spec: str | None = None,
) -> list[float]:
    """The largest difference of any logit from transformers', for each number of ranks.

    `model_spec` is the file of a spec to use instead of the family's.
    """
    tiny = ZOO[name]
    model = tiny.save(folder)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, VOCAB_SIZE, (n + num_decode,), generator=generator).tolist() for n in PROMPTS]
    oracle = by_steps if is_full and tiny.oracle is at_once else tiny.oracle
    with torch.inference_mode():
        expected = [oracle(model, ids, num_decode) for ids in prompts]

    def forward(parallel: TensorParallel) -> list[torch.Tensor]:
        return forward_worker.run(folder, parallel, prompts, num_decode, model_spec=model_spec, seed=SEED)

    errors = []
    for size in sizes:
        found = on_ranks(size, forward)
        pairs = zip(found, expected, strict=True)
        errors.append(max(float((ours - theirs).abs().max()) for ours, theirs in pairs))
    return errors


def main() -> None:
    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")] or list(ZOO)
    is_full = "--full" in sys.argv
    print(f"{'checkpoint':<22}{'architecture':<32}{'1 rank':>10}{'2 ranks':>10}{'seconds':>9}")
    worst, failed = 0.0, []
    for name in names:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            errors = worst_error(name, Path(folder), num_decode=32 if is_full else 4, sizes=(1, 2), is_full=is_full)
            architecture = json.loads((Path(folder) / "config.json").read_text())["architectures"][0]
        seconds = time.monotonic() - began
        print(f"{name:<22}{architecture:<32}{errors[0]:>10.1e}{errors[1]:>10.1e}{seconds:>9.2f}", flush=True)
        worst = max(worst, *errors)
        if not max(errors) < TOLERANCE:
            failed.append(name)
    print(json.dumps({"checkpoints": len(names), "worst_error": worst, "tolerance": TOLERANCE, "failed": failed}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
