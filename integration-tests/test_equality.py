"""Greedy output of the served demo model equals transformers', token by token, alone and in changing company."""

import asyncio
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from funitel_testing.clients import Answer, client_of, generate
from funitel_testing.company import in_company
from funitel_testing.scores import Checked, check_chat, check_completions, check_native
from funitel_testing.servers import Server
from funitel_testing.truth import NEAR_TIE, Truth

MAX_NEW_TOKENS = 64
HERE = Path(__file__).parent
AT_ONCE = 5
STRANGERS = 16 - AT_ONCE  # so that each prompt has fifteen others beside it


@pytest.fixture(scope="module")
def truth(demo_model: Path, oracle: ModuleType) -> Truth:
    """The demo model in transformers."""
    return Truth(oracle.load_model(demo_model, "cpu"), oracle.load_tokenizer(demo_model))


@pytest.fixture(scope="module")
def rows(is_full: bool) -> list[dict[str, Any]]:
    """Prompts with their names."""
    found: list[dict[str, Any]] = json.loads((HERE / "data" / "prompts.json").read_text())
    return found if is_full else found[:20:4]


def differences(truth: Truth, rows: list[dict[str, Any]], found: list[Answer]) -> list[str]:
    """What differs from greedy completions beyond near ties.

    Each token is the best one after the prompt and the tokens before it, so all of them are what transformers takes.
    """
    wrong = []
    for row, answer in zip(rows, found, strict=True):
        gaps = truth.gaps(truth.encode(row["prompt"]), answer.ids)
        wrong += [f"{row['name']}: position {at}, gap {gap}" for at, gap in enumerate(gaps) if gap > NEAR_TIE]
        ends = [at for at, token_id in enumerate(answer.ids, 1) if token_id in truth.ends()] or [MAX_NEW_TOKENS]
        if len(answer.ids) != ends[0]:
            wrong.append(f"{row['name']}: {len(answer.ids)} tokens of {ends[0]}")
    return wrong


@pytest.fixture(scope="module", params=[1, 2, 3])
def num_shard(request: pytest.FixtureRequest) -> int:
    """Ranks of the server; the tests of one server run together."""
    count: int = request.param
    return count


@pytest.fixture
def server(launch: Any, num_shard: int) -> Server:
    """The demo model in float32."""
    flags = ("--dtype", "float32", "--max-batch-total-tokens", "40000", "--enable-prefill-logprobs")
    running: Server = launch(*flags, "--num-shard", str(num_shard))
    return running


async def test_greedy_tokens_equal_transformers(
    num_shard: int,
    server: Server,
    truth: Truth,
    rows: list[dict[str, Any]],
    is_full: bool,
    figures: dict[str, object],
) -> None:
    if num_shard > 2 and not is_full:
        rows = [row for row in rows if row["name"] in ("english", "long")]
    async with client_of(server.url) as client:
        prompts = [row["prompt"] for row in rows]
        if is_full or num_shard == 1:
            alone = [await generate(client, prompt, max_new_tokens=MAX_NEW_TOKENS) for prompt in prompts]
            assert differences(truth, rows, alone) == []
        together: list[Answer] = []
        async with in_company(client, STRANGERS):
            for first in range(0, len(prompts), AT_ONCE):
                group = [generate(client, p, max_new_tokens=MAX_NEW_TOKENS) for p in prompts[first : first + AT_ONCE]]
                together += await asyncio.gather(*group)
        assert differences(truth, rows, together) == []
    pairs = zip(rows, together, strict=True)
    exact = sum(max(truth.gaps(truth.encode(row["prompt"]), answer.ids)) == 0 for row, answer in pairs)
    figures[f"2 greedy equality, {num_shard} shard(s), in company"] = f"{exact} of {len(rows)} prompts exact"


async def test_logprobs_equal_transformers(
    num_shard: int, server: Server, truth: Truth, is_full: bool, figures: dict[str, object]
) -> None:
    if num_shard > 2 and not is_full:
        pytest.skip("three shards are covered by --full")
    rows = {row["name"]: row["prompt"] for row in json.loads((HERE / "data" / "prompts.json").read_text())}
    checked = Checked()
    async with client_of(server.url) as client:
        if is_full:
            await _check_scores(client, truth, rows["english"], checked)
        async with in_company(client, STRANGERS):  # beside which a long prompt is cut into chunks
            await _check_scores(client, truth, rows["long"], checked)
    assert checked.wrong == []
    figures[f"3.5 log-probabilities of the demo model within 1e-3, {num_shard} shard(s)"] = (
        f"{checked.places} of {checked.places}"
    )


async def _check_scores(client: Any, truth: Truth, prompt: str, checked: Checked) -> None:
    """A greedy way and a sampled one on every route, side by side."""
    await asyncio.gather(
        check_native(client, truth, prompt, ["penalties", "everything"], checked),
        check_completions(client, truth, prompt, "biased", checked),
        check_completions(client, truth, prompt, "sampled", checked),
        check_chat(client, truth, "What is the capital of France?", "greedy", checked),
    )
