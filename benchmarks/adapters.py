"""Measure the time per output token of streams over several LoRA adapters, beside that of the base.

One server serves both, in alternation: all streams name the base, or each of them the next adapter. Adapters are random
matrices for the layers of --targets, by default every linear layer. Each figure is the median over rounds of the median
gap between tokens of all streams. The last line is one JSON object.

    python benchmarks/adapters.py [--model FOLDER] [--streams 16] [--adapters 8] [--rank 8] [--rounds 5] [--full]

`--full` fails where the adapters cost more than 1.15 times the base.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path

import httpx
import torch

from funitel_testing.cache import demo_folder
from funitel_testing.clients import client_of, stream
from funitel_testing.servers import serving
from funitel_testing.tiny_adapters import TinyAdapter, write_adapter

MOST = 1.15
TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
PROMPT = "Tell me about the sea, its weather and the people who live by it."


def linear_layers(folder: Path) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every linear layer of a Llama, by its module."""
    config = json.loads((folder / "config.json").read_text())
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    keys = config["num_key_value_heads"] * size
    attention = {"q": (heads * size, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, heads * size)}
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {
        f"model.layers.{layer}.{part}.{name}_proj": shape
        for layer in range(config["num_hidden_layers"])
        for part, shapes in (("self_attn", attention), ("mlp", mlp))
        for name, shape in shapes.items()
    }


def save_adapters(model: Path, root: Path, count: int, rank: int, targets: list[str]) -> list[str]:
    """Save random adapters of a model in bfloat16; returns what --lora-adapters takes for each."""
    layers = {name: shape for name, shape in linear_layers(model).items() if name.endswith(tuple(targets))}
    for index in range(count):
        generator = torch.Generator().manual_seed(index)
        tensors = {}
        for name, (outputs, inputs) in layers.items():
            for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                numbers = torch.randn(shape, generator=generator) * 0.01
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = numbers.bfloat16()
        write_adapter(root / str(index), TinyAdapter(rank=rank, targets=targets).config(), tensors)
    return [f"adapter-{index}={root / str(index)}" for index in range(count)]


async def measure(client: httpx.AsyncClient, names: list[str | None], max_new_tokens: int) -> float:
    """Milliseconds between two tokens, the median over all streams, one for each name."""
    length = {"max_new_tokens": max_new_tokens, "ignore_eos_token": True}
    asked = [length if name is None else length | {"adapter_id": name} for name in names]
    answers = await asyncio.gather(*(stream(client, PROMPT, **each) for each in asked))
    return 1000 * statistics.median(gap for answer in answers for gap in answer.gaps)


async def compare(url: str, given: argparse.Namespace) -> dict[str, object]:
    """The figures."""
    base: list[str | None] = [None] * given.streams
    mixed: list[str | None] = [f"adapter-{index % given.adapters}" for index in range(given.streams)]
    found: dict[str, list[float]] = {"base": [], "adapters": []}
    async with client_of(url) as client:
        for turn in range(given.rounds + 1):  # the first warms up
            for name, names in (("base", base), ("adapters", mixed)):
                gap = await measure(client, names, given.max_new_tokens)
                if turn:
                    found[name].append(gap)
                    print(f"{name:10} {gap:6.2f} ms", flush=True)
    ratios = [one / other for one, other in zip(found["adapters"], found["base"], strict=True)]
    figures = {name: round(statistics.median(gaps), 2) for name, gaps in found.items()}
    return figures | {"ratio": round(statistics.median(ratios), 3), "from": min(ratios), "to": max(ratios)}


def main() -> None:
    """Run a server and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a Llama; the demo model when not given")
    for name, default in (("streams", 16), ("adapters", 8), ("rank", 8), ("rounds", 5), ("max-new-tokens", 96)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--targets", default=TARGETS, help="ends of the names of the layers with adapters")
    parser.add_argument("--full", action="store_true", help="hold the ratio to its bound")
    parser.add_argument("flags", nargs="*", help="of the server, behind --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        model = given.model or demo_folder()
        adapters = save_adapters(model, Path(root) / "adapters", given.adapters, given.rank, given.targets.split(","))
        flags = ("--model-id", str(model), "--lora-adapters", ",".join(adapters), "--max-loras", str(given.adapters))
        with serving(Path(root), *flags, *given.flags) as server:
            figures = asyncio.run(compare(server.url, given))
    print(json.dumps(figures))
    if given.full and float(str(figures["ratio"])) > MOST:
        sys.exit(f"error: {figures['ratio']} is over {MOST}")


if __name__ == "__main__":
    main()
