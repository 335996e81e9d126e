"""Drafts beside rows without any, beside adapters, after a step that failed, and within the budget of a step."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from funitel.model_server.speculation.interface import DraftRow
from funitel.proto.step import Generation
from funitel.proto.strategy import DecodingStrategy
from funitel_testing.drafters import KnownDrafter, always_drafting, run_drafted
from funitel_testing.eagle3 import Eagle3Oracle
from funitel_testing.executors import ids_of, load_executor, prefill, run_alone, run_out, start
from funitel_testing.medusa import save_medusa
from funitel_testing.mtp import MtpOracle
from funitel_testing.tiny import byte_tokenizer, save_tiny
from funitel_testing.tiny_adapters import EIGHT, save_adapter
from funitel_testing.zoo import ZOO

STRATEGIES: dict[str, dict[str, Any]] = {
    "mirostat": {
        "do_sample": True,
        "seed": 3,
        "strategy": DecodingStrategy(mirostat=2, mirostat_tau=1.0, mirostat_eta=0.5),
    },
    "DRY": {
        "do_sample": True,
        "seed": 4,
        "top_k": 2,
        "strategy": DecodingStrategy(dry_multiplier=9.0, dry_allowed_length=1, dry_base=2.0, dry_penalty_last_n=-1),
    },
}


@pytest.mark.parametrize("fields", STRATEGIES.values(), ids=STRATEGIES)
def test_a_row_without_drafts_has_its_text_beside_one_with_drafts(fields: dict[str, Any], tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    plain, executor = load_executor(folder), always_drafting(load_executor(folder, speculate=4))
    drafting, other = start(1, range_of(40), 30), start(2, [7, 8, 9, 7, 8] * 4, 30, **fields)
    expected = [ids_of(run_alone(plain, each)) for each in (drafting, other)]
    assert executor.speculator is not None
    executor.speculator.drafter = KnownDrafter({1: [*drafting.input_ids, *expected[0]]}, 0.0)
    found: dict[int, list[Generation]] = {}
    run_out(executor, prefill(executor, 1, [replace(drafting, speculate=4), other]), found)
    assert [ids_of(found[1]), ids_of(found[2])] == expected


class CountingDrafter(KnownDrafter):
    """Counts the rows that it is asked for, and the drafts that they may have."""

    def __init__(self) -> None:
        super().__init__({}, 0.0)
        self.asked: list[tuple[int, int]] = []

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        self.asked.append((len(rows), sum(row.limit for row in rows)))
        return super().propose(rows)


@pytest.mark.parametrize("budget", [3, 8, 17])
def test_no_more_rows_are_asked_than_a_step_has_drafts_for(budget: int, tmp_path: Path) -> None:
    executor = always_drafting(load_executor(save_tiny("llama", tmp_path), speculate=4))
    assert executor.speculator is not None
    executor.speculator.max_step_drafts = budget
    executor.speculator.drafter = drafter = CountingDrafter()
    _, drafted, _ = run_drafted(executor, [start(i, [5 + i, 9, 30], 6) for i in range(1, 13)], 4)
    assert max(rows for rows, _ in drafter.asked) == min(budget, 12)
    assert max(drafts for _, drafts in drafter.asked) <= budget
    assert drafted == drafter.num_proposed


def test_hidden_states_of_a_step_that_failed_are_not_shown_to_the_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_tiny("llama", tmp_path / "target", num_hidden_layers=8)
    Eagle3Oracle(tmp_path / "head", target)
    executor = load_executor(target, speculate=3, draft_model=str(tmp_path / "head"))
    kept, lost = start(1, range_of(40), 8, speculate=3), start(2, range_of(100), 8, speculate=3)
    expected = ids_of(run_alone(executor, kept))
    begun = prefill(executor, 1, [kept])

    def fail(*_: object) -> None:
        raise RuntimeError("there is a fault")

    with monkeypatch.context() as patched:
        patched.setattr(executor.sampling, "_sample", fail)
        with pytest.raises(RuntimeError, match="there is a fault"):
            prefill(executor, 2, [lost])
    found: dict[int, list[Generation]] = {}
    run_out(executor, begun, found)
    assert ids_of(found[1]) == expected


STATEFUL = ("falcon_h1", "kimi_linear", "minimax", "mamba", "falcon_mamba", "mamba2", "jamba")


@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("family", STATEFUL)
def test_families_with_states_have_their_texts_with_drafts(family: str, share: float, tmp_path: Path) -> None:
    ZOO[family].save(tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    plain, executor = load_executor(tmp_path), always_drafting(load_executor(tmp_path, speculate=4))
    starts = [start(i, [(7 * i + 3 * k * k + k) % 200 + 20 for k in range(6 + i)], 16) for i in (1, 2, 3)]
    expected = {each.request_id: ids_of(run_alone(plain, each)) for each in starts}
    texts = {each.request_id: [*each.input_ids, *expected[each.request_id]] for each in starts}
    assert executor.speculator is not None
    executor.speculator.drafter = KnownDrafter(texts, share)
    found, drafted, accepted = run_drafted(executor, starts, 4)
    assert drafted
    assert (accepted > 0) == (share > 0)
    assert {i: ids_of(generations) for i, generations in found.items()} == expected


def save_eagle3(work: Path) -> tuple[Path, str | None]:
    target = save_tiny("llama", work / "target", num_hidden_layers=8)
    Eagle3Oracle(work / "head", target)
    return target, str(work / "head")


def save_heads(work: Path) -> tuple[Path, str | None]:
    save_medusa(work / "heads", has_out=False)
    return save_tiny("llama", work / "target"), str(work / "heads")


def save_draft_model(work: Path) -> tuple[Path, str | None]:
    save_tiny("qwen2", work / "draft", num_hidden_layers=1)
    return save_tiny("llama", work / "target"), str(work / "draft")


def save_mtp(work: Path) -> tuple[Path, str | None]:
    ZOO["qwen3_5"].save(work)
    byte_tokenizer().save(str(work / "tokenizer.json"))
    MtpOracle(work)
    return work, None


DRAFTERS = {
    "eagle3": save_eagle3,
    "medusa": save_heads,
    "draft_model": save_draft_model,
    "mtp": save_mtp,
}


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "torch"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_adapters_beside_a_drafter(name: str, is_fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_fused:
        monkeypatch.setattr("funitel.model_server.loading.decoder.load_fused", lambda *_: None)
    target, draft_model = DRAFTERS[name](tmp_path)
    base = tmp_path / "base"
    if name == "mtp":
        ZOO["qwen3_5"].save(base)  # without the layer that drafts
    adapter = str(save_adapter(base if name == "mtp" else target, tmp_path / "adapter", EIGHT[5], 1))
    executor = always_drafting(load_executor(target, speculate=3, draft_model=draft_model))
    plain = load_executor(target)
    assert executor.speculator is not None
    assert executor.speculator.drafter.name == name
    for each in (executor, plain):
        each.load_adapter("a", adapter)
    starts = [start(1, range_of(40), 8), start(3, [5, 9, 7] * 6, 8), start(4, range_of(40), 8, adapter_id="a")]
    starts.insert(1, start(2, list(range(100, 160)), 8, adapter_id="a"))
    found, drafted, _ = run_drafted(executor, starts, 3)
    assert drafted
    for each in starts:
        assert ids_of(found[each.request_id]) == ids_of(run_alone(plain, each))


def range_of(first: int) -> list[int]:
    return list(range(first, first + 20))
