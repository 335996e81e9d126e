"""Log-probabilities of small models equal transformers' on every route, alone, in company and in chunks."""

import asyncio
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from funitel_testing.clients import client_of
from funitel_testing.company import in_company
from funitel_testing.scores import (
    PAIRS,
    WAYS,
    Checked,
    check_chat,
    check_completions,
    check_native,
    check_native_stream,
)
from funitel_testing.siblings import check_siblings
from funitel_testing.tiny import FAMILIES, save_tiny
from funitel_testing.truth import Truth

CHUNK = 24  # prompt tokens of one step: the long prompt takes seven of them, alone too
SHORT, LONG = "Once upon a time", "It was the best of times, it was the worst of times, " * 3
PROBED = {1: ["gpt2"], 2: ["mistral"]}  # by number of shards; the others in the long form
STRANGERS = 6
CONTEXT = 512


@pytest.mark.parametrize("num_shard", [1, 2])
async def test_logprobs_equal_transformers(
    num_shard: int, launch: Any, oracle: ModuleType, tmp_path: Path, is_full: bool, figures: dict[str, object]
) -> None:
    checked = Checked()
    for family in FAMILIES if is_full else PROBED[num_shard]:
        context = {"n_positions" if family == "gpt2" else "max_position_embeddings": CONTEXT}
        folder = save_tiny(family, tmp_path / family, **context)
        truth = Truth(oracle.load_model(folder, "cpu"), oracle.load_tokenizer(folder))
        server = launch(
            *("--model-id", str(folder), "--dtype", "float32", "--num-shard", str(num_shard)),
            *("--enable-prefill-logprobs", "--max-batch-prefill-tokens", str(CHUNK)),
        )
        async with client_of(server.url) as client:
            await _check(client, truth, list(WAYS) if is_full else ["greedy", "everything"], checked)
            await check_native_stream(client, SHORT, "everything")
            async with in_company(client, STRANGERS):
                await _check(client, truth, list(WAYS), checked)
                await check_siblings(client, LONG)
    assert checked.wrong == []
    figures[f"3.5 log-probabilities within 1e-3, {num_shard} shard(s)"] = f"{checked.places} of {checked.places}"


async def _check(client: Any, truth: Truth, ways: list[str], checked: Checked) -> None:
    """All routes, side by side."""
    await asyncio.gather(
        check_native(client, truth, SHORT, ways, checked),
        check_native(client, truth, LONG, ways, checked),
        *(check_completions(client, truth, LONG, pair, checked) for pair in PAIRS),
        *(check_chat(client, truth, SHORT, pair, checked) for pair in PAIRS),
    )
