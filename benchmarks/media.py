"""Measure what pictures cost: the first token of a second turn, and the gaps of streams beside pictures.

The model is random, of the shape of SmolVLM-256M: a text model of 135M weights, and a tower of 93M that makes 64
features of a tile of 512 pixels. Turns: a conversation with a picture is asked again with one sentence more, with the
picture that the shards have encoded (hit), and with another that they have not (miss); the rest of the prompt is not
cached in either. Gaps: streams decode beside one request with eight pictures, and others alone, in alternation, until
they have as many tokens: a step takes longer the longer the contexts are. A figure is the median over rounds, with the
smallest and the largest. The last line is one JSON object.

    python benchmarks/media.py [--streams 16] [--pictures 8] [--rounds 5] [-- FLAGS]
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from funitel_testing.clients import Answer, client_of, stream
from funitel_testing.figures import spread
from funitel_testing.servers import Server, serving
from funitel_testing.vision_models import picture, save_vision
from funitel_testing.vision_requests import content_of

TEXT = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
}
CONFIG = {"scale_factor": 4}
IMAGES = {"size": {"longest_edge": 512}, "max_image_size": {"longest_edge": 512}, "do_image_splitting": False}
MAX_TOKENS = 1500  # of a stream beside pictures, which is hung up on before
_seeds = count(1000)


def save_model(folder: Path) -> Path:
    """The random model."""
    return save_vision(
        "smolvlm", folder, vision=VISION, config=CONFIG, images=IMAGES, processor={"image_seq_len": 64}, **TEXT
    )


async def first_token(client: httpx.AsyncClient, content: list[dict[str, Any]]) -> float:
    """Seconds to the first token of a chat."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "stream": True}
    began = time.monotonic()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data:") and "content" in line:
                return time.monotonic() - began
    raise AssertionError("no token came")


async def turns(server: Server, rounds: int) -> dict[str, list[float]]:
    """Milliseconds to the first token of a second turn, with the picture of the first and with a new one."""
    found: dict[str, list[float]] = {"hit": [], "miss": []}
    async with client_of(server.url) as client:
        for turn in range(rounds + 1):
            known = picture(640, 480, next(_seeds))
            await first_token(client, content_of([f"{turn} What is this? ", known]))
            for kind in ("hit", "miss") if turn % 2 else ("miss", "hit"):
                shown = known if kind == "hit" else picture(640, 480, next(_seeds))
                seconds = await first_token(client, content_of([f"{turn} {kind} once more: ", shown, " Say more."]))
                if turn:  # the first warms up
                    found[kind].append(1000 * seconds)
    return found


async def gaps(server: Server, given: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of the 99th percentile of the gaps of streams, alone and beside a request with pictures."""
    found: dict[str, list[float]] = {"alone": [], "beside": [], "pictures": []}
    async with client_of(server.url) as client:
        for turn in range(given.rounds + 1):
            num_tokens = MAX_TOKENS
            for kind in ("beside", "alone"):
                prompts = [f"{turn} {kind} stream {place}" for place in range(given.streams)]
                asked = [asyncio.create_task(_long(client, prompt, num_tokens)) for prompt in prompts]
                await asyncio.sleep(1.5)
                begin = time.monotonic()
                if kind == "beside":
                    pictures = [picture(640, 480, next(_seeds)) for _ in range(given.pictures)]
                    seconds = await first_token(client, content_of(["Compare: ", *pictures]))
                    num_tokens = max(len(_instants[prompt]) for prompt in prompts)
                else:
                    await asyncio.wait(asked)
                end = time.monotonic()
                is_early = kind == "beside" and any(each.done() for each in asked)
                for each in asked:
                    each.cancel()
                answers = await asyncio.gather(*asked, return_exceptions=True)
                failed = [each for each in answers if isinstance(each, Exception)]
                assert not is_early, "a stream ended early"
                assert not failed, failed
                instants = [_instants.pop(prompt) for prompt in prompts]
                between = [
                    b - a for each in instants for a, b in zip(each, each[1:], strict=False) if begin <= a and b <= end
                ]
                if turn:
                    found[kind].append(1000 * float(np.percentile(between, 99)))
                    if kind == "beside":
                        found["pictures"].append(1000 * seconds)
    return found


_instants: dict[str, list[float]] = {}


async def _long(client: httpx.AsyncClient, prompt: str, num_tokens: int) -> None:
    answer = Answer()
    _instants[prompt] = answer.instants
    await stream(client, prompt, answer=answer, max_new_tokens=num_tokens, ignore_eos_token=True)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--pictures", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("flags", nargs="*")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_model(folder / "model")
        flags = ("--model-id", str(model), "--hostname", "127.0.0.1", *given.flags)
        with serving(folder, *flags) as server:
            of_turns = asyncio.run(turns(server, given.rounds))
            print({kind: spread(values) for kind, values in of_turns.items()}, flush=True)
            of_gaps = asyncio.run(gaps(server, given))
    ratio = statistics.median(b / a for a, b in zip(of_gaps["alone"], of_gaps["beside"], strict=True))
    print(
        json.dumps(
            {
                "first_token_of_second_turn_ms": {kind: spread(values) for kind, values in of_turns.items()},
                "p99_gap_ms": {kind: spread(of_gaps[kind]) for kind in ("alone", "beside")},
                "p99_beside_over_alone": round(ratio, 2),
                "first_token_of_pictures_ms": spread(of_gaps["pictures"]),
            }
        )
    )


if __name__ == "__main__":
    main()
