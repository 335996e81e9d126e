"""Greedy output of the served demo model equals transformers', token by token, alone and in changing company."""

import asyncio
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from funitel_testing.clients import Answer, client_of, generate, stream

MAX_NEW_TOKENS = 64
HERE = Path(__file__).parent
AT_ONCE = 5
STRANGERS = 16 - AT_ONCE  # so that each prompt has fifteen others beside it
# The promise for float32 in torch: identical unless two logits tie this closely.
NEAR_TIE = 1e-4


def load_oracle() -> ModuleType:
    path = HERE.parent / "benchmarks" / "oracle.py"
    spec = importlib.util.spec_from_file_location("oracle", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def expected(demo_model: Path, is_full: bool) -> list[dict[str, Any]]:
    """Prompts with their true completions."""
    oracle = load_oracle()
    tokenizer, model = oracle.load_tokenizer(demo_model), oracle.load_model(demo_model, "cpu")
    rows = json.loads((HERE / "data" / "prompts.json").read_text())
    rows = rows if is_full else rows[:20:4]
    for row in rows:
        ids = tokenizer.encode(row["prompt"], add_special_tokens=False).ids
        row.update(oracle.complete(model, ids, MAX_NEW_TOKENS))
    return list(rows)


def differences(expected: list[dict[str, Any]], found: list[Answer]) -> list[str]:
    """What differs beyond near ties: prompt name, position, gap between the oracle's two best logits."""
    wrong = []
    for row, answer in zip(expected, found, strict=True):
        truth = row["completion_ids"]
        if answer.ids == truth:
            continue
        at = next((i for i, (a, b) in enumerate(zip(answer.ids, truth, strict=False)) if a != b), None)
        if at is None or row["gaps"][at] > NEAR_TIE:
            wrong.append(f"{row['name']}: position {at}, {len(answer.ids)} tokens of {len(truth)}")
    return wrong


@pytest.mark.parametrize("num_shard", [1, 2, 3])
async def test_greedy_tokens_equal_transformers(
    num_shard: int, launch: Any, expected: list[dict[str, Any]], is_full: bool, figures: dict[str, object]
) -> None:
    server = launch("--dtype", "float32", "--num-shard", str(num_shard), "--max-batch-total-tokens", "40000")
    async with client_of(server.url) as client:
        prompts = [row["prompt"] for row in expected]
        if is_full or num_shard == 1:
            alone = [await generate(client, prompt, max_new_tokens=MAX_NEW_TOKENS) for prompt in prompts]
            assert differences(expected, alone) == []
        busy = asyncio.create_task(_company(client))
        together: list[Answer] = []
        try:
            for first in range(0, len(prompts), AT_ONCE):
                group = [generate(client, p, max_new_tokens=MAX_NEW_TOKENS) for p in prompts[first : first + AT_ONCE]]
                together += await asyncio.gather(*group)
        finally:
            busy.cancel()
            (company,) = await asyncio.gather(busy, return_exceptions=True)
        assert isinstance(company, asyncio.CancelledError), company
        assert differences(expected, together) == []
    exact = sum(a.ids == row["completion_ids"] for a, row in zip(together, expected, strict=True))
    figures[f"2 greedy equality, {num_shard} shard(s), in company"] = f"{exact} of {len(expected)} prompts exact"


async def _company(client: Any) -> None:
    """Others that keep joining and leaving: some finish, some hang up, sampled and greedy, short and long."""

    async def one(number: int) -> None:
        round_number = 0
        while True:
            round_number += 1
            prompt = f"Visitor {number} says, in round {round_number}: " + "and so on " * (7 * number % 40)
            leave = 3 + number if number % 3 == 0 else None
            await stream(
                client, prompt, leave_after=leave, max_new_tokens=5 + 2 * number, do_sample=number % 2 == 0, seed=number
            )

    async with asyncio.TaskGroup() as group:
        for number in range(STRANGERS):
            group.create_task(one(number))
