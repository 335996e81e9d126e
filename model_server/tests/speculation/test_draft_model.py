"""A draft model: its drafts are its own greedy continuation, whatever its pool held before, and texts do not change."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from funitel.model_server.executor.executor import Executor
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import SettingsError, UnsupportedModel
from funitel.proto.step import Generation
from funitel_testing.executors import decode, ids_of, keep_rows, load_executor, prefill, run_alone, start
from funitel_testing.tiny import byte_tokenizer, save_tiny
from funitel_testing.zoo import ZOO

MOST = 4
PROMPTS = {1: list(range(40, 60)), 2: list(range(100, 170)), 3: list(range(5, 12))}


def run_drafted(executor: Executor, ids: list[int], count: int = 24, **fields: Any) -> tuple[dict[int, list[Generation]], int, int]:
    """What sequences get together with drafts, how many drafts there were, and how many were accepted."""
    found: dict[int, list[Generation]] = {}
    starts = [replace(start(i, PROMPTS[i], count, **fields), speculate=MOST) for i in ids]
    result = prefill(executor, 1, starts)
    drafted = accepted = 0
    while True:
        for generation in result.generations:
            found.setdefault(generation.request_id, []).append(generation)
        drafted += result.num_draft_tokens
        accepted += result.num_accepted_tokens
        if result.batch is None:
            return found, drafted, accepted
        finished = {g.request_id for g in result.generations if g.finished is not None}
        batch = result.batch
        if finished:
            batch = keep_rows(executor, batch.id, [i for i in batch.request_ids if i not in finished])
        result = decode(executor, [batch])


@pytest.fixture(scope="module", params=["fused", "torch"])
def folder_and_patch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny")), request.param == "fused"


@pytest.fixture(scope="module")
def executors(folder_and_patch: tuple[Path, bool]) -> tuple[Executor, Executor]:
    folder, is_fused = folder_and_patch
    with pytest.MonkeyPatch.context() as patched:
        if not is_fused:
            patched.setattr("funitel.model_server.loading.decoder.load_fused", lambda *_: None)
            patched.setattr("funitel.model_server.loading.drafters.load_fused", lambda *_: None)
        return load_executor(folder), load_executor(folder, speculate=MOST, draft_model=str(folder))


def test_drafts_of_the_target_itself_are_all_accepted(executors: tuple[Executor, Executor]) -> None:
    plain, drafting = executors
    for ids in ([1], [2], [1, 2, 3], [3]):
        found, drafted, accepted = run_drafted(drafting, ids)
        assert drafted == accepted > 0
        for i in ids:
            assert ids_of(found[i]) == ids_of(run_alone(plain, start(i, PROMPTS[i], 24)))
