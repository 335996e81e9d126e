"""Measure tokens per second of pipeline stages and of tensor parallelism beside one rank, through HTTP.

Servers of one rank (1x1), of two stages (2x1) and of two tensor-parallel ranks (1x2) run at the same time and are
measured in alternation, one at a time, each with as many compute threads in all. --shapes takes others, stages x ranks
of a stage; `2x2e` spreads whole experts of a mixture over the ranks of a stage. A figure is the median over rounds,
with the smallest and the largest. The last line is one JSON object.

    python benchmarks/pipeline.py [--model FOLDER] [--streams 16] [--shapes 1x1,2x1,1x2] [--rounds 5] [-- FLAGS]
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx

from funitel.proto.process.usable_cores import count_usable_cores
from funitel_testing.cache import demo_folder
from funitel_testing.clients import client_of, stream
from funitel_testing.servers import serving

PROMPT = "Tell me about the sea, its weather and the people who live by it."


def flags_of(shape: str, num_threads: int) -> list[str]:
    """Flags of the launcher for a shape such as 2x1; its ranks have `num_threads` together, each at least one."""
    num_stages, num_ranks = map(int, shape.removesuffix("e").split("x"))
    stages = [range(stage * num_ranks, (stage + 1) * num_ranks) for stage in range(num_stages)]
    partition = ";".join("&".join(map(str, ranks)) for ranks in stages)
    threads = max(1, num_threads // (num_stages * num_ranks))
    return [
        *("--partition", partition, "--num-threads", str(threads)),
        *(["--expert-parallel"] if shape.endswith("e") else []),
    ]


async def measure(client: httpx.AsyncClient, num_streams: int, max_new_tokens: int) -> float:
    """Tokens per second of so many streams together, from the first token of any to the last of all."""
    length = {"max_new_tokens": max_new_tokens, "ignore_eos_token": True}
    answers = await asyncio.gather(*(stream(client, f"{i}. {PROMPT}", **length) for i in range(num_streams)))
    instants = [instant for answer in answers for instant in answer.instants]
    return (len(instants) - 1) / (max(instants) - min(instants))


async def compare(urls: dict[str, str], given: argparse.Namespace) -> dict[str, object]:
    """The figures of every shape."""
    found: dict[str, list[float]] = {shape: [] for shape in urls}
    for turn in range(given.rounds + 1):  # the first warms up
        for shape, url in urls.items():
            async with client_of(url) as client:
                begin = time.monotonic()
                speed = await measure(client, given.streams, given.max_new_tokens)
            if turn:
                found[shape].append(speed)
                print(f"{shape:6} {speed:8.1f} tokens/s in {time.monotonic() - begin:.1f} s", flush=True)
    return {
        shape: {"median": round(statistics.median(each), 1), "from": round(min(each), 1), "to": round(max(each), 1)}
        for shape, each in found.items()
    }


def main() -> None:
    """Run the servers and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as --model-id; the demo model when not given")
    parser.add_argument("--shapes", default="1x1,2x1,1x2", help="stages x tensor-parallel ranks, with commas between")
    for name, default in (("streams", 16), ("rounds", 5), ("max-new-tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=count_usable_cores(), help="of all ranks of a server together")
    parser.add_argument("flags", nargs="*", help="of the servers, behind --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        model = given.model or str(demo_folder())
        urls = {}
        for shape in given.shapes.split(","):
            flags = ("--model-id", model, *flags_of(shape, given.threads), *given.flags)
            urls[shape] = stack.enter_context(serving(Path(root), *flags)).url
        figures = asyncio.run(compare(urls, given))
    print(json.dumps({"streams": given.streams} | figures))


if __name__ == "__main__":
    main()
