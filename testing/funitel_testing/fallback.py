"""Architectures through transformers over our blocks, as those of no row of the table are: a table of the worst errors.

Usage: python -m funitel_testing.fallback [NAME ...]. A random tiny checkpoint of each, three prompts of uneven length
in chunks beside each other and then 32 decode steps; every logit in float32 is held against transformers alone. Those
that it has a plan to split run once more on two ranks, with heads that two can share. The last line is one JSON object.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.loading.transformers import FallbackModel, load_fallback
from funitel.model_server.registry.decoders import FAMILIES
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import NoRow
from funitel_testing.forward_worker import BLOCK_SIZE, step_through
from funitel_testing.ranks import run_ranks
from funitel_testing.servers import free_port
from funitel_testing.zoo import CONTEXT, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, VOCAB_SIZE, ZOO, Tiny, by_steps

PROMPTS = (37, 5, 70)  # tokens: uneven, and longer than the windows
NUM_DECODE = 32
TOLERANCE = 1e-4

_MODERN: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": CONTEXT,
}
_HEAD_DIM = {"head_dim": 8}
_MAMBA_PART = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 24, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 48,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "short_mscale": 1.0,
    "long_mscale": 1.2,
    "factor": CONTEXT / 48,
}


@dataclass(frozen=True, kw_only=True)
class _Unlisted(Tiny):
    """A checkpoint whose `config.json` says an architecture of no row, for which its `model_type` says how to load it.

    That of transformers, if there is no row for it.
    """

    def save(self, folder: Path) -> Any:
        """See Tiny."""
        model = super().save(folder)
        if self.architecture in FAMILIES:
            path = folder / "config.json"
            config = json.loads(path.read_text()) | {"architectures": [f"Unlisted{self.architecture}"]}
            path.write_text(json.dumps(config, indent=2))
        return model


def _tiny(kind: str, model: str = "", **config: Any) -> Tiny:
    return _Unlisted(kind=kind, model=model, config={**_MODERN, **config}, attention="eager")


def _bare(kind: str, **config: Any) -> Tiny:
    return _Unlisted(kind=kind, config={"vocab_size": VOCAB_SIZE, **config}, attention="eager")


_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
UNLISTED: Mapping[str, Tiny] = {
    # all rows in one forward
    "arcee": _tiny("Arcee"),
    "helium": _tiny("Helium", **_HEAD_DIM),
    "ernie": _tiny("Ernie4_5", **_HEAD_DIM, tie_word_embeddings=False),
    "apertus": _tiny("Apertus"),
    "seed-oss": _tiny("SeedOss", **_HEAD_DIM),
    "exaone": _tiny("Exaone4", sliding_window=20, sliding_window_pattern=2),
    "dots": _tiny("Dots1", **_HEAD_DIM, **_MOE, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1),
    "gpt-oss": _tiny("GptOss", **_HEAD_DIM, num_local_experts=4, num_experts_per_tok=2, sliding_window=20),
    "nemotron": _tiny("Nemotron"),
    "hunyuan": _tiny("HunYuanDenseV1", **_HEAD_DIM),
    "phimoe": replace(_tiny("Phimoe", num_local_experts=4, rope_parameters=_LONGROPE), oracle=by_steps),
    # in padded batches, for the attention is of their own
    "codegen": _bare("CodeGen", n_embd=64, n_head=4, n_layer=2, n_positions=CONTEXT, rotary_dim=8),
    "biogpt": _Unlisted(
        kind="BioGpt",
        config={key: value for key, value in _MODERN.items() if key != "num_key_value_heads"},
        attention="eager",
    ),
    # with a state of their own
    "mamba": _bare("Mamba", hidden_size=HIDDEN, state_size=8, num_hidden_layers=2),
    "mamba2": _bare(
        "Mamba2", hidden_size=48, state_size=8, num_hidden_layers=2, num_heads=4, head_dim=24, n_groups=2, chunk_size=16
    ),
    "falcon-mamba": _bare("FalconMamba", hidden_size=HIDDEN, state_size=8, num_hidden_layers=2),
    "rwkv": _bare("Rwkv", hidden_size=HIDDEN, num_hidden_layers=3, context_length=CONTEXT, rescale_every=2),
    "lfm2": _tiny("Lfm2", layer_types=["conv", "full_attention"]),
    "jamba": _tiny(
        "Jamba", attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=8, use_mamba_kernels=False
    ),
    "falcon-h1": _tiny("FalconH1", **_MAMBA_PART, mamba_d_ssm=96),
    "bamba": _tiny("Bamba", **_MAMBA_PART, attn_layer_indices=[1]),
    "qwen3-next": _tiny(
        "Qwen3Next",
        **_HEAD_DIM,
        **_MOE,
        num_experts=4,
        shared_expert_intermediate_size=24,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention"],
    ),
}


# Those that transformers has a plan for, and what they need beside four heads so that two ranks can share them.
SPLIT: Mapping[str, Mapping[str, Any]] = {
    "arcee": {"num_key_value_heads": 2, "intermediate_size": 101},  # hidden units for one and a half each
    "helium": {"num_key_value_heads": 4, "head_dim": 12, "tie_word_embeddings": True},
    "ernie": {"num_key_value_heads": 1},  # of which each rank has a copy
    "apertus": {"num_key_value_heads": 2},
    "seed-oss": {"num_key_value_heads": 2},
    "exaone": {"num_key_value_heads": 2},
    "dots": {"num_key_value_heads": 2},
    "nemotron": {"num_key_value_heads": 2},
    "phimoe": {"num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 64},
    "jamba": {"num_key_value_heads": 2, "intermediate_size": 64},
    "qwen3-next": {"num_key_value_heads": 2},
}


@dataclass(frozen=True, slots=True)
class SplitRun:
    """What two ranks made of a checkpoint. `weights` are bytes held, split, and split in all, of each rank."""

    error: float
    way: str
    weights: tuple[tuple[int, int, int], ...]
    bytes_per_block: int


def load(folder: Path, parallel: TensorParallel | None = None, **settings: Any) -> FallbackModel:
    """The model in `folder` through transformers, whether the table has a row for it or not."""
    given = ModelServerSettings(model_id=str(folder), device="cpu", **{"block_size": BLOCK_SIZE, **settings})
    join = lambda: parallel or TensorParallel()  # noqa: E731
    return load_fallback(given, folder, NoRow("asked for"), torch.float32, torch.device("cpu"), join)


def truth(
    tiny: Tiny, folder: Path, num_decode: int, lengths: Sequence[int]
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Save the checkpoint; prompts with `num_decode` tokens behind each, and their logits by transformers alone."""
    theirs = tiny.save(folder)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, VOCAB_SIZE, (n + num_decode,), generator=generator).tolist() for n in lengths]
    with torch.inference_mode():
        return prompts, [tiny.oracle(theirs, ids, num_decode) for ids in prompts]


def difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest of any logit."""
    return max(float((mine - other).abs().max()) for mine, other in zip(found, expected, strict=True))


def worst_error(
    tiny: Tiny, folder: Path, num_decode: int = NUM_DECODE, lengths: Sequence[int] = PROMPTS
) -> tuple[float, str]:
    """The largest difference of any logit from transformers', and the way it is served; prompts have `lengths`."""
    prompts, expected = truth(tiny, folder, num_decode, lengths)
    ours = load(folder)
    assert ours.loaded.name.startswith("transformers-")
    chunk = 11 if ours.takes_chunks else max(lengths)
    found = step_through(ours.loaded.decoder, ours.pools.make(200), prompts, num_decode, chunk)
    return difference(found, expected), ours.loaded.name


def split_form(name: str) -> Tiny:
    """A checkpoint with heads that two ranks share out, or where `SPLIT` says so, have in common."""
    return replace(UNLISTED[name], config={**UNLISTED[name].config, "num_attention_heads": 4, **SPLIT[name]})


def on_two_ranks(names: Sequence[str], work: Path, num_decode: int = NUM_DECODE) -> dict[str, SplitRun]:
    """What two ranks, processes of their own, make of the split forms of checkpoints, which they load one by one."""
    folders = {name: work / name for name in names}
    truths = {name: truth(split_form(name), folder, num_decode, PROMPTS) for name, folder in folders.items()}
    prompts = next(iter(truths.values()))[0]
    job = {"size": 2, "port": free_port(), "folders": [str(folder) for folder in folders.values()]}
    (work / "job.json").write_text(json.dumps({**job, "prompts": prompts, "num_decode": num_decode}))
    from funitel_testing.fallback_worker import serve_rank  # which imports this module

    run_ranks(serve_rank, work, 2)
    first, second = (torch.load(work / f"{rank}.pt") for rank in range(2))
    runs = {}
    for name, mine, others in zip(names, first, second, strict=True):
        assert not any(logits.numel() for logits in others[0]), "the first rank alone has logits"
        runs[name] = SplitRun(difference(mine[0], truths[name][1]), mine[1], (mine[2], others[2]), mine[3])
    return runs


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    checkpoints = {**UNLISTED, "llama (forced)": ZOO["llama"]}
    names = sys.argv[1:] or list(checkpoints)
    print(f"transformers {transformers.__version__}")
    print(f"{'checkpoint':<18}{'architecture':<28}{'served':<24}{'1 rank':>9}{'2 ranks':>9}")
    worst, failed = 0.0, []
    with tempfile.TemporaryDirectory() as work:
        both = [name for name in names if name in SPLIT]
        split = on_two_ranks(both, Path(work)) if both else {}
    for name in names:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            error, way = worst_error(checkpoints[name], Path(folder))
        seconds = time.monotonic() - began
        two = split[name].error if name in split else None
        on_two = "-" if two is None else f"{two:.1e}"
        row = f"{name:<18}{checkpoints[name].architecture:<28}{way:<24}{error:>9.1e}{on_two:>9}{seconds:>7.2f} s"
        print(row, flush=True)
        worst = max(worst, error, two or 0.0)
        if not max(error, two or 0.0) < TOLERANCE:
            failed.append(name)
    print(json.dumps({"checkpoints": len(names), "worst_error": worst, "tolerance": TOLERANCE, "failed": failed}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
