"""Blocks in a file: what comes back is what was computed, and a step with a damaged slot is not computed."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from funitel.model_server.executor.executor import Executor
from funitel.model_server.kv_cache.disk_tier import DiskTier, disk_tier_of
from funitel.model_server.kv_cache.slot_file import PAGE
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import InvalidRequest, SettingsError
from funitel.proto.settings.layer_parts import LayerParts
from funitel.proto.step import BlockCopy, StoredBlock, WarmupLimits, WarmupResult
from funitel_testing.executors import BLOCK_SIZE, ids_of, load_executor, num_sequences, run_alone, run_out, start
from funitel_testing.tiny import save_tiny
from funitel_testing.tiny_seq2seq import save_tiny_seq2seq

PROMPT = list(range(40, 60))
NUM_FULL = 4  # blocks of the prompt but for its last token
WARM = [start(0, range(20))]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))


def key(slot: int) -> bytes:
    return slot.to_bytes(32, "big")


def warmed(executor: Executor) -> WarmupResult:
    return executor.warmup(WARM, WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=2000))


def with_disk(folder: Path, disk: Path, dtype: str = "float32") -> tuple[Executor, WarmupResult]:
    executor = load_executor(folder, dtype=dtype)
    executor.runner.options = replace(executor.runner.options, disk=DiskTier(disk, "m", 1 << 17, "x"))
    return executor, warmed(executor)


def close(executor: Executor) -> None:
    assert executor.runner.options.disk is not None
    executor.runner.options.disk.close()


def save(block: int, slot: int, age: float = 0.0) -> BlockCopy:
    return BlockCopy(block, slot, is_load=False, key=key(slot), age_seconds=age)


def load(block: int, slot: int) -> BlockCopy:
    return BlockCopy(block, slot, is_load=True, key=key(slot))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_come_back_in_another_process(folder: Path, tmp_path: Path, dtype: str) -> None:
    executor, result = with_disk(folder, tmp_path, dtype)
    assert result.is_disk
    assert result.stored_blocks == ()
    expected = ids_of(run_alone(executor, start(1, PROMPT, 10)))
    own = start(1, PROMPT).blocks
    saves = [save(block, slot, 2.0 * slot) for slot, block in enumerate(own[:NUM_FULL], 1)]
    run_out(executor, executor.compute_prefill(7, [start(2, PROMPT, 2)], copies=saves).describe(), {})
    close(executor)
    executor, result = with_disk(folder, tmp_path, dtype)
    found = {each.slot: each for each in result.stored_blocks}
    assert {slot: each.key for slot, each in found.items()} == {slot: key(slot) for slot in range(1, 5)}
    assert 8.0 <= found[4].age_seconds < 60
    into = tuple(range(300, 300 + NUM_FULL))
    loads = [load(block, slot) for slot, block in enumerate(into, 1)]
    back = start(3, PROMPT, 10, blocks=(*into, *own[:10]), cache_len=NUM_FULL * BLOCK_SIZE)
    first = executor.compute_prefill(8, [back], copies=loads).describe()
    assert first.num_forward_tokens == len(PROMPT) - NUM_FULL * BLOCK_SIZE
    answers = {}
    run_out(executor, first, answers)
    assert ids_of(answers[3]) == expected
    assert warmed(executor).stored_blocks[0].age_seconds < 2, "it was used just now"
    close(executor)


def damage(disk: Path, executor: Executor, slot: int) -> None:
    layout = executor.runner.options.disk._file.layout  # type: ignore[union-attr]
    with (disk / "m-0.kv").open("r+b") as file:
        file.seek(layout.content_at(slot) + 5)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def test_a_step_with_a_damaged_slot_changes_nothing(folder: Path, tmp_path: Path) -> None:
    executor, _ = with_disk(folder, tmp_path)
    pool = executor.runner.pool.pool
    pool[5], pool[6] = 5.0, 6.0
    saves = [save(5, 0), save(6, 1)]
    run_out(executor, executor.compute_prefill(1, [start(1, PROMPT, 2)], copies=saves).describe(), {})
    damage(tmp_path, executor, 1)
    pool[9] = 9.0
    result = executor.compute_prefill(2, [start(2, PROMPT)], copies=[load(8, 0), load(9, 1)]).describe()
    assert result.lost_slots == (1,)
    assert (result.generations, result.batch, num_sequences(executor)) == ((), None, 0)
    assert torch.equal(pool[8], pool[5])
    assert not pool[9].any()
    # What is planned over the refused step is refused with it, and writes nothing that outlives the process.
    pool[7] = 7.0
    ahead = executor.compute_prefill(3, [start(3, PROMPT)], copies=[save(7, 2)], is_ahead=True).describe()
    assert ahead.lost_slots == (2,)
    assert [each.slot for each in executor.runner.host.stored()] == [0]  # type: ignore[union-attr]
    executor.clear()
    result = executor.compute_prefill(4, [start(4, PROMPT)], copies=[save(7, 2)]).describe()
    assert result.lost_slots == ()
    assert [each.slot for each in executor.runner.host.stored()] == [0, 2]  # type: ignore[union-attr]
    close(executor)


def test_a_decode_with_a_damaged_slot_is_refused_too(folder: Path, tmp_path: Path) -> None:
    executor, _ = with_disk(folder, tmp_path)
    first = executor.compute_prefill(1, [start(1, PROMPT, 8)], copies=[save(5, 0)]).describe()
    assert first.batch is not None
    damage(tmp_path, executor, 0)
    assert executor.compute_decode([first.batch], copies=[load(9, 0)]).describe().lost_slots == (0,)
    executor.clear()
    close(executor)


def test_after_a_failed_call_nothing_is_written(folder: Path, tmp_path: Path) -> None:
    executor, _ = with_disk(folder, tmp_path)
    with pytest.raises(InvalidRequest):
        executor.compute_prefill(1, [start(1, [])], copies=[save(5, 0)])
    assert executor.compute_prefill(2, [start(2, PROMPT)], copies=[save(6, 1)]).describe().lost_slots == (1,)
    assert executor.runner.host.stored() == ()  # type: ignore[union-attr]
    executor.clear()
    assert executor.compute_prefill(3, [start(3, PROMPT)], copies=[save(6, 1)]).describe().lost_slots == ()
    assert len(executor.runner.host.stored()) == 1  # type: ignore[union-attr]
    close(executor)


def test_a_slot_that_was_not_written_is_told_with_the_first_that_is_missed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, _ = with_disk(folder, tmp_path)
    written = os.pwrite

    def full(fd: int, data: bytes, at: int) -> int:
        if len(data) > PAGE // 2:
            raise OSError(28, "No space left on device")
        return written(fd, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    first = executor.compute_prefill(1, [start(1, PROMPT)], copies=[save(5, 0), save(6, 1), save(7, 2)]).describe()
    assert first.lost_slots == (), "the step is computed all the same"
    monkeypatch.undo()
    second = executor.compute_prefill(2, [start(2, PROMPT)], copies=[save(7, 2), load(9, 0)]).describe()
    assert second.lost_slots == (0, 1)
    close(executor)


def test_a_save_without_a_key_wipes_the_slot(folder: Path, tmp_path: Path) -> None:
    executor, _ = with_disk(folder, tmp_path)
    executor.compute_prefill(1, [start(1, PROMPT)], copies=[save(5, 0), save(6, 1), BlockCopy(1, 0, False)])
    assert executor.runner.host.stored() == (StoredBlock(1, key(1), pytest.approx(0, abs=60)),)  # type: ignore[union-attr]
    close(executor)


@pytest.mark.parametrize(
    ("copy", "message"),
    [
        (BlockCopy(0, 0, True, key=key(0)), "is outside the 501 blocks of the pool and 29 slots of the file"),
        (BlockCopy(3, 29, False, key=key(0)), "is outside the 501 blocks of the pool and 29 slots of the file"),
        (BlockCopy(3, 2, True), "a copy of slot 2 has a key of 0 bytes, not 32"),
        (BlockCopy(3, 2, False, key=b"short"), "a copy of slot 2 has a key of 5 bytes, not 32"),
    ],
)
def test_copies_that_cannot_be_are_refused(folder: Path, tmp_path: Path, copy: BlockCopy, message: str) -> None:
    executor, result = with_disk(folder, tmp_path)
    assert result.host_blocks == 29
    with pytest.raises(InvalidRequest, match=message):
        executor.compute_prefill(1, [start(1, PROMPT)], copies=[copy])
    close(executor)


def tier_of(folder: Path, **changes: object) -> DiskTier:
    settings = ModelServerSettings(model_id=str(folder), kv_disk_gb=1.0, device="cpu")
    tier = disk_tier_of(replace(settings, **changes), folder, CPU, "fused", "torch.float32")  # type: ignore[arg-type]
    assert tier is not None
    return tier


def test_other_ranks_take_the_number_of_the_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot is found again only where every rank has the same in it."""
    executor = load_executor(folder)
    executor.runner.options = replace(executor.runner.options, disk=DiskTier(tmp_path, "m", 1 << 17, "x"))
    parallel = executor.runner.parallel
    monkeypatch.setattr(parallel, "rank", 1)
    monkeypatch.setattr(parallel, "share", lambda text, source: "3" if source == 0 else text)
    monkeypatch.setattr(parallel, "exchange", lambda text: [text, text])
    warmed(executor)
    assert executor.runner.options.disk is not None
    assert executor.runner.options.disk.number == 3
    close(executor)
    assert executor.runner.options.disk.number == -1


def test_what_a_file_is_of(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "model")
    own = tier_of(model)
    assert own.num_bytes == 1 << 30
    assert tier_of(model, num_threads=3, kv_disk_gb=2.0, uds_path="/x", folder_fd=9).identity == own.identity
    for change in (
        {"dtype": "bfloat16"},
        {"quantize": "x"},
        {"block_size": 32},
        {"sharded": True, "rank": 1, "world_size": 2},
        {"layer_parts": LayerParts("0-0=int8,1-2=float32")},
    ):
        assert tier_of(model, **change).identity != own.identity
    assert tier_of(model, sharded=True, rank=1, world_size=2).stem.endswith("-rank1of2")
    assert tier_of(model, sharded=True, rank=1, world_size=2).num_files == 2
    (model / "funitel-verified.json").write_text("{}")
    assert tier_of(model).identity == own.identity, "every start writes that file"
    weights = model / "model.safetensors"
    found = weights.stat()
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert tier_of(model).identity != own.identity, "the same size and time"


def test_what_it_is_not_for(tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    settings = ModelServerSettings(model_id=str(folder), kv_disk_gb=2.0, device="cpu")
    with pytest.raises(SettingsError, match=r"^--kv-disk-gb 2 is for CPUs; a GPU has --kv-host-gb$"):
        disk_tier_of(settings, folder, torch.device("cuda"), "torch", "torch.bfloat16")
    without = replace(settings, prefix_caching=False)
    assert disk_tier_of(without, folder, CPU, "torch", "torch.float32") is None
    assert "--kv-disk-gb 2 changes nothing without --prefix-caching" in caplog.text
    without = replace(settings, kv_disk_gb=0.0, kv_disk_dir="/x")
    assert disk_tier_of(without, folder, CPU, "torch", "torch.float32") is None
    assert "--kv-disk-dir /x changes nothing without --kv-disk-gb" in caplog.text
    other = save_tiny_seq2seq("t5", tmp_path)
    with pytest.raises(SettingsError, match="--kv-disk-gb 2 is not for encoder-decoders"):
        load_generator(replace(settings, model_id=str(other)), other)
