"""Replay a trace of arrivals through the router's own scheduler in virtual time.

The scheduler and the block allocator are the router's, unchanged; the shards only take time, by coefficients measured
with `--calibrate` on the real executor. So a million requests take a quarter of an hour to half an hour, and replicas
and imagined shards can be tried. Every combination of `--policy` and `--replicas` is a line of the table; the
last line on stdout is one JSON object. `docs/replay.md` says what is simulated and what is not.

    python benchmarks/replay.py --requests 64 --pool-share 0.25 --policy grow reserve
    python benchmarks/replay.py --requests 1000000 --rate 44 --replicas 8 --shards 8
    python benchmarks/replay.py --trace arrivals.jsonl
    python benchmarks/replay.py --calibrate > costs.json && python benchmarks/replay.py --costs costs.json
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

from replaying.costs import DEMO_COSTS, StepCosts
from replaying.run import Variant, replay_all
from replaying.table import table
from replaying.trace import Synthetic, TraceError, read, write


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    source = parser.add_argument_group("the trace")
    source.add_argument("--trace", type=Path, help="arrivals as JSON lines; without it they are drawn from --seed")
    source.add_argument("--write-trace", type=Path, metavar="FILE", help="write the arrivals to a file and end")
    source.add_argument("--seed", type=int, default=0)
    source.add_argument("--requests", type=_count, default=2000)
    source.add_argument("--rate", type=_positive, default=math.inf, help="requests a second; all at once without it")
    source.add_argument("--mean-prompt-tokens", type=_positive, default=Synthetic.mean_prompt_tokens)
    source.add_argument("--mean-completion-tokens", type=_positive, default=Synthetic.mean_completion_tokens)
    source.add_argument("--max-prompt-tokens", type=_count, default=Synthetic.max_prompt_tokens)
    source.add_argument("--max-completion-tokens", type=_count, default=Synthetic.max_completion_tokens)
    source.add_argument("--asks-for-most", action="store_true", help="requests ask for the most, whatever they use")
    source.add_argument("--prefix-groups", type=int, default=0, help="number of prefixes that prompts may share")
    source.add_argument("--prefix-tokens", type=_count, default=Synthetic.prefix_tokens)
    source.add_argument(
        "--grouped-share", type=_share, default=Synthetic.grouped_share, help="of the requests share one"
    )
    system = parser.add_argument_group("the system")
    system.add_argument("--policy", nargs="+", choices=("grow", "reserve"), default=["grow"])
    system.add_argument("--replicas", nargs="+", type=_count, default=[1])
    system.add_argument("--shards", type=_count, default=1, help="of each replica; they divide the time of a step")
    system.add_argument("--shard-efficiency", type=_share, default=0.9, help="kept at each doubling of the shards")
    pool = system.add_mutually_exclusive_group()
    pool.add_argument("--pool-tokens", type=_count, default=32_768, help="of one replica")
    pool.add_argument(
        "--pool-share", type=_positive, help="pool as a share of all prompt + max_new_tokens of the trace"
    )
    system.add_argument("--block-size", type=_count, default=16)
    system.add_argument("--max-batch-prefill-tokens", type=_count, default=4096)
    system.add_argument("--max-batch-size", type=_count)
    system.add_argument("--target-itl-ms", type=_positive, help="as the router's flag")
    system.add_argument("--pipeline-steps", type=int, choices=(1, 2), default=2, help="as the router's flag")
    system.add_argument("--no-prefix-caching", action="store_true")
    system.add_argument("--costs", type=Path, help="what --calibrate printed, in place of the built-in coefficients")
    calibration = parser.add_argument_group("calibration")
    calibration.add_argument("--calibrate", nargs="?", const="smollm2-135m-instruct", metavar="MODEL")
    calibration.add_argument("--dtype", help="as the shard's flag")
    calibration.add_argument("--quantize", help="as the shard's flag")
    calibration.add_argument("--num-threads", type=_count, help="as the shard's flag")
    calibration.add_argument("--steps", type=_count, default=8, help="timed of each shape")
    return parser.parse_args(argv)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be >= 1")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} must be > 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be > 0 and <= 1")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    options = parse(argv)
    try:
        if options.calibrate:
            _calibrate(options)
        elif options.write_trace:
            count = write(options.write_trace, _trace(options) if options.trace is None else read(options.trace))
            print(json.dumps({"requests": count, "file": str(options.write_trace)}))
        else:
            _replay(options)
    except (TraceError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _calibrate(options: argparse.Namespace) -> None:
    from replaying.calibration import as_record, calibrate  # torch, which nothing else here needs

    costs, samples = calibrate(options.calibrate, options.dtype, options.quantize, options.num_threads, options.steps)
    print(json.dumps(as_record(costs, samples)))


def _trace(options: argparse.Namespace) -> Synthetic:
    return Synthetic(
        num_requests=options.requests,
        rate=options.rate,
        seed=options.seed,
        mean_prompt_tokens=options.mean_prompt_tokens,
        mean_completion_tokens=options.mean_completion_tokens,
        max_prompt_tokens=options.max_prompt_tokens,
        max_completion_tokens=options.max_completion_tokens,
        asks_for_most=options.asks_for_most,
        num_groups=options.prefix_groups,
        prefix_tokens=options.prefix_tokens,
        grouped_share=options.grouped_share,
    )


def _replay(options: argparse.Namespace) -> None:
    trace: Path | Synthetic = options.trace or _trace(options)
    num_requests = all_tokens = longest = 0
    for arrival in read(trace) if isinstance(trace, Path) else trace:
        num_requests += 1
        all_tokens += arrival.prompt_tokens + arrival.max_new_tokens
        longest = max(longest, arrival.prompt_tokens)
    if "reserve" in options.policy and longest > options.max_batch_prefill_tokens:
        raise TraceError(
            f"the longest prompt has {longest} tokens: the reserve policy prefills prompts whole, "
            f"--max-batch-prefill-tokens {options.max_batch_prefill_tokens} must be at least that"
        )
    pool_tokens = int(all_tokens * options.pool_share) if options.pool_share else options.pool_tokens
    if pool_tokens < options.block_size:
        raise TraceError(f"the pool has {pool_tokens} tokens, must be >= the block size of {options.block_size}")
    costs = _costs(options.costs).divided(options.shards, options.shard_efficiency)
    first = Variant(
        policy="grow",
        num_replicas=1,
        trace=trace,
        num_requests=num_requests,
        num_blocks=pool_tokens // options.block_size,
        block_size=options.block_size,
        max_batch_prefill_tokens=options.max_batch_prefill_tokens,
        max_batch_size=options.max_batch_size,
        has_prefix_cache=not options.no_prefix_caching,
        target_gap_seconds=options.target_itl_ms and options.target_itl_ms / 1000,
        pipeline_steps=options.pipeline_steps,
        costs=costs,
    )
    variants = [
        replace(first, policy=policy, num_replicas=num_replicas)
        for policy, num_replicas in product(options.policy, options.replicas)
    ]
    reports = replay_all(variants)
    print(f"{num_requests} requests, pool of {pool_tokens} tokens, {options.shards} shards to a replica")
    print(table(reports))
    print(json.dumps({"pool_tokens": pool_tokens, "shards": options.shards, "costs": asdict(costs), "runs": reports}))


def _costs(path: Path | None) -> StepCosts:
    if path is None:
        return DEMO_COSTS
    try:
        return StepCosts(**{name: float(value) for name, value in json.loads(path.read_text())["costs"].items()})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TraceError(f"{path} does not hold what --calibrate prints: {error!r}") from None


if __name__ == "__main__":
    sys.exit(main())
