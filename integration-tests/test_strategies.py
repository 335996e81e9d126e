"""Decoding strategies against a running server: alone, in one batch, preempted, and after the only shard was killed."""

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from funitel_testing.clients import client_of, stream
from funitel_testing.sampled_rows import STRATEGIES
from funitel_testing.servers import serving

# A pool for less than a half of what is asked for together, and prompts in chunks of at most 24 tokens.
LIMITS = (
    *("--max-input-tokens", "64", "--max-total-tokens", "160"),
    *("--max-batch-total-tokens", "480", "--max-batch-prefill-tokens", "24"),
)
VERBS = ("was", "began to", "had never", "would often", "is the reason that")
WAYS: dict[str, dict[str, Any]] = STRATEGIES | {
    "plain": {"do_sample": True},
    "greedy": {},
    "no repeats": {"no_repeat_ngram_size": 2},
    "rules": {"min_tokens": 5, "bad_words": ["a"], "do_sample": True},
    "std": {"decoding_alg": "std", "temperature": 1.5},
    "with a grammar": {"mirostat": 2, "grammar": {"type": "regex", "value": "([a-z]{3,9} again, ){9}"}},
}


async def _ids(client: httpx.AsyncClient, name: str) -> list[int]:
    prompt = f"{name} and {name} "
    return (await stream(client, prompt, max_new_tokens=90, seed=3, ignore_eos=True, **WAYS[name])).ids


async def _together(client: httpx.AsyncClient) -> dict[str, list[int]]:
    return dict(zip(WAYS, await asyncio.gather(*(_ids(client, name) for name in WAYS)), strict=True))


@pytest.mark.parametrize("num_shard", [1, 2])
async def test_b6_strategies_give_the_same_tokens_in_company_preempted_and_after_a_crash(
    tiny_model: Path, tmp_path: Path, num_shard: int
) -> None:
    flags = ("--model-id", str(tiny_model), "--dtype", "float32", "--num-shard", str(num_shard), *LIMITS)
    with serving(tmp_path, *flags) as server:
        async with client_of(server.url) as client:
            alone = {name: await _ids(client, name) for name in WAYS}
            assert await _together(client) == alone
            assert server.metrics()["funitel_preempted_total"] > 0
            asking = asyncio.create_task(_together(client))
            await asyncio.to_thread(server.wait_steps, 10)
            assert not asking.done()
            os.kill(server.shard_pids()[0], signal.SIGKILL)
            assert await asyncio.wait_for(asking, 120) == alone
        assert server.metrics()["funitel_replica_returns_total"] == 1
        assert "Traceback" not in server.log.read_text()


async def test_b6_vllms_and_llama_cpps_extra_fields_with_openais_client(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, "--model-id", str(tiny_model), "--dtype", "float32", *LIMITS) as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        for extra in ({"mirostat": 2}, {"dry_multiplier": 1.0, "tfs_z": 0.9}, {"min_p": 0.1, "bad_words": ["b"]}):
            answer = await client.completions.create(model="m", prompt="ab", max_tokens=8, seed=1, extra_body=extra)
            again = await client.completions.create(model="m", prompt="ab", max_tokens=8, seed=1, extra_body=extra)
            assert answer.choices[0].text == again.choices[0].text
        with pytest.raises(openai.UnprocessableEntityError, match="`mirostat` and `top_k` exclude each other"):
            await client.completions.create(model="m", prompt="a", extra_body={"mirostat": 2, "top_k": 5})
        await client.close()


def _distinct_trigrams(ids: list[int]) -> float:
    return len(set(zip(ids, ids[1:], ids[2:], strict=False))) / (len(ids) - 2)


@pytest.mark.slow
async def test_b6_fsd_repeats_less_than_greedy(demo_model: Path, tmp_path: Path, figures: dict[str, object]) -> None:
    """Twenty continuations by the demo model; FSD is the same twice over, randomized FSD with a seed too."""
    prompts = [f"{subject} {verb}" for subject in ("The old man", "A river", "Our school", "Snow") for verb in VERBS]
    async with AsyncExitStack() as stack:
        server = stack.enter_context(serving(tmp_path, "--model-id", str(demo_model)))
        client = await stack.enter_async_context(client_of(server.url))

        async def ids_of(**how: Any) -> list[list[int]]:
            asked = (stream(client, prompt, max_new_tokens=48, ignore_eos=True, **how) for prompt in prompts)
            return [answer.ids for answer in await asyncio.gather(*asked)]

        greedy, fsd, again = [await ids_of(**how) for how in ({}, {"decoding_alg": "fsd"}, {"decoding_alg": "fsd"})]
        assert fsd == again
        seeded = {"decoding_alg": "random_fsd", "seed": 5}
        random = await ids_of(**seeded)
        assert random == await ids_of(**seeded)
        assert random != fsd
    ratios = {name: sum(map(_distinct_trigrams, ids)) / len(ids) for name, ids in (("greedy", greedy), ("fsd", fsd))}
    figures["distinct 3-grams of 20 continuations, as a share"] = ratios
    assert ratios["fsd"] > ratios["greedy"]
