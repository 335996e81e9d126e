"""A draft model: its drafts are its own greedy continuation, whatever its pool held before, and texts do not change."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from funitel.model_server.__main__ import download
from funitel.model_server.executor.executor import Executor
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.settings import DownloadSettings, ModelServerSettings
from funitel.proto.errors import SettingsError, UnsupportedModel, WeightsError
from funitel_testing.drafters import run_drafted, watched
from funitel_testing.executors import ids_of, load_executor, run_alone, start
from funitel_testing.tiny import save_tiny
from funitel_testing.zoo import ZOO

MOST = 4
PROMPTS = {1: list(range(40, 60)), 2: list(range(100, 170)), 3: list(range(5, 12))}


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


def test_seeded_text_is_the_same_with_drafts_and_without(executors: tuple[Executor, Executor]) -> None:
    plain, drafting = executors
    how = {"do_sample": True, "temperature": 1.2, "seed": 7}
    starts = [start(i, prompt, 24, **how) for i, prompt in PROMPTS.items()]
    found, drafted, accepted = run_drafted(drafting, starts, MOST)
    assert drafted > accepted
    for each in starts:
        assert ids_of(found[each.request_id]) == ids_of(run_alone(plain, each))


def test_drafts_of_the_target_itself_are_all_accepted(executors: tuple[Executor, Executor]) -> None:
    plain, drafting = executors
    for ids in ([1], [2], [1, 2, 3], [3]):
        found, drafted, accepted = run_drafted(drafting, [start(i, PROMPTS[i], 24) for i in ids], MOST)
        assert drafted == accepted > 0
        for i in ids:
            assert ids_of(found[i]) == ids_of(run_alone(plain, start(i, PROMPTS[i], 24)))


def refused(folder: Path, draft: Path, **settings: Any) -> None:
    chosen = {"device": "cpu", "num_threads": 1, "speculate": MOST, "draft_model": str(draft)} | settings
    load_generator(ModelServerSettings(model_id=str(folder), **chosen), folder)


def test_a_draft_model_has_the_tokens_of_its_target(tmp_path: Path) -> None:
    folder, other = save_tiny("llama", tmp_path / "target"), save_tiny("smollm", tmp_path / "draft")
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    added = next(each for each in vocabulary["added_tokens"] if each["content"] == "<extra3>")
    added["content"] = "<other3>"
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    message = rf"^--draft-model {other} has another vocabulary than {folder}: token '<extra3>' is not there, in .* 260$"
    with pytest.raises(SettingsError, match=message):
        refused(folder, other)


def test_a_draft_model_of_another_size_drafts_without_changing_texts(tmp_path: Path) -> None:
    folder, other = save_tiny("llama", tmp_path / "target"), save_tiny("qwen2", tmp_path / "draft", num_hidden_layers=1)
    drafting = load_executor(folder, speculate=MOST, draft_model=str(other))
    starts = [start(i, prompt, 16) for i, prompt in PROMPTS.items()]
    calls = watched(drafting)
    found, drafted, _ = run_drafted(drafting, starts, MOST)
    plain, alone = load_executor(folder), load_executor(other)
    for each in starts:
        assert ids_of(found[each.request_id]) == ids_of(run_alone(plain, each))
    assert drafted == sum(len(drafts) for _, drafts in calls) > 0
    for number, (row, drafts) in enumerate(calls):
        assert drafts == ids_of(run_alone(alone, start(number, row.tokens, row.limit)))


def test_a_draft_model_that_keeps_states_is_refused(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "target")
    ZOO["qwen3_5"].save(tmp_path / "draft")
    with pytest.raises(
        UnsupportedModel, match=r"^--draft-model .* cannot make drafts: Qwen3_5ForCausalLM keeps states"
    ):
        refused(folder, tmp_path / "draft")


@pytest.mark.parametrize(("speculate", "told"), [(None, "not given"), (0, "0")])
def test_a_draft_model_needs_to_be_told_how_many(speculate: int | None, told: str) -> None:
    with pytest.raises(SettingsError, match=rf"^--draft-model x makes drafts for --speculate, which is {told}$"):
        ModelServerSettings(model_id="y", draft_model="x", speculate=speculate)


def test_the_pool_has_room_for_both(tmp_path: Path) -> None:
    folder, other = save_tiny("llama", tmp_path / "target"), save_tiny("qwen2", tmp_path / "draft", num_hidden_layers=1)
    plain, drafting = load_executor(folder), load_executor(folder, speculate=MOST, draft_model=str(other))
    added = load_executor(other).runner.pools.bytes_per_block
    assert drafting.runner.pools.bytes_per_block == plain.runner.pools.bytes_per_block + added
    assert drafting.runner.pool.num_bytes == drafting.runner.pool.num_blocks * drafting.runner.pools.bytes_per_block


@pytest.fixture
def keeps_usr1() -> Iterator[None]:
    """A program that downloads handles SIGUSR1."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("keeps_usr1")
def test_a_download_fetches_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny("llama", tmp_path / "target")
    download(DownloadSettings(model_id=str(folder), draft_model=str(folder)))
    assert capsys.readouterr().out == f"{folder}\n"
    with pytest.raises(WeightsError, match=rf"^no such folder or file: {tmp_path}/missing"):
        download(DownloadSettings(model_id=str(folder), draft_model=f"{tmp_path}/missing"))


def test_a_draft_model_becomes_the_blocks_of_its_target(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    folder = save_tiny("llama", tmp_path, **sizes, intermediate_size=64)
    plain = load_executor(folder, dtype=None, quantize="q4")
    drafting = load_executor(folder, dtype=None, quantize="q4", speculate=2, draft_model=str(folder))
    expected, found = (ids_of(run_alone(each, start(1, range(20), 12))) for each in (plain, drafting))
    assert found == expected
