"""Slots of a file: what is read is what was saved under that key, whatever happened to the file, or nothing."""

import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from funitel.model_server.kv_cache import slot_file
from funitel.model_server.kv_cache.slot_file import ENTRY_BYTES, PAGE, SlotFile, SlotLayout
from funitel.proto.errors import SettingsError

NUM_SLOTS, NUM_BYTES = 6, 700
LAYOUT = SlotLayout(NUM_SLOTS, NUM_BYTES, b"f" * 32)
NUM_DAMAGES = 10_000


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int) -> bytes:
    return random.Random(number).randbytes(NUM_BYTES)


def save(file: SlotFile, slot: int, number: int, used_at: float = 0.0) -> bool:
    whole = memoryview(content(number))
    return file.save(slot, key(number), [whole[:300], whole[300:]], used_at)


def load(file: SlotFile, slot: int, number: int) -> bytes | None:
    """What a slot holds of a number, in two parts of memory; None, and zeros, for nothing."""
    into = bytearray(b"\xff" * NUM_BYTES)
    if file.load(slot, key(number), [memoryview(into)[:300], memoryview(into)[300:]]):
        return bytes(into)
    assert into == bytes(NUM_BYTES)
    return None


def opened(folder: Path, layout: SlotLayout = LAYOUT) -> SlotFile:
    return SlotFile.open(folder, "m", layout)


def path_of(folder: Path) -> Path:
    return folder / "m-0.kv"


def test_content_is_found_by_a_later_process(tmp_path: Path) -> None:
    file = opened(tmp_path / "new" / "kv")
    assert list(file.entries()) == []
    assert save(file, 2, 7, used_at=5.0)
    assert save(file, 4, 9, used_at=6.0)
    assert load(file, 2, 7) == content(7)
    file.close()
    again = opened(tmp_path / "new" / "kv")
    found = {each.slot: each for each in again.entries()}
    assert {slot: each.key for slot, each in found.items()} == {2: key(7), 4: key(9)}
    assert found[4].used_at == 6.0
    assert abs(found[2].used_at - time.time()) < 60  # it was read
    assert load(again, 4, 9) == content(9)
    assert load(again, 2, 9) is None
    assert [each.slot for each in again.entries()] == [4]


def test_the_file_is_private_sparse_and_as_large_as_it_may_be(tmp_path: Path) -> None:
    layout = SlotLayout.within(1 << 24, NUM_BYTES, b"g" * 32)
    file = opened(tmp_path, layout)
    found = path_of(tmp_path).stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_size == layout.num_bytes <= 1 << 24
    assert (1 << 24) - layout.num_bytes < 3 * PAGE
    assert found.st_blocks * 512 < 1 << 20
    file.close()
    assert SlotLayout.within(1 << 50, NUM_BYTES, b"g" * 32).num_slots == slot_file.MAX_SLOTS


def test_a_file_of_something_else_is_discarded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for layout in (
        SlotLayout(NUM_SLOTS, NUM_BYTES, b"h" * 32),
        SlotLayout(NUM_SLOTS + 1, NUM_BYTES, LAYOUT.fingerprint),
        SlotLayout(NUM_SLOTS, NUM_BYTES + 1, LAYOUT.fingerprint),
    ):
        caplog.clear()
        file = opened(tmp_path)
        save(file, 0, 1)
        file.close()
        other = opened(tmp_path, layout)
        assert list(other.entries()) == []
        assert [line.message for line in caplog.records if "is discarded" in line.message]
        other.close()


def test_a_damaged_head_discards_the_file(tmp_path: Path) -> None:
    for at in range(len(LAYOUT.head)):
        file = opened(tmp_path)
        save(file, 0, 1)
        os.pwrite(file._fd, bytes([os.pread(file._fd, 1, at)[0] ^ 1]), at)
        file.close()
        again = opened(tmp_path)
        assert list(again.entries()) == []
        again.close()


def test_two_processes_have_two_files(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    save(first, 0, 1)
    assert list(second.entries()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m-0.kv", "m-1.kv"]
    first.close()
    second.close()


def test_a_process_takes_the_file_that_is_its_own_before_others(tmp_path: Path) -> None:
    other = SlotLayout(NUM_SLOTS, NUM_BYTES, b"g" * 32)
    files = [opened(tmp_path), opened(tmp_path, other)]
    for number, file in enumerate(files):
        save(file, 0, number)
        file.close()
    for layout, number in ((other, 1), (LAYOUT, 0)):  # started in the other order
        file = opened(tmp_path, layout)
        assert load(file, 0, number) == content(number)
        file.close()


def test_the_number_that_is_asked_for_comes_first(tmp_path: Path) -> None:
    first, second = SlotFile.open(tmp_path, "m", LAYOUT, wanted=2), SlotFile.open(tmp_path, "m", LAYOUT, wanted=2)
    assert (first.number, second.number) == (2, 0), "another process has it"
    first.close()
    second.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m-0.kv", "m-2.kv"]


def test_what_cannot_be_a_folder_or_a_file_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SettingsError, match=r"^--kv-disk-dir [^:]*file: (Not a directory|File exists)$"):
        opened(tmp_path / "file")
    path_of(tmp_path).symlink_to(tmp_path / "file")
    with pytest.raises(SettingsError, match=r"^--kv-disk-dir .*m-0\.kv: Too many levels of symbolic links$"):
        opened(tmp_path)
    assert (tmp_path / "file").read_text() == "x"
    path_of(tmp_path).unlink()
    with pytest.raises(SettingsError, match=r"^--kv-disk-gb: 1 x \d+ bytes need \d+ more in .* free: lower it$"):
        opened(tmp_path, SlotLayout(1 << 40, NUM_BYTES, b"f" * 32))
    monkeypatch.setattr(slot_file, "MAX_FILES", 1)
    with opened_and_closed(tmp_path), pytest.raises(SettingsError, match=r"1 files m-N\.kv are in use"):
        opened(tmp_path)


class opened_and_closed:
    def __init__(self, folder: Path) -> None:
        self._file = opened(folder)

    def __enter__(self) -> SlotFile:
        return self._file

    def __exit__(self, *_: object) -> None:
        self._file.close()


# Damage: each takes a file, a place in it and a random source -------------------------------------------------------


def flip_bit(fd: int, slot: int, chance: random.Random) -> None:
    at = LAYOUT.content_at(slot) + chance.randrange(NUM_BYTES)
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1 << chance.randrange(8)]), at)


def flip_entry_bit(fd: int, slot: int, chance: random.Random) -> None:
    at = LAYOUT.entry_at(slot) + chance.randrange(slot_file._ENTRY.size + slot_file._SEAL_BYTES)
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1 << chance.randrange(8)]), at)


def cut(fd: int, slot: int, chance: random.Random) -> None:
    os.ftruncate(fd, chance.randrange(LAYOUT.content_at(slot) + NUM_BYTES))


def zero_a_part(fd: int, slot: int, chance: random.Random) -> None:
    begin = chance.randrange(NUM_BYTES - 16)
    os.pwrite(fd, bytes(chance.randint(16, NUM_BYTES - begin)), LAYOUT.content_at(slot) + begin)


def zero_the_entry(fd: int, slot: int, chance: random.Random) -> None:
    os.pwrite(fd, bytes(ENTRY_BYTES), LAYOUT.entry_at(slot))


def swap_contents(fd: int, slot: int, chance: random.Random) -> None:
    _swap(
        fd, LAYOUT.content_at(slot), LAYOUT.content_at((slot + chance.randrange(1, NUM_SLOTS)) % NUM_SLOTS), NUM_BYTES
    )


def swap_entries(fd: int, slot: int, chance: random.Random) -> None:
    _swap(fd, LAYOUT.entry_at(slot), LAYOUT.entry_at((slot + chance.randrange(1, NUM_SLOTS)) % NUM_SLOTS), ENTRY_BYTES)


def swap_both(fd: int, slot: int, chance: random.Random) -> None:
    other = (slot + chance.randrange(1, NUM_SLOTS)) % NUM_SLOTS
    _swap(fd, LAYOUT.content_at(slot), LAYOUT.content_at(other), NUM_BYTES)
    _swap(fd, LAYOUT.entry_at(slot), LAYOUT.entry_at(other), ENTRY_BYTES)


def overwrite(fd: int, slot: int, chance: random.Random) -> None:
    """An older content under the newer entry: as if a write of the disk's had been lost."""
    os.pwrite(fd, content(1000 + chance.randrange(100)), LAYOUT.content_at(slot))


def _swap(fd: int, a: int, b: int, size: int) -> None:
    here, there = os.pread(fd, size, a), os.pread(fd, size, b)
    os.pwrite(fd, there, a)
    os.pwrite(fd, here, b)


DAMAGES: tuple[Callable[[int, int, random.Random], None], ...] = (
    *(flip_bit, flip_entry_bit, cut, zero_a_part, zero_the_entry),
    *(swap_contents, swap_entries, swap_both, overwrite),
)


def test_nothing_wrong_is_read_of_ten_thousand_damaged_slots(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR")
    chance = random.Random(5)
    file = opened(tmp_path)
    num_refused = num_sound = 0
    for case in range(NUM_DAMAGES):
        os.ftruncate(file._fd, LAYOUT.num_bytes)
        for slot in range(NUM_SLOTS):
            save(file, slot, slot)
        slot, damage = chance.randrange(NUM_SLOTS), DAMAGES[case % len(DAMAGES)]
        damage(file._fd, slot, chance)
        num_refused += load(file, slot, slot) is None
        other = (slot + 1) % NUM_SLOTS
        found = load(file, other, other)
        assert found in (None, content(other)), damage.__name__
        num_sound += found is not None
    assert num_refused == NUM_DAMAGES
    assert num_sound > NUM_DAMAGES / 2
    file.close()


def test_a_slot_that_cannot_be_written_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = opened(tmp_path)
    save(file, 1, 1)
    written, whole = os.pwrite, [0]

    def full(fd: int, data: bytes, at: int) -> int:
        whole[0] += 1
        if at >= LAYOUT.content_at(0):
            raise OSError(28, "No space left on device")
        return written(fd, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    assert not save(file, 1, 2)
    assert not save(file, 1, 2)
    monkeypatch.undo()
    assert whole[0] == 4
    assert load(file, 1, 1) is None
    assert load(file, 1, 2) is None
    assert caplog.text.count("No space left on device; this is not logged again") == 1
    file.close()


def test_a_slot_that_cannot_be_read_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = opened(tmp_path)
    save(file, 1, 1)

    def broken(fd: int, parts: list[memoryview], at: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    assert load(file, 1, 1) is None
    assert "slot 1 cannot be read: [Errno 5] Input/output error" in caplog.text
    file.close()


WRITER = """
import sys, random
from pathlib import Path
from funitel.model_server.kv_cache.slot_file import SlotFile, SlotLayout
file = SlotFile.open(Path(sys.argv[1]), "m", SlotLayout(8, 300_000, b"f" * 32))
print("ready", flush=True)
number = 0
while True:
    content = random.Random(number).randbytes(300_000)
    file.save(number % 8, number.to_bytes(32, "big"), [memoryview(content)], 0.0)
    number += 1
"""


@pytest.mark.parametrize("attempt", range(5))
def test_a_kill_in_the_middle_of_writes_leaves_whole_slots(tmp_path: Path, attempt: int) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(0.15 + 0.013 * attempt)
        writer.send_signal(signal.SIGKILL)
    layout = SlotLayout(8, 300_000, b"f" * 32)
    file = SlotFile.open(tmp_path, "m", layout)
    found = list(file.entries())
    assert len(found) >= 7, "one may have been on its way"
    for each in found:
        into = bytearray(300_000)
        assert file.load(each.slot, each.key, [memoryview(into)])
        assert into == random.Random(int.from_bytes(each.key, "big")).randbytes(300_000)
    file.close()
