"""A file of slots for KV blocks that outlives the process: every slot with a key, a checksum and a time. No torch.

The file begins with a head of one page, which says what the slots are of (`fingerprint`), then has a table of an entry
for each slot, then the slots at multiples of a page. It is sparse: what was never written takes no room.

A slot is written in three steps: its entry is wiped, its content written, its entry written. A process that is killed
between two of them leaves a slot without an entry. The digest of an entry covers fingerprint, place, key and content,
so a slot is read as what it is asked for or not at all, whatever happened to the file. It is read and written by
`preadv` and `pwritev`, not through a mapping: a full disk, a sector that cannot be read and a file that was cut are
then errors of one call, where a mapping ends the process by SIGBUS.
"""

import fcntl
import hashlib
import logging
import os
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from funitel.proto.errors import SettingsError

logger = logging.getLogger(__name__)

VERSION = 1
PAGE = 4096
KEY_BYTES = 32
MAX_SLOTS = 1 << 22  # their keys are told in one message
MAX_FILES = 64  # of one model and rank in a folder, each of another running shard
_MAGIC, _ENTRY_MAGIC = b"funitelK", b"slot"
_HEAD = struct.Struct("<8sIQQ32s")  # magic, version, slots, bytes of a slot's content, fingerprint
_ENTRY = struct.Struct("<4sIQ32s32sd")  # magic, version, bytes of content, key, digest, Unix time of the last use
ENTRY_BYTES = 128
_SEAL_BYTES = 16  # of the checksum behind head and entry
_READ_BYTES = ENTRY_BYTES << 13  # of the table at once


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Where the slots of a file are: `num_slots` of `content_bytes` each, for what has the 32 bytes `fingerprint`."""

    num_slots: int
    content_bytes: int
    fingerprint: bytes

    @classmethod
    def within(cls, num_bytes: int, content_bytes: int, fingerprint: bytes) -> "SlotLayout":
        """As many slots as a file of `num_bytes` has room for, at most `MAX_SLOTS`."""
        per_slot = _up(content_bytes) + ENTRY_BYTES
        return cls(min(MAX_SLOTS, max(0, (num_bytes - 2 * PAGE) // per_slot)), content_bytes, fingerprint)

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return self.content_at(self.num_slots)

    def entry_at(self, slot: int) -> int:
        """The offset of an entry."""
        return PAGE + slot * ENTRY_BYTES

    def content_at(self, slot: int) -> int:
        """The offset of a slot."""
        return _up(PAGE + self.num_slots * ENTRY_BYTES) + slot * _up(self.content_bytes)

    @property
    def head(self) -> bytes:
        """The first page but for its zeros."""
        return _sealed(_HEAD.pack(_MAGIC, VERSION, self.num_slots, self.content_bytes, self.fingerprint))


@dataclass(frozen=True, slots=True)
class StoredSlot:
    """A slot with content: its key, and the Unix time at which that was used last."""

    slot: int
    key: bytes
    used_at: float


class SlotFile:
    """An open file of slots, locked against other processes. One thread at a time.

    Args:
        fd: of the file; it is closed with this object.
        layout: of the file.
        number: in its name.
    """

    def __init__(self, fd: int, layout: SlotLayout, number: int = 0) -> None:
        self.layout = layout
        self.number = number
        self._fd = fd
        self._has_failed = False

    @classmethod
    def open(
        cls, folder: Path, stem: str, layout: SlotLayout, num_files: int = 1, wanted: int | None = None
    ) -> "SlotFile":
        """Open a file `STEM-N.kv` of a folder that no other process has, with what it holds, or make it anew.

        It is number `wanted`, or else the first of this layout and fingerprint, or else the first of all. A file is
        discarded, with a line in the log, where it is damaged or of another layout or fingerprint. It is readable by
        its owner alone. `num_files` of as many bytes are to have room.

        Raises:
            SettingsError: the folder cannot be used, or its file system has too little room.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            paths = [folder / f"{stem}-{number}.kv" for number in range(MAX_FILES)]
            order = {
                number: (number != wanted, not _begins_with(path, layout.head)) for number, path in enumerate(paths)
            }
            for number in sorted(order, key=order.__getitem__):
                fd = _locked(paths[number])
                if fd is not None:
                    return cls._of(fd, paths[number], layout, num_files, number)
        except OSError as error:
            where = "" if error.filename in (None, str(folder)) else f"{error.filename}: "
            raise SettingsError(f"--kv-disk-dir {folder}: {where}{error.strerror}") from error
        raise SettingsError(f"--kv-disk-dir {folder}: {MAX_FILES} files {stem}-N.kv are in use by other processes")

    @classmethod
    def _of(cls, fd: int, path: Path, layout: SlotLayout, num_files: int, number: int) -> "SlotFile":
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            found = os.fstat(fd)
            if found.st_uid != os.geteuid():
                raise SettingsError(f"--kv-disk-dir: {path} belongs to another user")
            os.fchmod(fd, 0o600)
            is_ours = found.st_size == layout.num_bytes and os.pread(fd, len(layout.head), 0) == layout.head
            if not is_ours:
                if found.st_size:
                    logger.warning("KV disk tier: %s is discarded: it is of another model or layout, or damaged", path)
                os.ftruncate(fd, 0)
            _check_room(fd, path.parent, layout, num_files)
            if not is_ours:
                os.ftruncate(fd, layout.num_bytes)
                _write(fd, [memoryview(layout.head)], 0)  # last: a file without it is none
            undo.pop_all()
        return cls(fd, layout, number)

    def entries(self) -> Iterator[StoredSlot]:
        """The slots with an entry; whether their content is what the entry says is seen when they are read."""
        layout = self.layout
        for begin in range(0, layout.num_slots * ENTRY_BYTES, _READ_BYTES):
            size = min(_READ_BYTES, layout.num_slots * ENTRY_BYTES - begin)
            table = os.pread(self._fd, size, PAGE + begin)
            for at in range(0, len(table) - ENTRY_BYTES + 1, ENTRY_BYTES):
                entry = _read_entry(table[at : at + ENTRY_BYTES])
                if entry is not None:
                    yield StoredSlot((begin + at) // ENTRY_BYTES, entry[0], entry[2])

    def save(self, slot: int, key: bytes, content: Sequence[memoryview], used_at: float) -> bool:
        """Write content, in parts, to a slot; whether that could be done. After a failure the slot holds nothing."""
        layout = self.layout
        try:
            _write(self._fd, [memoryview(bytes(ENTRY_BYTES))], layout.entry_at(slot))
            _write(self._fd, content, layout.content_at(slot))
            digest = self._digest(slot, key, content)
            _write(self._fd, [memoryview(self._entry(key, digest, used_at))], layout.entry_at(slot))
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("KV disk tier: a slot cannot be written: %s; this is not logged again", error)
            return False
        return True

    def load(self, slot: int, key: bytes, into: Sequence[memoryview]) -> bool:
        """Read a slot into parts of memory; whether it held what `key` names.

        Otherwise the parts are zeros, and the slot has no entry any more.
        """
        layout, is_read = self.layout, False
        try:
            entry = _read_entry(os.pread(self._fd, ENTRY_BYTES, layout.entry_at(slot)))
            if entry is not None and entry[0] == key:
                is_read = _read(self._fd, into, layout.content_at(slot)) and self._digest(slot, key, into) == entry[1]
                if is_read:
                    renewed = self._entry(key, entry[1], time.time())
                    _write(self._fd, [memoryview(renewed)], layout.entry_at(slot))
            else:
                logger.warning("KV disk tier: slot %d does not hold what was saved there", slot)
        except OSError as error:
            logger.warning("KV disk tier: slot %d cannot be read: %s", slot, error)
        if not is_read:
            for part in into:
                part[:] = bytes(len(part))
            self.wipe(slot)
        return is_read

    def wipe(self, slot: int) -> None:
        """Let a slot hold nothing."""
        try:
            _write(self._fd, [memoryview(bytes(ENTRY_BYTES))], self.layout.entry_at(slot))
        except OSError as error:
            logger.warning("KV disk tier: slot %d cannot be wiped: %s", slot, error)

    def close(self) -> None:
        """Let go of the file, with its lock."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _entry(self, key: bytes, digest: bytes, used_at: float) -> bytes:
        packed = _ENTRY.pack(_ENTRY_MAGIC, VERSION, self.layout.content_bytes, key, digest, used_at)
        return _sealed(packed).ljust(ENTRY_BYTES, b"\0")

    def _digest(self, slot: int, key: bytes, content: Sequence[memoryview]) -> bytes:
        found = hashlib.sha256(self.layout.fingerprint + slot.to_bytes(8, "little") + key)
        for part in content:
            found.update(part)
        return found.digest()


def _up(num_bytes: int) -> int:
    """The next multiple of a page."""
    return -(-num_bytes // PAGE) * PAGE


def _sealed(packed: bytes) -> bytes:
    return packed + hashlib.sha256(packed).digest()[:_SEAL_BYTES]


def _read_entry(found: bytes) -> tuple[bytes, bytes, float] | None:
    """Key, digest and time of an entry; None for one that is damaged or empty."""
    packed = found[: _ENTRY.size]
    if len(found) < ENTRY_BYTES or not found.startswith(_ENTRY_MAGIC):
        return None
    if found[: _ENTRY.size + _SEAL_BYTES] != _sealed(packed):
        return None
    _, version, _, key, digest, used_at = _ENTRY.unpack(packed)
    return (key, digest, used_at) if version == VERSION else None


def _begins_with(path: Path, head: bytes) -> bool:
    """Whether there is a regular file that begins so; False for one that cannot be read."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(head)) == head
    except OSError:
        return False


def _locked(path: Path) -> int | None:
    """Open a regular file, or make it, and lock it; None where another process has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with ExitStack() as undo:
        undo.callback(os.close, fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise SettingsError(f"--kv-disk-dir: {path} is not a file")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        undo.pop_all()
    return fd


def _check_room(fd: int, folder: Path, layout: SlotLayout, num_files: int) -> None:
    """Raise SettingsError unless the file system has room for all slots that have none yet."""
    needed = num_files * (layout.num_bytes - os.fstat(fd).st_blocks * 512)
    room = os.fstatvfs(fd)
    free = room.f_bavail * room.f_frsize
    if needed > free:
        raise SettingsError(
            f"--kv-disk-gb: {num_files} x {layout.num_bytes} bytes need {needed} more in {folder}, which has "
            f"{free} free: lower it"
        )


def _write(fd: int, parts: Sequence[memoryview], at: int) -> None:
    for part in parts:
        done = 0
        while done < len(part):
            done += os.pwrite(fd, part[done:], at + done)
        at += len(part)


def _read(fd: int, parts: Sequence[memoryview], at: int) -> bool:
    """Fill parts of memory from a file; whether it is long enough."""
    for part in parts:
        done = 0
        while done < len(part):
            count = os.preadv(fd, [part[done:]], at + done)
            if not count:
                return False
            done += count
        at += len(part)
    return True
