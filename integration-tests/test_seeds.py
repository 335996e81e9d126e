"""A seeded sample is the same alone and in any company: joined, filtered, chunked, on one shard and on two.

The short form asks a tiny model, whose noise is made in the same way, token by token.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from funitel_testing.clients import client_of, generate, stream
from funitel_testing.tiny import save_tiny

TOKENS = 16
WAYS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_p": {"top_p": 0.85, "do_sample": True},
    "penalties": {"do_sample": True, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
}


@pytest.mark.parametrize("num_shard", [1, 2])
async def test_seeded_samples_do_not_depend_on_company(
    num_shard: int, launch: Any, tmp_path: Path, is_full: bool, figures: dict[str, object]
) -> None:
    seeds = range(50) if is_full else range(0, 50, 10)
    model = ()
    if not is_full:
        model = ("--model-id", str(save_tiny("qwen3", tmp_path, max_position_embeddings=2048)))
    # A prefill budget of 24 tokens cuts every prompt below into chunks once others run.
    server = launch(
        *model,
        *("--dtype", "float32", "--num-shard", str(num_shard)),
        *("--max-batch-total-tokens", "40000", "--max-batch-prefill-tokens", "24"),
    )
    checked = 0
    async with client_of(server.url) as client:
        for name, way in WAYS.items():
            prompts = {seed: f"Seed {seed}: " + "one two three " * (seed % 13) + "then" for seed in seeds}
            how = {"max_new_tokens": TOKENS} | way
            alone = {seed: (await generate(client, prompts[seed], seed=seed, **how)).ids for seed in seeds}
            assert len({tuple(ids) for ids in alone.values()}) > len(seeds) * 0.8, "the samples hardly vary"
            for arrangement in (_joined, _filtered, _chunked):
                found = await arrangement(client, prompts, how)
                assert found == alone, f"{name}, {arrangement.__name__}"
                checked += len(found)
    figures[f"5 seeded samples equal, {num_shard} shard(s)"] = f"{checked} of {checked}"


async def _joined(client: Any, prompts: dict[int, str], how: dict[str, Any]) -> dict[int, list[int]]:
    """Everybody arrives a moment after the one before."""

    async def late(place: int, seed: int) -> list[int]:
        await asyncio.sleep(0.03 * place)
        return (await generate(client, prompts[seed], seed=seed, **how)).ids

    ids = await asyncio.gather(*(late(place, seed) for place, seed in enumerate(prompts)))
    return dict(zip(prompts, ids, strict=True))


async def _filtered(client: Any, prompts: dict[int, str], how: dict[str, Any]) -> dict[int, list[int]]:
    """Everybody has a neighbour who hangs up after a few tokens."""

    async def pair(seed: int) -> list[int]:
        mine, _ = await asyncio.gather(
            generate(client, prompts[seed], seed=seed, **how),
            stream(client, "A neighbour", leave_after=1 + seed % 9, max_new_tokens=40, do_sample=True, seed=seed),
        )
        return mine.ids

    ids = await asyncio.gather(*map(pair, prompts))
    return dict(zip(prompts, ids, strict=True))


async def _chunked(client: Any, prompts: dict[int, str], how: dict[str, Any]) -> dict[int, list[int]]:
    """Long prompts beside them keep every step full of chunks."""
    long = [stream(client, "many words " * 60, max_new_tokens=2, seed=number) for number in range(3)]
    mine = [generate(client, prompt, seed=seed, **how) for seed, prompt in prompts.items()]
    answers = await asyncio.gather(*mine, *long)
    return {seed: answer.ids for seed, answer in zip(prompts, answers, strict=False)}
