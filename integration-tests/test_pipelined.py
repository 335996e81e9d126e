"""Steps sent ahead change nobody's tokens: requests join, leave, are chunked, preempted and forced, on two shards."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from funitel_testing.clients import client_of, stream
from funitel_testing.servers import Server

NUM_REQUESTS = 24
# A pool for a sixth of what is asked for, and prompts in chunks of at most 24 tokens.
LIMITS = (
    *("--max-input-tokens", "64", "--max-total-tokens", "160"),
    *("--max-batch-total-tokens", "480", "--max-batch-prefill-tokens", "24"),
)
SPAN = {"type": "regex", "value": "(the same words again and again, [ab]){3}"}


def asked(number: int) -> tuple[str, dict[str, Any], int | None]:
    """A prompt, how it is answered, and after how many tokens its client hangs up."""
    chance = random.Random(number)
    how: dict[str, Any] = {"max_new_tokens": chance.randrange(20, 96), "seed": number}
    if number % 3 == 1:
        how |= {"do_sample": True, "temperature": 0.9, "repetition_penalty": 1.2}
    if number % 4 == 2:
        how["grammar"] = SPAN
    if number % 6 == 5:
        how["stop"] = ["e", "qu"]
    prompt = "".join(chance.choice("abcdefgh ") for _ in range(chance.randrange(1, 64)))
    return prompt, how, chance.randrange(1, 20) if number % 5 == 3 else None


async def answers(server: Server) -> list[list[int]]:
    """Tokens of every request, which come a moment after one another."""

    async def one(number: int) -> list[int]:
        await asyncio.sleep(0.01 * number)
        prompt, how, leave_after = asked(number)
        return (await stream(client, prompt, leave_after=leave_after, **how)).ids

    async with client_of(server.url) as client:
        return await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS)))


@pytest.mark.parametrize("num_shard", [1, 2])
async def test_the_same_tokens_with_steps_sent_ahead_and_one_by_one(
    num_shard: int, launch: Any, tiny_model: Path, is_full: bool, figures: dict[str, object]
) -> None:
    if num_shard == 1 and not is_full:
        pytest.skip("the engine's own tests know one shard; --full runs it here too")
    found = {}
    for steps in ("1", "2", "3"):
        flags = ("--model-id", str(tiny_model), "--dtype", "float32", "--num-shard", str(num_shard), *LIMITS)
        server: Server = launch(*flags, "--pipeline-steps", steps)
        found[steps] = [await answers(server) for _ in range(5 if is_full else 2)]
        assert server.metrics()["funitel_preempted_total"] > 0
    for one_by_one, *ahead in zip(*found.values(), strict=True):
        for number, (expected, *others) in enumerate(zip(one_by_one, *ahead, strict=True)):
            leaves = asked(number)[2] is not None
            for ids in others:
                common = min(len(expected), len(ids)) if leaves else None  # a hang-up comes when it comes
                assert ids[:common] == expected[:common], f"request {number}"
    figures[f"4 requests equal with and without pipelined steps, {num_shard} shard(s)"] = NUM_REQUESTS
